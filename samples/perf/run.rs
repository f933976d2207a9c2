// SPDX-License-Identifier: GPL-2.0

//! A run: what it is told to do, how it ends, and what comes of it.

use crate::{
    args::{
        Args,
        Context,
        Load, //
    },
    connect,
    latency,
    poll::Qp,
    rate,
    reg,
    setup,
    void, //
};
use core::num::NonZero;
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
            Atomic as AtomicCell,
            Relaxed,
            Release, //
        },
        CondVar,
        CondVarTimeoutResult,
        SpinLockIrq, //
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
    cqe::CqePointer,
    prelude::*,
    qp::Chain, //
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

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!("ops {}\nns {}\n", self.ops, self.ns))?;
        f.write_fmt(fmt!("post_ns {}\npoll_ns {}\n", self.post_ns, self.poll_ns))?;
        f.write_fmt(fmt!("posts {}\n", self.posts))?;
        f.write_fmt(fmt!("setup_ns {}\n", self.setup_ns))?;
        f.write_fmt(fmt!("teardown_ns {}\n", self.teardown_ns))?;
        // A request that fails is the end of a run.
        f.write_fmt(fmt!("completions {}\nerrors 0\n", self.completions))
    }
}

/// The text of the file `result`.
pub(crate) struct Report {
    pub(crate) figures: Figures,
    /// Latencies, in nanoseconds.
    pub(crate) samples: KVVec<i64>,
}

impl From<Figures> for Report {
    fn from(figures: Figures) -> Self {
        Self {
            figures,
            samples: KVVec::new(),
        }
    }
}

/// The state of a phase.
struct State<P> {
    /// The number of owners that have not ended.
    left: u32,
    /// When the phase was over, or that it has failed.
    end: Option<Result<Instant<Monotonic>>>,
    /// The owners that are through, until the run is over.
    kept: Option<KVec<P>>,
}

impl<P> State<P> {
    /// Keeps an owner for the next phase. Returns it if there will be none.
    fn keep(&mut self, owner: P) -> Option<P> {
        let Some(kept) = &mut self.kept else {
            return Some(owner);
        };
        // There is room: an owner that is not kept was made too many.
        let _ = kept.push_within_capacity(owner);
        None
    }
}

/// The state that the owners of a run share. They count for themselves; this is touched when one of
/// them is through.
///
/// `P` is an owner, of which those that are through are kept for the next phase.
#[pin_data]
pub(crate) struct Run<P: Send> {
    /// `true` once the phase is over, for callers that poll.
    over: AtomicCell<bool>,
    /// Changes now and then while there is progress.
    progress: AtomicCell<u32>,
    #[pin]
    state: SpinLockIrq<State<P>>,
    #[pin]
    changed: CondVar,
}

impl<P: Send> Run<P> {
    #[inline(never)]
    pub(crate) fn new(owners: usize) -> Result<Arc<Self>> {
        let kept = KVec::with_capacity(owners, GFP_KERNEL)?;
        let init = pin_init!(Self {
            over: AtomicCell::new(false),
            progress: AtomicCell::new(0),
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
    pub(crate) fn begin(&self, owners: u32) {
        let mut state = self.state.lock();
        state.left = owners;
        state.end = None;
        drop(state);
        self.over.store(false, Release);
    }

    /// Returns whether an owner goes on, which is to complete `left` more times; and now and then
    /// that there is progress.
    #[inline]
    pub(crate) fn goes_on(&self, left: u32) -> bool {
        if left % 64 != 0 {
            return true;
        }
        if left == 0 {
            return false;
        }
        self.tick();
        true
    }

    /// Notes that there is progress.
    #[cold]
    pub(crate) fn tick(&self) {
        let progress = self.progress.load(Relaxed).wrapping_add(1);
        self.progress.store(progress, Relaxed);
    }

    /// Keeps an owner for the next phase, if there may be one.
    pub(crate) fn keep(&self, owner: P) {
        let refused = self.state.lock().keep(owner);
        drop(refused);
    }

    /// Returns an owner that was kept.
    pub(crate) fn take(&self) -> Option<P> {
        self.state.lock().kept.as_mut()?.pop()
    }

    /// Lets go of all owners, also of those that are through later: each keeps this run.
    pub(crate) fn dismiss(&self) {
        let kept = self.state.lock().kept.take();
        drop(kept);
    }

    /// An owner is through. The last one ends the phase.
    pub(crate) fn through(&self, owner: P) {
        let mut state = self.state.lock();
        state.left = state.left.wrapping_sub(1);
        let over = (state.left == 0).then(Instant::now);
        let refused = state.keep(owner);
        drop(state);
        if let Some(now) = over {
            self.end_with(Ok(now));
        }
        drop(refused);
    }

    /// Ends the phase: a request was not posted, or has failed. What is flushed after the end does
    /// not matter.
    #[cold]
    pub(crate) fn fail(&self, e: impl Into<Error>) {
        self.end_with(Err(e.into()));
    }

    /// Fails if the phase has.
    pub(crate) fn check(&self) -> Result {
        match self.state.lock().end {
            Some(Err(e)) => Err(e),
            _ => Ok(()),
        }
    }

    fn end_with(&self, result: Result<Instant<Monotonic>>) {
        self.state.lock().end.get_or_insert(result);
        self.over.store(true, Release);
        self.changed.notify_all();
    }

    /// Waits for the end of the phase and returns its time. Polls meanwhile if nothing else
    /// does.
    #[inline]
    pub(crate) fn wait(
        &self,
        poll: Option<impl FnMut() -> Result<u32>>,
    ) -> Result<Instant<Monotonic>> {
        if let Some(poll) = poll {
            self.poll(poll)?;
        }
        self.sleep()
    }

    /// Sleeps until the phase is over.
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

    /// Polls until the phase is over. When that has been in vain for long it sleeps.
    fn poll(&self, mut poll: impl FnMut() -> Result<u32>) -> Result {
        let spins = if nr_cpu_ids() > 1 { SPINS } else { SPINS_ALONE };
        let (mut idle, mut last) = (0, Instant::<Monotonic>::now());
        while !self.over.load(Acquire) {
            if poll()? != 0 {
                idle = 0;
                continue;
            }
            if idle == 0 {
                last = Instant::now();
            }
            idle += 1;
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

/// Returns how often owner `n` of `owners` comes back, for all of them to come back `total` times.
pub(crate) fn share(total: u32, n: u32, owners: u32) -> u32 {
    match (total.checked_div(owners), total.checked_rem(owners)) {
        (Some(all), Some(rest)) => all.saturating_add((n < rest).into()),
        _ => 0,
    }
}

/// Finds a device.
pub(crate) fn device(client: &ClientRef, name: &str, cx: &Sleepable) -> Result<Device> {
    let name = CString::try_from_fmt(fmt!("{name}"))?;
    client.device_by_name(&name, cx).ok_or(ENODEV)
}

/// Does what is asked for.
pub(crate) fn run(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let caller_polls = matches!(
        args.context,
        Context::Direct | Context::Batch | Context::Static
    );
    match args.load {
        Load::VoidRate if caller_polls => void::run(client, args, cx),
        Load::QpRate | Load::CqRate if caller_polls => Err(EINVAL),
        Load::SendLat | Load::WriteLat | Load::ReadLat => latency::run(client, args, cx),
        Load::SendRate | Load::WriteRate | Load::ReadRate | Load::VoidRate => {
            rate::run(client, args, cx)
        }
        Load::RegRate => reg::run(client, args, cx),
        Load::ConnectRate => connect::run(client, args, cx),
        Load::QpRate => setup::qps(client, args, cx),
        Load::CqRate => setup::cqs(client, args, cx),
    }
}

/// Posts a request `times` times, only the last one signaled.
#[inline]
pub(crate) fn post_times<P>(
    qp: &Qp,
    owner: P,
    times: NonZero<u32>,
    wr: impl for<'a> Fn(&'a P::Target) -> Result<SendWr<'a>> + Sync,
) -> Result<(), PostError<P>>
where
    P: CqePointer<0>,
    P::Target: CqeHandler<Pointer = P, Needs = Atomic>,
{
    let mut batch = qp.batch(owner);
    for _ in 1..times.get() {
        let posted = batch.post(|owner, chain: &mut Chain<'_, 1>| chain.push(wr(owner)?));
        if let Err(e) = posted {
            return Err(batch.into_error(e));
        }
    }
    match batch.finish(|owner, chain: &mut Chain<'_, 1>| chain.push(wr(owner)?)) {
        Ok(()) => Ok(()),
        Err(e) => Err(batch.into_error(e)),
    }
}
