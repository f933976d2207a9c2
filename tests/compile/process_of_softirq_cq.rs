// SPDX-License-Identifier: GPL-2.0

//! Processing a CQ that is polled in a softirq, so that handlers run twice at once.

use rdma::prelude::*;

#[cfg(mistake)]
type Context = Softirq;
#[cfg(not(mistake))]
type Context = Direct;

fn poll(cq: &Cq<Context>) -> u32 {
    cq.process(16) //~ E0599 exists for reference `&Cq<Softirq>`, but
}
