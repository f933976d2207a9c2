// SPDX-License-Identifier: GPL-2.0

//! Control of connections: finding, watching and ending them, in all contexts.

use crate::{
    config::Config,
    instance::Instance,
    reason::Reason, //
};
use kernel::{
    impl_has_hr_timer,
    new_condvar,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            AtomicFlag,
            Relaxed,
            Release, //
        },
        ArcBorrow,
        CondVar,
        SpinLockIrq, //
    },
    time::{
        hrtimer::{
            ArcHrTimerHandle,
            HrTimer,
            HrTimerCallback,
            HrTimerCallbackContext,
            HrTimerPointer,
            HrTimerRestart,
            RelativeMode, //
        },
        Delta,
        Monotonic, //
    }, //
};
use rdma::{
    cm,
    context::Sleepable,
    prelude::Arc,
    wc::Status, //
};

/// The number of checks for progress within the time that a connection may be idle.
const TICKS: u32 = 4;

/// The part of a connection that has its id.
#[pin_data]
pub(crate) struct Control {
    pub(crate) instance: Arc<Instance>,
    pub(crate) id: cm::Id,
    /// The number of pings that have begun plus those that have ended: odd within a ping.
    steps: Atomic<u64>,
    /// The steps that the timer saw last, and how often it has seen them.
    seen: Atomic<u64>,
    idle: Atomic<u32>,
    tick: Delta,
    #[pin]
    timer: HrTimer<Self>,
    /// Why the connection is over, once it is.
    #[pin]
    over: SpinLockIrq<Option<Reason>>,
    #[pin]
    changed: CondVar,
    /// `true` once the [`Conn`](crate::conn::Conn) is gone.
    gone: AtomicFlag,
}

impl_has_hr_timer! {
    impl HasHrTimer<Self> for Control {
        mode: RelativeMode<Monotonic>, field: self.timer
    }
}

impl Control {
    /// Makes the control of an id, and adds it to the connections of the instance.
    pub(crate) fn new(
        instance: &Arc<Instance>,
        config: &Config,
        id: cm::Id,
    ) -> Result<Arc<Self>, Reason> {
        let init = pin_init!(Self {
            instance: instance.clone(),
            id,
            steps: Atomic::new(0),
            seen: Atomic::new(0),
            idle: Atomic::new(0),
            tick: Delta::from_micros(i64::from(config.timeout_ms) * 1000 / i64::from(TICKS)),
            timer <- HrTimer::new(),
            over <- new_spinlock_irq!(None),
            changed <- new_condvar!(),
            gone: AtomicFlag::new(false),
        });
        let control = Arc::pin_init(init, GFP_KERNEL)?;
        instance.connections.add(&control)?;
        Ok(control)
    }

    /// A ping begins, or has ended.
    pub(crate) fn step(&self) {
        self.steps.add(1, Relaxed);
    }

    fn within_ping(&self) -> bool {
        self.steps.load(Relaxed) % 2 == 1
    }

    /// A request has failed.
    pub(crate) fn failed(&self, status: Status) {
        // A peer that disconnects at once after its last ping may not acknowledge the go-ahead any
        // more. On iWARP that flushes requests before it is told.
        let left = matches!(status, Status::RETRY_EXC_ERR | Status::WR_FLUSH_ERR);
        if left && !self.within_ping() {
            self.end(Reason::PeerDisconnected);
        } else {
            self.end(Reason::Request(status));
        }
    }

    /// Starts to watch for progress, until the handle is dropped.
    pub(crate) fn watch(self: Arc<Self>) -> ArcHrTimerHandle<Self> {
        let tick = self.tick;
        self.start(tick)
    }

    /// Ends the connection, for the first reason that is given. Any context.
    ///
    /// The rest is done in process context: the QP goes to the error state, and the peer is told.
    pub(crate) fn end(&self, reason: Reason) {
        {
            let mut over = self.over.lock();
            if over.is_some() {
                return;
            }
            *over = Some(reason);
        }
        self.instance.set_reason(reason);
        self.changed.notify_all();
        self.id.disconnect_later();
    }

    /// Ends the connection and does not wait for the peer's consent.
    pub(crate) fn stop(&self, reason: Reason, cx: &Sleepable) {
        self.end(reason);
        // A connection that is not established cannot be disconnected, but `connect` looks at
        // `over` then.
        let _ = self.id.disconnect(cx);
        self.id.release_handler(cx);
    }

    /// Returns why the connection is over, if it is.
    pub(crate) fn over(&self) -> Option<Reason> {
        *self.over.lock()
    }

    /// Fails if the connection is over.
    pub(crate) fn check(&self) -> Result<(), Reason> {
        self.over().map_or(Ok(()), Err)
    }

    /// Waits until the connection is over; a signal ends it.
    pub(crate) fn wait(&self) {
        let mut over = self.over.lock();
        while over.is_none() {
            if self.changed.wait_interruptible(&mut over) {
                drop(over);
                return self.end(Reason::Interrupted);
            }
        }
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Acquire)
    }
}

impl HrTimerCallback for Control {
    type Pointer<'a> = Arc<Self>;

    fn run(this: ArcBorrow<'_, Self>, mut cx: HrTimerCallbackContext<'_, Self>) -> HrTimerRestart {
        let steps = this.steps.load(Relaxed);
        let idle = if this.seen.load(Relaxed) == steps {
            this.idle.load(Relaxed) + 1
        } else {
            0
        };
        if idle == TICKS {
            this.end(Reason::NoProgress);
            return HrTimerRestart::NoRestart;
        }
        this.seen.store(steps, Relaxed);
        this.idle.store(idle, Relaxed);
        cx.forward_now(this.tick);
        HrTimerRestart::Restart
    }
}

impl cm::Handler for Control {
    fn event(&self, event: cm::Event<'_>, cx: &Sleepable) {
        match event {
            // A connection that was over before it was established could not be disconnected then.
            cm::Event::Established { .. } if self.over().is_some() => {
                let _ = self.id.disconnect(cx);
                return;
            }
            cm::Event::Disconnected if self.within_ping() => self.end(Reason::PeerGone),
            cm::Event::Disconnected => self.end(Reason::PeerDisconnected),
            cm::Event::Failed(e) => self.end(e.into()),
            cm::Event::Rejected(_) => self.end(ECONNREFUSED.into()),
            cm::Event::DeviceRemoval => self.end(Reason::DeviceRemoved),
            _ => return,
        }
        self.instance.connections.remove(self);
    }
}
