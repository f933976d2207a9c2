// SPDX-License-Identifier: GPL-2.0

//! A counted owner whose handlers, running at once, would race.

#[cfg(mistake)]
use core::cell::Cell;
#[cfg(not(mistake))]
use kernel::sync::atomic;
use rdma::prelude::*;

#[cfg(mistake)]
type Count = Cell<u32>;
#[cfg(not(mistake))]
type Count = atomic::Atomic<u32>;

#[derive(HasCqe)]
struct Send {
    cqe: Cqe<Self>,
    completions: Count,
}

impl CqeHandler for Send {
    type Pointer = Arc<Self>; //~ E0277 `Cell<u32>` cannot be shared between threads safely
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn zero() -> Count {
    Count::new(0)
}
