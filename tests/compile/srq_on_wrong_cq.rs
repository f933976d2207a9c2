// SPDX-License-Identifier: GPL-2.0

//! Putting a QP on an SRQ whose handler sleeps, where the QP completes in a softirq.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr,
    srq::{Receive, Slot, Srq}, //
};

struct Question {
    buf: Buf<FromDevice>,
}

impl Receive for Question {
    type Needs = Sleepable;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &Sleepable) {}
}

#[cfg(mistake)]
type Context = Softirq;
#[cfg(not(mistake))]
type Context = Workqueue;

fn qp(pd: &Pd, cq: &Cq<Context>, srq: &Srq<Question>, cx: &Sleepable) -> Result<Qp<Context>> {
    let init = InitAttr::on_srq(pd, cq, srq, &Caps::new(16, 0)); //~ E0277 Provides<rdma::context::
    init.create(cx)
}
