// SPDX-License-Identifier: GPL-2.0

//! Ending a submission queue, which waits for its commands, where one may not sleep. A work item
//! ends one that is dropped.

use crate::nvmet::Sq;
use rdma::prelude::*;

fn failed(sq: Sq, cx: &context::Atomic) {
    let _ = cx;
    #[cfg(mistake)]
    sq.destroy(cx); //~ E0308 mismatched types
    drop(sq);
}
