// SPDX-License-Identifier: GPL-2.0

//! Posting the markers of a drain, and waiting for them.

use super::marker::Markers;
use crate::{
    bindings,
    context::Sleepable,
    cq::{
        self,
        Seated, //
    },
    qp::post::{
        unnamed,
        Refusal, //
    }, //
};
use core::cell::Cell;
use kernel::{
    prelude::*,
    sync::Arc,
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic, //
    }, //
};

/// The length of one wait for something that will be told, in milliseconds: so often it is looked
/// whether that is in vain.
const STEP_MS: u32 = 10;

/// How many completions of a CQ that nobody else polls are processed in a row, and how many rows at
/// once.
const BUDGET: i32 = 64;
const ROWS: u32 = 16;

/// How long a send queue may stay full, in milliseconds, and which part of the patience at the
/// most, before it is taken to be full for ever. Flushing takes far less.
const FULL_MS: u32 = 1_000;
const FULL_PART: u32 = 4;

/// How long a drain waits until it looks for a reason.
const STALLED: Delta = Delta::from_millis(100);

/// How long a drain waits for a marker that a CQ may have lost.
const FAILED: Delta = Delta::from_millis(250);

/// Why a marker was not posted.
pub(super) enum Unposted {
    /// The queue is full, and has been for long.
    Full,
    /// The driver has refused it.
    Refused(Error),
    /// Nothing is known of it, or there is no use in trying.
    Lost(Error),
}

impl Unposted {
    pub(super) fn into_error(self) -> Error {
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
pub(super) struct Wait<'a> {
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
    /// A drain of queues that complete to these CQs. `markers` were not used before. `help` is
    /// called once if it takes long.
    pub(super) fn new(
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

    /// Fails if no time is left, which on a CQ that has lost completions is soon so: what it has
    /// not lost takes no longer to be processed.
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

    /// Posts the marker at `OFFSET` by `post`. A full queue has room again once something was
    /// flushed, but for one of requests without completions: `may_stay_full` says that it may be
    /// one.
    pub(super) fn post<const OFFSET: usize>(
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
    pub(super) fn wait(&self) -> Result {
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

    /// Waits for a completion that is told without polling.
    ///
    /// # Safety
    ///
    /// `completion` is initialised and stays that.
    pub(super) unsafe fn wait_for(&self, completion: *mut bindings::completion) -> Result {
        let step = msecs_to_jiffies(STEP_MS);
        // SAFETY: The completion is initialised, as the caller promises, and by the type invariant
        // this may sleep.
        while unsafe { bindings::wait_for_completion_timeout(completion, step) } == 0 {
            self.check()?;
        }
        Ok(())
    }

    /// Takes the seat of a CQ that its users poll, for a driver's own drain, which polls such a CQ,
    /// too.
    pub(super) fn sit<'cq>(&self, cq: &'cq cq::Inner) -> Result<Option<Seated<'cq>>> {
        if !cq.is_caller_polled() {
            return Ok(None);
        }
        let mut pauses = Pauses::new();
        loop {
            if let Some(seat) = cq.sit() {
                return Ok(Some(seat));
            }
            self.check()?;
            pauses.pause();
        }
    }

    /// Processes what has completed on CQs that nobody else polls, and says whether there are such.
    fn poll(&self) -> bool {
        let same = core::ptr::eq(self.send_cq, self.recv_cq);
        let sends = poll(self.send_cq);
        let recvs = if same { sends } else { poll(self.recv_cq) };
        sends || recvs
    }
}

/// Processes what has completed on a CQ if nobody else polls it, and says whether that is so.
fn poll(cq: &cq::Inner) -> bool {
    if !cq.is_caller_polled() {
        return false;
    }
    let Some(_seat) = cq.sit() else {
        // Who has the seat polls.
        return true;
    };
    for _ in 0..ROWS {
        // SAFETY: The CQ is there while `cq` lives, its users poll it, and it is our turn.
        if unsafe { bindings::ib_process_cq_direct(cq.raw.as_ptr(), BUDGET) } < BUDGET {
            break;
        }
    }
    true
}

/// Pauses between looks at what nobody tells. Most of that happens at once, some of it late: none
/// is much longer than a part of what was waited before.
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
