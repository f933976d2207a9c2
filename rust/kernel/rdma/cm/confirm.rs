// SPDX-License-Identifier: GPL-2.0

//! Connections that were accepted and that the peer has not confirmed.
//!
//! A request says how often the answer is sent again, and how long each is waited for. C believes
//! that, and keeps the id meanwhile: for more than a day, if the peer likes. So a connection that
//! is not confirmed in time is given up here, and a listener has no more than a number of them.
//! Those of iWARP are counted only.

use super::{
    callback::Shared,
    event::Event,
    running::Running, //
};
use crate::{
    bindings,
    context::{
        Context as _,
        Sleepable, //
    },
    deferred::Queue, //
};
use core::ptr::NonNull;
use kernel::{
    impl_has_hr_timer,
    impl_has_work,
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        ArcBorrow,
        Mutex, //
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
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// How long a peer has to confirm a connection. Peers that use the defaults of `rdma_cm` have
/// the answer sent again for 74 seconds at the most.
const TIMEOUT: Delta = Delta::from_secs(90);

/// A connection that came with a request, until its id is destroyed.
#[pin_data]
pub(super) struct Incoming {
    pub(super) shared: Arc<Shared>,
    /// Until the id is about to be destroyed. Locked before the handler is told.
    #[pin]
    live: Mutex<Option<Live>>,
    #[pin]
    timer: HrTimer<Self>,
    #[pin]
    give_up: Work<Self>,
    /// The ULP has accepted, and the peer has to confirm in time.
    accepted: Atomic<bool>,
    /// It is not confirmed, and a work item ends it.
    given_up: Atomic<bool>,
    /// The id is destroyed.
    destroyed: Atomic<bool>,
}

struct Live {
    id: NonNull<bindings::rdma_cm_id>,
    /// Runs while the peer has to confirm.
    timer: Option<ArcHrTimerHandle<Incoming>>,
}

// SAFETY: An id may be used from any thread; the connection manager locks it.
unsafe impl Send for Live {}

impl_has_hr_timer! {
    impl HasHrTimer<Self> for Incoming {
        mode: RelativeMode<Monotonic>, field: self.timer
    }
}

impl_has_work! {
    impl HasWork<Self> for Incoming { self.give_up }
}

impl HrTimerCallback for Incoming {
    type Pointer<'a> = Arc<Self>;

    fn run(this: ArcBorrow<'_, Self>, _cx: HrTimerCallbackContext<'_, Self>) -> HrTimerRestart {
        if this.is_unconfirmed() {
            Arc::from(this).give_up_later();
        }
        HrTimerRestart::NoRestart
    }
}

impl WorkItem for Incoming {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.give_up();
    }
}

impl Incoming {
    /// # Safety
    ///
    /// The id is alive until [`Incoming::close`] has returned, and `shared` is its context.
    pub(super) unsafe fn new(
        id: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
    ) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                shared,
                live <- new_mutex!(Some(Live { id, timer: None })),
                timer <- HrTimer::new(),
                give_up <- new_work!("rdma::cm::Incoming::give_up"),
                accepted: Atomic::new(false),
                given_up: Atomic::new(false),
                destroyed: Atomic::new(false),
            }),
            GFP_KERNEL,
        )
    }

    /// The ULP has accepted: the connection is given up unless it is confirmed in time. Not for
    /// iWARP, where `rdma_disconnect` waits for callbacks.
    pub(super) fn await_confirmation(self: &Arc<Self>) {
        self.accepted.store(true, Relaxed);
        if let Some(live) = &mut *self.live.lock() {
            live.timer = Some(self.clone().start(TIMEOUT));
        }
    }

    /// The id is about to be destroyed. Waits until nothing but its callback uses it.
    pub(super) fn close(&self) {
        let live = self.live.lock().take();
        // Waits for the timer.
        drop(live);
    }

    /// The id is destroyed. A listener may keep this for longer, but not the handler.
    pub(super) fn set_destroyed(&self) {
        self.destroyed.store(true, Relaxed);
        self.shared.release_handler();
    }

    /// Returns whether the peer has neither confirmed nor refused what is to be confirmed.
    fn is_unconfirmed(&self) -> bool {
        self.accepted.load(Relaxed) && !self.shared.is_established() && !self.shared.is_over()
    }

    /// Gives up, from a work item, a connection that is not confirmed. Any context.
    fn give_up_later(self: Arc<Self>) {
        self.given_up.store(true, Relaxed);
        // Already queued is as good.
        let _ = Queue::get().enqueue(self);
    }

    /// Gives up a connection that is not confirmed: its requests are flushed, and the handler gets
    /// its last event.
    fn give_up(&self) {
        let _running = Running::enter();
        let live = self.live.lock();
        let _telling = self.shared.telling.lock();
        let Some(live) = live.as_ref().filter(|_| self.is_unconfirmed()) else {
            return;
        };
        let handler = self.shared.give_up(|| {
            // SAFETY: The id is alive while `live` has it, which is locked.
            unsafe { bindings::rdma_disconnect(live.id.as_ptr()) };
        });
        if let Some(handler) = handler {
            // SAFETY: Work items run in process context, and the locks are mutexes.
            let cx = unsafe { Sleepable::assume() };
            handler.event(Event::Failed(ETIMEDOUT), &cx);
        }
    }
}

/// The connections that came to a listener and are not confirmed.
#[pin_data]
pub(super) struct Unconfirmed {
    #[pin]
    list: Mutex<KVec<Arc<Incoming>>>,
    max: usize,
}

impl Unconfirmed {
    pub(super) fn new(max: u32) -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(KVec::new()),
            max: max.max(1) as usize,
        })
    }

    /// Makes room for one more connection, if need be by giving up the one that waits for longest.
    ///
    /// Returns whether there is room. There is none while as many as may wait are being given up,
    /// or were not answered by the ULP.
    pub(super) fn make_room(&self) -> bool {
        let mut list = self.list.lock();
        list.retain(|it| !it.shared.is_established() && !it.destroyed.load(Relaxed));
        if list.len() >= 2 * self.max {
            return false;
        }
        let waiting = |it: &&Arc<Incoming>| !it.given_up.load(Relaxed) && !it.shared.is_over();
        if list.iter().filter(waiting).count() >= self.max {
            match list.iter().filter(waiting).find(|it| it.is_unconfirmed()) {
                Some(oldest) => oldest.clone().give_up_later(),
                None => return false,
            }
        }
        true
    }

    /// Adds a connection that the ULP has taken.
    pub(super) fn add(&self, it: &Arc<Incoming>) {
        // One that cannot be counted may not wait.
        if self.list.lock().push(it.clone(), GFP_KERNEL).is_err() {
            it.clone().give_up_later();
        }
    }
}
