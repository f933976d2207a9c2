// SPDX-License-Identifier: GPL-2.0

//! Freeing the buffers of an SRQ while the SRQ exists: a handler has a slot, not its memory.

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

    fn done(slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {
        #[cfg(mistake)]
        drop(slot.buf); //~ E0507 cannot move out of dereference of `rdma::srq::Slot
        #[cfg(not(mistake))]
        drop(slot);
    }
}
