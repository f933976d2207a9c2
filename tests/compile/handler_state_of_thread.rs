// SPDX-License-Identifier: GPL-2.0

//! Sharing between the handlers of a CQ, which run in any thread, what has to stay in one.

#[cfg(mistake)]
use core::ptr::NonNull;
use rdma::{
    cq::HandlerCell,
    prelude::*, //
};

#[cfg(mistake)]
type Last = Option<NonNull<u8>>;
#[cfg(not(mistake))]
type Last = Option<u8>;

#[derive(HasCqe)]
struct Recv {
    cqe: Cqe<Self>,
    last: HandlerCell<Last>,
}

impl CqeHandler for Recv {
    type Pointer = Arc<Self>; //~ E0277 `NonNull<u8>` cannot be sent between threads safely
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, wc: &Wc, _cx: &context::Atomic) {
        let _ = this.last.with(wc, |last| *last = None);
    }
}
