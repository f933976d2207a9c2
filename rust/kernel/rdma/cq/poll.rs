// SPDX-License-Identifier: GPL-2.0

//! Polling by the caller, and waiting for completions.

use crate::{
    cq,
    cqe::CqePointer as _,
    debug,
    prelude::*,
    trace,
    wc, //
};
use kernel::{
    sync::CondVarTimeoutResult,
    time, //
};

impl<C: CallerPolled> Cq<C> {
    /// Runs the handlers of at most `budget` completions and returns their number
    /// (`ib_process_cq_direct`). Errors of the driver count as no completion.
    ///
    /// Any context. One thread at a time polls: while another one does, or a handler of this CQ
    /// runs, this returns 0. So handlers of the CQ run one after the other, in the order of the
    /// completions. Do not spin for a completion where that may keep the other thread from its CPU,
    /// as in an interrupt.
    #[inline]
    pub fn process(&self, budget: u32) -> u32 {
        self.process_with(budget, |completion| completion.dispatch())
            .unwrap_or(0)
    }

    /// Gives at most `budget` completions to `handle`, one after the other, and returns their
    /// number: `ib_poll_cq` into an array, and a loop over that.
    ///
    /// Owners that `handle` [takes](Completion::take) are its own; others go to their handler. What
    /// is posted again here needs no reference to its QP ([`Qp::repost_send`]).
    ///
    /// Any context, as [`Cq::process`]. Fails with `EINVAL` if the budget is zero. `EOVERFLOW` if
    /// there is no completion and the CQ has lost some; or the driver's error.
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
    ///     cq.process_with(64, |completion| match completion.take::<Request, 0>() {
    ///         Ok((request, _wc)) => {
    ///             // If there is no room the request is freed.
    ///             let _ = free.push_within_capacity(request);
    ///         }
    ///         Err(other) => other.dispatch(),
    ///     })
    /// }
    /// ```
    #[inline]
    pub fn process_with(&self, budget: u32, handle: impl FnMut(Completion<'_>)) -> Result<u32> {
        if budget == 0 {
            return Err(EINVAL);
        }
        match self.inner.try_lock() {
            Some(guard) => self.inner.process_locked(guard, budget, handle),
            None => Ok(0),
        }
    }

    /// Polls at most `N` completions into the caller's array (`ib_poll_cq`), calls no handler, and
    /// returns their number. Completions that are left in it are dispatched first.
    ///
    /// Any context, any thread. While another thread polls, or [`Cq::process`] runs a handler, the
    /// CQ looks empty. Completions in arrays are not waited for: their handlers may run at the same
    /// time as others, and late. Fails with `EOVERFLOW` if there is no completion and the CQ has
    /// lost some; or the driver's error.
    #[inline]
    pub fn poll<const N: usize>(&self, array: &mut WcArray<N>) -> Result<usize> {
        array.dispatch();
        let n = match self.inner.try_lock() {
            Some(_guard) => self.inner.poll_raw(&mut array.wcs)?,
            None => 0,
        };
        // INVARIANT: The array was empty, and the CQ has just given its first `n` entries.
        (array.next, array.len, array.cq) = (0, n, self.inner.raw.as_ptr());
        Ok(n)
    }
}

impl cq::Inner {
    /// Gives at most `budget` completions to `handle`, and returns their number: see
    /// [`Cq::process_with`].
    #[inline]
    pub(crate) fn process_locked(
        &self,
        mut guard: cq::PollGuard<'_>,
        budget: u32,
        mut handle: impl FnMut(Completion<'_>),
    ) -> Result<u32> {
        let wcs = guard.wcs();
        let cq = self.raw.as_ptr();
        let mut left = budget;
        while left > 0 {
            let max = wc::POLL_BATCH.min(left as usize);
            let n = match self.poll_raw(&mut wcs[..max]) {
                Ok(n) => n.min(max),
                Err(_) if left != budget => break,
                Err(e) => return Err(e),
            };
            for wc in &wcs[..n] {
                // SAFETY: The CQ has just given it, into the array that belongs to the lock, so its
                // owner is taken back here only.
                handle(unsafe { Completion::new(cq, wc) });
            }
            left = left.saturating_sub(n as u32);
            if n < max {
                break;
            }
        }
        Ok(budget.saturating_sub(left))
    }

    /// Polls completions into `wcs`, and returns their number. The caller holds the poll lock, and
    /// has handled all that was polled into the array of the lock. Fails with `EOVERFLOW` if there
    /// is none and the CQ has lost some; or with the driver's error.
    #[inline]
    fn poll_raw(&self, wcs: &mut [MaybeUninit<bindings::ib_wc>]) -> Result<usize> {
        let cq = self.raw.as_ptr();
        // SAFETY: The CQ is there while `self` lives, and `wcs` has that many entries.
        let n = unsafe { trace::poll_cq(cq, wcs.len() as c_int, wcs.as_mut_ptr().cast()) };
        match usize::try_from(n) {
            Ok(0) => {
                self.empties.found();
                match self.has_failed() {
                    true => Err(EOVERFLOW),
                    false => Ok(0),
                }
            }
            Ok(n) => Ok(n),
            Err(_) => Err(Error::from_errno(n)),
        }
    }
}

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
    /// Completions that are there when the wait begins end it, [solicited](Notify::Solicited) or
    /// not. So this may be called at any time, by any number of threads; all of them are woken.
    /// While a thread polls, or runs handlers, others wait for that: see [`Cq::process`]. Fails, in
    /// this order and after completions that are there, with `EOVERFLOW` if the CQ has failed, so
    /// that completions are lost; `ENODEV` from when the device is being removed; `ERESTARTSYS` on
    /// a signal; or the driver's error.
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
    pub fn wait(&self, notify: Notify, timeout_ms: u32, _cx: &Sleepable) -> Result<Wait> {
        let waiting = self.inner.waiting.as_ref().ok_or(EINVAL)?;
        let left = time::msecs_to_jiffies(timeout_ms);
        let Some(mut left) = self.wait_for_poll_lock(waiting, left)? else {
            return Ok(Wait::TimedOut);
        };
        // Before arming: an event that another thread has armed for counts too.
        let seen = waiting.events.lock().completions;
        let flags = notify as u32 | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
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
        let mut events = waiting.events.lock();
        loop {
            if events.completions != seen {
                return Ok(Wait::Ready);
            }
            if self.inner.has_failed() {
                return Err(EOVERFLOW);
            }
            if events.gone {
                return Err(ENODEV);
            }
            if left == 0 {
                return Ok(Wait::TimedOut);
            }
            left = match waiting
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

    /// Takes the next completion of the array, which is filled again when it is empty, and waits
    /// for one at most `timeout_ms` milliseconds; `None` if there is none by then. If other threads
    /// take completions, the wait may begin anew.
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
        while array.is_empty() && self.poll(array)? == 0 {
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
        waiting: &cq::Waiting,
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

/// An array of `N` completions, which [`Cq::poll`] fills. Those that are left in it when it is
/// dropped, or filled again, are dispatched.
///
/// # Invariants
///
/// The entries `next..len` are completions that `cq` gave, and whose owners were not taken back.
pub struct WcArray<const N: usize> {
    wcs: [MaybeUninit<bindings::ib_wc>; N],
    next: usize,
    len: usize,
    cq: *mut bindings::ib_cq,
}

// SAFETY: Owners of requests are `Send`, and their handlers, which need no context, may run in any
// thread. The address of the CQ is only passed on.
unsafe impl<const N: usize> Send for WcArray<N> {}

impl<const N: usize> WcArray<N> {
    /// Returns an empty array. One of no length does not compile.
    #[inline]
    pub const fn new() -> Self {
        const { assert!(N > 0 && N <= 1 << 16, "an array has 1 to 65536 entries") };
        // INVARIANT: There are no entries.
        Self {
            wcs: [const { MaybeUninit::uninit() }; N],
            next: 0,
            len: 0,
            cq: core::ptr::null_mut(),
        }
    }

    /// Returns the number of completions that were not taken.
    #[inline]
    pub fn len(&self) -> usize {
        self.len - self.next
    }

    /// Returns whether all completions were taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// Returns an iterator that takes the completions. Those that it did not come to stay.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{WcArray, Cq}};
    /// /// Counts the requests that have failed.
    /// fn failures(cq: &Cq<Direct>) -> Result<usize> {
    ///     let (mut array, mut failures) = (WcArray::<16>::new(), 0);
    ///     cq.poll(&mut array)?;
    ///     while !array.is_empty() {
    ///         failures += array.len();
    ///         failures -= array.completions().filter(|c| c.result().is_ok()).count();
    ///         cq.poll(&mut array)?;
    ///     }
    ///     Ok(failures)
    /// }
    /// ```
    #[inline]
    pub fn completions(&mut self) -> Completions<'_> {
        let wcs = self.wcs.get(self.next..self.len).unwrap_or(&[]);
        // INVARIANT: The entries leave the range; those that are left come back when this is
        // dropped.
        self.next = self.len;
        // INVARIANT: These are the last entries. By the type invariant `cq` gave them, and their
        // owners were not taken back; they have just left the range.
        Completions {
            wcs: wcs.iter(),
            cq: self.cq,
            next: &mut self.next,
        }
    }

    /// Dispatches the completions that are left.
    #[inline]
    fn dispatch(&mut self) {
        if !self.is_empty() {
            self.dispatch_rest();
        }
    }

    #[inline(never)]
    fn dispatch_rest(&mut self) {
        self.completions().for_each(Completion::dispatch);
    }
}

impl<const N: usize> Default for WcArray<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Drop for WcArray<N> {
    #[inline]
    fn drop(&mut self) {
        self.dispatch();
    }
}

/// The completions of a [`WcArray`], in order.
///
/// # Invariants
///
/// `wcs` are the last entries of the array: completions that `cq` gave, and whose owners were not
/// taken back. `next` is that of the array, and its length.
pub struct Completions<'a> {
    wcs: core::slice::Iter<'a, MaybeUninit<bindings::ib_wc>>,
    cq: *mut bindings::ib_cq,
    next: &'a mut usize,
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        let wc = self.wcs.next()?;
        // SAFETY: By the type invariant `cq` gave it, and its owner was not taken back. It is not
        // in `wcs` any more.
        Some(unsafe { Completion::new(self.cq, wc) })
    }
}

impl Drop for Completions<'_> {
    #[inline]
    fn drop(&mut self) {
        // INVARIANT: What was not taken is in the array again.
        *self.next = self.next.saturating_sub(self.wcs.len());
    }
}

/// A completion that was polled, with the owner of its request.
///
/// The owner can be [taken](Completion::take) where its type is known; otherwise its handler is
/// called by [`Completion::dispatch`], or when this is dropped. A request at the front of a chain
/// completes only when it fails; it has no owner that could be taken.
///
/// # Invariants
///
/// `wc` is a completion that `cq` gave, and whose owner was not taken back.
pub struct Completion<'a> {
    pub(crate) wc: &'a Wc,
    cq: *mut bindings::ib_cq,
}

impl<'a> Completion<'a> {
    /// # Safety
    ///
    /// `cq` gave `wc`, whose owner was not taken back and is not taken back otherwise.
    #[inline]
    pub(super) unsafe fn new(
        cq: *mut bindings::ib_cq,
        wc: &'a MaybeUninit<bindings::ib_wc>,
    ) -> Self {
        // INVARIANT: `cq` gave it, and its owner is taken back here only, as the caller promises.
        Self {
            // SAFETY: `cq` gave it, as the caller promises, so it is initialised; `Wc` is
            // transparent.
            wc: unsafe { &*wc.as_ptr().cast::<Wc>() },
            cq,
        }
    }

    /// Returns the request's result, as [`Wc::result`].
    #[inline]
    pub fn result(&self) -> core::result::Result<wc::Success<'a>, WcError> {
        self.wc.result()
    }

    /// Calls the handler of the request's owner, as a drop does.
    #[inline]
    pub fn dispatch(self) {
        drop(self);
    }

    /// Takes the owner, if it is a `T` that was posted by its callback `ID`; its handler is not
    /// called. Gives the completion back if its owner is something else. If `T` is generic and of
    /// another crate, a module may not recognise owners that another module has made. For an
    /// example see [`Cq::process_with`].
    #[inline]
    pub fn take<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let cqe = self.wc.cqe();
        // SAFETY: By the type invariant the owner was not taken back, so its callback is there.
        if cqe.is_null() || !unsafe { crate::cqe::is_of::<T, ID>(cqe) } {
            wc::unlikely();
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        debug::deactivate(cqe);
        // SAFETY: The callback is that of `T`, so the address is from `into_cqe` of its pointer.
        // `this` is not dropped, so the owner is taken back once.
        Ok((unsafe { T::Pointer::from_cqe(cqe) }, this.wc))
    }
}

impl Drop for Completion<'_> {
    #[inline]
    fn drop(&mut self) {
        let cqe = self.wc.cqe();
        if cqe.is_null() {
            wc::unlikely();
            return;
        }
        // SAFETY: By the type invariant `cq` gave the completion, and its owner was not taken back,
        // so the callback is there; `self` is gone after this. Owners that need more than `Atomic`
        // cannot be posted to a CQ that callers poll. The callbacks of this crate keep no reference
        // to the CQ, and those of drivers, which are their drains', keep it.
        unsafe {
            let done = (*cqe).done.unwrap_unchecked();
            done(self.cq, core::ptr::from_ref(self.wc).cast_mut().cast());
        }
    }
}
