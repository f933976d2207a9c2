// SPDX-License-Identifier: GPL-2.0

//! Embedding the callback of another type, so that the handler gets the wrong owner.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)] //~ E0308 mismatched types
struct Send {
    #[cfg(mistake)]
    cqe: Cqe<ulp::Shared>,
    #[cfg(not(mistake))]
    cqe: Cqe<Self>,
}

impl CqeHandler for Send {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
