// SPDX-License-Identifier: GPL-2.0

//! How completions are come by: by the RDMA core, or by the caller in one of three ways.

use kernel::prelude::*;
use rdma::prelude::*;

/// How many completions are polled at once, as the RDMA core does.
pub(crate) const BATCH: usize = 16;

/// An owner that is recognised where completions are polled.
pub(crate) trait Owner: CqeHandler<Needs = Atomic> {
    /// Handles a completion, without a callback if it is of this owner.
    fn claim(completion: Completion<'_>);
}

/// How completions are come by.
pub(crate) trait Mode: 'static {
    /// The context of the CQs.
    type Cq: PollContext + Provides<Atomic>;

    /// Whether it is the caller who polls.
    const POLLED: bool = false;

    /// Handles completions, most of which are of owners `T`, and returns their number.
    fn poll<T: Owner>(_cq: &Cq<Self::Cq>, _budget: u32) -> Result<u32> {
        Ok(0)
    }
}

impl Mode for Softirq {
    type Cq = Self;
}

impl Mode for Workqueue {
    type Cq = Self;
}

impl Mode for UnboundWorkqueue {
    type Cq = Self;
}

/// By callbacks.
impl Mode for Direct {
    type Cq = Self;
    const POLLED: bool = true;

    #[inline]
    fn poll<T: Owner>(cq: &Cq<Self>, budget: u32) -> Result<u32> {
        Ok(cq.process(budget))
    }
}

/// By static dispatch.
pub(crate) enum Static {}

impl Mode for Static {
    type Cq = Direct;
    const POLLED: bool = true;

    #[inline]
    fn poll<T: Owner>(cq: &Cq<Direct>, budget: u32) -> Result<u32> {
        cq.process_with::<T, 0>(budget)
    }
}

/// Into an array.
pub(crate) enum Batched {}

impl Mode for Batched {
    type Cq = Direct;
    const POLLED: bool = true;

    #[inline]
    fn poll<T: Owner>(cq: &Cq<Direct>, _budget: u32) -> Result<u32> {
        let mut batch = Batch::<BATCH>::new();
        let n = cq.poll(&mut batch)?;
        for completion in batch.completions() {
            T::claim(completion);
        }
        Ok(n as u32)
    }
}
