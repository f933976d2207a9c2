// SPDX-License-Identifier: GPL-2.0

//! Answering by a slot of an SRQ with a pinned field, which others may have the address of.

use rdma::{
    prelude::*,
    srq::{Receive, Slot}, //
};

#[cfg(mistake)]
type Known = core::marker::PhantomPinned;
#[cfg(not(mistake))]
type Known = ();

#[derive(HasCqe)]
struct Question {
    answer: Cqe<Self>,
    buf: Buf<FromDevice>,
    known: Known,
}

impl Receive for Question {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

impl CqeHandler for Question {
    type Pointer = Slot<Self>; //~ E0277 `PhantomPinned` cannot be unpinned
    type Needs = context::Atomic;

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}
