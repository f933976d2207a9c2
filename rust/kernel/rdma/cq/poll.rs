// SPDX-License-Identifier: GPL-2.0

//! Polling by whoever has the CQ.

use crate::{
    bindings,
    context::{
        CallerPolled,
        Context,
        Provides,
        Sleepable,
        Waited, //
    },
    cq::{
        batch::Polled,
        Batch,
        Completion,
        Cq,
        CqContext, //
    },
    cqe::CqeHandler,
    wc::{
        Wc,
        POLL_BATCH, //
    }, //
};
use core::mem::MaybeUninit;
use kernel::{
    prelude::*,
    sync::CondVarTimeoutResult,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    }, //
};

impl<C: CallerPolled> Cq<C> {
    /// Runs the handlers of at most `budget` completions and returns their number
    /// (`ib_process_cq_direct`).
    ///
    /// This does what that function does, in rows of 16 completions instead of 8, and is compiled
    /// into the ULP: so the RDMA core's trace points (`cq_process`, `cq_poll`) do not see it, as
    /// they see no `ib_poll_cq`. Errors of the driver count as no completion.
    ///
    /// May be called in any context, from any thread. One at a time polls: while another thread
    /// does, or a handler of this CQ runs, there is nothing to be had, and this returns 0. So
    /// handlers of the CQ run one after the other, in the order of the completions. Do not spin for
    /// a completion where that may keep the other from its CPU, as in an interrupt.
    #[inline]
    pub fn process(&self, budget: u32) -> u32 {
        // A completion that is dropped goes to its handler.
        self.process_by(budget, |completion| drop(completion))
            .unwrap_or(0)
    }

    /// Runs the handlers of at most `budget` completions, as [`Cq::process`], where most of them
    /// are of owners of type `T`, posted by their callback `ID`: that handler is called directly,
    /// so it can be inlined, any other through its callback.
    ///
    /// May be called as [`Cq::process`].
    ///
    /// # Errors
    ///
    /// `EINVAL` if the budget is zero. `EOVERFLOW` if there is no completion and the CQ has lost
    /// some; or what the driver says.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::Cq, cqe::*, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Request { cqe: Cqe<Self> }
    /// # impl CqeHandler for Request {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn progress(cq: &Cq<Direct>) -> Result<u32> {
    ///     cq.process_with::<Request, 0>(64)
    /// }
    /// ```
    #[inline]
    pub fn process_with<T, const ID: u64>(&self, budget: u32) -> Result<u32>
    where
        T: CqeHandler<ID>,
        C: Provides<T::Needs>,
    {
        // SAFETY: The caller's context is the one that handlers of this CQ run in.
        let cx = unsafe { T::Needs::assume() };
        self.process_each::<T, ID>(budget, |owner, wc| T::done(owner, wc, &cx))
    }

    /// Gives the owners of type `T`, posted by their callback `ID`, of at most `budget` completions
    /// to `done` instead of to their handler, any other as [`Cq::process`] does. So the caller gets
    /// at what is his own, without a lock or a count that it would be shared by. A local
    /// invalidation goes to its owner's handler, see [`Completion::take_inv`].
    ///
    /// May be called as [`Cq::process`].
    ///
    /// # Errors
    ///
    /// As [`Cq::process_with`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::Cq, cqe::*, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Request { cqe: Cqe<Self> }
    /// # impl CqeHandler for Request {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn reap(cq: &Cq<Direct>, free: &mut KVec<Pin<KBox<Request>>>) -> Result<u32> {
    ///     cq.process_each::<Request, 0>(64, |request, _wc| {
    ///         // Without room the request is freed.
    ///         let _ = free.push_within_capacity(request);
    ///     })
    /// }
    /// ```
    #[inline]
    pub fn process_each<T, const ID: u64>(
        &self,
        budget: u32,
        mut done: impl FnMut(T::Pointer, &Wc),
    ) -> Result<u32>
    where
        T: CqeHandler<ID>,
    {
        self.process_by(budget, |completion| match completion.take::<T, ID>() {
            Ok((owner, wc)) => done(owner, wc),
            Err(other) => drop(other),
        })
    }

    /// Gives each of at most `budget` completions to `each`, one after the other, and returns their
    /// number. What `each` does not take goes to its handler, as in [`Cq::process`].
    ///
    /// This is `ib_poll_cq` into an array, with a loop over that, for who looks for owners of
    /// several types. In contrast to what is in a [`Batch`], what is dispatched here comes in
    /// order, and what is posted again needs no reference to its QP
    /// ([`Qp::repost_send`](crate::qp::Qp::repost_send)).
    ///
    /// May be called as [`Cq::process`].
    ///
    /// # Errors
    ///
    /// As [`Cq::process_with`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::Cq, cqe::*, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Request { cqe: Cqe<Self> }
    /// # impl CqeHandler for Request {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// # use Request as Reply;
    /// fn progress(cq: &Cq<Direct>) -> Result<u32> {
    ///     cq.process_by(64, |completion| match completion.take::<Request, 0>() {
    ///         Ok((request, _wc)) => drop(request),
    ///         Err(other) => {
    ///             if let Ok((reply, _wc)) = other.take::<Reply, 0>() {
    ///                 drop(reply);
    ///             } // To its handler, if it is neither.
    ///         }
    ///     })
    /// }
    /// ```
    #[inline]
    pub fn process_by(&self, budget: u32, mut each: impl FnMut(Completion<'_>)) -> Result<u32> {
        if budget == 0 {
            return Err(EINVAL);
        }
        let Some(mut seat) = self.inner.sit() else {
            return Ok(0);
        };
        let room = seat.room();
        let cq = self.inner.raw.as_ptr();
        let mut left = budget;
        while left > 0 {
            let row = POLL_BATCH.min(left as usize);
            let n = match self.poll_raw(&mut room[..row]) {
                Ok(n) => n.min(row),
                Err(_) if left != budget => break,
                Err(e) => return Err(e),
            };
            // SAFETY: The CQ has just given these, into room that is the seat's, so nobody else
            // takes their owners back.
            for completion in unsafe { Polled::new(cq, &room[..n]) } {
                each(completion);
            }
            left = left.saturating_sub(n as u32);
            if n < row {
                break;
            }
        }
        Ok(budget.saturating_sub(left))
    }

    /// Polls at most `N` completions into the caller's batch (`ib_poll_cq`), calls no handler, and
    /// returns their number. What the batch still had is dispatched first.
    ///
    /// May be called in any context, from any thread; each completion is in one batch. While
    /// another thread polls, or [`Cq::process`] runs a handler, there is nothing to be had. What is
    /// in batches is not waited for: its handlers may run at the same time as others, and late.
    ///
    /// # Errors
    ///
    /// `EOVERFLOW` if there is no completion and the CQ has lost some; or what the driver says.
    #[inline]
    pub fn poll<const N: usize>(&self, batch: &mut Batch<N>) -> Result<usize> {
        batch.dispatch();
        let n = match self.inner.sit() {
            Some(_seat) => self.poll_raw(batch.room())?,
            None => 0,
        };
        // SAFETY: The batch is empty, and the CQ has given `n` entries.
        unsafe { batch.fill(self.inner.raw.as_ptr(), n) };
        Ok(batch.len())
    }

    /// Takes the next completion of the batch, which is filled again when it is empty; `None` if
    /// there is none yet.
    ///
    /// With a `Batch<1>`, one completion is polled at a time.
    ///
    /// # Errors
    ///
    /// As [`Cq::poll`].
    #[inline]
    pub fn next<'a, const N: usize>(
        &self,
        batch: &'a mut Batch<N>,
    ) -> Result<Option<Completion<'a>>> {
        if batch.is_empty() {
            self.poll(batch)?;
        }
        Ok(batch.next())
    }

    /// Polls completions into `room`, and returns their number. The caller has the seat.
    #[inline]
    fn poll_raw(&self, room: &mut [MaybeUninit<bindings::ib_wc>]) -> Result<usize> {
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is there while `self` lives, and there is room for that many entries.
        // Clients are only told of devices that have all verbs (`kverbs_provider`), so the
        // operation exists.
        let n = unsafe {
            let poll = (*(*cq).device).ops.poll_cq.unwrap_unchecked();
            poll(cq, room.len() as c_int, room.as_mut_ptr().cast())
        };
        match usize::try_from(n) {
            Ok(0) if self.inner.has_failed() => Err(EOVERFLOW),
            Ok(n) => Ok(n),
            Err(_) => Err(Error::from_errno(n)),
        }
    }
}

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
    fn wait_for_poll_lock(
        &self,
        context: &CqContext,
        mut left: Jiffies,
    ) -> Result<Option<Jiffies>> {
        let mut events = context.events.lock();
        while self.inner.is_taken() && !events.gone {
            if left == 0 {
                return Ok(None);
            }
            // Nobody tells, so this looks again and again.
            match context.changed.wait_interruptible_timeout(&mut events, 1) {
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
        let context = self.inner.context().ok_or(EINVAL)?;
        let Some(mut left) = self.wait_for_poll_lock(context, msecs_to_jiffies(timeout_ms))? else {
            return Ok(Wait::TimedOut);
        };
        // Before arming: an event that another thread has armed for counts too.
        let seen = context.events.lock().completions;
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
        let mut events = context.events.lock();
        loop {
            if events.completions != seen {
                return Ok(Wait::Ready);
            }
            if context.has_failed() {
                return Err(EOVERFLOW);
            }
            if events.gone {
                return Err(ENODEV);
            }
            if left == 0 {
                return Ok(Wait::TimedOut);
            }
            left = match context
                .changed
                .wait_interruptible_timeout(&mut events, left)
            {
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
