// SPDX-License-Identifier: GPL-2.0

//! Sleeping in a handler that runs in a softirq.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Recv {
    cqe: Cqe<Self>,
    pd: Pd,
}

#[cfg(mistake)]
type Context = context::Atomic;
#[cfg(not(mistake))]
type Context = Sleepable;

impl CqeHandler for Recv {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Context;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &Context) {
        let answer = Buf::<ToDevice>::alloc(&this.pd, 64, cx); //~ E0308 mismatched types
        drop(answer);
    }
}
