// SPDX-License-Identifier: GPL-2.0

//! Connections that their peers have yet to answer or to confirm.

use crate::{
    cm::{
        self,
        Conn,
        InCallback,
        Manager, //
    },
    deferred,
    prelude::internal::*, //
};
use kernel::{
    sync::{
        self,
        atomic, //
    },
    time::{
        self,
        hrtimer::{
            self,
            HrTimerPointer as _, //
        }, //
    },
    workqueue, //
};

/// A connection that its peer has to answer, if it was asked for by events, or to confirm, if it
/// was accepted. One that the peer leaves alone for too long is given up, and a listener's number
/// of them is limited (cm.rst). On iWARP they are only counted: to disconnect waits there for the
/// event that the connection is established.
#[pin_data]
pub(crate) struct Pending<M: Manager> {
    conn: Arc<Conn<M>>,
    /// Set when the peer was asked, or its request accepted. Runs while the peer has time.
    #[pin]
    timeout: sync::Mutex<Option<hrtimer::ArcHrTimerHandle<Pending<M>>>>,
    #[pin]
    timer: hrtimer::HrTimer<Self>,
    #[pin]
    give_up: workqueue::Work<Self>,
    /// A work item ends it unless the peer has answered.
    given_up: atomic::Atomic<bool>,
}

kernel::impl_has_hr_timer! {
    impl{M: Manager} HasHrTimer<Self> for Pending<M> {
        mode: hrtimer::RelativeMode<time::Monotonic>, field: self.timer
    }
}

kernel::impl_has_work! {
    impl{M: Manager} HasWork<Self> for Pending<M> { self.give_up }
}

impl<M: Manager> hrtimer::HrTimerCallback for Pending<M> {
    type Pointer<'a> = Arc<Self>;

    fn run(
        this: ArcBorrow<'_, Self>,
        _cx: hrtimer::HrTimerCallbackContext<'_, Self>,
    ) -> hrtimer::HrTimerRestart {
        // The work item looks whether the peer has answered, which takes a mutex.
        Arc::from(this).give_up_later();
        hrtimer::HrTimerRestart::NoRestart
    }
}

impl<M: Manager> workqueue::WorkItem for Pending<M> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let conn = &this.conn;
        pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
        let _events = conn.event_lock.lock();
        if !this.is_due() {
            return;
        }
        let handler = conn.with_id(|id| {
            // SAFETY: `with_id` passes the id of this connection, alive meanwhile.
            unsafe { conn.give_up(id.as_ptr()) }
        });
        if let Some(handler) = handler.flatten() {
            // SAFETY: Work items run in process context, and the locks are mutexes.
            let cx = unsafe { Sleepable::assume() };
            handler
                .as_arc_borrow()
                .event(cm::Event::Failed(ETIMEDOUT), &cx);
        }
    }
}

impl<M: Manager> Pending<M> {
    /// Never inlined, so that the code of the work item is this module's.
    #[inline(never)]
    pub(crate) fn new(conn: Arc<Conn<M>>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                conn,
                timeout <- kernel::new_mutex!(None),
                timer <- hrtimer::HrTimer::new(),
                give_up <- kernel::new_work!("rdma::cm::Pending::give_up"),
                given_up: atomic::Atomic::new(false),
            }),
            GFP_KERNEL,
        )
    }

    /// The peer has this time, in milliseconds.
    pub(crate) fn arm(self: &Arc<Self>, timeout_ms: u32) {
        let timeout = time::Delta::from_millis(timeout_ms.into());
        *self.timeout.lock() = Some(self.clone().start(timeout));
    }

    /// Ends the timer, and waits for its callback. For the end of the id.
    pub(crate) fn disarm(&self) {
        // The drop waits for the timer, with the mutex unlocked.
        let _timeout = self.timeout.lock().take();
    }

    /// Returns whether the peer has confirmed the connection, as it does by using it, or its id is
    /// destroyed.
    pub(super) fn is_over(&self) -> bool {
        let state = self.conn.state();
        matches!(
            state,
            cm::State::Notified | cm::State::Established | cm::State::Destroyed
        )
    }

    /// Returns whether the connection is neither over nor given up.
    pub(super) fn is_waiting(&self) -> bool {
        !self.given_up.load(atomic::Relaxed) && self.conn.state() != cm::State::Closed
    }

    /// Returns whether the peer has to answer, and has not.
    pub(super) fn is_due(&self) -> bool {
        self.timeout.lock().is_some() && self.conn.state() == cm::State::Connecting
    }

    /// Gives the connection up from a work item, unless the peer answers. Any context.
    pub(super) fn give_up_later(self: Arc<Self>) {
        self.given_up.store(true, atomic::Relaxed);
        // Already queued is as good.
        let _ = deferred::CoreWorkqueue::get().enqueue(self);
    }
}
