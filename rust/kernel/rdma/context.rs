// SPDX-License-Identifier: GPL-2.0

//! Contexts that code runs in.
//!
//! A token of type [`Atomic`] or [`Sleepable`] is a proof of the caller's context: a function that
//! may sleep, or that takes a lock which is not for softirqs, takes a [`&Sleepable`](Sleepable),
//! and a completion handler gets the token of its context. A function without one may be called in
//! any context, softirqs and interrupts included, and all objects may be dropped there. What the
//! crate frees sleeps nowhere, but a value of the ULP's that an object has is dropped with it: its
//! own destructor has to stand that.
//!
//! The polling contexts of a completion queue are types too. [`Provides`] relates them to tokens.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`enum ib_poll_context`)

use crate::{
    prelude::internal::*,
    wc::Wc, //
};
use kernel::types::NotThreadSafe;
use private::Sealed;

pub(crate) mod private {
    pub trait Sealed {}
}

/// A context that code can run in.
pub trait Context: Sealed + Sized + 'static {
    /// Claims to run in this context.
    ///
    /// # Safety
    ///
    /// The caller must run in a context that allows what this one allows, for as long as the token
    /// lives.
    #[doc(hidden)]
    unsafe fn assume() -> Self;

    /// Claims to run in this context, in the handler of a completion.
    ///
    /// # Safety
    ///
    /// The caller must run in a context that allows what this one allows, for as long as the token
    /// lives. `wc` is of a request that was posted with a handler that needs this context, to a QP
    /// that completes where it is valid by [`Provides`]. `cq` is the CQ of `wc`, and valid,
    /// unless a caller of this crate has polled it: then it is null.
    #[doc(hidden)]
    #[inline]
    unsafe fn of_completion(_cq: *mut bindings::ib_cq, _wc: &Wc) -> Self {
        // SAFETY: The caller's context allows what this one allows, as it promises.
        unsafe { Self::assume() }
    }
}

/// The code may run in any context and must not sleep. Proof of nothing.
pub struct Atomic(NotThreadSafe);

/// Proof that the code may sleep.
///
/// # Invariants
///
/// The current task may sleep.
pub struct Sleepable(NotThreadSafe);

impl Sleepable {
    /// Returns the token where the caller may sleep, for code that is not passed one, such as a
    /// work item. Fails with `EAGAIN` in atomic context, but a held spinlock goes unnoticed without
    /// `CONFIG_PREEMPT_COUNT`, an RCU read-side section without `CONFIG_PREEMPT_RCU`.
    #[inline]
    pub fn current() -> Result<Self> {
        // SAFETY: The helper only reads the state of the current task and CPU.
        if unsafe { bindings::rdma_helper_may_sleep() } {
            // INVARIANT: Just checked.
            Ok(Self(NotThreadSafe))
        } else {
            Err(EAGAIN)
        }
    }
}

impl Sealed for Atomic {}
impl Context for Atomic {
    #[inline]
    unsafe fn assume() -> Self {
        Self(NotThreadSafe)
    }
}

impl Sealed for Sleepable {}
impl Context for Sleepable {
    #[inline]
    unsafe fn assume() -> Self {
        // INVARIANT: The caller's promise.
        Self(NotThreadSafe)
    }
}

/// A context that a completion queue is polled in.
pub trait PollContext: Sealed + Send + Sync + 'static {}

/// A [`PollContext`] that is known at compile time, as `enum ib_poll_context`.
pub trait FixedContext: PollContext {
    /// The C value.
    #[doc(hidden)]
    const RAW: bindings::ib_poll_context;

    /// Set if the completion queue raises events that can be waited for (`ib_create_cq`).
    #[doc(hidden)]
    const WAITED: bool = false;

    /// The context's name.
    const NAME: &'static str;
}

/// A [`PollContext`] in which a token `C` holds.
pub trait Provides<C: Context>: PollContext {}

/// A [`PollContext`] whose completion queues are polled by callers, which may be atomic.
pub trait CallerPolled: Provides<Atomic> {}

/// A [`PollContext`] in which the RDMA core polls. Handlers of one completion queue run one after
/// the other, unless it is [shared](crate::cq::Cq::pool_get).
pub trait CorePolled: PollContext {}

macro_rules! poll_context {
    (
        $(#[$doc:meta])*
        $name:ident: $polled:ident, $raw:ident, $text:literal, [$($cx:ty),*]
        $(, waited: $waited:literal)?
    ) => {
        $(#[$doc])*
        pub enum $name {}
        impl Sealed for $name {}
        impl PollContext for $name {}
        impl $polled for $name {}
        impl FixedContext for $name {
            const RAW: bindings::ib_poll_context = bindings::$raw;
            $(const WAITED: bool = $waited;)?
            const NAME: &'static str = $text;
        }
        $(impl Provides<$cx> for $name {})*
    };
}

poll_context!(
    /// Polled by the caller of [`Cq::process`](crate::cq::Cq::process) (`IB_POLL_DIRECT`).
    Direct: CallerPolled, ib_poll_context_IB_POLL_DIRECT, "direct", [Atomic]
);
poll_context!(
    /// Polled in softirq context through `irq_poll` (`IB_POLL_SOFTIRQ`). On PREEMPT_RT from a work
    /// item, as [`Workqueue`], unless the kernel keeps the softirqs of a CPU from running at the
    /// same time (`CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`): `irq_poll` relies on that.
    Softirq: CorePolled, ib_poll_context_IB_POLL_SOFTIRQ, "softirq", [Atomic]
);
poll_context!(
    /// Polled from a work item on the completion's CPU (`IB_POLL_WORKQUEUE`). Handlers may sleep.
    Workqueue: CorePolled, ib_poll_context_IB_POLL_WORKQUEUE, "workqueue", [Atomic, Sleepable]
);
poll_context!(
    /// Polled from a work item on any CPU (`IB_POLL_UNBOUND_WORKQUEUE`). Handlers may sleep.
    UnboundWorkqueue: CorePolled, ib_poll_context_IB_POLL_UNBOUND_WORKQUEUE, "unbound_workqueue",
    [Atomic, Sleepable]
);

poll_context!(
    /// Polled by the caller, as [`Direct`], which can also wait for completions
    /// ([`Cq::wait`](crate::cq::Cq::wait)); created by `ib_create_cq`.
    // Drains, the drivers' own among them, poll such a queue themselves.
    Waited: CallerPolled, ib_poll_context_IB_POLL_DIRECT, "waited", [Atomic], waited: true
);

/// Any of these contexts, as chosen at run time ([`Cq::into_any`](crate::cq::Cq::into_any)).
///
/// Handlers must not sleep, nor rely on disabled softirqs. [`Cq::process`](crate::cq::Cq::process)
/// returns 0 where the RDMA core polls; where the caller does, a QP on an SRQ is not created.
pub enum AnyContext {}
impl Sealed for AnyContext {}
impl PollContext for AnyContext {}
impl Provides<Atomic> for AnyContext {}
impl CallerPolled for AnyContext {}
impl CorePolled for AnyContext {}
