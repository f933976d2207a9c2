// SPDX-License-Identifier: GPL-2.0

//! The callback of a connection's id, and the steps that wait for it.

use super::{
    driver::Driver,
    event::Event,
    running::{
        current_task,
        Running, //
    },
    step::Step,
    Handler, //
};
use crate::{
    bindings,
    context::{
        Context as _,
        Sleepable, //
    }, //
};
use kernel::{
    error::to_result,
    new_condvar,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        CondVar,
        CondVarTimeoutResult,
        Mutex, //
    },
    time::msecs_to_jiffies, //
};

/// How long the end of an id waits for the manager's worker, in milliseconds. It runs at once,
/// unless the callback of another id keeps it.
pub(crate) const FOUND_MS: u32 = 10_000;

/// What the callback of an id works with. Lives as long as the C id, at least.
#[pin_data]
pub(super) struct Shared {
    #[pin]
    pub(super) step: Mutex<Step>,
    #[pin]
    pub(super) changed: CondVar,
    #[pin]
    handler: Mutex<Option<Arc<dyn Handler>>>,
    /// What makes the connection, until the peer was asked, if nobody waits for that.
    #[pin]
    pub(super) driver: Mutex<Option<Arc<Driver>>>,
    /// Nobody waits for the connection to be made.
    driven: Atomic<bool>,
    /// Held while the handler is called.
    #[pin]
    pub(super) telling: Mutex<()>,
    /// The task that has the id's handler lock as it is in the id's callback, or zero.
    locked_by: Atomic<usize>,
    /// The device and both addresses are known, and the event that says so was told, or they came
    /// with a request: C does not change them any more.
    resolved: Atomic<bool>,
    /// The id came with a request that was neither accepted nor rejected.
    unanswered: Atomic<bool>,
    /// The id has a connection of the device's own manager, which stays until it is destroyed.
    attached: Atomic<bool>,
    established: Atomic<bool>,
    /// The ULP has disconnected. C does nothing, and does not say so, while the peer's last message
    /// of the connection's making is still to come (`ib_send_cm_dreq` in core/cm.c).
    ended: Atomic<bool>,
    /// The ULP has said that the connection is there, which the manager's worker has yet to find.
    /// If the state has changed before it does, it does not cancel the message that waits for the
    /// peer's last one (`cm_establish_handler` in core/cm.c), and the id lives on for a minute.
    noted: Atomic<bool>,
    /// The last event came.
    over: Atomic<bool>,
    /// The device goes. Set with the handler locked, so that none comes too late to be told, and
    /// before the step is locked and failed, so that none begins after that.
    removed: Atomic<bool>,
    /// Where the id is in the list of its device, which protects this.
    pub(super) place: Atomic<u32>,
}

impl Shared {
    pub(super) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                step <- new_mutex!(Step::Idle),
                changed <- new_condvar!(),
                handler <- new_mutex!(None),
                driver <- new_mutex!(None),
                driven: Atomic::new(false),
                telling <- new_mutex!(()),
                locked_by: Atomic::new(0),
                resolved: Atomic::new(false),
                unanswered: Atomic::new(false),
                attached: Atomic::new(false),
                established: Atomic::new(false),
                ended: Atomic::new(false),
                noted: Atomic::new(false),
                over: Atomic::new(false),
                removed: Atomic::new(false),
                place: Atomic::new(0),
            }),
            GFP_KERNEL,
        )
    }

    /// Says that the current task has the id's handler lock, or has it no more.
    pub(super) fn set_locked(&self, locked: bool) {
        self.locked_by
            .store(if locked { current_task() } else { 0 }, Relaxed);
    }

    pub(super) fn is_locked_by_current(&self) -> bool {
        self.locked_by.load(Relaxed) == current_task()
    }

    /// Says whether the handler was told that the connection is there, or is being told.
    pub(super) fn is_established(&self) -> bool {
        self.established.load(Relaxed)
    }

    /// Says that the device and the addresses of the id are known.
    pub(super) fn set_resolved(&self) {
        self.resolved.store(true, Release);
    }

    pub(super) fn is_resolved(&self) -> bool {
        self.resolved.load(Acquire)
    }

    /// Says that the id came with a request, which can be answered.
    pub(super) fn set_unanswered(&self) {
        self.unanswered.store(true, Release);
    }

    /// Takes the right to answer the request, which one has once.
    ///
    /// C lets an id be rejected that has asked, or accepted, itself; but then it goes on sending
    /// that message, with a reference to the id, until nobody has answered for a minute.
    pub(super) fn take_answer(&self) -> Result {
        if self.unanswered.xchg(false, Full) {
            Ok(())
        } else {
            Err(EINVAL)
        }
    }

    /// Says that the id can be disconnected from here on.
    pub(super) fn attach(&self) {
        self.attached.store(true, Release);
    }

    /// Says that the connection is to end once it is there. Called before `rdma_disconnect`: either
    /// that finds the connection, or what finds it later finds this, by the connection manager's
    /// lock.
    ///
    /// Returns `false` if that is left to the event that is about to come: by the full barriers
    /// either this finds that it came, or it finds that the connection is to end.
    pub(super) fn end(&self) -> bool {
        self.ended.xchg(true, Full);
        !self.is_to_be_found()
    }

    /// Tells the connection manager by `notify` that the connection is there, unless it is to end:
    /// by the full barriers either this finds that, or `end` finds this. `later` ends what could
    /// not be ended meanwhile.
    pub(super) fn note(&self, notify: impl FnOnce() -> Result, later: impl FnOnce()) -> Result {
        if self.noted.xchg(true, Full) {
            return Err(EISCONN);
        }
        let noted = if self.ended.load(Relaxed) {
            Err(EINVAL)
        } else {
            notify()
        };
        noted.inspect_err(|_| {
            self.noted.xchg(false, Full);
            if self.ended.load(Relaxed) {
                later();
            }
        })
    }

    /// Says whether the manager's worker has yet to find that the connection is there.
    fn is_to_be_found(&self) -> bool {
        self.noted.load(Relaxed) && !self.established.load(Relaxed) && !self.over.load(Relaxed)
    }

    /// Notes that the connection is there, or over, for whoever waits until the worker has run.
    fn set_found(&self, how: &Atomic<bool>) {
        how.xchg(true, Full);
        if self.noted.load(Relaxed) {
            // Whoever waits has looked, or waits.
            drop(self.step.lock());
            self.changed.notify_all();
        }
    }

    /// Waits until the worker has run, if it is about to.
    pub(super) fn wait_found(&self) {
        let mut step = self.step.lock();
        let mut left = msecs_to_jiffies(FOUND_MS);
        while self.is_to_be_found() {
            match self.changed.wait_interruptible_timeout(&mut step, left) {
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                _ => return,
            }
        }
    }

    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Acquire)
    }

    /// Sets what is told of the connection's events, unless the last one was told.
    pub(super) fn set_handler(&self, handler: Arc<dyn Handler>) -> Result {
        self.set_both(handler, None)
    }

    /// As [`Shared::set_handler`], with what makes the connection.
    pub(super) fn set_driver(&self, handler: Arc<dyn Handler>, driver: Arc<Driver>) -> Result {
        self.set_both(handler, Some(driver))
    }

    fn set_both(&self, handler: Arc<dyn Handler>, driver: Option<Arc<Driver>>) -> Result {
        let mut slot = self.handler.lock();
        if self.removed.load(Relaxed) {
            return Err(ENODEV);
        }
        if slot.is_some() {
            return Err(EBUSY);
        }
        *slot = Some(handler);
        if driver.is_some() {
            self.driven.store(true, Relaxed);
            *self.driver.lock() = driver;
        }
        Ok(())
    }

    /// Says whether nobody waits for the connection to be made.
    pub(super) fn is_driven(&self) -> bool {
        self.driven.load(Relaxed)
    }

    /// Says whether the connection is still being made, and nobody waits for that.
    pub(super) fn is_being_driven(&self) -> bool {
        self.is_driven() && !self.established.load(Relaxed)
    }

    /// Says whether the last event has come.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Ends a connection that is not there: if it comes to be there now, its callback finds this
    /// and disconnects. Returns the handler, to be told of that, its last event; nothing if the end
    /// is left to the event that is about to come.
    pub(super) fn give_up(&self, disconnect: impl FnOnce()) -> Option<Arc<dyn Handler>> {
        if !self.end() {
            return None;
        }
        disconnect();
        self.over.store(true, Relaxed);
        self.take_handler()
    }

    /// Returns the handler, which is told nothing more.
    fn take_handler(&self) -> Option<Arc<dyn Handler>> {
        self.handler.lock().take()
    }

    pub(super) fn release_handler(&self) {
        drop(self.take_handler());
    }

    /// Tells the handler, and lets go of it if this was the last event.
    ///
    /// `end_step` wakes up who waits for the event and may let go of the handler at once. By then
    /// the handler is sure to be told.
    pub(super) fn tell(&self, event: Event<'_>, is_last: bool, end_step: impl FnOnce()) {
        let _telling = self.telling.lock();
        let handler = if is_last {
            self.take_handler()
        } else {
            self.handler.lock().clone()
        };
        end_step();
        if let Some(handler) = handler {
            // SAFETY: Callbacks and the removal of a device run in process context, with mutexes of
            // their own only.
            let cx = unsafe { Sleepable::assume() };
            handler.event(event, &cx);
        }
    }

    /// The device is about to go: there will be no other handler, and nobody waits any more. The
    /// handler stays, to be told by [`Shared::tell_removal`].
    pub(super) fn gone(&self) {
        let slot = self.handler.lock();
        self.removed.store(true, Relaxed);
        drop(slot);
        self.fail_step(ENODEV);
    }

    pub(super) fn is_gone(&self) -> bool {
        self.removed.load(Relaxed)
    }

    /// Tells the handler that the device goes, after [`Shared::gone`].
    pub(super) fn tell_removal(&self) {
        // A callback may wait for what is told here.
        let _running = Running::enter();
        self.release_driver();
        self.tell(Event::DeviceRemoval, true, || {});
    }

    /// Handles an event, and says whether the id is to be disconnected.
    ///
    /// # Safety
    ///
    /// This is the callback of `id`, and `raw` its event.
    unsafe fn on_event(
        &self,
        id: *mut bindings::rdma_cm_id,
        raw: &bindings::rdma_cm_event,
    ) -> bool {
        use bindings::{
            rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED as ADDR_RESOLVED,
            rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_RESPONSE as CONNECT_RESPONSE,
            rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED as ROUTE_RESOLVED, //
        };

        // SAFETY: The caller says that `raw` is an event of `id`. All ids with this callback are of
        // a connected service, and the private data of an event are valid during the callback.
        let event = unsafe { Event::from_raw(id, raw) };
        let mut is_last = event.is_last();
        let mut disconnect = false;
        let step = match event {
            Event::Established { private_data } => {
                self.set_found(&self.established);
                disconnect = self.ended.load(Relaxed);
                Some(Ok(private_data))
            }
            // The neighbour of a connection that exists got another address: the connection is
            // still there for the manager, but not for the network.
            Event::Failed(_) if self.established.load(Relaxed) => {
                is_last = false;
                disconnect = true;
                None
            }
            Event::Failed(e) => Some(Err(e)),
            Event::Rejected(_) => Some(Err(ECONNREFUSED)),
            // The peer waits for an answer, and the QP for its requests to be flushed.
            Event::Disconnected => {
                disconnect = true;
                Some(Err(ENOTCONN))
            }
            Event::DeviceRemoval => Some(Err(ENODEV)),
            Event::Other(ADDR_RESOLVED | ROUTE_RESOLVED) => {
                self.set_resolved();
                if !self.drive(raw.event) {
                    self.end_step(raw.event, Ok(&[]));
                }
                return false;
            }
            // The peer answered, but the QP is gone.
            Event::Other(CONNECT_RESPONSE) => Some(Err(ENOTCONN)),
            Event::Other(_) => None,
        };
        if is_last {
            self.release_driver();
            self.set_found(&self.over);
            // What was left to an event that does not come any more.
            disconnect |= self.noted.load(Relaxed) && self.ended.load(Relaxed);
        }
        self.tell(event, is_last, || {
            if let Some(result) = step {
                self.end_step(raw.event, result);
            }
        });
        disconnect
    }
}

/// The callback of every connection's id.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Shared`].
pub(super) unsafe extern "C" fn on_event(
    id: *mut bindings::rdma_cm_id,
    event: *mut bindings::rdma_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Shared`, which lives until the id is
    // destroyed, and the event is valid during the call.
    let (shared, event) = unsafe { (&*(*id).context.cast::<Shared>(), &*event) };
    let _running = Running::enter();
    shared.set_locked(true);
    // SAFETY: This is the callback of `id`, and `event` the event that it is called with.
    if unsafe { shared.on_event(id, event) } {
        // SAFETY: The id is alive during its callback, and established, so attached.
        let _ = to_result(unsafe { bindings::rdma_disconnect(id) });
    }
    shared.set_locked(false);
    // The id is never destroyed by its callback's return.
    0
}
