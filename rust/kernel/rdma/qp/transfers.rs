// SPDX-License-Identifier: GPL-2.0

//! The transfers of a QP, which is destroyed when none is left.

use super::prepared;
use crate::{
    completion::Completion,
    deferred,
    prelude::internal::*,
    sync::Users, //
};
use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

/// A count of transfers, which keep the QP: `rdma_rw_ctx_destroy` needs it, and is called in the
/// handler of the transfer. A drain proves that all requests have completed, not that all handlers
/// have begun: those of a direct CQ, or of one that the drain of an SRQ polls, may still be waiting
/// with another thread.
#[pin_data]
pub(crate) struct Transfers {
    /// The transfers that use the QP, and the QP itself.
    users: Users,
    /// Set when the QP itself is no longer counted.
    is_ending: Atomic<bool>,
    /// Completed by the last transfer once [`Transfers::wait`] was called.
    #[pin]
    ended: Completion,
    /// The contexts that were prepared. `None` if the QP was created without contexts.
    pub(crate) prepared: Option<Arc<prepared::PreparedList>>,
    /// Set if the device is one of iWARP.
    pub(crate) iwarp: bool,
}

impl Transfers {
    pub(super) fn new(
        prepared: Option<Arc<prepared::PreparedList>>,
        iwarp: bool,
    ) -> impl PinInit<Self> {
        pin_init!(Self {
            users: Users::new(),
            is_ending: Atomic::new(false),
            ended <- Completion::new(),
            prepared,
            iwarp,
        })
    }

    /// Counts a transfer that has begun. The caller has a reference to the QP.
    #[inline]
    pub(crate) fn begin(&self) {
        self.users.get();
    }

    /// Ends a transfer, which no longer uses the QP, or this. Returns the callback that it
    /// is given, which the caller then need not save.
    #[inline]
    pub(crate) fn end(&self, user: *mut bindings::ib_cqe) -> *mut bindings::ib_cqe {
        if self.users.put() {
            self.ended(user)
        } else {
            user
        }
    }

    fn ended(&self, user: *mut bindings::ib_cqe) -> *mut bindings::ib_cqe {
        self.ended.complete();
        user
    }

    /// Waits until no transfer is left. Called until it succeeds, when there is no reference to the
    /// QP. Fails with `ETIMEDOUT`, after a minute if a caller waits.
    pub(super) fn wait(&self, waiter: deferred::Waiter, cx: &Sleepable) -> Result {
        if !self.is_ending.xchg(true, Relaxed) && self.users.put() {
            return Ok(());
        }
        let ms = match waiter {
            deferred::Waiter::Caller => 60_000,
            deferred::Waiter::WorkItem => 50,
        };
        if !self.ended.wait_timeout(ms, cx) {
            return Err(ETIMEDOUT);
        }
        Ok(())
    }

    /// Returns the number of transfers, for a message.
    pub(super) fn count(&self) -> usize {
        let qp = usize::from(!self.is_ending.load(Relaxed));
        self.users.count().saturating_sub(qp)
    }
}
