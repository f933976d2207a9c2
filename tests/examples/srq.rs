// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/srq.rst.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr,
    srq::{
        Receive,
        Slot,
        Srq, //
    }, //
};

fn parse(_message: &[u8]) {}

struct Request {
    buf: Buf<FromDevice>,
}

impl Receive for Request {
    type Needs = context::Atomic;

    // The memory for a message: called each time that the slot is posted.
    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(mut slot: Slot<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Ok(wc) = wc.result() {
            parse(&slot.buf.received(&wc));
        }
        // Dropping the slot posts it again.
    }
}

fn create(pd: Pd, cq: Cq<Softirq>, id: cm::Id, cx: &Sleepable) -> Result {
    let request = || {
        Ok::<_, Error>(Request {
            buf: Buf::alloc(&pd, 64, cx)?,
        })
    };
    let srq = Srq::create(&pd, 1024, |_| request(), cx)?;
    let qp = InitAttr::on_srq(&pd, &cq, &srq, &Caps::new(64, 0)).create_for(&id, cx)?;
    Ok(())
}
