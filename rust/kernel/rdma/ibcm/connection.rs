// SPDX-License-Identifier: GPL-2.0

//! Connections.

use super::{
    callback::{
        on_event,
        RawId,
        Shared, //
    },
    Answer,
    ConnectError,
    Handler,
    Param,
    Path, //
};
use crate::{
    bindings,
    cm::running::Running,
    context::{
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
    gate::Kind,
    mad::timeouts::flush_timeouts,
    objects::Listed,
    qp::{
        self,
        Qp, //
    }, //
};
use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::Arc, //
};

/// # Invariants
///
/// - `id` has [`on_event`] as its callback and `shared` as its context.
struct State {
    id: RawId,
    port: u32,
    shared: Arc<Shared>,
    device: Device,
    _hold: Listed,
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
    hold: Listed,
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
            hold: device.list(Kind::Id)?,
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
            _hold: self.hold,
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
    /// [`Event::Disconnected`](super::Event::Disconnected) when it has answered, or has not in
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
    /// [`Event::Established`](super::Event::Established).
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
    qp: &qp::inner::Inner,
    path: &Path<'_>,
    service_id: u64,
    handler: Arc<dyn Handler>,
    param: &Param<'_>,
    _cx: &Sleepable,
) -> Result<(Connection, Answer), ConnectError> {
    if Running::is_current() {
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
    qp: &qp::inner::Inner,
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

pub(super) fn number(qp: &qp::inner::Inner) -> u32 {
    // SAFETY: `raw` is a QP by the invariant of `qp::Inner`, and its number does not change.
    unsafe { qp.raw.as_ref() }.qp_num
}

/// Returns the number of the first packet that the peer is to send.
pub(super) fn starting_psn(qp: &qp::inner::Inner) -> u32 {
    number(qp)
}

/// Takes a QP to RTS, with the attributes of the connection (`ib_cm_init_qp_attr`, `ib_modify_qp`).
pub(super) fn establish(qp: &qp::inner::Inner, id: RawId) -> Result {
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
