// SPDX-License-Identifier: GPL-2.0

//! Giving up an owner for the address of its callback, without a request.

use kernel::prelude::*;
#[cfg(mistake)]
use rdma::cqe::CqePointer;
use rdma::prelude::*;

fn give_up<T: CqeHandler>(owner: T::Pointer) -> Result<T::Pointer> {
    #[cfg(mistake)]
    owner.into_cqe(); //~ E0061 this method takes 1 argument but 0 arguments were supplied
    #[cfg(mistake)]
    return Err(EINVAL);
    #[cfg(not(mistake))]
    Ok(owner)
}
