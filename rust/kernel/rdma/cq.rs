// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! Who polls a [`Cq`], and where handlers run, is the type's parameter:
//!
//! - [`Softirq`], [`Workqueue`](crate::context::Workqueue) and
//!   [`UnboundWorkqueue`](crate::context::UnboundWorkqueue): the RDMA core, which calls the
//!   [`CqeHandler`](crate::cqe::CqeHandler) of each request ([`Cq::alloc`]). Such CQs can be shared
//!   ([`Cq::pool_get`]). Where handlers do not sleep, which of the three it is can be chosen at run
//!   time ([`Cq::into_atomic`]).
//! - [`Direct`](crate::context::Direct): whoever has it, which calls handlers ([`Cq::process`],
//!   [`Cq::process_with`]) or takes completions without ([`Cq::poll`], [`Cq::next`]).
//! - [`Waited`](crate::context::Waited): as a direct one, and completions can be waited for
//!   ([`Cq::wait`]).
//!
//! Overrun is made impossible by leases: a QP takes as many entries as its queues can have
//! outstanding when it is created, and creation fails where there is no room.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cq`);
//! C source: `drivers/infiniband/core/cq.c`

mod alloc;
mod batch;
mod inner;
mod lease;
mod poll;
mod pool;
mod room;
mod seat;
mod set;
mod wait;
mod watch;

pub use batch::{
    Batch,
    Completion,
    Completions, //
};
pub(crate) use inner::{
    Inner,
    Seated, //
};
pub(crate) use lease::{
    lease,
    Lease, //
};
pub use set::CqSet;
pub use wait::Wait;

use crate::{
    bindings,
    context::{
        CorePolled,
        PollContext,
        Sleepable,
        Softirq, //
    },
    device::Device, //
};
use alloc::{
    alloc,
    Request, //
};
use core::{
    marker::PhantomData,
    sync::atomic, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// A completion queue that is polled in context `C`; if that is [`Softirq`], perhaps by a work item
/// instead ([`Cq::into_atomic`]).
///
/// A counted handle. The CQ is freed, from a work item, when the last handle and every QP that uses
/// it are gone.
pub struct Cq<C: PollContext> {
    inner: Arc<Inner>,
    _context: PhantomData<fn() -> C>,
}

impl<C: PollContext> Clone for Cq<C> {
    fn clone(&self) -> Self {
        Self::from_inner(self.inner.clone())
    }
}

impl<C: PollContext> Cq<C> {
    /// Allocates a CQ with at least `entries` entries on completion vector `vector`
    /// (`ib_alloc_cq`; `ib_create_cq` for a [`Waited`](crate::context::Waited) one).
    ///
    /// Size it by [`Caps::entries`](crate::qp::Caps::entries) of the QPs that will use it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device has no CQ of that size or no such vector; `ENODEV` for a `Waited` one
    /// if the device is being removed; `ENOMEM`, or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Softirq}, cq::Cq, device::Device};
    /// fn make(dev: &Device, cx: &Sleepable) -> Result<Cq<Softirq>> {
    ///     Cq::alloc(dev, 128, 0, cx)
    /// }
    /// ```
    pub fn alloc(dev: &Device, entries: u32, vector: u32, cx: &Sleepable) -> Result<Self> {
        let request = Request::new::<C>(entries, Some(vector));
        Ok(Self::from_inner(alloc(dev, &request, cx)?))
    }

    /// Allocates a CQ on a completion vector of the core's choice (`ib_alloc_cq_any`).
    ///
    /// # Errors
    ///
    /// As [`Cq::alloc`].
    pub fn alloc_any(dev: &Device, entries: u32, cx: &Sleepable) -> Result<Self> {
        let request = Request::new::<C>(entries, None);
        Ok(Self::from_inner(alloc(dev, &request, cx)?))
    }

    fn from_inner(inner: Arc<Inner>) -> Self {
        Self {
            inner,
            _context: PhantomData,
        }
    }

    /// Has the device tell of completions once there are `count` of them, or `period_us`
    /// microseconds after the first (`rdma_set_cq_moderation`).
    ///
    /// Process context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot, or if the CQ is shared; or the driver's error.
    pub fn moderate(&self, count: u16, period_us: u16, _cx: &Sleepable) -> Result {
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is there while `self` lives.
        to_result(unsafe { bindings::rdma_set_cq_moderation(cq, count, period_us) })
    }

    /// Returns the number of entries: those that the driver gave or, of a shared CQ, those that
    /// were taken.
    pub fn entries(&self) -> u32 {
        self.inner.entries
    }

    /// Returns the number of entries that no QP has leased.
    pub fn free_entries(&self) -> u32 {
        self.inner.room.free().try_into().unwrap_or(0)
    }

    /// Returns the completion vector that the CQ is on.
    pub fn vector(&self) -> u32 {
        // SAFETY: The CQ is there while `self` lives; the field does not change.
        unsafe { (*self.inner.raw.as_ptr()).comp_vector }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.dev
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl<C: CorePolled> Cq<C> {
    /// Returns the CQ as one for handlers that do not sleep, so that such code is compiled once and
    /// the context chosen at run time, as the argument of `ib_alloc_cq` is.
    ///
    /// The core goes on polling where it did. A [`Cq<Softirq>`](Cq) says that handlers are given
    /// [`Atomic`](crate::context::Atomic), which every context provides, and that the core polls;
    /// nothing else follows from its type, least of all that softirqs are disabled.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::Cq, device::Device};
    /// fn make(dev: &Device, in_softirq: bool, cx: &Sleepable) -> Result<Cq<Softirq>> {
    ///     if in_softirq {
    ///         Cq::alloc(dev, 128, 0, cx)
    ///     } else {
    ///         Ok(Cq::<Workqueue>::alloc(dev, 128, 0, cx)?.into_atomic())
    ///     }
    /// }
    /// ```
    pub fn into_atomic(self) -> Cq<Softirq> {
        Cq::from_inner(self.inner)
    }
}
