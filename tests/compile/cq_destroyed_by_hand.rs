// SPDX-License-Identifier: GPL-2.0

//! Destroying a CQ oneself, by whichever of C's three functions.

use kernel::prelude::*;
use rdma::prelude::*;

fn end(cq: Cq<Softirq>, qp: Qp<Softirq>, cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    cq.destroy(cx); //~ E0599 no method named `destroy`
    #[cfg(not(mistake))]
    drop(cq);
    qp.destroy(cx)
}
