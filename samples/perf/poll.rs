// SPDX-License-Identifier: GPL-2.0

//! Polling of completions: by the RDMA core, or by the caller in one of three ways.

use crate::args::Context;
use kernel::prelude::*;
use rdma::prelude::*;

/// The number of completions that are polled at once, as by the RDMA core.
pub(crate) const BATCH: u32 = 16;

/// An owner that is recognised where completions are polled.
pub(crate) trait Owner: CqeHandler<Needs = Atomic> {
    /// Handles a completion, without a callback if it is of this owner.
    fn claim(completion: Completion<'_>);
}

/// Handles completions, not many more than it is told, and returns their number.
pub(crate) type Poll<C> = fn(&Cq<C>, u32) -> Result<u32>;

/// The polling context. Loads are compiled once for each, and one of them is chosen when
/// a run is set up.
pub(crate) trait Mode: PollContext + Provides<Atomic> {
    /// Allocates a CQ for a context.
    fn cq(dev: &Device, entries: u32, context: Context, cx: &Sleepable) -> Result<Cq<Self>>
    where
        Self: Sized;

    /// Handles a completion, if there is one and it is the caller who polls.
    fn process_one(_cq: &Cq<Self>)
    where
        Self: Sized,
    {
    }

    /// Returns how the caller polls a CQ whose completions are mostly of owners `T`, or `None`.
    fn poll<T: Owner>(_context: Context) -> Option<Poll<Self>>
    where
        Self: Sized,
    {
        None
    }
}

/// The caller.
impl Mode for Direct {
    fn cq(dev: &Device, entries: u32, _context: Context, cx: &Sleepable) -> Result<Cq<Self>> {
        Cq::alloc(dev, entries, 0, cx)
    }

    fn process_one(cq: &Cq<Self>) {
        cq.process(1);
    }

    #[inline]
    fn poll<T: Owner>(context: Context) -> Option<Poll<Self>> {
        Some(match context {
            Context::Static => |cq, budget| cq.process_with(budget, T::claim),
            Context::Batch => |cq, _| cq.process_with(BATCH, T::claim),
            _ => |cq, budget| Ok(cq.process(budget)),
        })
    }
}

/// The RDMA core.
impl Mode for Softirq {
    fn cq(dev: &Device, entries: u32, context: Context, cx: &Sleepable) -> Result<Cq<Self>> {
        Ok(match context {
            Context::Workqueue => Cq::<Workqueue>::alloc(dev, entries, 0, cx)?.into_atomic(),
            Context::UnboundWorkqueue => {
                Cq::<UnboundWorkqueue>::alloc(dev, entries, 0, cx)?.into_atomic()
            }
            _ => Cq::alloc(dev, entries, 0, cx)?,
        })
    }
}
