// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions in a handler of the CQ that is waited for.

use kernel::prelude::*;
use rdma::{context::Waited, prelude::*};

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    cq: Cq<Waited>,
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &context::Atomic) {
        #[cfg(mistake)]
        let _ = this.cq.wait(Notify::NextComp, 1000, cx); //~ E0308 mismatched types
        #[cfg(not(mistake))]
        let _ = (this.cq.process(0), cx);
    }
}
