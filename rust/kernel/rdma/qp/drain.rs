// SPDX-License-Identifier: GPL-2.0

//! Proof that a QP has no request outstanding.
//!
//! This does what `ib_drain_qp` does (the QP goes to the error state, and a marker request at the
//! end of each queue completes after everything before it) with every result checked. A driver's
//! own drain, which returns nothing, is called only where that cannot be done.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`ib_drain_qp`)

use super::{
    post,
    Inner,
    OnEnd, //
};
use crate::{
    completion::Completion,
    cq,
    cqe::Queue,
    debug,
    deferred::Waiter,
    objects,
    prelude::internal::*,
    refs,
    trace,
    wr::Refusal, //
};
use core::cell::Cell;
use kernel::{
    alloc::flags::GFP_NOWAIT,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        barrier::{
            self,
            smp_mb, //
        }, //
    },
    time, //
};

/// The time that a caller waits for a drain. After it a device that owes completions, and whose CQs
/// have none, is taken to have lost them.
const PATIENCE: time::Delta = time::Delta::from_secs(60);

/// The time that a work item waits for the end of a QP before it lets other objects end. It is long
/// enough for a full send queue.
const TURN: time::Delta = time::Delta::from_secs(5);

/// The same where the markers are posted already.
const SHORT_TURN: time::Delta = time::Delta::from_millis(50);

/// The time after which a full send queue is taken to stay full. Flushing takes far less.
const FULL: time::Delta = time::Delta::from_secs(1);

/// The time after which a drain tries to help the driver.
const STALLED: time::Delta = time::Delta::from_millis(100);

/// The time that a drain waits for a marker that a CQ may have lost.
const FAILED: time::Delta = time::Delta::from_millis(250);

/// The interval, in milliseconds, at which a wait for a completion checks for failures.
const STEP_MS: u32 = 10;

/// The first pause between polls, in microseconds.
const PAUSE_US: u32 = 20;

/// The number of completions that are processed before a pause.
const BUDGET: u32 = 1024;

/// The purpose of a drain.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// Requests that were posted before.
    Posted,
    /// The end of the QP: nobody can post to it. It is called again if it fails.
    Last(Waiter),
}

impl Inner {
    /// Moves the QP to the error state and waits until every request that was posted to it before
    /// has completed. Then drops the owners that were kept until this. The last drain empties a
    /// send queue that stays full, and takes a QP to the reset state whose device does not complete
    /// its requests. Nothing is proved if it fails: with `EDEADLK` in a handler of one of the CQs;
    /// `EOVERFLOW` if a CQ has lost completions; `ETIMEDOUT`; or the driver's error.
    pub(super) fn drain(&self, drain: Drain, cx: &Sleepable) -> Result<End> {
        // Another drain may wait for this handler.
        if self.is_polled_by_current() {
            return Err(EDEADLK);
        }
        let this_one = WaitTime::new();
        let is_last = drain != Drain::Posted;
        let waited = if is_last {
            &self.context.ending
        } else {
            &this_one
        };
        let wait = DrainWait::new(self, drain, waited, cx);
        // The queues and the CQs have room for one marker each, and another drain may have the
        // owners.
        let mut alone = wait.until(|| self.context.draining.try_lock())?;
        // SAFETY: There is an `Inner` only in its `Deferred`, which pins it.
        let own = unsafe { Pin::new_unchecked(&self.context.markers) };
        wait.until(|| alone.prepare(own, is_last))?;
        if alone.is_reset {
            return Ok(End::Drained);
        }
        alone.watch.get_or_insert_with(|| self.watch());
        let markers = alone.markers(own);
        let resumed = markers.is_out();
        if resumed && drain == Drain::Last(Waiter::WorkItem) {
            wait.patience.set(SHORT_TURN);
        }
        let drain_list = self.context.drain_list.take();
        let kept = self.object.take_undrained();

        let qp = self.raw().as_ptr();
        // SAFETY: By the type invariant the QP is valid.
        let began = unsafe { bindings::rdma_helper_trace_drain_begin(qp) };
        let waited = if resumed { wait.wait(markers) } else { Ok(()) };
        let end = waited.and_then(|()| self.flush(&wait, markers, is_last, !drain_list.is_empty()));
        let end = match end {
            Err(e) if is_last && wait.is_lost(e) => match self.forget_requests(&wait, markers) {
                Ok(()) => {
                    alone.is_reset = true;
                    Ok(End::Drained)
                }
                Err(_) => Err(e),
            },
            end => end,
        };
        let rc = match end {
            Ok(End::Drained) => 0,
            Ok(End::Full) => EBUSY.to_errno(),
            Err(e) => e.to_errno(),
        };
        // SAFETY: By the type invariant the QP is valid.
        unsafe { bindings::rdma_helper_trace_drain_end(qp, began, rc) };

        if alone.all(own).all(|markers| !markers.is_out()) {
            alone.watch = None;
        }
        if !matches!(end, Ok(End::Drained)) {
            self.object.put_undrained(kept);
            return end;
        }
        // A destructor may drain.
        drop(alone);
        // SAFETY: If there are such owners, `flush` has not left the send queue to the driver: the
        // marker, which was posted behind their requests, has completed, or a reset has taken all
        // requests out.
        unsafe { drain_list.release() };
        end
    }

    /// Makes polls into arrays of callers handle markers, and ignored completions, at once.
    fn watch(&self) -> [cq::ArrayWatch; 2] {
        let markers: [unsafe extern "C" fn(_, _); 2] = [reached::<0>, reached::<1>];
        let markers = markers.map(|done| done as usize);
        [&self.send.cq, &self.recv.cq].map(|cq| cq::ArrayWatch::new(cq, markers))
    }

    /// Ends the requests of a QP whose device does not complete them: in the reset state it has
    /// none. Those that have completed are handled first. Nobody can post to the QP.
    fn forget_requests(&self, wait: &DrainWait<'_>, markers: Pin<&Markers>) -> Result {
        // A reset takes completions out of the CQs, too. The markers may be among those that the
        // pollers have just handled.
        let was_out = markers.is_out();
        wait.restart();
        wait.polled()?;
        if was_out && !markers.is_out() {
            return Err(ETIMEDOUT);
        }
        self.modifier().reset()?;
        wait.restart();
        wait.polled()?;
        let dev = self.pd.device();
        let num = self.num;
        pr_err!("{dev}: QP {num} was reset: its device does not complete its requests\n");
        Ok(())
    }

    /// Takes the QP to the reset state after the last drain, and waits for the pollers of the CQs.
    /// Returns `false` if the driver refuses that. Fails with `ETIMEDOUT` if a poller has not
    /// idled.
    pub(super) fn reset(&self, waiter: Waiter, cx: &Sleepable) -> Result<bool> {
        let mut draining = self.context.draining.lock();
        if !draining.is_reset {
            if self.modifier().reset().is_err() {
                return Ok(false);
            }
            draining.is_reset = true;
        }
        // A handler that is waited for may drain another QP.
        drop(draining);
        self.settle(waiter, cx)?;
        Ok(true)
    }

    /// Moves the QP to the error state and waits for the markers. With `last`, nobody can post to
    /// the QP. With `keeps`, it has sends that have no completion of their own.
    fn flush(
        &self,
        wait: &DrainWait<'_>,
        markers: Pin<&Markers>,
        last: bool,
        keeps: bool,
    ) -> Result<End> {
        let ops = self.ops();
        let kept_needs = |queue| self.context.kept.iter().any(|it| it.needs_marker(queue));
        self.modifier().go_to_error()?;
        wait.last_wqe_reached()?;

        let is_ud = self.is_ud();
        // Both queues flush at the same time: each has its marker before one is waited for.
        let mut full = false;
        match wait.post(markers, Queue::Send) {
            Err(Unposted::Full) => full = true,
            Err(Unposted::Refused(e)) => {
                // The driver's drain posts an RDMA WRITE, and returns at once if there is no room
                // for it. Then only requests with completions of their own are known to have ended.
                let needs_marker = is_ud || keeps || kept_needs(Queue::Send);
                let drain = ops.drain_sq.filter(|_| !needs_marker);
                let drain = drain.ok_or_else(|| wait.refused(e))?;
                // SAFETY: It is the device's, for the send queue of a QP that is not for datagrams.
                unsafe { wait.drain_by_driver(drain, &self.send.cq) }?
            }
            posted => posted?,
        }
        if self.srq.is_none() {
            match wait.post(markers, Queue::Recv) {
                Err(Unposted::Refused(e)) => {
                    let drain = ops.drain_rq.filter(|_| !kept_needs(Queue::Recv));
                    let drain = drain.ok_or_else(|| wait.refused(e))?;
                    // SAFETY: `drain` is the `drain_rq` of the QP's device, which is for its
                    // receive queue.
                    unsafe { wait.drain_by_driver(drain, &self.recv.cq) }?
                }
                posted => posted?,
            }
        }
        wait.wait(markers)?;
        if full {
            // Completions may have waited for a poller that is late, and entries for them.
            wait.polled()?;
            match wait.post(markers, Queue::Send) {
                Err(Unposted::Full) if !last => return Ok(End::Full),
                Err(Unposted::Full) => {
                    // The queue is full of requests without completions of their own, which are
                    // done or flushed, and of no request behind them that has one. In the reset
                    // state a device forgets all requests, and takes their completions out of the
                    // CQs. The receives have come back by now, and the sends had the time of the
                    // waits for room to complete. Nobody posts: mlx5 sets the positions of the
                    // queues to zero without their locks.
                    wait.polled()?;
                    self.modifier().restart()?;
                    wait.post(markers, Queue::Send)?;
                }
                posted => posted?,
            }
            wait.wait(markers)?;
        }
        Ok(End::Drained)
    }

    /// Posts the marker of a queue, in the send queue of a QP for datagrams to an address handle of
    /// its own.
    ///
    /// # Safety
    ///
    /// `cqe` is that of a marker which exists until the request has completed. If the queue is
    /// the send queue of a QP for datagrams, that has such an address handle.
    unsafe fn post_marker(&self, queue: Queue, cqe: *mut bindings::ib_cqe) -> Result<(), Refusal> {
        let qp = self.raw().as_ptr();
        debug::set_qp_of(qp, cqe);
        if let Queue::Recv = queue {
            let mut wr = bindings::ib_recv_wr::default();
            wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
            // SAFETY: By the type invariant the QP is valid. The request has neither entries nor a
            // successor, and the marker exists until it has completed, as the caller promises.
            let ret = unsafe {
                trace::PostVerb::post_one(trace::PostVerb::op(qp), qp, &raw mut wr, false)
            };
            return Refusal::check(ret, wr.next);
        }
        let mut rdma = bindings::ib_rdma_wr::default();
        let mut ud = bindings::ib_ud_wr::default();
        let wr: *mut bindings::ib_send_wr = match self.marker_ah.as_ref() {
            Some(ah) => {
                ud.wr.opcode = bindings::ib_wr_opcode_IB_WR_SEND;
                ud.ah = ah.raw.as_ptr();
                (&raw mut ud).cast()
            }
            None => {
                rdma.wr.opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
                (&raw mut rdma).cast()
            }
        };
        // SAFETY: `wr` is the request above, which is of the kind that the type of the QP and the
        // opcode ask for, and has neither entries nor a successor. By the type invariant the QP is
        // valid; the marker exists until the request has completed, as the caller promises.
        unsafe {
            (*wr).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
            (*wr).send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
            let ret = trace::PostVerb::post_one(trace::PostVerb::op(qp), qp, wr, false);
            Refusal::check(ret, (*wr).next)
        }
    }
}

/// What a drain has come to.
pub(super) enum End {
    /// All requests have completed.
    Drained,
    /// The send queue stays full of requests that have no completion. All others have completed,
    /// and their handlers have returned.
    Full,
}

/// The reason that a marker was not posted.
enum Unposted {
    /// The queue stays full.
    Full,
    /// The driver has refused it.
    Refused(Error),
    /// It may be posted, or the time is over.
    Lost(Error),
}

impl From<Unposted> for Error {
    fn from(e: Unposted) -> Self {
        match e {
            Unposted::Full => ETIMEDOUT,
            Unposted::Refused(e) | Unposted::Lost(e) => e,
        }
    }
}

/// The time for which something was waited for, which is reported every ten seconds.
pub(super) struct WaitTime {
    /// The second in which the wait began, or zero.
    since: Atomic<u32>,
    /// The number of reports.
    reports: Atomic<u32>,
}

impl WaitTime {
    pub(super) const fn new() -> Self {
        Self {
            since: Atomic::new(0),
            reports: Atomic::new(0),
        }
    }

    /// Returns the seconds since this was called for the first time.
    fn secs(&self) -> u32 {
        let now = objects::now();
        match self.since.cmpxchg(0, now, Relaxed) {
            Ok(_) => 0,
            Err(since) => now.saturating_sub(since),
        }
    }

    /// Returns the seconds of the wait, if they are to be reported.
    pub(super) fn report(&self) -> Option<u32> {
        let secs = self.secs();
        let due = secs / (refs::REPORT_MS / 1_000);
        (self.reports.xchg(due, Relaxed) < due).then_some(secs)
    }
}

/// A drain that is under way.
struct DrainWait<'a> {
    qp: &'a Inner,
    patience: Cell<time::Delta>,
    /// When it was found for the first time that something has to be waited for.
    began: Cell<Option<time::Instant<time::Monotonic>>>,
    helped: Cell<bool>,
    /// Set if the device has refused a marker.
    is_refused: Cell<bool>,
    /// That of all turns.
    waited: &'a WaitTime,
    cx: &'a Sleepable,
}

impl<'a> DrainWait<'a> {
    fn new(qp: &'a Inner, drain: Drain, waited: &'a WaitTime, cx: &'a Sleepable) -> Self {
        Self {
            qp,
            patience: Cell::new(match drain {
                Drain::Last(Waiter::WorkItem) => TURN,
                _ => PATIENCE,
            }),
            began: Cell::new(None),
            helped: Cell::new(false),
            is_refused: Cell::new(false),
            waited,
            cx,
        }
    }

    /// Tries until there is a result, and pauses in between. Fails if no time is left.
    fn until<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> Result<T> {
        let mut us = PAUSE_US;
        loop {
            if let Some(result) = attempt() {
                return Ok(result);
            }
            self.pause(&mut us)?;
        }
    }

    /// Takes the poll lock of a CQ if callers poll it. Fails if no time is left.
    fn lock<'c>(&self, cq: &'c cq::Inner) -> Result<Option<cq::PollGuard<'c>>> {
        let is_polled = cq.is_caller_polled();
        is_polled.then(|| self.until(|| cq.try_lock())).transpose()
    }

    /// Polls, and pauses until it is worth another look. Fails if no time is left.
    #[inline(never)]
    fn pause(&self, us: &mut u32) -> Result {
        self.check()?;
        self.poll();
        pause(us);
        Ok(())
    }

    /// Fails if no time is left. There is less of it on a CQ that has lost completions: those that
    /// it has are processed in that time.
    fn check(&self) -> Result {
        let began = self.began.get().unwrap_or_else(time::Instant::now);
        self.began.set(Some(began));
        let elapsed = began.elapsed();
        if let Some(secs) = self.waited.report() {
            self.qp.report_wait(secs, self.cx);
        }
        let failed = self.qp.send.cq.has_failed() || self.qp.recv.cq.has_failed();
        if failed && elapsed > FAILED {
            return Err(EOVERFLOW);
        }
        if elapsed > self.patience.get() {
            return Err(ETIMEDOUT);
        }
        if elapsed > STALLED && !self.helped.get() {
            self.helped.set(self.qp.modifier().restart_receiver());
        }
        Ok(())
    }

    /// Returns whether the end of the QP has waited for more than a minute.
    fn is_late(&self) -> bool {
        i64::from(self.waited.secs()) >= PATIENCE.as_millis() / 1_000
    }

    /// Begins another wait, of a moment.
    fn restart(&self) {
        self.began.set(None);
        self.patience.set(SHORT_TURN);
    }

    /// Notes that the device has refused a marker, and returns the error.
    fn refused(&self, error: Error) -> Error {
        self.is_refused.set(true);
        error
    }

    /// Returns whether a drain has failed with `error` because the device has failed or has lost
    /// completions. Handlers are waited for without a limit, and other errors may pass.
    fn is_lost(&self, error: Error) -> bool {
        error == EOVERFLOW || self.is_refused.get() || self.is_late()
    }

    /// Waits until a QP on an SRQ, which is in the error state, takes nothing from that,
    /// and the completions of all that it took are in its CQ (`IB_EVENT_QP_LAST_WQE_REACHED`).
    ///
    /// siw does not raise the event (`siw_verbs_modify_qp()`), nor need it: the change of the state
    /// excludes receives, and completes the one that is under way.
    fn last_wqe_reached(&self) -> Result {
        let driver = self.qp.ops().driver_id;
        if self.qp.srq.is_none() || driver == bindings::rdma_driver_id_RDMA_DRIVER_SIW {
            return Ok(());
        }
        // SAFETY: By the type invariant of `Inner` the QP is valid.
        let reached = unsafe { &raw mut (*self.qp.raw().as_ptr()).srq_completion };
        let step = time::msecs_to_jiffies(STEP_MS);
        // SAFETY: The core has initialised the completion of every QP, and the token proves that
        // this may sleep.
        while unsafe { bindings::wait_for_completion_timeout(reached, step) } == 0 {
            self.check()?;
        }
        // The event comes once, and there may be another drain.
        // SAFETY: The core has initialised the completion of every QP.
        unsafe { bindings::complete_all(reached) };
        Ok(())
    }

    /// Posts the marker of a queue. A full queue is tried again: it has room when requests were
    /// flushed. A send queue may be full of requests without completions.
    fn post(&self, markers: Pin<&Markers>, queue: Queue) -> Result<(), Unposted> {
        let is_send = matches!(queue, Queue::Send);
        // Nobody could post to a QP for datagrams that has no address handle yet.
        if is_send && self.qp.is_ud() && self.qp.marker_ah.as_ref().is_none() {
            return Ok(());
        }
        let cqe = markers.give(queue);
        let mut us = PAUSE_US;
        let mut full_since = None;
        let posted = loop {
            // SAFETY: `cqe` is from `Markers::give`. Markers exist until the QP is destroyed, for
            // which its last drain waits for them, or resets the QP: see `reached`. A QP for
            // datagrams has an address handle, as checked above.
            match unsafe { self.qp.post_marker(queue, cqe) } {
                Ok(()) => break Ok(()),
                // It may be in the queue.
                Err(refusal) if !refusal.named => {
                    post::unnamed();
                    return Err(Unposted::Lost(refusal.error));
                }
                Err(Refusal { error: ENOMEM, .. }) => {
                    let since =
                        full_since.get_or_insert_with(time::Instant::<time::Monotonic>::now);
                    if is_send && since.elapsed() > FULL {
                        break Err(Unposted::Full);
                    }
                    if let Err(e) = self.pause(&mut us) {
                        break Err(Unposted::Lost(e));
                    }
                }
                Err(Refusal { error, .. }) => break Err(Unposted::Refused(error)),
            }
        };
        // The driver reports that it did not post it.
        posted.inspect_err(|_| markers.take_back(queue, cqe))
    }

    /// Drains a queue by the driver's own function, after a marker was refused.
    ///
    /// mlx4, mlx5 and hns bring a drain for devices that are dead, to which nothing can be posted
    /// again; their reset completes what is left. It returns nothing, also if there is no room
    /// for its own marker, and polls the CQ if callers do. It calls `ib_modify_qp` without the lock
    /// of [`Inner::modifier`], for which a handler that it waits for may be waiting: these drivers
    /// have a mutex of their own in the QP.
    ///
    /// # Safety
    ///
    /// `drain` is the device's, for a queue of the QP that completes to `cq`; if that is the send
    /// queue, the QP is not for datagrams.
    unsafe fn drain_by_driver(
        &self,
        drain: unsafe extern "C" fn(*mut bindings::ib_qp),
        cq: &cq::Inner,
    ) -> Result {
        let guard = self.lock(cq)?;
        // SAFETY: `drain` is for a queue of this QP, as the caller promises, which is valid by the
        // type invariant of `Inner`. The token proves that this may sleep.
        unsafe { drain(self.qp.raw().as_ptr()) };
        drop(guard);
        // It may have found no room, and returned at once. The handlers have to return in any case.
        self.polled()
    }

    /// Waits until the markers that were posted have completed. More can be posted then.
    fn wait(&self, markers: Pin<&Markers>) -> Result {
        let mut us = PAUSE_US;
        markers.wait(|reached| {
            let polled = self.poll();
            if reached.try_wait() || (!polled && reached.wait_timeout(STEP_MS, self.cx)) {
                return Ok(true);
            }
            if polled {
                pause(&mut us);
            }
            self.check()?;
            Ok(false)
        })
    }

    /// Waits until what the CQs have is processed.
    fn polled(&self) -> Result {
        let wait_for = |cq: &cq::Inner| {
            let is_done = || process(cq).unwrap_or_else(|| cq.is_idle(self.cx));
            self.until(|| is_done().then_some(()))
        };
        let send = &self.qp.send.cq;
        let recv = &self.qp.recv.cq;
        wait_for(send)?;
        if send != recv {
            wait_for(recv)?;
        }
        Ok(())
    }

    /// Waits until the handlers that the core's pollers have begun have returned, also where a
    /// poller goes on with completions of other QPs.
    fn returned(&self) -> Result {
        // Handlers that are not waited for must see what was written before. `work_busy()` checks
        // without a barrier whether the poller's work item is queued; the barrier in `queue_work()`
        // pairs with this one.
        smp_mb(barrier::Full);
        for flush in self.qp.context.flushes.as_ref().into_iter().flatten() {
            if !flush.is_idle(self.cx) {
                // A work item waits, as it may have to wait for long.
                let number = cq::Flush::start(flush);
                self.until(|| flush.is_done(number).then_some(()))?;
            }
        }
        Ok(())
    }

    /// Has receives that are out ignored from here on. Returns `false`, and does nothing, if
    /// completions of their CQ may be in an array of a caller.
    fn ignore<'k>(&self, kept: impl Iterator<Item = &'k dyn OnEnd>) -> Result<bool> {
        let cq = &self.qp.recv.cq;
        // If callers poll the CQ, no handler runs while the lock is held, except for completions in
        // arrays.
        let guard = self.lock(cq)?;
        let is_known = cq.has_only_poller();
        if is_known {
            let ignores = &self.qp.context.ignores;
            if ignores.as_ref().is_none() {
                ignores.populate(self.qp.watch());
            }
            kept.for_each(|kept| kept.ignore());
        }
        drop(guard);
        Ok(is_known)
    }

    /// Processes the completions of CQs that callers poll, and returns whether there are such.
    fn poll(&self) -> bool {
        let send = &self.qp.send.cq;
        let recv = &self.qp.recv.cq;
        let sends = process(send).is_some();
        let recvs = send != recv && process(recv).is_some();
        sends || recvs
    }
}

impl Inner {
    /// Waits until what the pollers of the CQs have polled is handled, also where they go on with
    /// completions of other QPs. Fails with `ETIMEDOUT` while a handler has not returned.
    pub(super) fn settle(&self, waiter: Waiter, cx: &Sleepable) -> Result {
        let wait = DrainWait::new(self, Drain::Last(waiter), &self.context.ending, cx);
        // The QP is destroyed, or has no requests.
        wait.helped.set(true);
        if waiter == Waiter::WorkItem {
            wait.patience.set(SHORT_TURN);
        }
        let settled = wait.polled();
        let send = &self.send.cq;
        let recv = &self.recv.cq;
        let core_polls = !send.is_caller_polled() && !recv.is_caller_polled();
        if settled.is_err() && core_polls && waiter == Waiter::WorkItem && wait.is_late() {
            // The poller has other completions all the time. Nothing waits for the work item.
            send.flush(cx);
            recv.flush(cx);
            return Ok(());
        }
        settled
    }

    /// Waits until the handlers that had begun have returned, whatever is posted, except where
    /// callers poll. The caller has called [`Inner::reserve_flushes`]. Fails with `EDEADLK` in one
    /// of them, and as a drain whose time is over.
    pub(super) fn handlers_returned(&self, cx: &Sleepable) -> Result {
        if self.is_polled_by_current() {
            return Err(EDEADLK);
        }
        let waited = WaitTime::new();
        let wait = DrainWait::new(self, Drain::Posted, &waited, cx);
        // No driver is waited for.
        wait.helped.set(true);
        wait.returned()
    }

    /// Ends the receives of `kept` that are lost. Fails as a drain whose time is over.
    pub(super) fn end_recvs<'k>(
        &self,
        kept: impl Iterator<Item = &'k dyn OnEnd> + Clone,
        cx: &Sleepable,
    ) -> Result {
        let waited = WaitTime::new();
        let wait = DrainWait::new(self, Drain::Posted, &waited, cx);
        // No driver is waited for.
        wait.helped.set(true);
        // A caller may have polled one into an array.
        if wait.ignore(kept.clone())? {
            kept.for_each(|kept| kept.drained());
        }
        Ok(())
    }

    /// See [`Qp::release_recvs`](super::Qp::release_recvs).
    pub(crate) fn release_recvs(&self, cx: &Sleepable) -> Result {
        if self.is_polled_by_current() {
            return Err(EDEADLK);
        }
        let waited = WaitTime::new();
        let wait = DrainWait::new(self, Drain::Posted, &waited, cx);
        // No driver is waited for.
        wait.helped.set(true);
        // Read once: an owner that is added later is not ignored, so it must not be released.
        let kept = self.context.kept.iter();
        if !wait.ignore(kept.clone())? {
            return Err(EOPNOTSUPP);
        }
        wait.returned()?;
        // All of them, also behind one that is not released.
        match kept.filter(|kept| !kept.release()).count() {
            0 => Ok(()),
            _ => Err(EBUSY),
        }
    }

    /// Reports what a drain, or the end of the QP, has waited for, for `secs` seconds.
    pub(super) fn report_wait(&self, secs: u32, cx: &Sleepable) {
        let dev = self.pd.device();
        let num = self.num;
        let send = &self.send.cq;
        let recv = &self.recv.cq;
        let report = |cq: &cq::Inner| {
            let polled = if cq.is_being_polled(cx) {
                "a handler of which has not returned"
            } else {
                "which gets no completion of the drain"
            };
            pr_warn!(
                "{dev}: QP {num} has waited {secs} s to be drained: for CQ {}, {polled}\n",
                cq.num()
            );
        };
        report(send);
        if send != recv {
            report(recv);
        }
        let transfers = self.context.transfers.count();
        if transfers > 0 {
            pr_warn!("{dev}: QP {num} has {transfers} transfer(s) of rdma_rw\n");
        }
    }
}

/// Processes the completions of a CQ that callers poll, and returns whether it is empty then;
/// `None` if the core polls it. A failure ends the drain when its time is over.
fn process(cq: &cq::Inner) -> Option<bool> {
    if !cq.is_caller_polled() {
        return None;
    }
    // Otherwise the holder of the lock polls.
    let Some(guard) = cq.try_lock() else {
        return Some(false);
    };
    match guard.process(BUDGET, |it| it.dispatch()) {
        Ok(n) => Some(n < BUDGET),
        // It has lost completions, and has no other.
        Err(e) => Some(e == EOVERFLOW),
    }
}

/// Pauses between polls. The next pause is a quarter longer, up to 10 ms: most of what is polled
/// for happens soon.
fn pause(us: &mut u32) {
    time::delay::fsleep(time::Delta::from_micros((*us).into()));
    *us = (*us + *us / 4).min(1_000 * STEP_MS);
}

/// The drains of a QP, of which one at a time is under way. `own` are always the QP's own markers.
pub(super) struct Draining {
    /// Markers besides those of the QP: of drains that have failed, and of a QP on a shared CQ. The
    /// ones that are not reached stay here until the QP is destroyed.
    more: KVec<Pin<KBox<Markers>>>,
    /// The index of the markers of this drain, or of the one before: the next takes them if they
    /// are free. That of the QP's own is 0, which is not used if a CQ is shared.
    at: usize,
    /// Set if the markers are those of the last drain, which resumes with them.
    is_last: bool,
    /// Set if the last drain has taken the QP to the reset state.
    is_reset: bool,
    /// Set if a CQ is shared, so that other modules may be about to handle what they have polled.
    is_shared: bool,
    /// Set while a marker is out.
    watch: Option<[cq::ArrayWatch; 2]>,
}

impl Draining {
    pub(super) fn new(is_shared: bool) -> Result<Self> {
        let mut draining = Self {
            more: KVec::new(),
            at: 0,
            is_shared,
            is_last: false,
            is_reset: false,
            watch: None,
        };
        if is_shared {
            draining.add(GFP_KERNEL)?;
        }
        Ok(draining)
    }

    /// Adds markers, for the next drain.
    fn add(&mut self, flags: kernel::alloc::Flags) -> Result {
        let markers = KBox::pin_init(Markers::new(), flags)?;
        self.more.push(markers, flags)?;
        self.at = self.more.len();
        Ok(())
    }

    /// Returns all markers. The QP's own are the first.
    fn all<'a>(&'a self, own: Pin<&'a Markers>) -> impl Iterator<Item = Pin<&'a Markers>> {
        Iterator::chain(core::iter::once(own), self.more.iter().map(Pin::as_ref))
    }

    /// Returns those of this drain.
    fn markers<'a>(&'a self, own: Pin<&'a Markers>) -> Pin<&'a Markers> {
        self.all(own).nth(self.at).unwrap_or(own)
    }

    /// Returns the index of the first markers of which none is posted.
    fn first_free(&self, own: Pin<&Markers>) -> Option<usize> {
        let mut all = self.all(own).enumerate().skip(self.is_shared.into());
        let (index, _) = all.find(|(_, markers)| !markers.is_out())?;
        Some(index)
    }

    /// Has markers ready that can be posted, or those that the last drain has posted. Needs memory
    /// if a drain has failed, and returns `None` while there is none. It is not reclaimed here: it
    /// may belong to what is drained.
    fn prepare(&mut self, own: Pin<&Markers>, is_last: bool) -> Option<()> {
        if self.markers(own).is_out() && !(is_last && self.is_last) {
            match self.first_free(own) {
                Some(index) => self.at = index,
                None => self.add(GFP_NOWAIT | __GFP_NOWARN).ok()?,
            }
        }
        self.is_last = is_last;
        Some(())
    }
}

impl Drop for Draining {
    /// Frees the markers, but for those that the poller of another module may be about to reach.
    fn drop(&mut self) {
        for markers in self.more.drain_all() {
            if self.is_shared && markers.is_out() {
                core::mem::forget(markers);
            }
        }
    }
}

/// The requests at the ends of a QP's two queues, for one drain at a time. They exist until the
/// QP is destroyed.
#[pin_data]
#[repr(C)]
pub(super) struct Markers {
    /// By [`Queue`]. The first field, to get back from it.
    cqes: [bindings::ib_cqe; 2],
    /// The markers that were given and not reached, a bit each; and [`BUSY`].
    state: Atomic<u32>,
    /// Completed when none is left, so that the drain is woken up once.
    #[pin]
    reached: Completion,
}

/// Set unless a drain waits.
const BUSY: u32 = 4;

// SAFETY: A completion may be used from any thread, and the rest does not change.
unsafe impl Send for Markers {}
// SAFETY: A shared reference gives an atomic, a completion, and callbacks that are never written.
unsafe impl Sync for Markers {}

impl Markers {
    pub(super) fn new() -> impl PinInit<Self> {
        let marker = |done| bindings::ib_cqe { done: Some(done) };
        pin_init!(Self {
            cqes: [marker(reached::<0>), marker(reached::<1>)],
            state: Atomic::new(BUSY),
            reached <- Completion::new(),
        })
    }

    /// Changes the state, and returns the one before. A caller that finds a marker reached sees all
    /// that was done before it was.
    fn change(&self, to: impl Fn(u32) -> u32) -> u32 {
        let mut state = self.state.load(Relaxed);
        while let Err(other) = self.state.cmpxchg(state, to(state), Full) {
            state = other;
        }
        state
    }

    /// Returns whether a marker is posted that was not reached.
    fn is_out(&self) -> bool {
        // Acquire and release, by a change of nothing: see `change`.
        self.change(|state| state) & !BUSY != 0
    }

    /// Gives the marker of a queue, to be posted.
    pub(super) fn give(self: Pin<&Self>, queue: Queue) -> *mut bindings::ib_cqe {
        self.change(|state| state | 1 << queue as u32);
        let cqes: *mut bindings::ib_cqe = ptr::from_ref(self.get_ref()).cast_mut().cast();
        // SAFETY: The markers begin with those of both queues.
        let cqe = unsafe { cqes.add(queue as usize) };
        debug::activate(cqe, "the marker of a drain");
        cqe
    }

    /// Takes a marker back that was given, and not posted. The drain does not wait yet.
    pub(super) fn take_back(&self, queue: Queue, cqe: *mut bindings::ib_cqe) {
        debug::deactivate(cqe);
        self.change(|state| state & !(1 << queue as u32));
    }

    /// Waits until all markers that were given are reached, by calling `wait` until it returns
    /// whether they are, or fails. Then all that was done before has happened, and more can be
    /// given.
    pub(super) fn wait(&self, mut wait: impl FnMut(&Completion) -> Result<bool>) -> Result {
        if self.change(|state| state & !BUSY) != BUSY {
            loop {
                match wait(&self.reached) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(e) if self.change(|state| state | BUSY) != 0 => return Err(e),
                    Err(_) => {
                        // The last one has just been reached: its callback is about to say so.
                        while !matches!(wait(&self.reached), Ok(true)) {}
                        break;
                    }
                }
            }
        }
        self.state.store(BUSY, Relaxed);
        Ok(())
    }
}

/// The `done` callback of the marker of number `QUEUE`.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, for a request that was posted with the result of
/// [`Markers::give`].
unsafe extern "C" fn reached<const QUEUE: usize>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    let cqe = wc.cqe();
    if !debug::deactivate(cqe) {
        return debug::report("a drain");
    }
    let bit = 1 << QUEUE;
    // SAFETY: `cqe` is from `give`, which has added this number to the address of the markers.
    let markers: *mut Markers = unsafe { cqe.sub(QUEUE) }.cast();
    // SAFETY: The markers exist until the QP is destroyed, and its last drain waits for this
    // one, unless the QP was reset and the pollers of its CQs have idled since. Where others poll a
    // CQ, the drop of `Draining` leaves such markers.
    let state = unsafe { &*markers }.change(|state| state & !bit);
    if state & bit == 0 {
        // It does not end the next drain.
        return debug::report("a drain");
    }
    if state & !bit == 0 {
        // SAFETY: A drain waits for this, which is the last access.
        unsafe { &*markers }.reached.complete();
    }
}
