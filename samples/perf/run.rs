// SPDX-License-Identifier: GPL-2.0

//! A run: its parameters, its end and its results.

use crate::{
    args::{
        Args,
        Load, //
    },
    array,
    call,
    connect,
    laps::{
        nanos,
        Times, //
    },
    latency,
    poll::{
        Poller,
        Qp, //
    },
    rate,
    reg,
    rw,
    setup,
    void, //
};
use kernel::{
    cpu::nr_cpu_ids,
    fmt,
    new_condvar,
    new_spinlock_irq,
    prelude::*,
    processor::cpu_relax,
    str::CString,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        CondVar,
        CondVarTimeoutResult,
        SpinLockIrq,
        SpinLockIrqGuard, //
    },
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    device::Device,
    prelude::*, //
};

/// After so long without progress a run is stuck, in milliseconds.
const STUCK_MS: u32 = 10_000;

/// The number of polls without a completion before sleeping. The other end may need the only CPU;
/// where there are more, the sleep would be what is measured.
const SPINS: u32 = 512;
const SPINS_ALONE: u32 = 64;

/// The result of a run.
#[derive(Default)]
pub(crate) struct Figures {
    pub(crate) ops: u64,
    pub(crate) ns: i64,
    pub(crate) post_ns: i64,
    pub(crate) poll_ns: i64,
    pub(crate) posts: u64,
    pub(crate) completions: u64,
    pub(crate) setup_ns: i64,
    pub(crate) teardown_ns: i64,
}

impl Figures {
    /// Adds a round of so many requests, which were posted from `began` to `posted` and have
    /// completed now.
    #[inline]
    pub(crate) fn add_round(
        &mut self,
        requests: u32,
        began: Instant<Monotonic>,
        posted: Instant<Monotonic>,
    ) {
        self.poll_ns = self.poll_ns.saturating_add(posted.elapsed().as_nanos());
        self.post_ns = self.post_ns.saturating_add(nanos(began, posted));
        self.ops = self.ops.saturating_add(requests.into());
    }

    /// Writes one a line.
    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ops,
            ns,
            post_ns,
            poll_ns,
            posts,
            completions,
            setup_ns,
            teardown_ns,
        } = self;
        // A request that fails is the end of a run.
        f.write_fmt(fmt!(
            "ops {ops}\nns {ns}\npost_ns {post_ns}\npoll_ns {poll_ns}\nposts {posts}\n\
             setup_ns {setup_ns}\nteardown_ns {teardown_ns}\n\
             completions {completions}\nerrors 0\n"
        ))
    }
}

/// The result of a run, with its latencies.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) figures: Figures,
    /// The latencies, and when the first of them began.
    pub(crate) laps: Option<(Arc<Times>, Instant<Monotonic>)>,
}

/// An owner of requests that is posted again each time that it comes back.
pub(crate) enum Owned {
    Ball(Pin<KBox<latency::Slot>>),
    Group(Pin<KBox<rate::Group>>),
    FastReg(Pin<KBox<reg::FastReg>>),
}

impl Owned {
    /// Has it come back so often in the next phase, and returns its QP.
    fn prepare(&mut self, times: u32) -> Qp {
        match self {
            // The laps of all slots are counted.
            Self::Ball(slot) => slot.qp.clone(),
            Self::Group(group) => group.prepare(times),
            Self::FastReg(fmr) => fmr.prepare(times),
        }
    }

    /// Posts it, to its QP, for the first time in a phase.
    fn start(self, qp: &Qp) {
        match self {
            Self::Ball(slot) => slot.start(qp),
            Self::Group(group) => group.start(qp),
            Self::FastReg(fmr) => fmr.start(qp),
        }
    }
}

/// Shares `total` completions among owners, and yields how many each of them gets. The first ones
/// get what is left over.
pub(crate) fn shares(total: u32, owners: u32) -> impl Iterator<Item = u32> {
    let each = total.checked_div(owners).unwrap_or(0);
    let left_over = total.checked_rem(owners).unwrap_or(0);
    (0..owners).map(move |n| each.saturating_add((n < left_over).into()))
}

/// Has owners come back `total` times, and returns the QP of each.
fn prepare(owners: &mut [Owned], total: u32) -> Result<KVVec<Qp>> {
    let mut qps = KVVec::with_capacity(owners.len(), GFP_KERNEL)?;
    let shares = shares(total, owners.len() as u32);
    for (owner, times) in owners.iter_mut().zip(shares) {
        qps.push_within_capacity(owner.prepare(times))?;
    }
    Ok(qps)
}

/// The state of a phase.
struct State {
    /// The number of owners that have not ended.
    left: u32,
    /// When the phase was over, or that it has failed.
    end: Option<Result<Instant<Monotonic>>>,
    /// The owners that are through, until the run is over.
    kept: Option<KVVec<Owned>>,
}

impl State {
    /// Keeps an owner for the next phase. Returns it if there will be none.
    fn keep(&mut self, owner: Owned) -> Option<Owned> {
        let Some(kept) = &mut self.kept else {
            return Some(owner);
        };
        // There is room: an owner that is not kept was made too many.
        kept.push_within_capacity(owner).err().map(|e| e.0)
    }
}

/// The state that the owners of a run share. They count for themselves; this is touched when one of
/// them is through.
#[pin_data]
pub(crate) struct Run {
    /// `true` once the phase is over, for callers that poll.
    over: Atomic<bool>,
    /// Changes now and then while there is progress.
    progress: Atomic<u32>,
    /// The number of owners.
    owners: usize,
    #[pin]
    state: SpinLockIrq<State>,
    #[pin]
    changed: CondVar,
}

impl Run {
    pub(crate) fn new(owners: usize) -> Result<Arc<Self>> {
        let kept = KVVec::with_capacity(owners, GFP_KERNEL)?;
        let init = pin_init!(Self {
            over: Atomic::new(false),
            progress: Atomic::new(0),
            owners,
            state <- new_spinlock_irq!(State {
                left: 0,
                end: None,
                kept: Some(kept),
            }),
            changed <- new_condvar!(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Begins a phase of so many owners.
    #[inline(never)]
    pub(crate) fn begin(&self, owners: u32) {
        let mut state = self.state.lock();
        state.left = owners;
        state.end = None;
        drop(state);
        self.over.store(false, Release);
    }

    /// Takes all owners that are kept, but no more than `most`.
    fn take(&self, most: usize) -> Result<KVVec<Owned>> {
        let spare = KVVec::with_capacity(self.owners, GFP_KERNEL)?;
        let mut owners = self.state.lock().kept.replace(spare).ok_or(EIO)?;
        while owners.len() > most {
            let Some(owner) = owners.pop() else { break };
            self.keep(owner);
        }
        Ok(owners)
    }

    /// Has all owners that are kept come back `total` times, and returns when that began, and the
    /// nanoseconds that it took. Polls meanwhile if nothing else does.
    pub(crate) fn phase(
        &self,
        total: u32,
        first: &Option<Poller<'_>>,
        second: &Option<Poller<'_>>,
    ) -> Result<(Instant<Monotonic>, i64)> {
        let mut owners = self.take(total as usize)?;
        if owners.is_empty() {
            return Ok((Instant::now(), 0));
        }
        let qps = prepare(&mut owners, total)?;
        self.begin(owners.len() as u32);
        let began = Instant::now();
        for (owner, qp) in owners.drain_all().zip(&qps) {
            owner.start(qp);
        }
        Ok((began, self.wait(began, first, second)?))
    }

    /// Waits until the phase is over, and returns the nanoseconds that it took. Polls meanwhile if
    /// nothing else does.
    pub(crate) fn wait(
        &self,
        began: Instant<Monotonic>,
        first: &Option<Poller<'_>>,
        second: &Option<Poller<'_>>,
    ) -> Result<i64> {
        if let Some(first) = first {
            self.poll(first, second.as_ref())?;
        }
        Ok(nanos(began, self.sleep()?))
    }

    /// Notes that there is progress.
    #[cold]
    pub(crate) fn tick(&self) {
        let progress = self.progress.load(Relaxed).wrapping_add(1);
        self.progress.store(progress, Relaxed);
    }

    /// Keeps an owner for the next phase, if there may be one.
    #[inline(never)]
    pub(crate) fn keep(&self, owner: Owned) {
        let refused = self.state.lock().keep(owner);
        drop(refused);
    }

    /// Lets go of all owners, also of those that are through later: each keeps this run.
    pub(crate) fn dismiss(&self) {
        let kept = self.state.lock().kept.take();
        drop(kept);
    }

    /// An owner is through. The last one ends the phase.
    #[inline(never)]
    pub(crate) fn through(&self, owner: Owned) {
        self.through_inlined(owner);
    }

    /// As [`Run::through`], where there are many owners that come back a few times.
    #[inline(always)]
    pub(crate) fn through_inlined(&self, owner: Owned) {
        let mut state = self.state.lock();
        match state.keep(owner) {
            None => self.ended_in(state),
            Some(owner) => self.dismissed(state, owner),
        }
    }

    /// An owner is through for which there will be no phase.
    #[cold]
    #[inline(never)]
    fn dismissed(&self, state: SpinLockIrqGuard<'_, State>, owner: Owned) {
        self.ended_in(state);
        drop(owner);
    }

    /// One of the owners has ended. The last one ends the phase.
    pub(crate) fn ended(&self) {
        self.ended_in(self.state.lock());
    }

    #[inline]
    fn ended_in(&self, mut state: SpinLockIrqGuard<'_, State>) {
        state.left = state.left.wrapping_sub(1);
        let over = state.left == 0;
        drop(state);
        if over {
            self.end_with(None);
        }
    }

    /// Ends the phase: a request was not posted, or has failed. What is flushed after the end does
    /// not matter.
    #[cold]
    pub(crate) fn fail(&self, e: Error) {
        self.end_with(Some(e));
    }

    /// Fails if the phase has.
    #[inline]
    pub(crate) fn check(&self) -> Result {
        if self.over.load(Acquire) {
            self.sleep().map(|_| ())
        } else {
            Ok(())
        }
    }

    #[cold]
    #[inline(never)]
    fn end_with(&self, error: Option<Error>) {
        let end = error.map_or_else(|| Ok(Instant::now()), Err);
        self.state.lock().end.get_or_insert(end);
        self.over.store(true, Release);
        self.changed.notify_all();
    }

    /// Sleeps until the phase is over, and returns its time.
    pub(crate) fn sleep(&self) -> Result<Instant<Monotonic>> {
        let mut state = self.state.lock();
        let mut seen = (self.progress.load(Relaxed), state.left);
        loop {
            if let Some(result) = state.end {
                return result;
            }
            let stuck = msecs_to_jiffies(STUCK_MS);
            match self.changed.wait_interruptible_timeout(&mut state, stuck) {
                CondVarTimeoutResult::Woken { .. } => {}
                CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
                CondVarTimeoutResult::Timeout => {
                    let now = (self.progress.load(Relaxed), state.left);
                    if state.end.is_none() && now == seen {
                        return Err(ETIME);
                    }
                    seen = now;
                }
            }
        }
    }

    /// Polls until the phase is over. It sleeps when it has found nothing for long.
    fn poll(&self, first: &Poller<'_>, second: Option<&Poller<'_>>) -> Result {
        let spins = if nr_cpu_ids() > 1 { SPINS } else { SPINS_ALONE };
        let mut idle = 0u32;
        let mut last = Instant::<Monotonic>::now();
        while !self.over.load(Acquire) {
            let mut polled = first.poll()?;
            if let Some(second) = second {
                polled |= second.poll()?;
            }
            if polled != 0 {
                idle = 0;
                continue;
            }
            if idle == 0 {
                last = Instant::now();
            }
            idle = idle.saturating_add(1);
            if idle <= spins {
                cpu_relax();
            } else if last.elapsed() < Delta::from_millis(STUCK_MS.into()) {
                fsleep(Delta::from_micros(20));
            } else {
                return Err(ETIME);
            }
        }
        Ok(())
    }
}

/// Finds a device.
pub(crate) fn device(client: &ClientRef, name: &str, cx: &Sleepable) -> Result<Device> {
    let name = CString::try_from_fmt(fmt!("{name}"))?;
    client.device_by_name(&name, cx).ok_or(ENODEV)
}

/// Does what is asked for.
pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let caller_polls = args.context.is_polled();
    match args.load {
        Load::VoidRate if caller_polls => void::run(client, args, report, cx),
        Load::QpRate | Load::CqRate if caller_polls => Err(EINVAL),
        Load::SendLat | Load::WriteLat | Load::ReadLat => latency::run(client, args, report, cx),
        Load::SendRate | Load::WriteRate | Load::ReadRate | Load::VoidRate => {
            rate::run(client, args, report, cx)
        }
        Load::QueueRate | Load::PoolRate => array::run(client, args, report, cx),
        Load::RegRate => reg::run(client, args, report, cx),
        Load::CallRate | Load::TagRate => call::run(client, args, report, cx),
        Load::RwReadRate | Load::RwWriteRate => rw::run(client, args, report, cx),
        Load::ConnectRate => connect::run(client, args, report, cx),
        Load::QpRate => setup::qps(client, args, report, cx),
        Load::CqRate => setup::cqs(client, args, report, cx),
    }
}
