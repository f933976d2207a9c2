// SPDX-License-Identifier: GPL-2.0

//! Destroying a QP that others still post to.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn end(shared: Arc<ulp::Shared>, cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    shared.qp.destroy(cx)?; //~ E0507 cannot move out of dereference of `kernel::sync::Arc<ulp
    #[cfg(not(mistake))]
    shared.qp.drain(cx)?;
    Ok(())
}
