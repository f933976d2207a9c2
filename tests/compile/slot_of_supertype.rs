// SPDX-License-Identifier: GPL-2.0

//! Writing a function for bytes that live for ever into a slot, whose handler calls it with others.

use rdma::{
    prelude::*,
    srq::{Receive, Slot}, //
};

struct Question<F> {
    buf: Buf<FromDevice>,
    answer: F,
}

impl<F: Send + 'static> Receive for Question<F> {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn set(slot: Slot<Question<fn(&[u8])>>, answer: fn(&[u8]), _for_ever: fn(&'static [u8])) {
    #[cfg(mistake)]
    let mut slot: Slot<Question<fn(&'static [u8])>> = slot; //~ E0308 mismatched types
    #[cfg(not(mistake))]
    let mut slot = slot;
    slot.answer = answer;
}
