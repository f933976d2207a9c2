// SPDX-License-Identifier: GPL-2.0

//! Polling of completions: by the RDMA core, or by the caller in one of three ways.

use crate::args::Context;
use kernel::prelude::*;
use rdma::{
    cq,
    device::Device,
    prelude::*,
    qp, //
};

/// Loads are compiled for any context: that is chosen when a run is set up.
pub(crate) type Cq = cq::Cq<AnyContext>;
pub(crate) type Qp = qp::Qp<AnyContext>;

/// The number of completions that are polled at once, as by the RDMA core.
pub(crate) const BATCH: u32 = 16;

/// An owner that is recognised where completions are polled.
pub(crate) trait Owner: CqeHandler<Needs = context::Atomic> {
    /// Handles a completion, without a callback if it is of this owner.
    fn claim(completion: cq::Completion<'_>);
}

/// A CQ that the caller polls.
pub(crate) struct Poller<'a> {
    poll: fn(&Cq, u32) -> Result<u32>,
    cq: &'a Cq,
    budget: u32,
}

impl Poller<'_> {
    /// Handles completions, not many more than the budget, and returns their number.
    #[inline]
    pub(crate) fn poll(&self) -> Result<u32> {
        (self.poll)(self.cq, self.budget)
    }
}

/// Allocates a CQ for a context.
pub(crate) fn alloc_cq(dev: &Device, entries: u32, context: Context, cx: &Sleepable) -> Result<Cq> {
    Ok(match context {
        Context::Direct | Context::Batch | Context::Static => {
            cq::Cq::<Direct>::alloc(dev, entries, 0, cx)?.into_any()
        }
        Context::Softirq => cq::Cq::<Softirq>::alloc(dev, entries, 0, cx)?.into_any(),
        Context::Workqueue => cq::Cq::<Workqueue>::alloc(dev, entries, 0, cx)?.into_any(),
        Context::UnboundWorkqueue => {
            cq::Cq::<UnboundWorkqueue>::alloc(dev, entries, 0, cx)?.into_any()
        }
    })
}

/// Runs the handlers of completions, and returns their number.
pub(crate) fn process(cq: &Cq, budget: u32) -> Result<u32> {
    Ok(cq.process(budget))
}

/// Returns how the caller polls a CQ whose completions are mostly of owners `T`; `None` if the RDMA
/// core does.
pub(crate) fn caller<T: Owner>(context: Context, cq: &Cq, budget: u32) -> Option<Poller<'_>> {
    let budget = match context {
        Context::Static => budget,
        Context::Batch => BATCH,
        _ => return handlers(context, cq, budget),
    };
    let poll = |cq: &Cq, budget| cq.process_with(budget, T::claim);
    Some(Poller { poll, cq, budget })
}

/// Returns how the caller polls a CQ all of whose completions go to handlers; `None` if the RDMA
/// core does.
pub(crate) fn handlers(context: Context, cq: &Cq, budget: u32) -> Option<Poller<'_>> {
    let poll = process;
    context.is_polled().then_some(Poller { poll, cq, budget })
}
