// SPDX-License-Identifier: GPL-2.0

//! The InfiniBand connection manager: connections to a service id over a path, without IP.
//!
//! For ULPs that have an addressing of their own (SRP, IPoIB); all others are better off with
//! [`cm`], whose C side is built upon it. Works on RoCE too, where a [`Path`] is made of two GIDs.
//!
//! The QP is one of [`Qp::create_raw`], in the reset state, or in the INIT state so that receives
//! can be posted before: [`Connection::connect`] and [`Request::accept`] take it to RTS. Neither
//! keeps the other. See Documentation/ibcm.rst.
//!
//! # Examples
//!
//! ```
//! # use rdma::{cm::RejectReason, device::{Device, Gid}, ibcm, prelude::*};
//! const VERSION: &[u8] = b"v1";
//!
//! fn connect(
//!     (dev, qp): (&Device, &Qp<Softirq>),
//!     (to, service): (Gid, u64),
//!     handler: Arc<dyn cm::Handler>,
//!     cx: &Sleepable,
//! ) -> Result<ibcm::Connection> {
//!     let from = dev.port(1).and_then(|port| port.gids().next()).ok_or(ENODEV)?;
//!     let path = ibcm::Path::new(&from, to, cx)?;
//!     let param = ibcm::Param::default();
//!     let (connection, answer) =
//!         ibcm::Connection::connect(qp, &path, service, handler, &param, cx)?;
//!     if !answer.starts_with(VERSION) {
//!         connection.disconnect(cx)?;
//!     }
//!     Ok(connection)
//! }
//!
//! fn answer(
//!     request: ibcm::Request<'_>,
//!     qp: &Qp<Softirq>,
//!     handler: Arc<dyn cm::Handler>,
//!     cx: &Sleepable,
//! ) -> Result<ibcm::Connection> {
//!     if !request.private_data().starts_with(VERSION) {
//!         request.reject(cm::RejectReason::CONSUMER_DEFINED, VERSION, cx)?;
//!         return Err(EPROTO);
//!     }
//!     pr_info!("a request through port {}\n", request.port_num());
//!     request.accept(qp, handler, &cm::ConnParam::default(), cx)
//! }
//!
//! /// A receive has completed, perhaps before the peer's confirmation has come.
//! fn received(connection: &ibcm::Connection, wc: &Wc) {
//!     match wc.result() {
//!         Ok(_) => connection.notify_established(),
//!         Err(_) => connection.disconnect_later(),
//!     }
//! }
//! ```
//!
//! C header: [`include/rdma/ib_cm.h`](srctree/include/rdma/ib_cm.h)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    ah,
    cm::{
        self,
        Conn,
        InCallback,
        Manager,
        RawId, //
    },
    code::HasCode,
    deferred,
    device::{
        self,
        Device, //
    },
    objects,
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    refs,
    removal,
    rnr_timer::RnrTimer,
    timeouts::flush_timeouts, //
};
use core::{
    mem::ManuallyDrop,
    ptr, //
};
use kernel::{
    error::from_result,
    sync, //
};

/// Parameters of a request, as `struct ib_cm_req_param`.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    /// Those of both connection managers; at most 92 bytes of private data, which zeroes follow.
    pub conn: cm::ConnParam<'a>,
    /// The time that either side may take to answer: 4.096 µs times two to the power of it, to 31.
    pub response_timeout: u8,
    /// The number of times that a request of the connection manager is sent again, 1 to 15.
    pub max_cm_retries: u8,
}

impl Default for Param<'_> {
    fn default() -> Self {
        Self {
            conn: cm::ConnParam::default(),
            response_timeout: 20,
            max_cm_retries: 15,
        }
    }
}

/// The path between two ports (`struct sa_path_rec`), from an entry of a GID table of this host.
pub struct Path<'a> {
    from: &'a device::GidAttr,
    raw: bindings::sa_path_rec,
}

impl<'a> Path<'a> {
    /// Finds the path from one GID to another, which may take a second. Fails with
    /// `EPROTONOSUPPORT` if the GID is not of RoCE: elsewhere the subnet administrator knows paths.
    /// `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` without a way; or the driver's error.
    pub fn new(from: &'a device::GidAttr, to: device::Gid, cx: &Sleepable) -> Result<Self> {
        // As the connection manager for IP addresses does.
        const PACKET_LIFE_TIME: u8 = 16;
        const ALL_PARTITIONS: u16 = 0xffff;

        let rec_type = match from.gid_type() {
            device::GidType::RoceV1 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V1,
            device::GidType::RoceV2 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V2,
            _ => return Err(EPROTONOSUPPORT),
        };
        let dev = from.device();
        let port = from.port_num();
        let mtu = dev.port(port).ok_or(ENODEV)?.query(cx)?.active_mtu;
        let source = ah::Source::synthetic(from, to)?;
        let mut attr = bindings::rdma_ah_attr::default();
        // SAFETY: The device is registered by the invariant of `device::Inner`, and has the port.
        to_result(unsafe {
            bindings::ib_init_ah_attr_from_wc(
                dev.as_raw(),
                port,
                &source.wc,
                source.header(),
                &raw mut attr,
            )
        })?;
        // SAFETY: The call has filled in an address for RoCE, which is released after this.
        let dmac = unsafe {
            bindings::rdma_destroy_ah_attr(&raw mut attr);
            attr.__bindgen_anon_1.roce.dmac
        };
        let equal = bindings::ib_sa_selector_IB_SA_EQ as u8;
        let raw = bindings::sa_path_rec {
            rec_type,
            sgid: from.gid().to_raw(),
            dgid: to.to_raw(),
            hop_limit: attr.grh.hop_limit,
            reversible: 1,
            pkey: ALL_PARTITIONS.to_be(),
            mtu_selector: equal,
            // `enum ib_mtu` is 1 for 256 bytes.
            mtu: (mtu / 128).checked_ilog2().ok_or(EINVAL)?.try_into()?,
            rate_selector: equal,
            rate: bindings::ib_rate_IB_RATE_PORT_CURRENT as u8,
            packet_life_time_selector: equal,
            packet_life_time: PACKET_LIFE_TIME,
            __bindgen_anon_1: bindings::sa_path_rec__bindgen_ty_1 {
                roce: ManuallyDrop::new(bindings::sa_path_rec_roce {
                    route_resolved: true,
                    dmac,
                }),
            },
            ..Default::default()
        };
        Ok(Self { from, raw })
    }
}

/// # Invariants
///
/// `id` has [`on_event`] as its callback and `conn` as its context.
struct Connected {
    id: RawId<IbCm>,
    port: u32,
    conn: Arc<Conn<IbCm>>,
    pending: Arc<cm::Pending<IbCm>>,
    device: Device,
    object: objects::Object,
}

impl deferred::Teardown for Connected {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, cx: &Sleepable) -> Result {
        let timeouts = || flush_timeouts(&self.device, self.port, cx);
        let destroy = || {
            // `ib_destroy_cm_id()` does not wait for the callback of a message that was not
            // answered in time, which has no reference to the id. Those that have begun are over
            // after this.
            timeouts();
            // SAFETY: The id is alive by the invariant of `RawId`, and `teardown` has taken it from
            // all else that uses it.
            unsafe { IbCm::destroy(self.id.as_ptr()) };
            // The id has no more messages. Callbacks that have begun are over then.
            timeouts();
        };
        (self.conn).teardown(Some(&self.device), Some(&self.pending), destroy, cx);
        Ok(())
    }
}

/// A reliable connection that the InfiniBand connection manager has made (`struct ib_cm_id`).
/// Dropping it disconnects it, without waiting for the peer, and destroys the id, from a work item.
pub struct Connection {
    state: deferred::Deferred<Connected>,
}

impl Connection {
    /// Makes the connection of an id. Never inlined: see [`deferred::Reserved::fill`].
    ///
    /// # Safety
    ///
    /// `id` gives away an id, whose callback is [`on_event`], with the context that it gets.
    #[inline(never)]
    unsafe fn new(
        device: &Device,
        port: u32,
        handler: Arc<dyn cm::Handler>,
        id: &dyn Fn(*mut c_void, Arc<cm::Pending<IbCm>>) -> Result<RawId<IbCm>>,
    ) -> Result<Self> {
        device.client().module.check_handler(&handler)?;
        let conn = Conn::new(cm::State::Connecting)?;
        conn.set_handler(&handler)?;
        let pending = cm::Pending::new(conn.clone())?;
        let reserved = deferred::Deferred::reserve()?;
        let mut object = device.object(refs::ObjectKind::Id);
        object.summary = objects::Summary::Connection(conn.clone());
        let id = id(Arc::as_ptr(&conn).cast_mut().cast(), pending.clone())?;
        conn.set_id(Some(id));
        // INVARIANT: The caller promises so of callback and context.
        let state = reserved.fill(Connected {
            id,
            port,
            conn: conn.clone(),
            pending,
            device: device.clone(),
            object,
        });
        let added = device.inner().removal.add(conn);
        added.inspect_err(|_| state.conn.release_handler())?;
        Ok(Self { state })
    }

    /// Asks for a connection to a service id (`ib_send_cm_req`), waits for the answer, takes the QP
    /// to RTS (`ib_cm_init_qp_attr`, `ib_modify_qp`), confirms (`ib_send_cm_rtu`), and returns the
    /// answer's 196 bytes. `handler` gets the events of the connection but for
    /// [`cm::Event::Established`].
    ///
    /// # Errors
    ///
    /// The handler is released.
    ///
    /// - `ECONNREFUSED` if the peer rejects.
    /// - `ETIMEDOUT` without an answer in [`cm::ConnParam::timeout_ms`], or to all that was sent.
    /// - `EINVAL` if QP and path are not of one device, if the QP is in use already, or with too
    ///   much private data.
    /// - `ERESTARTSYS` on a signal, and `ENODEV` if the device is being removed.
    /// - `EDEADLK` in a callback of a connection manager.
    /// - The connection manager's, or the driver's.
    pub fn connect<S: PollContext, R: PollContext>(
        qp: &Qp<S, R>,
        path: &Path<'_>,
        service_id: u64,
        handler: Arc<dyn cm::Handler>,
        param: &Param<'_>,
        cx: &Sleepable,
    ) -> Result<(Self, cm::PrivateData)> {
        connect(&qp.inner, path, service_id, handler, param, cx)
    }

    /// Asks the peer to end the connection (`ib_send_cm_dreq`), as soon as it has confirmed it. The
    /// handler gets [`cm::Event::Disconnected`] when it has answered, or has not in time. Fails
    /// with `EINVAL` if there is no connection (yet, or no longer), or the manager's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        // SAFETY: The id is not destroyed by its invariant.
        unsafe { self.state.conn.end(self.state.id.as_ptr()) }
    }

    /// As [`Connection::disconnect`], from a work item: for completion handlers that may not sleep.
    /// An error has no effect. Any context.
    pub fn disconnect_later(&self) {
        self.state.conn.disconnect_later();
    }

    /// Tells the manager, from a work item, that a message has come before the peer's confirmation
    /// (`ib_cm_notify` of `IB_EVENT_COMM_EST`). The handler gets [`cm::Event::Established`]. Does
    /// nothing if that is known, or if there is no connection. Any context.
    pub fn notify_established(&self) {
        self.state.conn.notify_established();
    }
}

/// As [`Connection::connect`], not generic.
fn connect(
    qp: &qp::Inner,
    path: &Path<'_>,
    service_id: u64,
    handler: Arc<dyn cm::Handler>,
    param: &Param<'_>,
    cx: &Sleepable,
) -> Result<(Connection, cm::PrivateData)> {
    let device = path.from.device();
    if *qp.pd.device() != *device {
        return Err(EINVAL);
    }
    // SAFETY: The id is new, with this callback. `Connection::new` passes the context, a `Conn`
    // that `Connected` keeps until its teardown has destroyed the id.
    let connection = unsafe {
        let id = |context, _| create(device, on_event, context);
        Connection::new(device, path.from.port_num(), handler, &id)
    }?;
    let conn = connection.state.conn.clone();
    let id = connection.state.id;
    let answered = bindings::ib_cm_event_type_IB_CM_REP_RECEIVED;
    let connect = || {
        let ask = || send_req(id, qp, path, service_id, param);
        let answer = conn.wait_for_answer(answered, ask, param.conn.timeout_ms, cx)?;
        establish(qp, id, param.conn.min_rnr_timer)?;
        // SAFETY: The id is alive by the invariant of `RawId`. There are no private data.
        to_result(unsafe { bindings::ib_send_cm_rtu(id.as_ptr(), ptr::null(), 0) })?;
        Ok((connection, answer))
    };
    connect().inspect_err(|_| conn.release_handler())
}

/// Creates an id (`ib_create_cm_id`).
///
/// # Safety
///
/// `context` is what `callback` expects, and lives until the id is destroyed.
unsafe fn create(
    device: &Device,
    callback: unsafe extern "C" fn(*mut bindings::ib_cm_id, *const bindings::ib_cm_event) -> c_int,
    context: *mut c_void,
) -> Result<RawId<IbCm>> {
    // SAFETY: The device is registered by the invariant of `device::Inner`; the caller promises so
    // of callback and context.
    let raw = unsafe { bindings::ib_create_cm_id(device.as_raw(), Some(callback), context) };
    // SAFETY: `ib_create_cm_id` has returned the id, or an error, and nothing else destroys it.
    unsafe { RawId::new(raw) }
}

fn send_req(
    id: RawId<IbCm>,
    qp: &qp::Inner,
    path: &Path<'_>,
    service_id: u64,
    param: &Param<'_>,
) -> Result {
    // SAFETY: The record is valid, and owns nothing: C copies it by assignment, too.
    let mut record = unsafe { ptr::read(&raw const path.raw) };
    let response_timeout = param.response_timeout.min(31);
    let conn = param.conn.to_raw()?;
    let mut req = bindings::ib_cm_req_param {
        primary_path: &raw mut record,
        ppath_sgid_attr: path.from.as_raw(),
        service_id: service_id.to_be(),
        qp_num: qp.num(),
        qp_type: bindings::ib_qp_type_IB_QPT_RC,
        starting_psn: qp.num(),
        private_data: conn.private_data,
        private_data_len: conn.private_data_len,
        responder_resources: conn.responder_resources,
        initiator_depth: conn.initiator_depth,
        remote_cm_response_timeout: response_timeout,
        flow_control: conn.flow_control,
        local_cm_response_timeout: response_timeout,
        retry_count: conn.retry_count,
        rnr_retry_count: conn.rnr_retry_count,
        // Without a retry C does not wait at all when it destroys the id.
        max_cm_retries: param.max_cm_retries.clamp(1, 15),
        ..Default::default()
    };
    // SAFETY: The id is alive by the invariant of `RawId`. The parameters, and what they point to,
    // are copied by the call, which takes a reference to the GID's entry.
    to_result(unsafe { bindings::ib_send_cm_req(id.as_ptr(), &raw mut req) })
}

/// Takes a QP to RTS, with the attributes of the connection (`ib_cm_init_qp_attr`, `ib_modify_qp`).
fn establish(qp: &qp::Inner, id: RawId<IbCm>, min_rnr_timer: RnrTimer) -> Result {
    let mut modifier = qp.modifier();
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
        // SAFETY: The id is alive by the invariant of `RawId`; it only writes attributes and mask.
        to_result(unsafe {
            bindings::ib_cm_init_qp_attr(id.as_ptr(), &raw mut attr, &raw mut mask)
        })?;
        // The number of the peer's first packet, which the manager learns only from the answer.
        attr.rq_psn = qp.num();
        // The default of the manager is the longest timer.
        attr.min_rnr_timer = min_rnr_timer.as_raw();
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
    type Async = core::convert::Infallible;
    type Data = ();

    fn data() -> impl PinInit<()> {}

    unsafe fn disconnect(_conn: &Conn<Self>, id: *mut Self::Id) -> Result {
        // SAFETY: The caller promises that the id is alive; there are no data. C checks the state.
        to_result(unsafe { bindings::ib_send_cm_dreq(id, ptr::null(), 0) })
    }

    unsafe fn notify(id: *mut Self::Id) -> bool {
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        // SAFETY: The caller promises that the id is alive.
        unsafe { bindings::ib_cm_notify(id, event) == 0 }
    }

    unsafe fn destroy(id: *mut Self::Id) {
        // SAFETY: The caller promises that the id is alive, and is not used after this.
        unsafe { bindings::ib_destroy_cm_id(id) };
    }
}

const REP_LEN: usize = bindings::ib_cm_data_size_IB_CM_REP_PRIVATE_DATA_SIZE as usize;
const REQ_LEN: usize = bindings::ib_cm_data_size_IB_CM_REQ_PRIVATE_DATA_SIZE as usize;

/// The callback of every connection's id, which its return never destroys.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Conn`].
unsafe extern "C" fn on_event(
    id: *mut bindings::ib_cm_id,
    raw: *const bindings::ib_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Conn`, which lives until the id is
    // destroyed and the timeouts that had begun are over, of which this may be one. The event is
    // valid during the call. Callbacks run in process context.
    let (conn, raw, cx) = unsafe {
        let conn = sync::ArcBorrow::<Conn<IbCm>>::from_raw((*id).context.cast());
        (Arc::from(conn), &*raw, Sleepable::assume())
    };
    pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
    let is_answer = raw.event == bindings::ib_cm_event_type_IB_CM_REP_RECEIVED;
    let event = match raw.event {
        _ if is_answer => cm::Event::Established {
            // SAFETY: The private data of an answer have this length, and live as long as it.
            private_data: unsafe { cm::private_data_at(raw.private_data, REP_LEN) },
        },
        bindings::ib_cm_event_type_IB_CM_REJ_RECEIVED => {
            // SAFETY: This event has this member, and private data of this length.
            let (reason, sent) = unsafe {
                let reason = (*raw.param.rej_rcvd).reason;
                (reason, cm::private_data_at(raw.private_data, cm::REJ_LEN))
            };
            cm::Event::Rejected(cm::Rejected::new(cm::RejectReason(reason), sent))
        }
        bindings::ib_cm_event_type_IB_CM_REQ_ERROR | bindings::ib_cm_event_type_IB_CM_REP_ERROR => {
            cm::Event::Failed(ETIMEDOUT)
        }
        bindings::ib_cm_event_type_IB_CM_RTU_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_USER_ESTABLISHED => {
            cm::Event::Established { private_data: &[] }
        }
        bindings::ib_cm_event_type_IB_CM_DREQ_RECEIVED => {
            // SAFETY: The id is alive during its callback. A peer that misses it asks again.
            unsafe { bindings::ib_send_cm_drep(id, ptr::null(), 0) };
            cm::Event::Disconnected
        }
        bindings::ib_cm_event_type_IB_CM_DREP_RECEIVED
        | bindings::ib_cm_event_type_IB_CM_DREQ_ERROR => cm::Event::Disconnected,
        _ => return 0,
    };
    let _events = conn.event_lock.lock();
    let effects = conn.advance(&event, raw.event);
    // The caller of `connect` has yet to take the QP to where it can send.
    if let Some(handler) = effects.handler.filter(|_| !is_answer) {
        handler.as_arc_borrow().event(event, &cx);
    }
    if effects.disconnect {
        // SAFETY: The id is alive during its callback.
        let _ = unsafe { IbCm::disconnect(&conn, id) };
    }
    0
}

/// The handler of a listener's events. A work item that a method starts gets a reference by
/// `Arc::from(self)`.
pub trait Accept: HasCode + Send + Sync {
    /// A peer wants to connect: [`Request::accept`] it, [`Request::reject`] it, or drop it, which
    /// rejects it as well ([`CONSUMER_DEFINED`](cm::RejectReason::CONSUMER_DEFINED)). Other
    /// callbacks wait for this to return.
    fn request(self: ArcBorrow<'_, Self>, request: Request<'_>, cx: &Sleepable);

    /// The device goes, and the listener with it.
    fn stopped(self: ArcBorrow<'_, Self>) {}
}

/// A function that is called with each request. Its errors are reported, ten in each five seconds.
impl<F: Fn(Request<'_>, &Sleepable) -> Result + Send + Sync + 'static> Accept for F {
    fn request(self: ArcBorrow<'_, Self>, request: Request<'_>, cx: &Sleepable) {
        request.verdict.report(self(request, cx));
    }
}

/// The context of a listener's C id, which lives as long as that.
///
/// # Invariants
///
/// `id` has [`on_listener_event`] as its callback and this as its context.
#[pin_data]
struct Listening {
    #[pin]
    id: cm::ListenId<IbCm>,
    accept: Arc<dyn Accept>,
    #[pin]
    backlog: cm::Backlog<IbCm>,
    device: Device,
    index: removal::Index,
    // Dropped last: the client may be gone after that.
    object: objects::Object,
}

impl removal::OnRemoval for Listening {
    fn index(&self) -> &removal::Index {
        &self.index
    }

    fn removed(&self, _cx: &Sleepable) {
        self.id.destroy();
        // A handler that waits here holds up all others.
        pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
        self.accept.as_arc_borrow().stopped();
    }
}

/// The callback of every listener's id, and of a request's until it is taken.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Listening`].
unsafe extern "C" fn on_listener_event(
    id: *mut bindings::ib_cm_id,
    event: *const bindings::ib_cm_event,
) -> c_int {
    let Some(id) = NonNull::new(id) else { return 0 };
    // SAFETY: The context of an id with this callback is its listener's, which lives until that is
    // destroyed; and that waits for this. The event is valid during the call, in process context.
    let (listening, event, cx) = unsafe {
        let listening = &*id.as_ref().context.cast::<Listening>();
        (listening, &*event, Sleepable::assume())
    };
    pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
    if event.event != bindings::ib_cm_event_type_IB_CM_REQ_RECEIVED {
        return 0;
    }
    from_result(|| {
        listening.backlog.admit(&listening.object, |verdict| {
            // INVARIANT: This is the callback of the request's id, with its event, and the id lives
            // as long.
            let request = Request {
                id: RawId(id),
                event,
                device: &listening.device,
                verdict,
            };
            listening.accept.as_arc_borrow().request(request, &cx);
        })?;
        Ok(0)
    })
}

impl deferred::Teardown for Arc<Listening> {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        self.device.inner().removal.remove(&**self);
        self.id.destroy();
        Ok(())
    }
}

/// Listens for connections to a service id on one device (`ib_cm_listen`). Dropping it stops
/// listening, from a work item. Connections that were accepted go on.
pub struct Listener {
    state: deferred::Deferred<Arc<Listening>>,
}

impl Listener {
    /// Listens on a service id. `backlog` is the number of connections that may wait for their
    /// peers to confirm them, as that of [`cm::Listener::new`]. Fails with `EBUSY` if there is a
    /// listener on the service id; `EPROTONOSUPPORT` on iWARP; `ENODEV` if the device goes; `EPERM`
    /// if it is another module's; `ENOMEM`; or the manager's error.
    pub fn new(
        device: &Device,
        service_id: u64,
        backlog: u32,
        accept: Arc<dyn Accept>,
        _cx: &Sleepable,
    ) -> Result<Self> {
        if device.is_iwarp() {
            return Err(EPROTONOSUPPORT);
        }
        device.client().module.check_handler(&accept)?;
        let reserved = deferred::Deferred::reserve()?;
        let mut object = device.object(refs::ObjectKind::Id);
        object.summary = objects::Summary::Listener;
        let listening = Arc::pin_init(
            pin_init!(Listening {
                id <- cm::ListenId::new(),
                accept,
                backlog <- cm::Backlog::new(backlog),
                device: device.clone(),
                index: removal::Index::new(),
                object,
            }),
            GFP_KERNEL,
        )?;
        let context = Arc::as_ptr(&listening).cast_mut().cast();
        // SAFETY: The context is a `Listening`. The teardown of the listener, which keeps it,
        // destroys the id.
        let id = unsafe { create(device, on_listener_event, context) }?;
        listening.id.set(id);
        let this = Self {
            state: reserved.fill(listening.clone()),
        };
        // SAFETY: The id is alive: `this` has it, and the removal does not know it yet.
        to_result(unsafe { bindings::ib_cm_listen(id.as_ptr(), service_id.to_be()) })?;
        device.inner().removal.add(listening)?;
        Ok(this)
    }

    /// Stops listening and waits for that, so that the service id is free. Fails with `EDEADLK` in
    /// a callback of a connection manager; it then ends from a work item.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        InCallback::refuse()?;
        self.state.destroy(cx)
    }
}

/// A connection request that waits for an answer.
///
/// # Invariants
///
/// `event` is the connection request of `id`, and this is its callback.
pub struct Request<'a> {
    id: RawId<IbCm>,
    event: &'a bindings::ib_cm_event,
    device: &'a Device,
    verdict: &'a cm::Verdict<IbCm>,
}

impl Request<'_> {
    /// Returns what the peer sent along, 92 bytes.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: By the type invariant this is the event of a request, with data of this length.
        unsafe { cm::private_data_at(self.event.private_data, REQ_LEN) }
    }

    /// Returns the peer's parameters, which C has turned round to be those of this end.
    fn param(&self) -> &bindings::ib_cm_req_event_param {
        // SAFETY: By the type invariant this is the event of a request, which has this member set.
        unsafe { &self.event.param.req_rcvd }
    }

    /// Returns the number of the port that the request came through.
    pub fn port_num(&self) -> u32 {
        self.param().port.into()
    }

    /// Returns how many RDMA READs and atomics the peer wants to have outstanding here.
    pub fn responder_resources(&self) -> u8 {
        self.param().responder_resources
    }

    /// Returns how many RDMA READs and atomics the peer lets this side have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.param().initiator_depth
    }

    /// Takes the QP to RTS and accepts (`ib_send_cm_rep`). The peer may send from here on.
    /// `handler` gets the connection's events. A peer that does not confirm within
    /// [`cm::ConnParam::timeout_ms`] is given up with [`cm::Event::Failed`]. Fails with `EINVAL` if
    /// the QP is of another device, or in use already, or with too much private data; `ENODEV` if
    /// the device goes; `ENOMEM`; or the manager's or driver's error. The request is rejected.
    pub fn accept<S: PollContext, R: PollContext>(
        self,
        qp: &Qp<S, R>,
        handler: Arc<dyn cm::Handler>,
        param: &cm::ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result<Connection> {
        self.accept_inner(&qp.inner, handler, param)
    }

    fn accept_inner(
        self,
        qp: &qp::Inner,
        handler: Arc<dyn cm::Handler>,
        param: &cm::ConnParam<'_>,
    ) -> Result<Connection> {
        if *qp.pd.device() != *self.device {
            return Err(EINVAL);
        }
        let timer = param.min_rnr_timer;
        let timeout_ms = param.timeout_ms;
        let param = param.to_raw()?;
        let mut rep = bindings::ib_cm_rep_param {
            qp_num: qp.num(),
            starting_psn: qp.num(),
            private_data: param.private_data,
            private_data_len: param.private_data_len,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control,
            rnr_retry_count: param.rnr_retry_count,
            ..Default::default()
        };
        let raw = self.id.as_ptr();
        let take = |context, pending| {
            // SAFETY: The id is alive by the invariant of `RawId`. By that of the request this is
            // its callback, and no other one runs before this has returned.
            unsafe {
                (*raw).context = context;
                (*raw).cm_handler = Some(on_event);
            }
            // The id is ours: a work item will destroy it, never this callback's return.
            self.verdict.taken.set(Some(pending));
            Ok(self.id)
        };
        // SAFETY: The callback's return does not destroy what `take` has taken and set.
        let connection = unsafe { Connection::new(self.device, self.port_num(), handler, &take) }?;
        let accepted = establish(qp, self.id, timer).and_then(|()| {
            // SAFETY: The id is alive by the invariant of `RawId`. The call copies the parameters.
            to_result(unsafe { bindings::ib_send_cm_rep(raw, &raw mut rep) })
        });
        accepted.inspect_err(|_| connection.state.conn.release_handler())?;
        connection.state.pending.arm(timeout_ms);
        Ok(connection)
    }

    /// Rejects the connection (`ib_send_cm_rej`). Fails with `EINVAL` for more than 148 bytes of
    /// private data, or the connection manager's error; the request is rejected in any case.
    pub fn reject(self, reason: cm::RejectReason, private_data: &[u8], _cx: &Sleepable) -> Result {
        let len = private_data.len().try_into()?;
        // SAFETY: The id is alive by the invariant of `RawId`, and the data are copied by the call.
        to_result(unsafe {
            bindings::ib_send_cm_rej(
                self.id.as_ptr(),
                reason.0,
                ptr::null_mut(),
                0,
                private_data.as_ptr().cast(),
                len,
            )
        })
    }
}
