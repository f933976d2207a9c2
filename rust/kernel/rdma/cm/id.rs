// SPDX-License-Identifier: GPL-2.0

//! Ids of connections and of listeners.

use crate::{
    client::ClientRef,
    cm::{
        self,
        pending::Pending,
        Conn,
        InCallback,
        Manager,
        RawId, //
    },
    deferred,
    device::{
        self,
        Device, //
    },
    objects,
    pd::Pd,
    prelude::internal::*,
    refs::{
        self,
        Owner as _, //
    },
    rnr_timer::RnrTimer,
    timeouts::flush_timeouts, //
};
use core::{
    net::SocketAddr,
    ptr, //
};
use kernel::{
    sync::{
        self,
        atomic, //
    },
    workqueue, //
};

/// A connection's id, as `struct rdma_cm_id` of a reliable connected service. A counted handle: a
/// work item destroys the id when the last one is dropped.
#[derive(Clone)]
pub struct Id {
    pub(crate) state: Shared,
}

/// A reference to the state that the handles of one id share.
pub(crate) type Shared = deferred::Deferred<OwnedId>;

impl Id {
    /// As [`Id::create_with`] the default options.
    pub fn create(client: &ClientRef, cx: &Sleepable) -> Result<Self> {
        Self::create_with(client, &Options::default(), cx)
    }

    /// Creates an id for an active connection (`rdma_create_id`). Fails with `ENOMEM`, or the
    /// connection manager's error; with `ENODEV` if the network namespace is being dismantled; and
    /// for a source address with `EADDRINUSE`, `EADDRNOTAVAIL`, or `ENODEV` if no device has it.
    pub fn create_with(client: &ClientRef, options: &Options<'_>, _cx: &Sleepable) -> Result<Self> {
        let reserved = deferred::Deferred::reserve()?;
        let conn = Conn::new(cm::State::Idle)?;
        let mut object = client.object(refs::ObjectKind::Id);
        object.summary = objects::Summary::Connection(conn.clone());
        let context = Arc::as_ptr(&conn).cast_mut().cast();
        // SAFETY: The context is a `Conn`. `OwnedId`, which is made below, keeps it until it has
        // destroyed the id.
        let raw = unsafe { options.create(client, on_event, context) }?;
        // `teardown` takes it back before it destroys the id.
        conn.set_id(Some(raw));
        // INVARIANT: The id was just created, with this callback and context.
        let state = reserved.fill(OwnedId {
            raw,
            conn,
            device: sync::SetOnce::new(),
            pending: sync::SetOnce::new(),
            client: client.clone(),
            object,
        });
        // SAFETY: The id was just created, and no other thread knows it yet.
        unsafe { options.apply(raw) }?;
        state.bind()?;
        Ok(Self { state })
    }

    /// Creates an id and finds the device, the path and the route to an address, each in
    /// `timeout_ms`. Fails as [`Id::create`], [`Id::resolve_addr`] and [`Id::resolve_route`].
    pub fn resolve(
        client: &ClientRef,
        dst: SocketAddr,
        timeout_ms: u32,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = Self::create(client, cx)?;
        id.resolve_addr(dst, timeout_ms, cx)?;
        id.resolve_route(timeout_ms, cx)?;
        Ok(id)
    }

    /// Destroys the id and waits for that (`rdma_destroy_id`). The handle is gone in any case.
    /// Fails with `EBUSY` if there is another one, or the id's QP: the id ends with the last of
    /// them; with `EDEADLK` in a callback of the connection manager: a work item destroys the id.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        InCallback::refuse()?;
        self.state.destroy(cx)
    }

    /// Finds the device and the path to an address (`rdma_resolve_addr`) and waits for that. Drop
    /// the id if this fails: it may keep the device from being removed.
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT` or `EHOSTUNREACH` if no host has the address.
    /// - `ENODEV` if the device is not the client's.
    /// - `ERESTARTSYS` on a signal, and `ECANCELED` after [`Id::disconnect`].
    /// - `EBUSY` if another step is waited for, or the id is one of [`Id::connect_to`].
    /// - `EDEADLK` in a callback of the connection manager.
    pub fn resolve_addr(&self, dst: SocketAddr, timeout_ms: u32, cx: &Sleepable) -> Result {
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED;
        let resolve = || self.state.resolve_addr(dst, timeout_ms);
        self.state.conn.wait_for(resolved, resolve, cx)?;
        self.state.bind()
    }

    /// Finds the route (`rdma_resolve_route`) and waits for that. Fails as [`Id::resolve_addr`];
    /// with `ENOTCONN` before the address was found.
    pub fn resolve_route(&self, timeout_ms: u32, cx: &Sleepable) -> Result {
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED;
        let resolve = || self.state.resolve_route(timeout_ms);
        self.state.conn.wait_for(resolved, resolve, cx)
    }

    /// Returns the client's handle of the id's device. Fails with `ENOTCONN` before it has one.
    pub fn device(&self) -> Result<&Device> {
        self.state.device.as_ref().ok_or(ENOTCONN)
    }

    /// Returns the GIDs of this end and the other (`rdma_read_gids`); `ENOTCONN` if not known yet.
    pub fn gids(&self) -> Result<(device::Gid, device::Gid)> {
        self.device()?;
        self.addrs()?;
        let (mut src, mut dst) = Default::default();
        // SAFETY: The id is alive by the invariant of `RawId`. `device()` and `addrs()` have found
        // that it has its device and its addresses. On iWARP the answer changes the IP
        // addresses, but C reads those of the interfaces there, which no longer change.
        unsafe { bindings::rdma_read_gids(self.state.as_raw(), &raw mut src, &raw mut dst) };
        Ok((device::Gid::from_raw(&src), device::Gid::from_raw(&dst)))
    }

    /// Returns the addresses of this end and the other, with their ports (`id->route.addr`). A
    /// request has them from the beginning, and those that the peer has used where the listener has
    /// a wildcard; other ids have them once the address is resolved. The scope id of a link-local
    /// address is the index of the network interface. Any context. Fails with `ENOTCONN` before
    /// that.
    ///
    /// # Examples
    ///
    /// ```
    /// use rdma::prelude::*;
    ///
    /// /// Prints the address at which a host has found a wildcard listener, and that of the host:
    /// /// what discovery and the log of NVMe show.
    /// fn accepted(id: &cm::Id) -> Result {
    ///     let (traddr, host_traddr) = id.addrs()?;
    ///     pr_info!("{host_traddr:?} has connected to {traddr:?}\n");
    ///     Ok(())
    /// }
    /// ```
    pub fn addrs(&self) -> Result<(SocketAddr, SocketAddr)> {
        self.state.conn.data.addrs.copy().ok_or(ENOTCONN)
    }

    /// Begins to connect to an address, without waiting. `handler` is asked for a QP when the route
    /// is known, and then gets all events. Address and route may each take `timeout_ms`, also if
    /// the id is dropped, and the peer's answer [`cm::ConnParam::timeout_ms`], but on iWARP;
    /// [`Id::disconnect`] gives up. Fails as [`Id::create_with`], or with the error of
    /// `rdma_resolve_addr`: the handler is released then, and gets no event.
    pub fn connect_to<H: Connect>(
        client: &ClientRef,
        dst: SocketAddr,
        timeout_ms: u32,
        options: &Options<'_>,
        handler: Arc<H>,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = Self::create_with(client, options, cx)?;
        id.begin(dst, timeout_ms, handler.clone(), handler)?;
        Ok(id)
    }

    fn begin(
        &self,
        dst: SocketAddr,
        timeout_ms: u32,
        handler: Arc<dyn cm::Handler>,
        connect: Arc<dyn AnyConnect>,
    ) -> Result {
        self.state.client.module().check_handler(&handler)?;
        let connect = AsyncConnect {
            id: self.clone(),
            connect,
            timeout_ms,
        };
        let conn = &self.state.conn;
        self.state.pending.populate(Pending::new(conn.clone())?);
        conn.begin_async(handler, Arc::new(connect, GFP_KERNEL)?)?;
        let resolving = self.state.resolve_addr(dst, timeout_ms);
        resolving.inspect_err(|_| drop(conn.end_async()))
    }

    /// Connects the id's QP to the peer (`rdma_connect`), waits for that, and returns the private
    /// data of the answer. `handler` gets all events.
    ///
    /// siw connects in `rdma_connect` itself: against a host that is silent this lasts as long as
    /// TCP tries, two minutes, and no signal ends it.
    ///
    /// # Errors
    ///
    /// Requests that were posted to the QP stay there, see [`Qp::drain`], and a connection that is
    /// established nevertheless is ended.
    ///
    /// - `ECONNREFUSED` if the peer rejects.
    /// - `ETIMEDOUT` if it does not answer within [`cm::ConnParam::timeout_ms`].
    /// - `EINVAL` without a QP or with too much private data, and `EBUSY` if the id has a handler.
    /// - `ENODEV` if the device is being removed.
    /// - Those of [`Id::resolve_addr`] for the wait, or the connection manager's.
    ///
    /// [`Qp::drain`]: crate::qp::Qp::drain
    ///
    /// # Examples
    ///
    /// ```
    /// use rdma::prelude::*;
    ///
    /// /// Connects an id of [`cm::Id::resolve`] with its QP, and returns the peer's answer.
    /// fn connect(id: &cm::Id, qp: Qp<Softirq>, cx: &Sleepable) -> Result<cm::PrivateData> {
    ///     let param = cm::ConnParam {
    ///         private_data: b"hello",
    ///         ..Default::default()
    ///     };
    ///     // The QP is the handler: the connection keeps it until its last event.
    ///     id.connect(Arc::new(qp, GFP_KERNEL)?, &param, cx)
    /// }
    /// ```
    pub fn connect(
        &self,
        handler: Arc<dyn cm::Handler>,
        param: &cm::ConnParam<'_>,
        cx: &Sleepable,
    ) -> Result<cm::PrivateData> {
        self.state.client.module().check_handler(&handler)?;
        let raw = self.qp_param(param)?;
        let conn = &self.state.conn;
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        let mut installed = false;
        let mut asked = false;
        let connect = || {
            conn.set_handler(&handler)?;
            installed = true;
            let timer = param.min_rnr_timer;
            // SAFETY: Called by `connect_qp`, in `with_handler_lock`. The data are the caller's.
            let ask = || unsafe { self.call_with_qp(bindings::rdma_connect_locked, raw, timer) };
            // This is no callback, as `wait_for_answer` has checked.
            let connected = self.state.with_handler_lock(|| conn.connect_qp(ask));
            asked = connected.is_ok();
            connected
        };
        let answer = conn.wait_for_answer(established, connect, param.timeout_ms, cx);
        answer.inspect_err(|_| {
            if asked {
                // If the connection comes nevertheless, its callback ends it.
                let _ = conn.begin_disconnect();
            }
            // If the device goes, the handler still gets that event.
            if installed && !conn.is_gone() {
                conn.release_handler();
            }
        })
    }

    /// Accepts a connection request (`rdma_accept`), once. The peer may send from here on.
    /// `handler` gets all events. A peer that does not confirm within [`cm::ConnParam::timeout_ms`]
    /// is given up with [`cm::Event::Failed`]; not so on iWARP.
    ///
    /// # Errors
    ///
    /// The handler is released.
    ///
    /// - `EINVAL` without a QP, without a request that is still to be answered, or with too much
    ///   private data.
    /// - `ENODEV` if the device is being removed.
    /// - `EDEADLK` in a callback of the connection manager that is not that of this request.
    /// - The connection manager's, which has rejected the request.
    pub fn accept(
        &self,
        handler: Arc<dyn cm::Handler>,
        param: &cm::ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result {
        self.state.client.module().check_handler(&handler)?;
        let raw = self.qp_param(param)?;
        let timer = param.min_rnr_timer;
        let conn = &self.state.conn;
        let locked = InCallback::has_locked(self.state.as_raw());
        if !locked && InCallback::is_current() {
            // Another task may have this id's lock, and wait for that of the callback's id.
            return Err(EDEADLK);
        }
        conn.begin_answer(Some(handler))?;
        // A disconnection that has begun, and does nothing yet, ends before this: it locks the QP.
        // SAFETY: Its callback or `with_handler_lock` has the id's lock. The data are the caller's.
        let accept = || unsafe { self.call_with_qp(bindings::rdma_accept, raw, timer) };
        let accepted = if locked {
            accept()
        } else {
            self.state.with_handler_lock(accept)
        };
        accepted.inspect_err(|_| conn.release_handler())?;
        // To disconnect waits on iWARP for the event that the connection is established.
        let is_iwarp = self.device().is_ok_and(Device::is_iwarp);
        if let Some(pending) = self.state.pending.as_ref().filter(|_| !is_iwarp) {
            pending.arm(param.timeout_ms);
        }
        Ok(())
    }

    /// Rejects a connection request, with data for the peer (`rdma_reject`, consumer defined).
    /// Fails with `EINVAL` for more than 148 bytes of private data, or without a request that is
    /// still to be answered; or the connection manager's error.
    pub fn reject(&self, private_data: &[u8], _cx: &Sleepable) -> Result {
        if private_data.len() > cm::REJ_LEN {
            return Err(EINVAL);
        }
        let data = private_data.as_ptr().cast();
        let len = private_data.len().try_into()?;
        let reason = cm::RejectReason::CONSUMER_DEFINED.0.try_into()?;
        self.state.conn.begin_answer(None)?;
        // SAFETY: The id is alive by the invariant of `RawId`, and the data are copied by the call.
        to_result(unsafe { bindings::rdma_reject(self.state.as_raw(), data, len, reason) })
    }

    /// Tells the connection manager, from a work item, that data have come on the QP of a
    /// connection that is being made (`rdma_notify` with `IB_EVENT_COMM_EST`). Any context.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, qp};
    /// /// Called by the ULP's [`qp::Events`].
    /// fn qp_event(id: &cm::Id, event: qp::Event) {
    ///     if event == qp::Event::COMM_EST {
    ///         id.notify_established();
    ///     }
    /// }
    /// ```
    pub fn notify_established(&self) {
        self.state.conn.notify_established();
    }

    /// Ends the connection (`rdma_disconnect`): the QP goes to the error state, its requests are
    /// flushed, and the handler gets [`cm::Event::Disconnected`]. What the peer has yet to confirm
    /// ends as soon as it has, or when its time is over ([`Id::accept`]). A step that another
    /// thread waits for fails with `ECANCELED`. What [`Id::connect_to`] has begun is given up:
    /// unless the connection is established, the handler is released without another event. Fails
    /// with `EINVAL` if the id was never connected; on iWARP with `EDEADLK` in the callback of
    /// another id, where [`Id::disconnect_later`] works; or the driver's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        let conn = &self.state.conn;
        let is_iwarp = self.device().is_ok_and(Device::is_iwarp);
        // iWARP waits until the connection is made or refused, which its ordered workqueue finds.
        if is_iwarp && InCallback::is_current() {
            if !InCallback::has_locked(self.state.as_raw()) {
                return Err(EDEADLK);
            }
            if conn.state() != cm::State::Established {
                // The event of establishment comes after this callback, and ends it.
                return conn.begin_disconnect().map(drop);
            }
        }
        // SAFETY: The id is alive by the invariant of `RawId`.
        unsafe { conn.end(self.state.as_raw()) }
    }

    /// As [`Id::disconnect`], from a work item. Any context.
    pub fn disconnect_later(&self) {
        self.state.conn.disconnect_later();
    }

    /// Lets go of the handler before the last event. A call of it that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.state.conn.release_handler();
    }

    /// Returns the parameters of a connection for C. Takes no lock: it is called before it is known
    /// whether this task may wait for one.
    fn qp_param(&self, param: &cm::ConnParam<'_>) -> Result<bindings::rdma_conn_param> {
        // SAFETY: The id is alive by the invariant of `RawId`. C may set the QP, which is compared.
        if unsafe { (&raw const (*self.state.as_raw()).qp).read_volatile() }.is_null() {
            return Err(EINVAL);
        }
        param.to_raw()
    }

    /// Sets the RNR timer of the id, and calls C, with the QP locked: `iw_cm_connect()` and
    /// `iw_cm_accept()` take a reference to the QP only after they have found it, and
    /// `rdma_set_min_rnr_timer()` waits for a task that destroys it.
    ///
    /// # Safety
    ///
    /// `call` is `rdma_connect_locked` or `rdma_accept`, this task has the id's handler lock, and
    /// the private data of `param` are valid.
    unsafe fn call_with_qp(
        &self,
        call: unsafe extern "C" fn(
            *mut bindings::rdma_cm_id,
            *mut bindings::rdma_conn_param,
        ) -> c_int,
        mut param: bindings::rdma_conn_param,
        timer: RnrTimer,
    ) -> Result {
        let _qp = self.state.conn.data.qp.lock();
        let timer = timer.as_raw();
        // SAFETY: The id is alive by the invariant of `RawId`, and of a reliable service, as all
        // are. The call locks what it changes.
        to_result(unsafe { bindings::rdma_set_min_rnr_timer(self.state.as_raw(), timer) })?;
        // SAFETY: The id is alive by the invariant of `RawId`, and the caller promises that it is
        // locked, and the data are valid. The call copies them, and the parameters.
        to_result(unsafe { call(self.state.as_raw(), &raw mut param) })
    }
}

/// The handler of a connection that [`Id::connect_to`] makes.
pub trait Connect: cm::Handler + Sized {
    /// The route is known: make the QP of `id`, post receives, and return the parameters with which
    /// the crate asks the peer (`rdma_connect_locked`). Called in process context, once, before any
    /// event. An error becomes [`cm::Event::Failed`]. Receives, or the QP's context, may keep a
    /// clone of `self`.
    fn resolved(self: &Arc<Self>, id: &Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>>;
}

/// A [`Connect`] of any type.
trait AnyConnect: Send + Sync {
    /// Calls [`Connect::resolved`], and `ask` with the parameters.
    fn resolve(
        self: ArcBorrow<'_, Self>,
        id: &Id,
        ask: &mut dyn FnMut(&cm::ConnParam<'_>) -> Result,
        cx: &Sleepable,
    ) -> Result;
}

impl<H: Connect> AnyConnect for H {
    fn resolve(
        self: ArcBorrow<'_, Self>,
        id: &Id,
        ask: &mut dyn FnMut(&cm::ConnParam<'_>) -> Result,
        cx: &Sleepable,
    ) -> Result {
        let this = Arc::from(self);
        ask(&this.resolved(id, cx)?)
    }
}

/// A connection that is made by its events. Keeps the id until the peer was asked.
pub(crate) struct AsyncConnect {
    id: Id,
    connect: Arc<dyn AnyConnect>,
    timeout_ms: u32,
}

impl AsyncConnect {
    /// Takes the next step after an event of the id, whose callback this is.
    fn step(&self, event: bindings::rdma_cm_event_type, cx: &Sleepable) -> Result {
        match event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => {
                self.id.state.bind()?;
                self.id.state.resolve_route(self.timeout_ms)
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => {
                let connect = self.connect.as_arc_borrow();
                connect.resolve(&self.id, &mut |param| self.ask(param), cx)
            }
            _ => Ok(()),
        }
    }

    /// Asks the peer, in the callback of the id.
    fn ask(&self, param: &cm::ConnParam<'_>) -> Result {
        let raw = self.id.qp_param(param)?;
        let timer = param.min_rnr_timer;
        let conn = &self.id.state.conn;
        // SAFETY: The id is locked in its callback. The private data are the caller's.
        let ask = || unsafe { (self.id).call_with_qp(bindings::rdma_connect_locked, raw, timer) };
        let disconnect = conn.ask(ask)?;
        // On iWARP the callback of the event of establishment disconnects, and the driver
        // bounds the time that the peer has.
        if self.id.device().is_ok_and(Device::is_iwarp) {
            return Ok(());
        }
        if disconnect {
            // SAFETY: The id is alive by the invariant of `RawId`, and was just connected.
            let _ = unsafe { RdmaCm::disconnect(conn, self.id.state.as_raw()) };
        } else if let Some(pending) = self.id.state.pending.as_ref() {
            pending.arm(param.timeout_ms);
        }
        Ok(())
    }
}

impl Conn<RdmaCm> {
    /// Sets the addresses to those of the id.
    ///
    /// # Safety
    ///
    /// The id is alive, and this is its callback for a request, or for a resolved address.
    pub(super) unsafe fn set_addrs(&self, id: *mut bindings::rdma_cm_id) {
        // SAFETY: The id is alive and has both addresses, as the caller promises. C changes them
        // with the id's handler lock, which the callback has.
        let (src, dst) = unsafe {
            let addr = &(*id).route.addr;
            let scope = addr.dev_addr.bound_dev_if.try_into().unwrap_or(0);
            (
                cm::socket_addr(&addr.src_addr, scope),
                cm::socket_addr(&addr.dst_addr, scope),
            )
        };
        if let (Some(src), Some(dst)) = (src, dst) {
            self.data.addrs.populate((src, dst));
        }
    }
}

/// The RDMA connection manager.
pub(crate) struct RdmaCm;

/// The part of a connection that ib_cm has not.
#[pin_data]
pub(crate) struct ConnData {
    /// Locked where C uses the QP of the id without a reference: it is created or destroyed, the
    /// connection is asked for, accepted, or on iWARP disconnected.
    #[pin]
    qp: sync::Mutex<()>,
    /// The addresses of this end and the other, once C knows them and the device: for functions
    /// that any context may call.
    addrs: sync::SetOnce<(SocketAddr, SocketAddr)>,
    /// The connection was established, and a message of the peer has ended it.
    peer_ended: atomic::Atomic<bool>,
}

impl Manager for RdmaCm {
    type Id = bindings::rdma_cm_id;
    type Async = AsyncConnect;
    type Data = ConnData;

    fn data() -> impl PinInit<ConnData> {
        pin_init!(ConnData {
            qp <- kernel::new_mutex!(()),
            addrs: sync::SetOnce::new(),
            peer_ended: atomic::Atomic::new(false),
        })
    }

    unsafe fn disconnect(conn: &Conn<Self>, id: *mut Self::Id) -> Result {
        // SAFETY: The caller promises that the id is alive, and has had a connection, so its
        // device.
        let is_iwarp = unsafe { (*(*id).device).node_type } == device::NodeType::Rnic as u8;
        // `iw_cm_disconnect()` modifies the QP without a reference to it. A task that has it locked
        // destroys it or disconnects it; or it accepts, and the event of establishment ends it, as
        // `begin_disconnect` has noted.
        let guard = is_iwarp.then(|| conn.data.qp.try_lock());
        if let Some(None) = guard {
            return Ok(());
        }
        // SAFETY: The caller promises that the id is alive. One that is not connected is left
        // alone.
        to_result(unsafe { bindings::rdma_disconnect(id) })
    }

    unsafe fn notify(id: *mut Self::Id) -> bool {
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        // SAFETY: The caller promises that the id is alive, and has had a connection, so its
        // device.
        unsafe {
            // For others C does nothing.
            let is_ca = (*(*id).device).node_type == device::NodeType::Ca as u8;
            is_ca && bindings::rdma_notify(id, event) == 0
        }
    }

    unsafe fn destroy(id: *mut Self::Id) {
        // SAFETY: The caller promises that the id is alive, and is not used after this.
        unsafe { bindings::rdma_destroy_id(id) };
    }
}

/// The callback of every connection's id.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Conn`].
pub(super) unsafe extern "C" fn on_event(
    id: *mut bindings::rdma_cm_id,
    raw: *mut bindings::rdma_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Conn`, which lives until the id is
    // destroyed. The event is valid during the call, which is in process context.
    let (conn, raw, cx) = unsafe {
        let conn = &*(*id).context.cast::<Conn<RdmaCm>>();
        (conn, &*raw, Sleepable::assume())
    };
    pin_init::stack_pin_init!(let _in_callback = InCallback::enter_locked(id));
    // SAFETY: `raw` is an event of `id`, whose callback this is. All ids with this callback are of
    // a connected service, and the private data of an event are valid during the callback.
    let event = unsafe { cm::Event::from_raw(id, raw) };
    let events = conn.event_lock.lock();
    let is_over = matches!(event, cm::Event::Disconnected);
    if is_over && raw.status == 0 && conn.state() == cm::State::Established {
        conn.data.peer_ended.store(true, atomic::Relaxed);
    }
    if raw.event == bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED {
        // SAFETY: The id is alive during its callback, before which C has set the addresses.
        unsafe { conn.set_addrs(id) };
    }
    let effects = conn.advance(&event, raw.event);
    if let Some(handler) = effects.handler {
        handler.as_arc_borrow().event(event, &cx);
    }
    if let Some(Err(e)) = (effects.connect).map(|connect| connect.step(raw.event, &cx)) {
        if let Some(handler) = conn.end_async() {
            handler.as_arc_borrow().event(cm::Event::Failed(e), &cx);
        }
    }
    drop(events);
    // A peer that has disconnected waits for an answer, also where this side has asked for the end
    // too, and the QP for its requests to be flushed.
    if effects.disconnect || is_over {
        // SAFETY: The id is alive during its callback, and was established or asked for.
        let _ = unsafe { RdmaCm::disconnect(conn, id) };
    }
    // The id is never destroyed by its callback's return.
    0
}

type Callback =
    unsafe extern "C" fn(*mut bindings::rdma_cm_id, *mut bindings::rdma_cm_event) -> c_int;

/// Options of an id. The default leaves all to the connection manager.
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// /// Listens on an address of IPv6, for IPv4 too.
/// fn listen(
///     client: &ClientRef,
///     addr: SocketAddr,
///     accept: Arc<dyn cm::Accept>,
///     cx: &Sleepable,
/// ) -> Result<cm::Listener> {
///     let options = cm::Options {
///         dual_stack: true,
///         ..Default::default()
///     };
///     cm::Listener::new_with(client, addr, 128, &options, accept, cx)
/// }
/// ```
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    /// The network namespace is that of this device (`rdma_dev_net`), instead of the initial one:
    /// `ENODEV` if it is being dismantled.
    pub net_of: Option<&'a Device>,
    /// The address to connect from (`rdma_bind_addr`). Port 0 is any free one. Not for listeners.
    pub src: Option<SocketAddr>,
    /// Other ids may have the same address (`rdma_set_reuseaddr`), all of which must say so.
    pub reuse_addr: bool,
    /// A listener on `::` listens for IPv4 too (`rdma_set_afonly`).
    pub dual_stack: bool,
    /// Only devices of this type (`rdma_restrict_node_type`).
    pub node_type: Option<device::NodeType>,
    /// The traffic class of the packets (`rdma_set_service_type`): the type of service of IPv4.
    pub service_type: Option<u8>,
    /// The time after which both sides send a packet again that was not acknowledged, up to 31, as
    /// the InfiniBand specification encodes it (`rdma_set_ack_timeout`). Not for listeners.
    pub ack_timeout: Option<u8>,
}

impl Options<'_> {
    /// Creates an id, to which the options are still to be applied.
    ///
    /// # Safety
    ///
    /// `context` is what `callback` expects, and lives until the id is destroyed.
    pub(super) unsafe fn create(
        &self,
        client: &ClientRef,
        callback: Callback,
        context: *mut c_void,
    ) -> Result<RawId<RdmaCm>> {
        let dev = self.net_of.map_or(ptr::null_mut(), Device::as_raw);
        // SAFETY: The device is registered by the invariant of its `Inner`. It leaves its namespace
        // only when its clients have released it, and a namespace is freed only after that.
        let net = unsafe { bindings::rdma_helper_get_net(dev) };
        if net.is_null() {
            return Err(ENODEV);
        }
        // SAFETY: The caller promises so of callback and context, and the client's name lives as
        // long. The reference to the network namespace was just taken: the id takes its own.
        let raw = unsafe {
            let raw = bindings::__rdma_create_kernel_id(
                net,
                Some(callback),
                context,
                bindings::rdma_ucm_port_space_RDMA_PS_TCP,
                bindings::ib_qp_type_IB_QPT_RC,
                client.name().as_char_ptr(),
            );
            bindings::rdma_helper_put_net(net);
            raw
        };
        // SAFETY: It was just created.
        unsafe { RawId::new(raw) }
    }

    /// Applies the options to an id, its own address at last.
    ///
    /// # Safety
    ///
    /// The id is alive, and was just created.
    pub(super) unsafe fn apply(&self, id: RawId<RdmaCm>) -> Result {
        let id = id.as_ptr();
        // SAFETY: The caller promises that the id is alive; the calls lock what they change, and
        // copy the address.
        unsafe {
            if let Some(node_type) = self.node_type {
                to_result(bindings::rdma_restrict_node_type(id, node_type as u8))?;
            }
            if self.reuse_addr {
                to_result(bindings::rdma_set_reuseaddr(id, 1))?;
            }
            if let Some(service_type) = self.service_type {
                bindings::rdma_set_service_type(id, service_type.into());
            }
            if let Some(timeout) = self.ack_timeout {
                // C does not check it.
                if timeout > 31 {
                    return Err(EINVAL);
                }
                to_result(bindings::rdma_set_ack_timeout(id, timeout))?;
            }
            if let Some(src) = self.src {
                let mut src = cm::SockAddr::from(src);
                to_result(bindings::rdma_bind_addr(id, src.as_mut_ptr()))?;
            }
        }
        Ok(())
    }
}

/// # Invariants
///
/// `raw` is an id, owned by this, whose callback is [`on_event`] with `conn` as its context.
pub(crate) struct OwnedId {
    pub(super) raw: RawId<RdmaCm>,
    pub(super) conn: Arc<Conn<RdmaCm>>,
    pub(crate) device: sync::SetOnce<Device>,
    /// Set where the peer has to answer in time.
    pub(super) pending: sync::SetOnce<Arc<Pending<RdmaCm>>>,
    pub(super) client: ClientRef,
    pub(crate) object: objects::Object,
}

impl OwnedId {
    fn as_raw(&self) -> *mut bindings::rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Calls a function with the handler lock of the id. Not in its callback, which has it.
    fn with_handler_lock<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: The id is alive by the invariant of `RawId`.
        unsafe { bindings::rdma_lock_handler(self.as_raw()) };
        let result = f();
        // SAFETY: The id is alive by the invariant of `RawId`, and was locked above.
        unsafe { bindings::rdma_unlock_handler(self.as_raw()) };
        result
    }

    /// Begins to find the device and the path to an address (`rdma_resolve_addr`).
    fn resolve_addr(&self, dst: SocketAddr, timeout_ms: u32) -> Result {
        let mut dst = cm::SockAddr::from(dst);
        let src = ptr::null_mut();
        let dst = dst.as_mut_ptr();
        let timeout = timeout_ms.try_into()?;
        // SAFETY: The id is alive by the invariant of `RawId`. The call copies the address.
        to_result(unsafe { bindings::rdma_resolve_addr(self.as_raw(), src, dst, timeout) })
    }

    /// Begins to find the route (`rdma_resolve_route`).
    fn resolve_route(&self, timeout_ms: u32) -> Result {
        // `addr_handler()` in core/cma.c changes the state of the C id before it looks for the
        // device.
        self.conn.data.addrs.as_ref().ok_or(ENOTCONN)?;
        // SAFETY: The id is alive by the invariant of `RawId`. The call reads the device and the
        // addresses without a lock: C sets them before the event in which `addrs` are set.
        to_result(unsafe { bindings::rdma_resolve_route(self.as_raw(), timeout_ms.try_into()?) })
    }

    /// Keeps the id's device, if it has one, from going away unnoticed.
    pub(super) fn bind(&self) -> Result {
        if let Some((_, to)) = self.conn.data.addrs.as_ref() {
            self.object
                .set_peer(objects::PeerAddr::To(to.ip(), to.port()));
        }
        // SAFETY: The id is alive by the invariant of `RawId`. It was just created, or C has set
        // the device before: it came with a request, or its address was resolved.
        let raw = unsafe { (*self.as_raw()).device };
        if raw.is_null() || self.device.as_ref().is_some() {
            return Ok(());
        }
        let device = self.client.device(raw)?;
        device.inner().removal.add(self.conn.clone())?;
        self.device.populate(device);
        Ok(())
    }

    /// Creates the QP (`rdma_create_qp`). `EBUSY` if the id has one, or is (dis)connected just now.
    ///
    /// # Safety
    ///
    /// PD and CQs are alive and of the device that the id is bound to, and the id and the context
    /// of `attr` live until the QP is destroyed.
    pub(crate) unsafe fn create_qp(
        &self,
        pd: &Pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>> {
        let id = self.as_raw();
        // `rdma_create_qp()` uses the `iw_cm_id`, which `rdma_connect_locked()` creates, and
        // destroys if it fails. A task that destroys a QP of iWARP with the lock may wait for a
        // callback that creates one.
        let Some(_guard) = self.conn.data.qp.try_lock() else {
            return Err(EBUSY);
        };
        // SAFETY: The id is alive by the invariant of `RawId`. Its QP changes with the lock only.
        if unsafe { !(*id).qp.is_null() } {
            return Err(EBUSY);
        }
        // SAFETY: The id is alive by the invariant of `RawId`, and has no QP, as just checked. The
        // caller promises so of PD, CQs and context.
        to_result(unsafe { bindings::rdma_create_qp(id, pd.as_raw(), attr) })?;
        // SAFETY: The id is alive by the invariant of `RawId`. Creation has set its QP.
        NonNull::new(unsafe { (*id).qp }).ok_or(EIO)
    }

    /// Destroys the QP (`rdma_destroy_qp`).
    ///
    /// # Safety
    ///
    /// The id has a QP, which has no request outstanding and is no longer used.
    pub(crate) unsafe fn destroy_qp(&self) {
        let _guard = self.conn.data.qp.lock();
        // SAFETY: The id is alive by the invariant of `RawId`, and its QP is no longer used, as
        // the caller promises; nor by `iw_cm_disconnect()`, as the lock is held.
        unsafe { bindings::rdma_destroy_qp(self.as_raw()) };
    }

    /// Waits for the callback of a message that was not answered. `rdma_destroy_id()` does not:
    /// `cm_process_send_error()` in core/cm.c gives the message's reference back, and only then
    /// calls back, which takes the id's handler lock. That may be held for long, so it is taken
    /// first: such a callback waits for no other.
    ///
    /// There is none where a message of the peer has ended an established connection. C calls back
    /// only for a REQ, REP or DREQ that the id, locked, still waits for: an established connection
    /// waits for neither of the first two, and the peer's message ends the wait for the last.
    fn end_callback(&self, cx: &Sleepable) {
        if self.conn.data.peer_ended.load(atomic::Relaxed) {
            return;
        }
        self.with_handler_lock(|| {});
        if let Some(device) = self.device.as_ref() {
            // SAFETY: The id is alive by the invariant of `RawId`. The port of one that has a
            // device does not change.
            let port = unsafe { (*self.as_raw()).port_num };
            flush_timeouts(device, port, cx);
        }
    }
}

impl deferred::Teardown for OwnedId {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn queue(&self) -> &workqueue::Queue {
        match self.device.as_ref() {
            Some(device) => device.inner().queue(),
            None => self.object.queue(),
        }
    }

    fn teardown(&self, cx: &Sleepable) -> Result {
        let destroy = || {
            self.end_callback(cx);
            // SAFETY: The id is alive by the invariant of `RawId`, and its QP, which has kept
            // `OwnedId`, is gone. This waits for callbacks that have begun and have a reference.
            // That of a message that was not answered has none, and has returned; should one begin
            // only now, C's own memory is at stake: see Documentation/safety.rst.
            unsafe { RdmaCm::destroy(self.as_raw()) };
        };
        let device = self.device.as_ref();
        let pending = self.pending.as_ref();
        self.conn.teardown(device, pending, destroy, cx);
        Ok(())
    }
}
