// SPDX-License-Identifier: GPL-2.0

//! Connections that were accepted and that the peer has not confirmed.
//!
//! A request says how often the answer is sent again, and how long each is waited for. C believes
//! that, and keeps the id meanwhile: for more than a day, if the peer likes. So a connection that is
//! not confirmed in time is given up here, and a listener has no more than a number of them.

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
use kernel::{
    impl_has_hr_timer,
    impl_has_work,
    new_mutex,
    prelude::*,
    sync::{
        atomic::ordering::{
            Full,
            Relaxed, //
        },
        Arc,
        ArcBorrow,
        Mutex, //
    },
    time::{
        hrtimer::{
            ArcHrTimerHandle,
            HrTimerCallback,
            HrTimerCallbackContext,
            HrTimerPointer,
            HrTimerRestart,
            RelativeMode, //
        },
        Delta,
        Monotonic, //
    },
    workqueue::WorkItem, //
};

/// How long a peer has to confirm a connection. Peers that use the defaults of `rdma_cm` have
/// the answer sent again for 74 seconds at the most.
const TIMEOUT: Delta = Delta::from_secs(90);

impl_has_hr_timer! {
    impl HasHrTimer<Self> for Shared {
        mode: RelativeMode<Monotonic>, field: self.timer
    }
}

impl_has_work! {
    impl HasWork<Self> for Shared { self.give_up }
}

impl HrTimerCallback for Shared {
    type Pointer<'a> = Arc<Self>;

    fn run(this: ArcBorrow<'_, Self>, _cx: HrTimerCallbackContext<'_, Self>) -> HrTimerRestart {
        if this.is_unconfirmed() {
            Arc::from(this).give_up_later();
        }
        HrTimerRestart::NoRestart
    }
}

impl WorkItem for Shared {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.give_up();
    }
}

impl Shared {
    /// The ULP has accepted: the connection is given up unless it is confirmed in time, or the
    /// handle is dropped.
    pub(super) fn await_confirmation(self: &Arc<Self>) -> ArcHrTimerHandle<Self> {
        self.accepted.store(true, Relaxed);
        self.clone().start(TIMEOUT)
    }

    /// Returns whether the ULP has accepted, and the peer has neither confirmed nor refused.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.accepted.load(Relaxed) && !self.established.load(Relaxed) && !self.over.load(Relaxed)
    }

    /// Gives up, from a work item, a connection that is not confirmed. Any context.
    pub(super) fn give_up_later(self: Arc<Self>) {
        self.given_up.store(true, Relaxed);
        // Already queued is as good.
        let _ = Queue::get().enqueue(self);
    }

    /// Gives up a connection that is not confirmed: its requests are flushed, and the handler gets
    /// its last event.
    fn give_up(&self) {
        let _running = Running::enter();
        let id = self.id.lock();
        let _telling = self.telling.lock();
        let Some(id) = id.as_ref().filter(|_| self.is_unconfirmed()) else {
            return;
        };
        // If the peer confirms now, the callback finds this and disconnects.
        self.ended.xchg(true, Full);
        // SAFETY: The id is alive while `id` has it, which is locked.
        unsafe { bindings::rdma_disconnect(id.0.as_ptr()) };
        self.over.store(true, Relaxed);
        if let Some(handler) = self.take_handler() {
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
    list: Mutex<KVec<Arc<Shared>>>,
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
        list.retain(|id| !id.established.load(Relaxed) && !id.closed.load(Relaxed));
        if list.len() >= 2 * self.max {
            return false;
        }
        let waiting = |id: &&Arc<Shared>| !id.given_up.load(Relaxed) && !id.over.load(Relaxed);
        if list.iter().filter(waiting).count() >= self.max {
            match list.iter().filter(waiting).find(|id| id.is_unconfirmed()) {
                Some(oldest) => oldest.clone().give_up_later(),
                None => return false,
            }
        }
        true
    }

    /// Adds a connection that the ULP has taken.
    pub(super) fn add(&self, id: &Arc<Shared>) {
        // One that cannot be counted may not wait.
        if self.list.lock().push(id.clone(), GFP_KERNEL).is_err() {
            id.clone().give_up_later();
        }
    }
}
