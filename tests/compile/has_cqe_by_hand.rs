// SPDX-License-Identifier: GPL-2.0

//! Saying oneself where the callback is.

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg_attr(not(mistake), derive(HasCqe))]
struct Send {
    cqe: Cqe<Self>,
    number: u64,
}

#[cfg(mistake)]
impl HasCqe for Send {
    const FIELD: rdma::cqe::Field<Self, 0> = rdma::cqe_field!(number); //~ E0308 mismatched types
}

impl CqeHandler for Send {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
