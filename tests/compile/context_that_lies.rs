// SPDX-License-Identifier: GPL-2.0

//! Claiming that a softirq may sleep.

use rdma::{context::Context, prelude::*};

#[cfg(mistake)]
impl Provides<Sleepable> for Softirq {} //~ E0117 only traits defined in the current crate

fn promises<C: FixedContext + Provides<N>, N: Context>() -> &'static str {
    C::NAME
}

fn name() -> &'static str {
    promises::<Softirq, context::Atomic>()
}
