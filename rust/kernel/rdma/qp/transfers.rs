// SPDX-License-Identifier: GPL-2.0

//! The transfers of a QP, which is destroyed when none is left.

use crate::{
    completion::Completion,
    deferred,
    lost,
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
    /// Set if the QP was created with contexts, so that transfers can be prepared.
    pub(crate) has_contexts: bool,
    /// Set when the QP takes back the transfers that are prepared.
    is_closed: Atomic<bool>,
    /// Set if the device is one of iWARP.
    pub(crate) iwarp: bool,
}

impl Transfers {
    pub(super) fn new(has_contexts: bool, iwarp: bool) -> impl PinInit<Self> {
        pin_init!(Self {
            users: Users::new(),
            is_ending: Atomic::new(false),
            ended <- Completion::new(),
            has_contexts,
            is_closed: Atomic::new(false),
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

    /// Takes back the transfers that are prepared and were not posted. These are no requests, so no
    /// drain ends them, and their contexts may be kept by the QP itself: by a table, a ring, an SRQ
    /// or the QP's own context. It looks through the contexts of all QPs, unless no transfer is
    /// left, as after a drain where all were posted. Any context.
    ///
    /// # Safety
    ///
    /// This is part of `qp`, which is valid and has no handle.
    pub(super) unsafe fn close(&self, qp: *mut bindings::ib_qp) {
        self.is_closed.store(true, Relaxed);
        if self.count() > 0 {
            // SAFETY: The QP is valid and has no handle, as the caller promises.
            unsafe { lost::take_back(qp) };
        }
    }

    /// Returns whether the QP has begun to take back what is prepared. If not, it will look at a
    /// context whose list the caller has locked.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
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
