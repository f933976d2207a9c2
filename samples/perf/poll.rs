// SPDX-License-Identifier: GPL-2.0

//! Polling of completions: by the RDMA core, or by the caller in one of three ways.

use crate::args::Context;
use kernel::prelude::*;
use rdma::{
    cq,
    prelude::*,
    qp, //
};

/// What a load is compiled for: the context is chosen when a run is set up.
pub(crate) type Cq = cq::Cq<AnyContext>;
pub(crate) type Qp = qp::Qp<AnyContext>;

/// The number of completions that are polled at once, as by the RDMA core.
pub(crate) const BATCH: u32 = 16;

/// An owner that is recognised where completions are polled.
pub(crate) trait Owner: CqeHandler<Needs = Atomic> {
    /// Handles a completion, without a callback if it is of this owner.
    fn claim(completion: Completion<'_>);
}

/// Handles completions, not many more than it is told, and returns their number.
pub(crate) type Poll = fn(&Cq, u32) -> Result<u32>;

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

/// Returns how the caller polls a CQ whose completions are mostly of owners `T`; `None` if the RDMA
/// core does.
pub(crate) fn caller<T: Owner>(context: Context) -> Option<Poll> {
    match context {
        Context::Static => Some(|cq, budget| cq.process_with(budget, T::claim)),
        Context::Batch => Some(|cq, _| cq.process_with(BATCH, T::claim)),
        Context::Direct => Some(|cq, budget| Ok(cq.process(budget))),
        _ => None,
    }
}
