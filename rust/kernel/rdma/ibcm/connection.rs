// SPDX-License-Identifier: GPL-2.0

//! Connections.

use crate::{
    bindings,
    cm::{
        callback::InCallback,
        state::{
            self,
            Change,
            Conn,
            Manager,
            RawId, //
        },
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
    mad::flush_timeouts,
    objects::Object,
    qp::{
        self,
        Qp, //
    },
    refs::Kind, //
};
use core::{
    convert::Infallible,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::{
        Arc,
        ArcBorrow, //
    }, //
};

/// # Invariants
///
/// `id` has [`on_event`] as its callback and `conn` as its context.
struct State {
    id: RawId<IbCm>,
    port: u32,
    conn: Arc<Conn<IbCm>>,
    device: Device,
    _listed: Object,
}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: The device is registered by the invariant of `device::Inner`.
        let timeouts = || unsafe { flush_timeouts(self.device.as_raw(), self.port, cx) };
        self.device.inner().removal.remove(&self.conn);
        self.conn.set_id(None);
        self.conn.wait_notified();
        // `ib_destroy_cm_id()` waits for callbacks, but not for that of a message that was not
        // answered in time: the manager gives its reference to the id back before. What has begun
        // is over after this.
        timeouts();
        // SAFETY: The id is not destroyed yet by the invariant of `RawId`, and `set_id` has
        // taken it from all others.
        unsafe { bindings::ib_destroy_cm_id(self.id.as_ptr()) };
        // The id has no messages any more. Callbacks that have begun meanwhile are over after
        // this, and none uses `conn`.
        timeouts();
        self.conn.end_handler();
        Fate::Gone
    }
}

/// A connection that has no id yet.
pub(super) struct NewConnection {
    reserved: Reserved<State>,
    listed: Object,
    pub(super) conn: Arc<Conn<IbCm>>,
    port: u32,
    device: Device,
}

impl NewConnection {
    /// Allocates a connection whose id is one of a port.
    pub(super) fn new(device: &Device, port: u32, handler: Arc<dyn Handler>) -> Result<Self> {
        let conn = Conn::new(state::State::Connecting, Some(handler))?;
        Ok(Self {
            reserved: Deferred::reserve()?,
            listed: device.list(Kind::Id)?,
            conn,
            port,
            device: device.clone(),
        })
    }

    /// Takes an id. Not generic and never inlined: see [`Reserved::fill`].
    ///
    /// # Safety
    ///
    /// The caller owns the id, whose callback is [`on_event`] with `self.conn` as its context.
    #[inline(never)]
    pub(super) unsafe fn fill(self, id: RawId<IbCm>) -> Result<Connection> {
        self.conn.set_id(Some(id));
        let conn = self.conn.clone();
        // INVARIANT: The caller says so of callback and context.
        let state = self.reserved.fill(State {
            id,
            conn: self.conn,
            port: self.port,
            device: self.device,
            _listed: self.listed,
        });
        state.device.inner().removal.add(conn)?;
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
    /// `handler` gets the events of the connection afterwards.
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
    /// [`Event::Disconnected`](crate::ibcm::Event::Disconnected) when it has answered, or has not
    /// in time. If [`Connection::established`] was just called, the peer is asked when the handler
    /// was got that event.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no connection (any more); or the connection manager's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        // SAFETY: The id is not destroyed by its invariant.
        unsafe { IbCm::end(&self.state.conn, self.state.id.as_ptr()) }
    }

    /// As [`Connection::disconnect`], from a work item: for completion handlers that may not sleep.
    /// An error has no effect.
    pub fn disconnect_later(&self) {
        self.state.conn.disconnect_later();
    }

    /// Tells the manager that the peer uses the connection, when a message has come before its
    /// confirmation (`ib_cm_notify` of `IB_EVENT_COMM_EST`). The handler gets
    /// [`Event::Established`](crate::ibcm::Event::Established).
    ///
    /// # Errors
    ///
    /// `EISCONN` if that is known, or was said before; `EINVAL` if there is no connection (any
    /// more); `ENOMEM`.
    pub fn established(&self, _cx: &Sleepable) -> Result {
        // SAFETY: The id is not destroyed by its invariant.
        unsafe { self.state.conn.notify_established(self.state.id.as_ptr()) }
    }

    /// As [`Connection::established`], from a work item: for the handler of a QP's events, which
    /// may not sleep. An error has no effect.
    pub fn established_later(&self) {
        self.state.conn.notify_later();
    }

    /// Lets go of the handler before the last event. A call of it that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.state.conn.release_handler();
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
    let device = path.from().device();
    if *qp.pd.device() != *device {
        return Err(EINVAL.into());
    }
    let new = NewConnection::new(device, path.from().port_num(), handler)?;
    let conn = new.conn.clone();
    // SAFETY: The device is registered by the invariant of `device::Inner`, and the context lives
    // until the id is destroyed.
    let raw = from_err_ptr(unsafe {
        bindings::ib_create_cm_id(
            device.as_raw(),
            Some(on_event),
            Arc::as_ptr(&conn).cast_mut().cast(),
        )
    })?;
    // INVARIANT: The id was just created; the connection destroys it, as its last user.
    let id = RawId(NonNull::new(raw).ok_or(ENOMEM)?);
    // SAFETY: The id was just created, with this callback and context.
    let connection = unsafe { new.fill(id) }?;
    let answered = bindings::ib_cm_event_type_IB_CM_REP_RECEIVED;
    let connect = || {
        let param = param.clamp();
        let answer = conn.wait_for(answered, Answer::none(), || {
            send_req(id, qp, path, service_id, &param)
        })?;
        establish(qp, id)?;
        // SAFETY: The id is alive by the invariant of `RawId`. There are no private data.
        to_result(unsafe { bindings::ib_send_cm_rtu(raw, core::ptr::null(), 0) })?;
        Ok(answer)
    };
    match connect() {
        Ok(answer) => Ok((connection, answer)),
        Err(e) => {
            conn.release_handler();
            Err(e)
        }
    }
}

fn send_req(
    id: RawId<IbCm>,
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
pub(super) fn establish(qp: &qp::Inner, id: RawId<IbCm>) -> Result {
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

/// The InfiniBand connection manager.
pub(crate) struct IbCm;

impl Manager for IbCm {
    type Id = bindings::ib_cm_id;
    type Handler = dyn Handler;
    type Reply = Answer;
    type Error = ConnectError;
    type Async = Infallible;

    const WAITER_ONLY: bool = true;

    unsafe fn disconnect(id: *mut Self::Id) -> Result {
        // SAFETY: The caller says that the id is alive; there are no private data. Unless it is
        // connected, C refuses.
        to_result(unsafe { bindings::ib_send_cm_dreq(id, core::ptr::null(), 0) })
    }

    unsafe fn notify(id: *mut Self::Id) -> Result<bool> {
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        // SAFETY: The caller says that the id is alive.
        to_result(unsafe { bindings::ib_cm_notify(id, event) })?;
        Ok(true)
    }

    unsafe fn end(conn: &Conn<Self>, id: *mut Self::Id) -> Result {
        if conn.leave_disconnect() {
            return Ok(());
        }
        // SAFETY: The caller says that the id is alive.
        unsafe { Self::disconnect(id) }
    }

    fn device_removal(handler: &dyn Handler, cx: &Sleepable) {
        handler.event(Event::DeviceRemoval, cx);
    }
}

/// Handles an event.
///
/// # Safety
///
/// This is the callback of `id`, whose connection is `conn`, and `raw` its event.
unsafe fn handle(
    conn: &Conn<IbCm>,
    id: *mut bindings::ib_cm_id,
    raw: &bindings::ib_cm_event,
    cx: &Sleepable,
) {
    let (change, error, event) = match raw.event {
        bindings::ib_cm_event_type_IB_CM_REP_RECEIVED => (Change::Established, None, None),
        bindings::ib_cm_event_type_IB_CM_REJ_RECEIVED => {
            // SAFETY: This is the event of a rejection.
            let rejected = unsafe { rejection(raw) };
            (Change::Closed, Some(rejected), Some(Event::Failed))
        }
        bindings::ib_cm_event_type_IB_CM_REQ_ERROR | bindings::ib_cm_event_type_IB_CM_REP_ERROR => {
            (Change::Closed, Some(ETIMEDOUT.into()), Some(Event::Failed))
        }
        bindings::ib_cm_event_type_IB_CM_RTU_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_USER_ESTABLISHED => {
            (Change::Established, None, Some(Event::Established))
        }
        bindings::ib_cm_event_type_IB_CM_DREQ_RECEIVED => {
            // SAFETY: The id is alive during its callback. Should the answer be lost, the peer asks
            // again, or gives up.
            unsafe { bindings::ib_send_cm_drep(id, core::ptr::null(), 0) };
            (
                Change::Closed,
                Some(ENOTCONN.into()),
                Some(Event::Disconnected),
            )
        }
        bindings::ib_cm_event_type_IB_CM_DREP_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_DREQ_ERROR => {
            (Change::Closed, None, Some(Event::Disconnected))
        }
        _ => (Change::None, None, None),
    };
    let fill = |answer: &mut Answer| {
        // SAFETY: Only the event of an answer ends the wait of a call with success. It has this
        // member set, and private data of this length.
        unsafe {
            let rep = &*raw.param.rep_rcvd;
            answer.private_data = PrivateData::new(private_data(raw, REP_LEN));
            answer.responder_resources = rep.responder_resources;
            answer.initiator_depth = rep.initiator_depth;
        }
    };
    let reply = match error {
        Some(error) => Some(Err(error)),
        None => Some(Ok(fill)),
    };
    let _events = conn.lock_events();
    let effects = conn.advance(change, raw.event, reply);
    if let (Some(handler), Some(event)) = (effects.handler, event) {
        handler.event(event, cx);
    }
    if effects.disconnect {
        // SAFETY: The id is alive during its callback.
        let _ = unsafe { IbCm::disconnect(id) };
    }
}

/// Returns the reason for which the peer has rejected a connection, and what it sent along.
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
/// Called by the connection manager for an id whose context is a [`Conn`].
pub(super) unsafe extern "C" fn on_event(
    id: *mut bindings::ib_cm_id,
    event: *const bindings::ib_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Conn`, which lives until the id is
    // destroyed and the timeouts that had begun are over, of which this may be one. The event is
    // valid during the call. Callbacks run in process context.
    let (conn, event, cx) = unsafe {
        (
            Arc::from(ArcBorrow::from_raw((*id).context.cast::<Conn<IbCm>>())),
            &*event,
            Sleepable::assume(),
        )
    };
    let _in_callback = InCallback::enter();
    // SAFETY: This is the callback of `id`, and `event` the event that it is called with.
    unsafe { handle(&conn, id, event, &cx) };
    // The id is never destroyed by its callback's return.
    0
}
