// SPDX-License-Identifier: GPL-2.0

//! Destroying a QP by C's function, which does not drain it.

use kernel::prelude::*;
use rdma::prelude::*;

fn end(qp: Qp<Softirq>, cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    // SAFETY: There is none: requests may be outstanding.
    let _ = unsafe { rdma::bindings::ib_destroy_qp_user(qp.as_raw(), core::ptr::null_mut()) };
    //~^ E0603 `bindings` is private
    //~^^ E0599 no method named `as_raw`
    #[cfg(not(mistake))]
    qp.destroy(cx)?;
    Ok(())
}
