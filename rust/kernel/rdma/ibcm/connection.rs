// SPDX-License-Identifier: GPL-2.0

//! Connections.

use crate::{
    bindings,
    cm::{
        callback::InCallback,
        connection::FOUND_MS,
        PrivateData,
        RejectReason, //
    },
    context::{
        Context as _,
        PollContext,
        Sleepable, //
    },
    deferred::{
        Deferred,
        Fate,
        Queue,
        Reserved,
        Teardown, //
    },
    device::Device,
    ibcm::{
        Answer,
        ConnectError,
        Event,
        Handler,
        Param,
        Path, //
    },
    mad::agent::flush_timeouts,
    objects::Listed,
    qp::{
        self,
        Qp, //
    },
    refs::Kind,
    removal::{
        self,
        OnRemoval, //
    }, //
};
use core::{
    mem::replace,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    impl_has_work,
    new_condvar,
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full, //
            },
            Atomic, //
        },
        Arc,
        ArcBorrow,
        CondVar,
        CondVarTimeoutResult,
        Mutex, //
    },
    time::msecs_to_jiffies,
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// # Invariants
///
/// - `id` has [`on_event`] as its callback and `shared` as its context.
struct State {
    id: RawId,
    port: u32,
    shared: Arc<Shared>,
    device: Device,
    _listed: Listed,
}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: The device is registered by the invariant of `device::Inner`.
        let timeouts = || unsafe { flush_timeouts(self.device.as_raw(), self.port, cx) };
        self.device.inner().removal.remove(&self.shared);
        self.shared.set_id(None);
        self.shared.wait_found();
        // `ib_destroy_cm_id()` waits for callbacks, but not for that of a message that was not
        // answered in time: the manager gives its reference to the id back before. What has begun
        // is over after this.
        timeouts();
        // SAFETY: The id is not destroyed yet by the invariant of `RawId`, and nobody else uses it
        // any more.
        unsafe { bindings::ib_destroy_cm_id(self.id.as_ptr()) };
        // The id has no messages any more. What has begun meanwhile is over after this, and nobody
        // uses `shared`.
        timeouts();
        self.shared.end_handler();
        Fate::Gone
    }
}

/// What a connection is made of, before there is an id.
pub(super) struct Place {
    reserved: Reserved<State>,
    listed: Listed,
    pub(super) shared: Arc<Shared>,
    port: u32,
    device: Device,
}

impl Place {
    /// Reserves the place for an id of a port.
    pub(super) fn new(
        device: &Device,
        port: u32,
        handler: Arc<dyn Handler>,
        waits: bool,
    ) -> Result<Self> {
        let (reserved, shared) = (Deferred::reserve()?, Shared::new(handler, waits)?);
        Ok(Self {
            reserved,
            listed: device.list(Kind::Id)?,
            shared,
            port,
            device: device.clone(),
        })
    }

    /// Takes an id. Not generic and never inlined: see [`Reserved::fill`].
    ///
    /// # Safety
    ///
    /// The caller owns the id, whose callback is [`on_event`] with `self.shared` as its context.
    #[inline(never)]
    pub(super) unsafe fn fill(self, id: RawId) -> Result<Connection> {
        self.shared.set_id(Some(id));
        let shared = self.shared.clone();
        // INVARIANT: The caller says so of callback and context.
        let state = self.reserved.fill(State {
            id,
            shared: self.shared,
            port: self.port,
            device: self.device,
            _listed: self.listed,
        });
        state.device.inner().removal.add(shared)?;
        Ok(Connection { state })
    }
}

/// A reliable connection that the InfiniBand connection manager has made (`struct ib_cm_id`).
///
/// Dropping it disconnects it, without waiting for the peer, and destroys the id, from a work item.
pub struct Connection {
    state: Deferred<State>,
}

impl Connection {
    /// Asks for a connection to a service id (`ib_send_cm_req`), waits for the answer, takes the QP
    /// to RTS (`ib_cm_init_qp_attr`, `ib_modify_qp`), and confirms (`ib_send_cm_rtu`).
    ///
    /// `handler` is told of everything that happens to the connection afterwards.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Rejected`]; or `ETIMEDOUT` without an answer; `EINVAL` if QP and path are
    /// not of one device, if the QP is in use already, or with too much private data;
    /// `ERESTARTSYS` on a signal; `ENODEV` if the device goes; `EDEADLK` in a callback of a
    /// connection manager; or the connection manager's or driver's error.
    pub fn connect<S: PollContext, R: PollContext>(
        qp: &Qp<S, R>,
        path: &Path<'_>,
        service_id: u64,
        handler: Arc<dyn Handler>,
        param: &Param<'_>,
        cx: &Sleepable,
    ) -> Result<(Self, Answer), ConnectError> {
        connect(&qp.inner, path, service_id, handler, param, cx)
    }

    /// Asks the peer to end the connection (`ib_send_cm_dreq`). The handler gets
    /// [`Event::Disconnected`](crate::ibcm::Event::Disconnected) when it has answered, or has not in
    /// time. If [`Connection::established`] was just called, the peer is asked when the handler was
    /// told of that.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no connection (any more); or the connection manager's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        self.state.shared.disconnect(self.state.id)
    }

    /// As [`Connection::disconnect`], from a work item: for completion handlers that may not sleep.
    /// An error has no effect.
    pub fn disconnect_later(&self) {
        self.state.shared.disconnect_later();
    }

    /// Says that the peer uses the connection, when a message has come before its confirmation
    /// (`ib_cm_notify` of `IB_EVENT_COMM_EST`). The handler gets
    /// [`Event::Established`](crate::ibcm::Event::Established).
    ///
    /// # Errors
    ///
    /// `EISCONN` if that is known, or was said before; `EINVAL` if there is no connection (any
    /// more); `ENOMEM`.
    pub fn established(&self, _cx: &Sleepable) -> Result {
        self.state.shared.established(self.state.id)
    }

    /// As [`Connection::established`], from a work item: for the handler of a QP's events, which
    /// may not sleep. An error has no effect.
    pub fn established_later(&self) {
        self.state.shared.established_later();
    }

    /// Lets go of the handler before the last event. A call of it that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.state.shared.release_handler();
    }
}

/// As [`Connection::connect`]. Not generic, so that what it needs at its end is code of this
/// module.
#[inline(never)]
fn connect(
    qp: &qp::Inner,
    path: &Path<'_>,
    service_id: u64,
    handler: Arc<dyn Handler>,
    param: &Param<'_>,
    _cx: &Sleepable,
) -> Result<(Connection, Answer), ConnectError> {
    if InCallback::is_current() {
        return Err(EDEADLK.into());
    }
    let device = path.from().device();
    if *qp.pd.device() != *device {
        return Err(EINVAL.into());
    }
    let place = Place::new(device, path.from().port_num(), handler, true)?;
    let shared = place.shared.clone();
    // SAFETY: The device is registered by the invariant of `device::Inner`, and the context lives
    // until the id is destroyed.
    let raw = from_err_ptr(unsafe {
        bindings::ib_create_cm_id(
            device.as_raw(),
            Some(on_event),
            Arc::as_ptr(&shared).cast_mut().cast(),
        )
    })?;
    // INVARIANT: The id was just created; the connection destroys it, as its last user.
    let id = RawId(NonNull::new(raw).ok_or(ENOMEM)?);
    // SAFETY: The id was just created, with this callback and context.
    let connection = unsafe { place.fill(id) }?;
    send_req(id, qp, path, service_id, &param.clamp())?;
    let made = shared.wait().and_then(|answer| {
        establish(qp, id)?;
        // SAFETY: The id is alive by the invariant of `RawId`. There are no private data.
        to_result(unsafe { bindings::ib_send_cm_rtu(raw, core::ptr::null(), 0) })?;
        Ok(answer)
    });
    match made {
        Ok(answer) => Ok((connection, answer)),
        Err(e) => {
            shared.release_handler();
            Err(e)
        }
    }
}

fn send_req(
    id: RawId,
    qp: &qp::Inner,
    path: &Path<'_>,
    service_id: u64,
    param: &Param<'_>,
) -> Result {
    let mut record = path.to_raw();
    let mut req = bindings::ib_cm_req_param {
        primary_path: &raw mut record,
        ppath_sgid_attr: path.from().as_raw(),
        service_id: service_id.to_be(),
        qp_num: number(qp),
        qp_type: bindings::ib_qp_type_IB_QPT_RC,
        starting_psn: starting_psn(qp),
        private_data: param.private_data.as_ptr().cast(),
        private_data_len: param.private_data.len().try_into()?,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        remote_cm_response_timeout: param.response_timeout,
        flow_control: 1,
        local_cm_response_timeout: param.response_timeout,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        max_cm_retries: param.max_cm_retries,
        ..Default::default()
    };
    // SAFETY: The id is alive by the invariant of `RawId`. The parameters, and what they point to,
    // are copied by the call, which takes a reference to the GID's entry.
    to_result(unsafe { bindings::ib_send_cm_req(id.as_ptr(), &raw mut req) })
}

pub(super) fn number(qp: &qp::Inner) -> u32 {
    // SAFETY: `raw` is a QP by the invariant of `qp::Inner`, and its number does not change.
    unsafe { qp.raw.as_ref() }.qp_num
}

/// Returns the number of the first packet that the peer is to send.
pub(super) fn starting_psn(qp: &qp::Inner) -> u32 {
    number(qp)
}

/// Takes a QP to RTS, with the attributes of the connection (`ib_cm_init_qp_attr`, `ib_modify_qp`).
pub(super) fn establish(qp: &qp::Inner, id: RawId) -> Result {
    let modifier = qp.modifier();
    for state in [
        bindings::ib_qp_state_IB_QPS_INIT,
        bindings::ib_qp_state_IB_QPS_RTR,
        bindings::ib_qp_state_IB_QPS_RTS,
    ] {
        let mut attr = bindings::ib_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        let mut mask = 0;
        // SAFETY: The id is alive by the invariant of `RawId`; the call writes the attributes and
        // the mask only.
        to_result(unsafe {
            bindings::ib_cm_init_qp_attr(id.as_ptr(), &raw mut attr, &raw mut mask)
        })?;
        // The manager learns it only from the answer, which may be sent after this.
        attr.rq_psn = starting_psn(qp);
        // SAFETY: The attributes are complete for the mask, as the manager has written both. What
        // they point to, the entry of a GID, is the id's, which is alive.
        unsafe { modifier.modify(&mut attr, mask as bindings::ib_qp_attr_mask) }?;
    }
    Ok(())
}

/// # Invariants
///
/// An id that is not destroyed.
#[derive(Clone, Copy)]
pub(super) struct RawId(pub(super) NonNull<bindings::ib_cm_id>);

// SAFETY: An id may be used and destroyed from any thread.
unsafe impl Send for RawId {}
// SAFETY: An id may be used by several threads at once: the connection manager locks it.
unsafe impl Sync for RawId {}

impl RawId {
    pub(super) fn as_ptr(self) -> *mut bindings::ib_cm_id {
        self.0.as_ptr()
    }

    /// Asks the peer to end the connection, if there is one.
    pub(super) fn disconnect(self) -> Result {
        // SAFETY: By the type invariant the id is not destroyed; there are no private data.
        to_result(unsafe { bindings::ib_send_cm_dreq(self.as_ptr(), core::ptr::null(), 0) })
    }

    /// Says that the peer uses the connection.
    pub(super) fn established(self) -> Result {
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        // SAFETY: By the type invariant the id is not destroyed.
        to_result(unsafe { bindings::ib_cm_notify(self.as_ptr(), event) })
    }
}

type Outcome = Result<KBox<Answer>, ConnectError>;

/// How far the making of a connection is.
enum Step {
    /// Somebody waits for the peer's answer, which goes into the box.
    Waiting(KBox<Answer>),
    /// That is there.
    Done(Outcome),
    /// Nobody waits.
    Over,
    /// The device goes, which whoever has waited knows. The handler is not told.
    Gone,
}

/// The ULP has not said that the connection is there.
const UNSAID: u32 = 0;
/// It has, and the manager's worker has yet to find it.
const SAID: u32 = 1;
/// And the connection is to end then.
const ENDS: u32 = 2;
/// The worker has found it, or the connection was made or has ended by itself.
const FOUND: u32 = 3;

/// What the callback of a connection's id works with. Lives as long as the C id.
#[pin_data]
pub(super) struct Shared {
    /// The id, until it is about to be destroyed: for the removal of its device, and for work
    /// items.
    #[pin]
    id: Mutex<Option<RawId>>,
    #[pin]
    step: Mutex<Step>,
    #[pin]
    changed: CondVar,
    #[pin]
    handler: Mutex<Option<Arc<dyn Handler>>>,
    /// Held while the handler is called.
    #[pin]
    telling: Mutex<()>,
    #[pin]
    disconnect: Work<Self, DISCONNECT>,
    #[pin]
    established: Work<Self, ESTABLISHED>,
    /// How far [`Connection::established`](crate::ibcm::Connection::established) has come. If the state
    /// of the C id changes before the worker runs, it does not cancel the message that waits for
    /// the peer's last one (`cm_establish_handler` in core/cm.c), and the id lives on for a minute.
    noted: Atomic<u32>,
    place: removal::Place,
}

/// The work items of a connection.
const DISCONNECT: u64 = 0;
const ESTABLISHED: u64 = 1;

impl_has_work! {
    impl HasWork<Self, DISCONNECT> for Shared { self.disconnect }
    impl HasWork<Self, ESTABLISHED> for Shared { self.established }
}

impl WorkItem<DISCONNECT> for Shared {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.with_id(|id| this.disconnect(id));
    }
}

impl WorkItem<ESTABLISHED> for Shared {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.with_id(|id| this.established(id));
    }
}

impl Shared {
    /// Never inlined, so that the code of the work items is this module's.
    #[inline(never)]
    pub(super) fn new(handler: Arc<dyn Handler>, waits: bool) -> Result<Arc<Self>> {
        let step = if waits {
            Step::Waiting(KBox::new(Answer::none(), GFP_KERNEL)?)
        } else {
            Step::Over
        };
        Arc::pin_init(
            pin_init!(Self {
                id <- new_mutex!(None),
                step <- new_mutex!(step),
                changed <- new_condvar!(),
                handler <- new_mutex!(Some(handler)),
                telling <- new_mutex!(()),
                disconnect <- new_work!("rdma::ibcm::Connection::disconnect"),
                established <- new_work!("rdma::ibcm::Connection::established"),
                noted: Atomic::new(UNSAID),
                place: removal::Place::new(),
            }),
            GFP_KERNEL,
        )
    }

    pub(super) fn set_id(&self, id: Option<RawId>) {
        *self.id.lock() = id;
    }

    /// Calls a function with the id, unless it is destroyed. What it says is of no use: nobody
    /// waits for it.
    fn with_id(&self, call: impl FnOnce(RawId) -> Result) {
        // The id is not destroyed while it is locked.
        if let Some(id) = *self.id.lock() {
            let _ = call(id);
        }
    }

    /// Disconnects from a work item.
    pub(super) fn disconnect_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = Queue::get().enqueue::<_, DISCONNECT>(self.clone());
    }

    /// Says from a work item that the peer uses the connection.
    pub(super) fn established_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = Queue::get().enqueue::<_, ESTABLISHED>(self.clone());
    }

    /// Tells the manager that the connection is there.
    pub(super) fn established(&self, id: RawId) -> Result {
        match self.noted.cmpxchg(UNSAID, SAID, Full) {
            Ok(_) => (),
            // The manager knows whether it is still there.
            Err(FOUND) => return id.established(),
            Err(_) => return Err(EISCONN),
        }
        id.established().inspect_err(|_| {
            let kept = self.noted.cmpxchg(SAID, UNSAID, Full);
            if kept == Err(ENDS) && self.noted.cmpxchg(ENDS, UNSAID, Full).is_ok() {
                // No worker runs that it was left to.
                let _ = id.disconnect();
            }
        })
    }

    /// Asks the peer to end the connection, or leaves that to the worker if it is about to run.
    pub(super) fn disconnect(&self, id: RawId) -> Result {
        if self.leave_end() {
            return Ok(());
        }
        id.disconnect()
    }

    /// Leaves the end of the connection to the worker, if that is about to run.
    fn leave_end(&self) -> bool {
        match self.noted.cmpxchg(SAID, ENDS, Full) {
            Ok(_) => true,
            Err(noted) => noted == ENDS,
        }
    }

    /// Notes that the worker has run, or needs not, and says whether the end was left to it.
    fn found(&self) -> bool {
        let noted = self.noted.xchg(FOUND, Full);
        if noted == SAID || noted == ENDS {
            // Whoever waits has looked, or waits.
            drop(self.step.lock());
            self.changed.notify_all();
        }
        noted == ENDS
    }

    /// Waits until the worker has run, if it is about to.
    pub(super) fn wait_found(&self) {
        let mut step = self.step.lock();
        let mut left = msecs_to_jiffies(FOUND_MS);
        while matches!(self.noted.load(Acquire), SAID | ENDS) {
            match self.changed.wait_interruptible_timeout(&mut step, left) {
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                _ => return,
            }
        }
    }

    /// Waits until the peer has answered.
    pub(super) fn wait(&self) -> Result<Answer, ConnectError> {
        let mut step = self.step.lock();
        while matches!(*step, Step::Waiting(_)) {
            if self.changed.wait_interruptible(&mut step) {
                break;
            }
        }
        if matches!(*step, Step::Gone) {
            return Err(ENODEV.into());
        }
        match replace(&mut *step, Step::Over) {
            Step::Done(outcome) => outcome.map(|answer| *answer),
            _ => Err(ERESTARTSYS.into()),
        }
    }

    /// Gives whoever waits an outcome; otherwise, or if nobody does, tells the handler.
    fn end(&self, outcome: Outcome, otherwise: Event, cx: &Sleepable) {
        let mut step = self.step.lock();
        if matches!(*step, Step::Waiting(_)) {
            *step = Step::Done(outcome);
            self.changed.notify_all();
        } else {
            drop(step);
            drop(outcome);
            self.tell(otherwise, cx);
        }
    }

    pub(super) fn release_handler(&self) {
        let handler = self.handler.lock().take();
        drop(handler);
    }

    /// Lets go of the handler and waits for a call of it that has begun.
    pub(super) fn end_handler(&self) {
        self.release_handler();
        drop(self.telling.lock());
    }

    /// Tells the handler, and lets go of it if this was the last event.
    fn tell(&self, event: Event, cx: &Sleepable) {
        let _telling = self.telling.lock();
        let handler = if event.is_last() {
            self.handler.lock().take()
        } else {
            self.handler.lock().clone()
        };
        if let Some(handler) = handler {
            handler.event(event, cx);
        }
    }

    fn on_event(&self, id: *mut bindings::ib_cm_id, event: &bindings::ib_cm_event, cx: &Sleepable) {
        // All but a peer that asks for more time come after the state has changed.
        let ends = event.event != bindings::ib_cm_event_type_IB_CM_MRA_RECEIVED && self.found();
        match event.event {
            bindings::ib_cm_event_type_IB_CM_REP_RECEIVED => {
                let mut step = self.step.lock();
                *step = match replace(&mut *step, Step::Over) {
                    Step::Waiting(mut answer) => {
                        // SAFETY: This member is set for this event, whose private data have this
                        // length.
                        unsafe {
                            let rep = &*event.param.rep_rcvd;
                            answer.private_data = PrivateData::new(private_data(event, REP_LEN));
                            answer.responder_resources = rep.responder_resources;
                            answer.initiator_depth = rep.initiator_depth;
                        }
                        self.changed.notify_all();
                        Step::Done(Ok(answer))
                    }
                    other => other,
                };
            }
            bindings::ib_cm_event_type_IB_CM_REJ_RECEIVED => {
                // SAFETY: This is the event of a rejection.
                let rejected = unsafe { rejection(event) };
                self.end(Err(rejected), Event::Failed, cx);
            }
            bindings::ib_cm_event_type_IB_CM_REQ_ERROR
            | bindings::ib_cm_event_type_IB_CM_REP_ERROR => {
                self.end(Err(ETIMEDOUT.into()), Event::Failed, cx);
            }
            bindings::ib_cm_event_type_IB_CM_RTU_RECEIVED
            | bindings::ib_cm_event_type_IB_CM_USER_ESTABLISHED => {
                self.tell(Event::Established, cx);
            }
            bindings::ib_cm_event_type_IB_CM_DREQ_RECEIVED => {
                // SAFETY: The id is alive during its callback. Should the answer be lost, the peer
                // asks again, or gives up.
                unsafe { bindings::ib_send_cm_drep(id, core::ptr::null(), 0) };
                self.end(Err(ENOTCONN.into()), Event::Disconnected, cx);
            }
            bindings::ib_cm_event_type_IB_CM_DREP_RECEIVED
            | bindings::ib_cm_event_type_IB_CM_DREQ_ERROR => self.tell(Event::Disconnected, cx),
            _ => {}
        }
        if ends {
            // SAFETY: The id is alive during its callback. Unless it is connected, C refuses.
            unsafe { bindings::ib_send_cm_dreq(id, core::ptr::null(), 0) };
        }
    }
}

/// Says why the peer has rejected a connection.
///
/// # Safety
///
/// The event is that of a rejection.
unsafe fn rejection(event: &bindings::ib_cm_event) -> ConnectError {
    // SAFETY: This member is set for this event, whose private data have this length.
    let (reason, sent) = unsafe {
        let rej = &*event.param.rej_rcvd;
        (RejectReason(rej.reason), private_data(event, REJ_LEN))
    };
    let mut private_data = KVec::new();
    // Without memory there is the reason at least.
    let _ = private_data.extend_from_slice(sent, GFP_KERNEL);
    ConnectError::Rejected {
        reason,
        private_data,
    }
}

impl OnRemoval for Shared {
    fn place(&self) -> &removal::Place {
        &self.place
    }

    fn gone(self: Arc<Self>) {
        let mut step = self.step.lock();
        if matches!(*step, Step::Waiting(_)) {
            *step = Step::Gone;
            self.changed.notify_all();
        }
    }

    fn removed(&self, cx: &Sleepable) {
        // A handler that waits here keeps all others from being told.
        let _in_callback = InCallback::enter();
        if !matches!(*self.step.lock(), Step::Gone) {
            self.tell(Event::DeviceRemoval, cx);
        }
    }

    fn disconnect(&self) {
        // Unless it is connected, C refuses.
        self.with_id(|id| self.disconnect(id));
    }
}

const REP_LEN: usize = bindings::ib_cm_data_size_IB_CM_REP_PRIVATE_DATA_SIZE as usize;
const REJ_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;
pub(super) const REQ_LEN: usize = bindings::ib_cm_data_size_IB_CM_REQ_PRIVATE_DATA_SIZE as usize;

/// Returns the private data of an event.
///
/// # Safety
///
/// Events of this type have private data of this length, if any.
pub(super) unsafe fn private_data(event: &bindings::ib_cm_event, len: usize) -> &[u8] {
    if event.private_data.is_null() {
        return &[];
    }
    // SAFETY: The caller says that private data have this length. They are part of the datagram
    // that the event is about, which is valid as long as that.
    unsafe { core::slice::from_raw_parts(event.private_data.cast(), len) }
}

/// The callback of every connection's id.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Shared`].
pub(super) unsafe extern "C" fn on_event(
    id: *mut bindings::ib_cm_id,
    event: *const bindings::ib_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Shared`, which lives until the id is
    // destroyed and the timeouts that had begun are over, of which this may be one. The event is
    // valid during the call. Callbacks run in process context.
    let (shared, event, cx) = unsafe {
        (
            Arc::from(ArcBorrow::from_raw((*id).context.cast::<Shared>())),
            &*event,
            Sleepable::assume(),
        )
    };
    let _in_callback = InCallback::enter();
    shared.on_event(id, event, &cx);
    // The id is never destroyed by its callback's return.
    0
}
