// SPDX-License-Identifier: GPL-2.0

//! Proof that a QP has no request outstanding.
//!
//! `ib_drain_qp` returns nothing and only warns when it fails. This does what it does (the QP goes
//! to the error state, and a marker request at the end of each queue completes after everything
//! before it) with every result checked. A driver's own drain returns nothing, and is called only
//! where that cannot be done.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`ib_drain_qp`)

use crate::{
    ah::Ah,
    bindings,
    context::Sleepable,
    cq::{
        self,
        PollGuard, //
    },
    debug,
    qp::{
        self,
        post::{
            recv_raw,
            send_raw,
            unnamed,
            Refusal, //
        }, //
    }, //
};
use core::{
    cell::Cell,
    mem::{
        offset_of,
        ManuallyDrop, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Arc, //
    },
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic, //
    },
    types::Opaque, //
};

/// The time that a drain may take before the QP is given up, in milliseconds.
pub(crate) const PATIENCE_MS: u32 = 60_000;

/// Posts the marker of a send queue.
///
/// # Safety
///
/// `qp` is valid. `wr` is of the kind that its type and the opcode ask for, and has no entries.
/// `cqe` is that of a marker which is there until the request has completed.
unsafe fn post_marker(
    qp: *mut bindings::ib_qp,
    wr: &mut bindings::ib_send_wr,
    opcode: bindings::ib_wr_opcode,
    cqe: *mut bindings::ib_cqe,
) -> Result<(), Refusal> {
    wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    wr.opcode = opcode;
    wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
    // It was set by an earlier try.
    wr.next = core::ptr::null_mut();
    // SAFETY: `qp` and `wr`, now without a successor, are valid, and the marker is there until the
    // request has completed, as the caller promises.
    match unsafe { send_raw(qp, wr) } {
        0 => Ok(()),
        // SAFETY: `wr` is valid, and `ret` is what `send_raw` has just returned for it.
        ret => Err(unsafe { Refusal::of_send(ret, wr) }),
    }
}

/// Returns whether a driver raises the event that a QP takes nothing from its SRQ any more.
///
/// siw does not (`siw_verbs_modify_qp()`): it moves a QP to the error state under a lock that
/// excludes its receives, and completes the one that it is in the midst of before the call returns.
fn has_last_wqe_event(ops: &bindings::ib_device_ops) -> bool {
    ops.driver_id != bindings::rdma_driver_id_RDMA_DRIVER_SIW
}

/// Waits until a QP that is in the error state takes nothing from its SRQ any more, and the
/// completions of all that it took are in its CQ (`IB_EVENT_QP_LAST_WQE_REACHED`).
///
/// # Safety
///
/// `qp` is a valid QP on an SRQ.
unsafe fn last_wqe_reached(qp: *mut bindings::ib_qp, wait: &Wait<'_>) -> Result {
    // SAFETY: `qp` is valid and on an SRQ, as the caller promises. The core has initialised the
    // completion of every QP.
    unsafe {
        let reached = &raw mut (*qp).srq_completion;
        wait.wait_for(reached)?;
        // The event comes once, and there may be another drain.
        bindings::complete_all(reached);
    }
    Ok(())
}

/// Drains a queue by the driver's own function, if it has one, after a marker was refused;
/// otherwise fails with the error of the refusal.
///
/// mlx4, mlx5 and hns bring a drain for devices that are dead, to which nothing can be posted any
/// more; their reset completes what is left. It returns nothing, also if there is no room for its
/// own marker. So it is called only if a marker was refused.
///
/// # Safety
///
/// `qp` is valid. `drain` is its device's, for a queue that completes to `cq`; if that is the send
/// queue, `qp` is not for datagrams. The caller may sleep.
unsafe fn drain_by_driver(
    qp: *mut bindings::ib_qp,
    drain: Option<unsafe extern "C" fn(*mut bindings::ib_qp)>,
    wait: &Wait<'_>,
    cq: &cq::Inner,
    e: Error,
) -> Result {
    let drain = drain.ok_or(e)?;
    let _guard = wait.lock(cq)?;
    // SAFETY: `drain` is for a queue of this QP, which is valid, and this may sleep, as the caller
    // promises.
    unsafe { drain(qp) };
    Ok(())
}

/// Moves a QP to the error state and waits until every request that was posted to it before has
/// completed.
///
/// # Errors
///
/// Nothing is proved on any error: `EDEADLK` in a handler of one of the CQs; `EOVERFLOW` if a CQ
/// has lost completions; `ETIMEDOUT`; or the driver's error.
///
/// # Safety
///
/// The QP completes to the two CQs. If it is on an SRQ they are the same, and not a direct one. If
/// it is for datagrams, `nowhere` is an address handle of its PD; without one nothing was posted to
/// its send queue.
pub(crate) unsafe fn drain(
    inner: &qp::Inner,
    send_cq: &cq::Inner,
    recv_cq: &cq::Inner,
    nowhere: Option<&Ah>,
    markers: Arc<Markers>,
    patience_ms: u32,
    cx: &Sleepable,
) -> Result {
    if send_cq.is_polled_by_current() || recv_cq.is_polled_by_current() {
        return Err(EDEADLK);
    }
    let restart_receiver = || inner.modifier().restart_receiver();
    let wait = Wait::new(
        send_cq,
        recv_cq,
        markers,
        patience_ms,
        &restart_receiver,
        cx,
    );
    let qp = inner.raw.as_ptr();
    let ops = inner.ops();

    inner.modifier().to_error()?;

    let on_srq = inner.is_on_srq();
    if on_srq && has_last_wqe_event(ops) {
        // SAFETY: The QP is valid and on an SRQ.
        unsafe { last_wqe_reached(qp, &wait) }?;
    }

    let is_ud = inner.qp_type() == bindings::ib_qp_type_IB_QPT_UD;
    // Drivers' own drains, and the core's, post an RDMA WRITE.
    let send = |cqe| match nowhere {
        Some(ah) => {
            let mut wr = bindings::ib_ud_wr {
                ah: ah.as_raw(),
                ..Default::default()
            };
            // SAFETY: The QP is valid and for datagrams, the request has no entries, and the queue
            // is given a reference to the marker of `cqe`: see `Wait::post`.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_SEND, cqe) }
        }
        None => {
            let mut wr = bindings::ib_rdma_wr::default();
            // SAFETY: The QP is valid, the request has no entries, and the queue is given a
            // reference to the marker of `cqe`: see `Wait::post`.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, cqe) }
        }
    };
    let recv = |cqe| {
        let mut wr = bindings::ib_recv_wr::default();
        wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
        // SAFETY: The QP is valid, the request has no entries, and the queue is given a reference
        // to the marker of `cqe`: see `Wait::post`.
        match unsafe { recv_raw(qp, &raw mut wr) } {
            0 => Ok(()),
            // SAFETY: `wr` is valid, and `ret` is what `recv_raw` has just returned for it.
            ret => Err(unsafe { Refusal::of_recv(ret, &raw mut wr) }),
        }
    };

    // Both queues flush at the same time: each has its marker before one is waited for.
    let has_sends = nowhere.is_some() || !is_ud;
    let mut full = false;
    if has_sends {
        match wait.post::<SEND>(true, &send) {
            Ok(()) => {}
            Err(Unposted::Full) => full = true,
            Err(Unposted::Lost(e)) => return Err(e),
            Err(Unposted::Refused(e)) => {
                let drain = ops.drain_sq.filter(|_| !is_ud);
                // SAFETY: The QP is valid and not for datagrams, its send queue completes to this
                // CQ, and the token says that this may sleep.
                unsafe { drain_by_driver(qp, drain, &wait, send_cq, e) }?
            }
        }
    }
    if !on_srq {
        match wait.post::<RECV>(false, recv) {
            Ok(()) => {}
            Err(Unposted::Full) => return Err(ETIMEDOUT),
            Err(Unposted::Lost(e)) => return Err(e),
            Err(Unposted::Refused(e)) => {
                // SAFETY: The QP is valid, its receive queue completes to this CQ, and the token
                // says that this may sleep.
                unsafe { drain_by_driver(qp, ops.drain_rq, &wait, recv_cq, e) }?
            }
        }
    }
    wait.wait()?;
    if full {
        // The queue is full of requests without completions of their own, which are done or
        // flushed, and of no request behind them that has one. In the reset state a device forgets
        // all requests. The receives have come back by now, and the sends had the time of the wait
        // for room.
        inner.modifier().restart()?;
        wait.post::<SEND>(true, send)
            .map_err(Unposted::into_error)?;
        wait.wait()?;
    }
    Ok(())
}

/// The requests at the ends of a QP's two queues. A drain uses them once; they are allocated with
/// the QP, so that its end needs no memory.
///
/// The drain, and each queue that one was posted to, have a reference, so that one that is late
/// does no harm.
pub(crate) struct Markers {
    send: bindings::ib_cqe,
    recv: bindings::ib_cqe,
    /// The number of markers that were given and not reached, and one more until the drain waits.
    left: Atomic<u32>,
    /// Completed when none is left, so that the drain is woken up once.
    reached: Opaque<bindings::completion>,
}

/// The offsets of the two.
const SEND: usize = offset_of!(Markers, send);
const RECV: usize = offset_of!(Markers, recv);

// SAFETY: A completion may be used from any thread, and the rest does not change.
unsafe impl Send for Markers {}
// SAFETY: A shared reference gives an atomic, a completion, and callbacks that are never written.
unsafe impl Sync for Markers {}

impl Markers {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let marker = |done| bindings::ib_cqe { done: Some(done) };
        let markers = Arc::new(
            Self {
                send: marker(reached::<SEND>),
                recv: marker(reached::<RECV>),
                left: Atomic::new(1),
                reached: Opaque::uninit(),
            },
            GFP_KERNEL,
        )?;
        // SAFETY: The memory is valid and stays in place.
        unsafe { bindings::init_completion(markers.reached.get()) };
        Ok(markers)
    }

    /// Gives a reference up for the address of the marker at `OFFSET`.
    fn give<const OFFSET: usize>(self: Arc<Self>) -> *mut bindings::ib_cqe {
        self.left.add(1, Relaxed);
        // SAFETY: The offset is that of a field.
        let cqe = unsafe { Arc::into_raw(self).byte_add(OFFSET) };
        let cqe = cqe.cast_mut().cast();
        debug::activate(cqe, "the marker of a drain");
        cqe
    }

    /// Takes the reference back.
    ///
    /// # Safety
    ///
    /// `cqe` is from [`Markers::give`] with this offset. Each one is taken back once.
    unsafe fn from_cqe<const OFFSET: usize>(cqe: *mut bindings::ib_cqe) -> Arc<Self> {
        // SAFETY: `cqe` is from `give`, which has added this offset to the address of a reference
        // that it gave up, and is taken back once, as the caller promises.
        unsafe { Arc::from_raw(cqe.byte_sub(OFFSET).cast_const().cast()) }
    }

    /// Takes the reference of a marker back that was not posted.
    ///
    /// # Safety
    ///
    /// `cqe` is from [`Markers::give`] with this offset. Each one is taken back once.
    unsafe fn take_back<const OFFSET: usize>(cqe: *mut bindings::ib_cqe) {
        debug::deactivate(cqe);
        // SAFETY: `cqe` is from `give` with this offset and is taken back once, as the caller
        // promises.
        let markers = unsafe { Self::from_cqe::<OFFSET>(cqe) };
        // The drain does not wait yet, so it is not the last one.
        markers.left.fetch_sub(1, Relaxed);
    }

    /// Begins to wait. Returns `true` if all markers have been reached; otherwise the last one
    /// completes `reached`.
    fn are_reached(&self) -> bool {
        self.leave()
    }

    /// Prepares for more markers. All that were given have been reached.
    fn begin_again(&self) {
        self.left.store(1, Relaxed);
    }

    /// Returns whether this was the last one. Then all that was done before the others has
    /// happened.
    fn leave(&self) -> bool {
        self.left.fetch_sub(1, Full) == 1
    }
}

/// The `done` callback of the marker at `OFFSET`.
///
/// # Safety
///
/// Called by the RDMA core for a request that was posted with the result of [`Markers::give`].
unsafe extern "C" fn reached<const OFFSET: usize>(
    _cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: `wc` is valid during this call, and both members of the union are as wide.
    let cqe = unsafe { *(*wc).__bindgen_anon_1.wr_cqe };
    if !debug::deactivate(cqe) {
        return debug::report("a drain");
    }
    // SAFETY: The queue's reference is given up here.
    let markers = unsafe { Markers::from_cqe::<OFFSET>(cqe) };
    if markers.leave() {
        // SAFETY: The completion is initialised.
        unsafe { bindings::complete(markers.reached.get()) };
    }
}

/// The interval, in milliseconds, at which a wait for a completion checks for failures.
const STEP_MS: u32 = 10;

/// The budget of one call of `ib_process_cq_direct`, and the number of calls before a pause.
const BUDGET: i32 = 64;
const CALLS: u32 = 16;

/// The time, in milliseconds, and the part of the patience, after which a full send queue is taken
/// to stay full. Flushing takes far less.
const FULL_MS: u32 = 1_000;
const FULL_PART: u32 = 4;

/// The time after which a drain tries to help the driver.
const STALLED: Delta = Delta::from_millis(100);

/// The time that a drain waits for a marker that a CQ may have lost.
const FAILED: Delta = Delta::from_millis(250);

/// The reason that a marker was not posted.
enum Unposted {
    /// The queue stays full.
    Full,
    /// The driver has refused it.
    Refused(Error),
    /// It may be posted, or the time is over.
    Lost(Error),
}

impl Unposted {
    fn into_error(self) -> Error {
        match self {
            Self::Full => ETIMEDOUT,
            Self::Refused(e) | Self::Lost(e) => e,
        }
    }
}

/// A drain that is under way.
///
/// # Invariants
///
/// The current task may sleep: this has borrowed its token.
struct Wait<'a> {
    send_cq: &'a cq::Inner,
    recv_cq: &'a cq::Inner,
    markers: Arc<Markers>,
    began: Instant<Monotonic>,
    patience: Delta,
    full: Delta,
    help: Cell<Option<&'a dyn Fn()>>,
    _cx: &'a Sleepable,
}

impl<'a> Wait<'a> {
    /// Begins the drain of queues that complete to these CQs. `markers` are not in use. `help` is
    /// called once if it takes long.
    fn new(
        send_cq: &'a cq::Inner,
        recv_cq: &'a cq::Inner,
        markers: Arc<Markers>,
        patience_ms: u32,
        help: &'a dyn Fn(),
        cx: &'a Sleepable,
    ) -> Self {
        // INVARIANT: By that of the token.
        Self {
            send_cq,
            recv_cq,
            markers,
            began: Instant::now(),
            patience: Delta::from_millis(patience_ms.into()),
            full: Delta::from_millis(FULL_MS.min(patience_ms / FULL_PART).into()),
            help: Cell::new(Some(help)),
            _cx: cx,
        }
    }

    /// Fails if no time is left. There is less of it on a CQ that has lost completions: those that
    /// it has are processed in that time.
    fn check(&self) -> Result {
        let failed = self.send_cq.has_failed() || self.recv_cq.has_failed();
        let (patience, error) = match failed {
            true => (self.patience.min(FAILED), EOVERFLOW),
            false => (self.patience, ETIMEDOUT),
        };
        let elapsed = self.began.elapsed();
        if elapsed > patience {
            return Err(error);
        }
        if elapsed > STALLED {
            if let Some(help) = self.help.take() {
                help();
            }
        }
        Ok(())
    }

    /// Posts the marker at `OFFSET` by `post`. A full queue is tried again: it has room when
    /// requests were flushed. With `may_stay_full` it may be full of requests without completions.
    fn post<const OFFSET: usize>(
        &self,
        may_stay_full: bool,
        post: impl Fn(*mut bindings::ib_cqe) -> Result<(), Refusal>,
    ) -> Result<(), Unposted> {
        let cqe = self.markers.clone().give::<OFFSET>();
        let mut pauses = Pauses::new();
        let began = Instant::<Monotonic>::now();
        let posted = loop {
            match post(cqe) {
                Ok(()) => break Ok(()),
                // It may be in the queue, which then keeps its reference.
                Err(refusal) if !refusal.named => {
                    unnamed();
                    return Err(Unposted::Lost(refusal.error()));
                }
                Err(refusal) if refusal.error() == ENOMEM => {
                    if let Err(e) = self.check() {
                        break Err(Unposted::Lost(e));
                    }
                    if may_stay_full && began.elapsed() > self.full {
                        break Err(Unposted::Full);
                    }
                    self.poll();
                    pauses.pause();
                }
                Err(refusal) => break Err(Unposted::Refused(refusal.error())),
            }
        };
        // SAFETY: It was just given, and the driver says that it did not post it.
        posted.inspect_err(|_| unsafe { Markers::take_back::<OFFSET>(cqe) })
    }

    /// Waits until the markers that were posted have completed. More can be posted then.
    fn wait(&self) -> Result {
        if !self.markers.are_reached() {
            self.wait_for_last()?;
        }
        self.markers.begin_again();
        Ok(())
    }

    /// Waits until the last marker has completed.
    fn wait_for_last(&self) -> Result {
        let reached = self.markers.reached.get();
        let mut pauses = Pauses::new();
        while self.poll() {
            // SAFETY: The completion lives as long as the markers, which have initialised it.
            if unsafe { bindings::try_wait_for_completion(reached) } {
                return Ok(());
            }
            self.check()?;
            pauses.pause();
        }
        // SAFETY: The completion lives as long as the markers, which have initialised it.
        unsafe { self.wait_for(reached) }
    }

    /// Waits for a completion that needs no polling.
    ///
    /// # Safety
    ///
    /// `completion` is initialised and stays that.
    unsafe fn wait_for(&self, completion: *mut bindings::completion) -> Result {
        let step = msecs_to_jiffies(STEP_MS);
        // SAFETY: The completion is initialised, as the caller promises, and by the type invariant
        // this may sleep.
        while unsafe { bindings::wait_for_completion_timeout(completion, step) } == 0 {
            self.check()?;
        }
        Ok(())
    }

    /// Takes the poll lock of a CQ that callers poll, for a driver's own drain, which polls such a
    /// CQ, too.
    fn lock<'cq>(&self, cq: &'cq cq::Inner) -> Result<Option<PollGuard<'cq>>> {
        if !cq.is_caller_polled() {
            return Ok(None);
        }
        let mut pauses = Pauses::new();
        loop {
            if let Some(guard) = cq.try_lock() {
                return Ok(Some(guard));
            }
            self.check()?;
            pauses.pause();
        }
    }

    /// Processes the completions of CQs that callers poll, and returns whether there are such.
    fn poll(&self) -> bool {
        let same = core::ptr::eq(self.send_cq, self.recv_cq);
        let sends = poll(self.send_cq);
        let recvs = if same { sends } else { poll(self.recv_cq) };
        sends || recvs
    }
}

/// Processes the completions of a CQ if callers poll it, and returns whether they do.
fn poll(cq: &cq::Inner) -> bool {
    if !cq.is_caller_polled() {
        return false;
    }
    let Some(_guard) = cq.try_lock() else {
        // The holder of the lock polls.
        return true;
    };
    for _ in 0..CALLS {
        // SAFETY: The CQ is there while `cq` lives, its users poll it, and the poll lock is held.
        if unsafe { bindings::ib_process_cq_direct(cq.raw.as_ptr(), BUDGET) } < BUDGET {
            break;
        }
    }
    true
}

/// Pauses between polls. Each is a quarter longer than the one before, up to 10 ms: most of what is
/// polled for happens soon.
struct Pauses(u32);

impl Pauses {
    const FIRST_US: u32 = 20;

    fn new() -> Self {
        Self(Self::FIRST_US)
    }

    fn pause(&mut self) {
        fsleep(Delta::from_micros(self.0.into()));
        self.0 = (self.0 + self.0 / 4).min(1_000 * STEP_MS);
    }
}
