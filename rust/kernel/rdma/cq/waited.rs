// SPDX-License-Identifier: GPL-2.0

//! Waits for completions.

use crate::{
    completion::wait_event_jiffies,
    cq::{
        Completion,
        Cq,
        Inner,
        WcArray, //
    },
    prelude::internal::*,
    removal, //
};
use kernel::{
    sync::CondVarTimeoutResult,
    time, //
};

/// The completions that a wait is for, as `enum ib_cq_notify_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Notify {
    /// The next one.
    NextComp = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP,
    /// That of a receive whose sender has asked for it
    /// ([`SendWr::solicited`](crate::wr::SendWr::solicited)), or of a request that has failed.
    Solicited = bindings::ib_cq_notify_flags_IB_CQ_SOLICITED,
}

/// The end of a wait that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// There may be completions: poll until there are none. Another thread may have taken them.
    Ready,
    /// No completion has come in time.
    TimedOut,
}

impl Cq<Waited> {
    /// Waits until there are completions (`ib_req_notify_cq`, then the event), at most for
    /// `timeout_ms` milliseconds; with 0 it never sleeps.
    ///
    /// Completions that have come before the wait end it, [solicited](Notify::Solicited) or
    /// not. Any number of threads may wait, and all are woken; while one polls, or runs handlers,
    /// others wait for that. Fails, in this order and after completions that have come, with
    /// `EOVERFLOW` if the CQ has lost completions; `ENODEV` from when the device is being removed;
    /// `ERESTARTSYS` on a signal; or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Waited}, cq::{Cq, Notify, Wait}};
    /// /// Runs the handlers of all completions, until none comes for five seconds.
    /// fn serve(cq: &Cq<Waited>, cx: &Sleepable) -> Result {
    ///     while cq.wait(Notify::NextComp, 5_000, cx)? == Wait::Ready {
    ///         while cq.process(64) == 64 {}
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn wait(&self, notify: Notify, timeout_ms: u32, cx: &Sleepable) -> Result<Wait> {
        let waiting = self.inner.waiting.as_ref().ok_or(EINVAL)?;
        let left = time::msecs_to_jiffies(timeout_ms);
        let Some(left) = self.wait_for_poll_lock(waiting, left)? else {
            return Ok(Wait::TimedOut);
        };
        // Before arming: an event that another thread has armed for counts too.
        let seen = waiting.events.lock().completions;
        let flags = notify as u32 | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is valid while `self` lives. Clients are only told of devices that have
        // all verbs (`kverbs_provider`), so the operation exists.
        let missed = unsafe { ((*(*cq).device).ops.req_notify_cq.unwrap_unchecked())(cq, flags) };
        if missed < 0 {
            return Err(Error::from_errno(missed));
        }
        if missed > 0 {
            return Ok(Wait::Ready);
        }
        // Every completion from here on, and those that were not there to be missed, is an event.
        let ready = |events: &mut WaitEvents| {
            if events.completions != seen {
                Some(Ok(Wait::Ready))
            } else if self.inner.has_failed() {
                Some(Err(EOVERFLOW))
            } else if events.gone {
                Some(Err(ENODEV))
            } else {
                None
            }
        };
        let mut events = waiting.events.lock();
        match wait_event_jiffies(&waiting.changed, &mut events, left, ready, cx) {
            Ok(ended) => ended,
            Err(ETIMEDOUT) => Ok(Wait::TimedOut),
            Err(e) => Err(e),
        }
    }

    /// Takes the next completion of the array, which is filled again when it is empty, and waits
    /// for one at most `timeout_ms` milliseconds; `None` if there is none by then. The wait may
    /// begin anew if other threads take completions.
    ///
    /// Fails as [`Cq::poll`] and [`Cq::wait`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Waited}, cq::{WcArray, Cq}};
    /// /// Runs the handlers of all completions, until none comes for a second.
    /// fn serve(cq: &Cq<Waited>, cx: &Sleepable) -> Result {
    ///     let mut array = WcArray::<8>::new();
    ///     while let Some(completion) = cq.next(&mut array, 1_000, cx)? {
    ///         completion.dispatch();
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn next<'a, const N: usize>(
        &self,
        array: &'a mut WcArray<N>,
        timeout_ms: u32,
        cx: &Sleepable,
    ) -> Result<Option<Completion<'a>>> {
        while array.next == array.len && self.poll(array)? == 0 {
            if self.wait(Notify::NextComp, timeout_ms, cx)? == Wait::TimedOut {
                return Ok(None);
            }
        }
        Ok(array.completions().next())
    }

    /// Waits until no other thread polls, as the CQ looks empty until then. Returns the rest of the
    /// time, or `None` if it was not long enough.
    fn wait_for_poll_lock(
        &self,
        waiting: &Waiting,
        mut left: time::Jiffies,
    ) -> Result<Option<time::Jiffies>> {
        let mut events = waiting.events.lock();
        while self.inner.poll_lock.holder() != 0 && !events.gone {
            if left == 0 {
                return Ok(None);
            }
            // The poll lock wakes no one when it is released.
            match waiting.changed.wait_interruptible_timeout(&mut events, 1) {
                CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
                _ => left = left.saturating_sub(1),
            }
        }
        Ok(Some(left))
    }
}

/// The events that a wait is for.
pub(super) struct WaitEvents {
    /// The number of calls of `comp_handler`.
    completions: u32,
    /// Set when the device is being removed.
    gone: bool,
}

/// The waits for the completions of a CQ.
#[pin_data]
pub(super) struct Waiting {
    #[pin]
    pub(super) events: kernel::sync::SpinLockIrq<WaitEvents>,
    #[pin]
    pub(super) changed: kernel::sync::CondVar,
    index: removal::Index,
}

impl Waiting {
    pub(super) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            events <- kernel::new_spinlock_irq!(
                WaitEvents {
                    completions: 0,
                    gone: false,
                },
                "rdma::cq::Waiting::events"
            ),
            changed <- kernel::new_condvar!("rdma::cq::Waiting::changed"),
            index: removal::Index::new(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }
}

impl removal::OnRemoval for Waiting {
    fn index(&self) -> &removal::Index {
        &self.index
    }

    fn gone(self: Arc<Self>) {
        self.events.lock().gone = true;
        self.changed.notify_all();
    }
}

/// `ib_cq.comp_handler` of a CQ that can be waited for.
///
/// # Safety
///
/// Called by the driver, in any context, with the [`Inner`] of a CQ that is not destroyed.
pub(super) unsafe extern "C" fn completed(_cq: *mut bindings::ib_cq, context: *mut c_void) {
    // SAFETY: The context is the `Inner` of a CQ that is not destroyed, as the caller promises, and
    // is freed after that.
    let inner = unsafe { &*context.cast::<Inner>() };
    let Some(waiting) = &inner.waiting else {
        return;
    };
    let mut events = waiting.events.lock();
    events.completions = events.completions.wrapping_add(1);
    drop(events);
    waiting.changed.notify_all();
}
