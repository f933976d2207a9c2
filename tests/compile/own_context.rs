// SPDX-License-Identifier: GPL-2.0

//! Inventing a polling context, to get its promises without keeping them.

use rdma::{context::Context, prelude::*};

#[cfg(mistake)]
enum Mine {}

#[cfg(mistake)]
impl Provides<Sleepable> for Mine {} //~ E0277 the trait bound `Mine: PollContext` is not satisfied

fn promises<C: FixedContext + Provides<N>, N: Context>() -> &'static str {
    C::NAME
}

fn name() -> &'static str {
    promises::<Workqueue, Sleepable>()
}
