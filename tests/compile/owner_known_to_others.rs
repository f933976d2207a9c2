// SPDX-License-Identifier: GPL-2.0

//! An exclusive owner with a pinned field, which others may have the address of.

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Known = core::marker::PhantomPinned;
#[cfg(not(mistake))]
type Known = ();

#[derive(HasCqe)]
struct Send {
    cqe: Cqe<Self>,
    known: Known,
}

impl CqeHandler for Send {
    type Pointer = Pin<KBox<Self>>; //~ E0277 `PhantomPinned` cannot be unpinned
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
