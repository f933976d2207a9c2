// SPDX-License-Identifier: GPL-2.0

//! The callback of a connection's id, and the steps that wait for it.

use super::{
    event::Event,
    Handler,
    PrivateData, //
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
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        CondVar,
        Mutex, //
    }, //
};

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's init, before anything can use it.
    unsafe(uninit) static RUNNING: Mutex<KVec<usize>> = KVec::new();
}

/// Makes ready what this file keeps for all ids.
///
/// # Safety
///
/// To be called once, when the module is loaded.
pub(crate) unsafe fn init() {
    // SAFETY: By the caller's promise.
    unsafe { RUNNING.init() };
}

/// Returns the address of the current task, to be compared.
fn current_task() -> usize {
    // SAFETY: There is a current task.
    unsafe { bindings::get_current() as usize }
}

/// A mark of the current task while it is in a callback of the connection manager.
///
/// Callbacks share a few work queues, one of them ordered: who waits in a callback for another
/// event may wait for ever, and with it everybody else.
pub(super) struct Running(usize);

impl Running {
    pub(super) fn enter() -> Self {
        let task = current_task();
        // Without memory a wait in this callback goes unnoticed; nothing else depends on it.
        let _ = RUNNING.lock().push(task, GFP_KERNEL);
        Self(task)
    }

    /// Says whether the current task is in a callback.
    pub(super) fn is_current() -> bool {
        RUNNING.lock().contains(&current_task())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut running = RUNNING.lock();
        running.retain(|task| *task != self.0);
        if running.is_empty() {
            // Nothing drops a static when the module is unloaded.
            *running = KVec::new();
        }
    }
}

/// A step that somebody waits for.
#[expect(clippy::large_enum_variant, reason = "one in an id, never moved")]
enum Step {
    /// Nobody waits.
    Idle,
    /// Started; the event with this C value is its success.
    Waiting(bindings::rdma_cm_event_type),
    /// Ended.
    Done(Result<PrivateData>),
}

/// What the callback of an id works with. Lives as long as the C id.
#[pin_data]
pub(super) struct Shared {
    #[pin]
    step: Mutex<Step>,
    #[pin]
    changed: CondVar,
    #[pin]
    handler: Mutex<Option<Arc<dyn Handler>>>,
    /// Held while the handler is called.
    #[pin]
    telling: Mutex<()>,
    /// The task that has the id's handler lock as it is in the id's callback, or zero.
    locked_by: Atomic<usize>,
    /// The id has a connection of the device's own manager, which stays until it is destroyed.
    attached: Atomic<bool>,
    established: Atomic<bool>,
    /// The device goes. Set with the handler locked, so that none comes too late to be told.
    removed: Atomic<bool>,
}

impl Shared {
    pub(super) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                step <- new_mutex!(Step::Idle),
                changed <- new_condvar!(),
                handler <- new_mutex!(None),
                telling <- new_mutex!(()),
                locked_by: Atomic::new(0),
                attached: Atomic::new(false),
                established: Atomic::new(false),
                removed: Atomic::new(false),
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

    /// Says that the id can be disconnected and rejected from here on.
    pub(super) fn attach(&self) {
        self.attached.store(true, Release);
    }

    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Acquire)
    }

    /// Sets what is told of the connection's events, unless the last one was told.
    pub(super) fn set_handler(&self, handler: Arc<dyn Handler>) -> Result {
        let mut slot = self.handler.lock();
        if self.removed.load(Relaxed) {
            return Err(ENODEV);
        }
        if slot.is_some() {
            return Err(EBUSY);
        }
        *slot = Some(handler);
        Ok(())
    }

    pub(super) fn release_handler(&self) {
        let handler = self.handler.lock().take();
        drop(handler);
    }

    /// Starts a step and waits for the event that is its success, or for a failure.
    pub(super) fn step(
        &self,
        success: bindings::rdma_cm_event_type,
        start: impl FnOnce() -> Result,
    ) -> Result<PrivateData> {
        if Running::is_current() {
            return Err(EDEADLK);
        }
        {
            let mut step = self.step.lock();
            if !matches!(*step, Step::Idle) {
                return Err(EBUSY);
            }
            *step = Step::Waiting(success);
        }
        let started = start();
        let mut step = self.step.lock();
        if let Err(e) = started {
            *step = Step::Idle;
            return Err(e);
        }
        loop {
            if let Step::Done(result) = &*step {
                let result = *result;
                *step = Step::Idle;
                return result;
            }
            if self.changed.wait_interruptible(&mut step) {
                *step = Step::Idle;
                return Err(ERESTARTSYS);
            }
        }
    }

    /// Ends the step that is waited for, if a result of this event does that.
    fn end_step(&self, event: bindings::rdma_cm_event_type, result: Result<PrivateData>) {
        let mut step = self.step.lock();
        match *step {
            Step::Waiting(success) if result.is_err() || success == event => {
                *step = Step::Done(result);
                self.changed.notify_all();
            }
            _ => {}
        }
    }

    /// Fails the step that is waited for, if there is one.
    pub(super) fn fail_step(&self, error: Error) {
        self.end_step(
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE,
            Err(error),
        );
    }

    /// Tells the handler, and lets go of it if this was the last event.
    ///
    /// `end_step` wakes up who waits for the event and may let go of the handler at once. By then
    /// the handler is sure to be told.
    fn tell(&self, event: Event<'_>, is_last: bool, end_step: impl FnOnce()) {
        let _telling = self.telling.lock();
        let handler = if is_last {
            self.handler.lock().take()
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

    /// Tells the handler that the device goes; there will be no other handler.
    pub(super) fn tell_removal(&self) {
        let slot = self.handler.lock();
        self.removed.store(true, Relaxed);
        drop(slot);
        self.tell(Event::DeviceRemoval, true, || self.fail_step(ENODEV));
    }

    /// Handles an event, and says whether the id is to be disconnected.
    fn on_event(&self, raw: &bindings::rdma_cm_event) -> bool {
        use bindings::{
            rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED as ADDR_RESOLVED,
            rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_RESPONSE as CONNECT_RESPONSE,
            rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED as ROUTE_RESOLVED, //
        };

        // SAFETY: The callback gets events of a connected service, with their private data.
        let event = unsafe { Event::from_raw(raw) };
        let mut is_last = event.is_last();
        let mut disconnect = false;
        let step = match event {
            Event::Established { private_data } => {
                self.established.store(true, Relaxed);
                Some(Ok(PrivateData::new(private_data)))
            }
            // The neighbour of a connection that exists got another address: the connection is
            // still there for the manager, but not for the network.
            Event::Failed(_) if self.established.load(Relaxed) => {
                is_last = false;
                disconnect = true;
                None
            }
            Event::Failed(e) => Some(Err(e)),
            // The peer waits for an answer, and the QP for its requests to be flushed.
            Event::Disconnected => {
                disconnect = true;
                Some(Err(ENOTCONN))
            }
            Event::DeviceRemoval => Some(Err(ENODEV)),
            Event::Other(ADDR_RESOLVED | ROUTE_RESOLVED) => {
                self.end_step(raw.event, Ok(PrivateData::new(&[])));
                return false;
            }
            // The peer answered, but the QP is gone.
            Event::Other(CONNECT_RESPONSE) => Some(Err(ENOTCONN)),
            Event::Other(_) => None,
        };
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
    if shared.on_event(event) {
        // SAFETY: The id is alive during its callback, and established, so attached.
        let _ = to_result(unsafe { bindings::rdma_disconnect(id) });
    }
    shared.set_locked(false);
    // The id is never destroyed by its callback's return.
    0
}
