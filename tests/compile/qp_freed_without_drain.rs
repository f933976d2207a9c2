// SPDX-License-Identifier: GPL-2.0

//! Destroying a QP in a way that does not drain it: there is none.

use kernel::prelude::*;
use rdma::prelude::*;

fn end(qp: Qp<Softirq>, cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    qp.destroy_undrained(cx)?; //~ E0599 no method named `destroy_undrained`
    #[cfg(not(mistake))]
    qp.destroy(cx)?;
    Ok(())
}
