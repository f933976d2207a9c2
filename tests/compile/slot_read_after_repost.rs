// SPDX-License-Identifier: GPL-2.0

//! Reading a receive of an SRQ after it was posted again.

use rdma::{
    prelude::*,
    srq::{Receive, Slot}, //
};

struct Question {
    buf: Buf<FromDevice>,
}

impl Receive for Question {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(mut slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {
        #[cfg(mistake)]
        drop(slot);
        let _first = slot.buf.cpu().first().copied(); //~ E0382 borrow of moved value: `slot`
        #[cfg(not(mistake))]
        drop(slot);
    }
}
