// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions.

use super::{
    watch::Watch,
    Batch,
    Completion,
    Cq, //
};
use crate::{
    bindings,
    context::{
        Sleepable,
        Waited, //
    }, //
};
use kernel::{
    prelude::*,
    sync::CondVarTimeoutResult,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    }, //
};

/// How a wait has ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// There may be completions: poll until there are none. Another thread may have taken them.
    Ready,
    /// None has come in time.
    TimedOut,
}

impl Cq<Waited> {
    /// Waits until there are completions (`ib_req_notify_cq`, then the event), at most for
    /// `timeout_ms` milliseconds; with 0 it only looks and never sleeps.
    ///
    /// Completions that were there before count, so this may be called at any time, by any number
    /// of threads; all of them are woken. While a thread polls, or runs handlers, others wait for
    /// that: see [`Cq::process`].
    ///
    /// # Errors
    ///
    /// In this order, after completions that are there: `EOVERFLOW` if the CQ has failed, so that
    /// completions are lost; `ENODEV` from when the device is being removed; `ERESTARTSYS` on a
    /// signal. Or what the driver says.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Waited}, cq::{Batch, Cq, Wait}};
    /// fn serve(cq: &Cq<Waited>, cx: &Sleepable) -> Result {
    ///     let mut batch = Batch::<8>::new();
    ///     loop {
    ///         while let Some(completion) = cq.next(&mut batch)? {
    ///             drop(completion); // To its handler.
    ///         }
    ///         if cq.wait(5_000, cx)? == Wait::TimedOut {
    ///             return Err(ETIMEDOUT);
    ///         }
    ///     }
    /// }
    /// ```
    pub fn wait(&self, timeout_ms: u32, cx: &Sleepable) -> Result<Wait> {
        let next = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP;
        self.wait_armed(next, timeout_ms, cx)
    }

    /// Waits as [`Cq::wait`], but for the completion of a receive whose sender has asked for that
    /// ([`SendWr::solicited`](crate::wr::SendWr::solicited)), or of a request that has failed
    /// (`IB_CQ_SOLICITED`).
    ///
    /// Any completion that is there before the wait begins ends it, so poll until there are none.
    ///
    /// # Errors
    ///
    /// As [`Cq::wait`].
    pub fn wait_solicited(&self, timeout_ms: u32, cx: &Sleepable) -> Result<Wait> {
        let solicited = bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
        self.wait_armed(solicited, timeout_ms, cx)
    }

    /// Takes the next completion, as [`Cq::next`], and waits for it at most `timeout_ms`
    /// milliseconds; `None` if there is none by then. If other threads take completions, the wait
    /// may begin anew.
    ///
    /// # Errors
    ///
    /// As [`Cq::poll`] and [`Cq::wait`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Waited}, cq::{Batch, Cq}};
    /// /// Runs the handlers of all completions, until none comes for a second.
    /// fn serve(cq: &Cq<Waited>, cx: &Sleepable) -> Result {
    ///     let mut batch = Batch::<8>::new();
    ///     while let Some(completion) = cq.next_within(&mut batch, 1_000, cx)? {
    ///         drop(completion);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn next_within<'a, const N: usize>(
        &self,
        batch: &'a mut Batch<N>,
        timeout_ms: u32,
        cx: &Sleepable,
    ) -> Result<Option<Completion<'a>>> {
        while batch.is_empty() && self.poll(batch)? == 0 {
            if self.wait(timeout_ms, cx)? == Wait::TimedOut {
                return Ok(None);
            }
        }
        Ok(batch.next())
    }

    /// Waits until no other thread polls, as there is nothing to be had until then. Returns what is
    /// left of the time, or `None` if that was not long enough.
    fn wait_for_seat(&self, watch: &Watch, mut left: Jiffies) -> Result<Option<Jiffies>> {
        let mut events = watch.events.lock();
        while self.inner.is_taken() && !events.gone {
            if left == 0 {
                return Ok(None);
            }
            // Nobody tells, so this looks again and again.
            match watch.changed.wait_interruptible_timeout(&mut events, 1) {
                CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
                _ => left = left.saturating_sub(1),
            }
        }
        Ok(Some(left))
    }

    fn wait_armed(
        &self,
        flag: bindings::ib_cq_notify_flags,
        timeout_ms: u32,
        _cx: &Sleepable,
    ) -> Result<Wait> {
        let watch = self.inner.watch().ok_or(EINVAL)?;
        let Some(mut left) = self.wait_for_seat(watch, msecs_to_jiffies(timeout_ms))? else {
            return Ok(Wait::TimedOut);
        };
        // Before arming: an event that another thread has armed for counts too.
        let seen = watch.events.lock().completions;
        let flags = flag | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is there while `self` lives. Clients are only told of devices that have
        // all verbs (`kverbs_provider`), so the operation exists.
        let missed = unsafe { ((*(*cq).device).ops.req_notify_cq.unwrap_unchecked())(cq, flags) };
        if missed < 0 {
            return Err(Error::from_errno(missed));
        }
        if missed > 0 {
            return Ok(Wait::Ready);
        }
        // Every completion from here on, and those that were not there to be missed, is an event.
        let mut events = watch.events.lock();
        loop {
            if events.completions != seen {
                return Ok(Wait::Ready);
            }
            if watch.has_failed() {
                return Err(EOVERFLOW);
            }
            if events.gone {
                return Err(ENODEV);
            }
            if left == 0 {
                return Ok(Wait::TimedOut);
            }
            left = match watch.changed.wait_interruptible_timeout(&mut events, left) {
                CondVarTimeoutResult::Woken { jiffies } => jiffies,
                CondVarTimeoutResult::Timeout => 0,
                CondVarTimeoutResult::Signal { .. } if events.completions == seen => {
                    return Err(ERESTARTSYS);
                }
                CondVarTimeoutResult::Signal { jiffies } => jiffies,
            };
        }
    }
}
