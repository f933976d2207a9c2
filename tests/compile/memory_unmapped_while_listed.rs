// SPDX-License-Identifier: GPL-2.0

//! Taking an owner's memory back while a request is made of its entries.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    sg::{SgMap, SgOwner},
    wr::SgeList, //
};

fn message<O: SgOwner<ToDevice>>(header: &Buf<ToDevice>, data: SgMap<O, ToDevice>) -> Result<O> {
    let mut sges = SgeList::<_, 4>::new(header.whole());
    data.append_to(&mut sges)?;
    #[cfg(mistake)]
    let owner = data.into_owner(); //~ E0505 cannot move out of `data` because it is borrowed
    drop(SendWr::send(sges));
    #[cfg(not(mistake))]
    let owner = data.into_owner();
    Ok(owner)
}
