// SPDX-License-Identifier: GPL-2.0

//! Connections that came with a request and that the peer has yet to confirm.
//!
//! A request says how often the answer is sent again, and how long each is waited for. C believes
//! that, and keeps the id meanwhile: for more than a day, if the peer likes. So a connection that
//! is not confirmed in time is given up here, and a listener has no more than a number of them.
//! Those of iWARP are counted only.

use crate::{
    cm::{
        callback::InCallback,
        connection::RdmaCm,
        state::{
            Conn,
            Manager,
            State, //
        },
        Event, //
    },
    context::{
        Context as _,
        Sleepable, //
    },
    deferred::Queue, //
};
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

/// The time that a peer has to confirm a connection. Peers that use the defaults of `rdma_cm` have
/// the answer sent again for 74 seconds at the most.
const TIMEOUT: Delta = Delta::from_secs(90);

/// A connection that came with a request, until its id is destroyed.
#[pin_data]
pub(super) struct Incoming {
    pub(super) conn: Arc<Conn<RdmaCm>>,
    /// Runs while the peer has to confirm.
    #[pin]
    timeout: Mutex<Option<ArcHrTimerHandle<Incoming>>>,
    #[pin]
    timer: HrTimer<Self>,
    #[pin]
    give_up: Work<Self>,
    /// The ULP has accepted, and the peer has to confirm in time.
    accepted: Atomic<bool>,
    /// A work item ends it unless it is confirmed.
    given_up: Atomic<bool>,
    /// The id is destroyed.
    destroyed: Atomic<bool>,
}

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
        // The work item looks whether it is confirmed, which takes a mutex.
        Arc::from(this).give_up_later();
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
    pub(super) fn new(conn: Arc<Conn<RdmaCm>>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                conn,
                timeout <- new_mutex!(None),
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
        *self.timeout.lock() = Some(self.clone().start(TIMEOUT));
    }

    /// Stops the timer, and waits for it. The id is about to be destroyed.
    pub(super) fn close(&self) {
        let timeout = self.timeout.lock().take();
        drop(timeout);
    }

    /// Notes that the id is destroyed. A listener may keep this for longer.
    pub(super) fn set_destroyed(&self) {
        self.destroyed.store(true, Relaxed);
    }

    /// Returns whether the peer has neither confirmed nor refused what is to be confirmed.
    fn is_unconfirmed(&self) -> bool {
        self.accepted.load(Relaxed) && self.conn.is_unconfirmed()
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
        let _in_callback = InCallback::enter();
        let _events = self.conn.lock_events();
        if !self.is_unconfirmed() {
            return;
        }
        let mut handler = None;
        self.conn.with_id(|id| {
            handler = self.conn.give_up(|| {
                // SAFETY: `with_id` passes the id, which is not destroyed meanwhile. It was
                // accepted.
                let _ = unsafe { RdmaCm::disconnect(id.as_ptr()) };
            });
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
        list.retain(|it| it.conn.state() != State::Established && !it.destroyed.load(Relaxed));
        if list.len() >= 2 * self.max {
            return false;
        }
        let waiting =
            |it: &&Arc<Incoming>| !it.given_up.load(Relaxed) && it.conn.state() != State::Closed;
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
