// SPDX-License-Identifier: GPL-2.0

//! Putting a QP on an SRQ by another type than that of its slots, whose handler needs less.

#![allow(coherence_leak_check)]

use core::marker::PhantomData;
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr,
    srq::{Receive, Slot, Srq}, //
};

struct Question<F> {
    buf: Buf<FromDevice>,
    _kind: PhantomData<F>,
}

impl Receive for Question<fn(&u8)> {
    type Needs = Sleepable;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &Sleepable) {}
}

impl Receive for Question<fn(&'static u8)> {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

#[cfg(mistake)]
type Context = Softirq;
#[cfg(not(mistake))]
type Context = Workqueue;

type Questions = Srq<Question<fn(&u8)>>;

fn qp(pd: &Pd, cq: &Cq<Context>, srq: &Questions, cx: &Sleepable) -> Result<Qp<Context>> {
    #[cfg(mistake)]
    let srq: &Srq<Question<fn(&'static u8)>> = srq; //~ E0308 mismatched types
    InitAttr::on_srq(pd, cq, srq, &Caps::new(16, 0)).create(cx)
}
