// SPDX-License-Identifier: GPL-2.0

//! Freeing the operations of a transport of 9P when they are unregistered, while mounts use them.

use crate::{
    client::{
        Operations,
        Registration, //
    },
    Mount, //
};
use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(not(mistake))]
static OPERATIONS: Operations<Mount> = Operations::new();

fn register(cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    let operations = Operations::<Mount>::new();
    #[cfg(mistake)]
    let operations = &operations; //~ E0597 `operations` does not live long enough
    #[cfg(not(mistake))]
    let operations = &OPERATIONS;
    drop(Registration::new(operations, cx)?);
    Ok(())
}
