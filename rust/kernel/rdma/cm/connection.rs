// SPDX-License-Identifier: GPL-2.0

//! Making and ending connections.

use crate::{
    bindings,
    client::ClientRef,
    cm::{
        callback::InCallback,
        state::{
            Change,
            Conn,
            Manager, //
        },
        ConnParam,
        Event,
        Handler,
        Id,
        Options,
        PrivateData,
        RejectReason,
        SockAddr, //
    },
    context::{
        Context as _,
        Sleepable, //
    },
    device::{
        Device,
        NodeType, //
    }, //
};
use core::net::SocketAddr;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// The length of the private data of a rejection, in bytes.
const REJECT_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;

impl Id {
    /// Connects the id's QP to the peer (`rdma_connect`), waits until that has worked or failed,
    /// and returns what the peer sent along.
    ///
    /// `handler` gets all events of the connection, the first one included.
    ///
    /// After an error, requests that were posted to the QP stay there:
    /// [`Qp::drain`](crate::qp::Qp::drain) or the QP's end gives them back.
    ///
    /// # Errors
    ///
    /// `ECONNREFUSED` if the peer rejects; `EINVAL` without a QP or with too much private data;
    /// `EBUSY` if the id has a handler already; `ENODEV` if its device goes; the errors of waiting
    /// as for [`Id::resolve_addr`]; or the connection manager's error.
    pub fn connect(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result<PrivateData> {
        let mut param = self.qp_param(param)?;
        let conn = self.conn();
        let id = self.inner.as_raw();
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        let mut installed = false;
        conn.wait_for(established, PrivateData::new(&[]), || {
            conn.set_handler(handler)?;
            installed = true;
            // SAFETY: The id is alive by the invariant of `State`, and not locked by this task,
            // which is in no callback: `wait_for` has looked. The parameters are copied by the
            // call.
            to_result(unsafe {
                bindings::rdma_lock_handler(id);
                let ret = bindings::rdma_connect_locked(id, &raw mut param);
                if ret == 0 {
                    conn.set_asked();
                }
                bindings::rdma_unlock_handler(id);
                ret
            })
        })
        .inspect_err(|_| {
            // If the device goes, the handler still gets that event.
            if installed && !conn.is_gone() {
                conn.release_handler();
            }
        })
    }

    /// Accepts a connection request (`rdma_accept`), once. The peer may send from here on. If the
    /// connection manager fails, it has rejected the request.
    ///
    /// `handler` gets all events of the connection. A peer that does not confirm
    /// within 90 seconds, however often it wants to be asked, is given up with
    /// [`Event::Failed`](crate::cm::Event::Failed); not so on iWARP.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a QP, without a request that is still to be answered, or with too much
    /// private data; `ENODEV` if its device goes; `EDEADLK` in a callback of the connection manager
    /// that is not that of this request; or the connection manager's error. The handler is
    /// released.
    pub fn accept(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result {
        let mut param = self.qp_param(param)?;
        let conn = self.conn();
        let locked = conn.is_in_own_callback();
        if !locked && InCallback::is_current() {
            // Another task may have the lock of this id, and wait for that of the current
            // callback's.
            return Err(EDEADLK);
        }
        conn.begin_accept(handler)?;
        let id = self.inner.as_raw();
        // SAFETY: The id is alive by the invariant of `State`, and the parameters are copied by the
        // call. It needs the id's handler lock, which a callback of the id has already.
        let ret = unsafe {
            if !locked {
                bindings::rdma_lock_handler(id);
            }
            let ret = bindings::rdma_accept(id, &raw mut param);
            if !locked {
                bindings::rdma_unlock_handler(id);
            }
            ret
        };
        to_result(ret).inspect_err(|_| conn.release_handler())?;
        let state = self.state();
        // To disconnect waits on iWARP for the event that the connection is there.
        let is_iwarp = state.device.as_ref().is_some_and(Device::is_iwarp);
        if let Some(incoming) = state.incoming.as_ref().filter(|_| !is_iwarp) {
            incoming.await_confirmation();
        }
        Ok(())
    }

    pub(super) fn qp_param(&self, param: &ConnParam<'_>) -> Result<bindings::rdma_conn_param> {
        // SAFETY: The id is alive by the invariant of `State`; whether it has a QP is all that is
        // read.
        if unsafe { (*self.inner.as_raw()).qp }.is_null() {
            return Err(EINVAL);
        }
        param.to_raw()
    }

    /// Rejects a connection request, with data for the peer (`rdma_reject` for
    /// [`RejectReason::CONSUMER_DEFINED`]).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data or if there is no request that is still to
    /// be answered, or the connection manager's error.
    pub fn reject(&self, private_data: &[u8], _cx: &Sleepable) -> Result {
        if private_data.len() > REJECT_LEN {
            return Err(EINVAL);
        }
        let len = private_data.len().try_into()?;
        let reason = RejectReason::CONSUMER_DEFINED.0.try_into()?;
        self.conn().begin_reject()?;
        // SAFETY: The id is alive by the invariant of `State`, and the data are copied by the call.
        to_result(unsafe {
            bindings::rdma_reject(
                self.inner.as_raw(),
                private_data.as_ptr().cast(),
                len,
                reason,
            )
        })
    }

    /// Tells the connection manager that data have come on a QP whose connection is still being
    /// made, which proves that it is (`rdma_notify` with `IB_EVENT_COMM_EST`). Called on that event
    /// of the QP: the peer's last message may be lost.
    ///
    /// # Errors
    ///
    /// `EISCONN` if the connection is known to be made, or that was said before; `EINVAL` if it is
    /// not being made, or is to end; `ENOMEM`.
    pub fn notify_established(&self, _cx: &Sleepable) -> Result {
        self.inner.notify_established()
    }

    /// As [`Id::notify_established`], from a work item: for the handler of a QP's events, which may
    /// not sleep. An error has no effect.
    pub fn notify_established_later(&self) {
        self.conn().notify_later();
    }

    /// Ends the connection (`rdma_disconnect`): the QP goes to the error state, its requests are
    /// flushed, and the handler gets [`Event::Disconnected`](crate::cm::Event::Disconnected). If
    /// the peer has not confirmed yet that the connection is there, it ends as soon as it has, or
    /// when its time is over ([`Id::accept`]); if
    /// [`Id::notify_established`] was just called, as soon as the handler gets that event. If
    /// another thread is still making the connection, the step that it waits for fails with
    /// `ECANCELED`. What [`Id::connect_to`] has begun is given up: unless the connection is there,
    /// the handler is released without another event.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the id was never connected; on iWARP `EDEADLK` in a callback of the connection
    /// manager that is not this id's, where [`Id::disconnect_later`] is for; or the driver's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        self.inner.disconnect()
    }

    /// As [`Id::disconnect`], from a work item: for completion handlers that may not sleep.
    pub fn disconnect_later(&self) {
        self.conn().disconnect_later();
    }

    /// Lets go of the handler before the last event, for an owner of the connection that gives it
    /// up. A call of the handler that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.conn().release_handler();
    }
}

/// The handler of a connection that [`Id::connect_to`] makes.
pub trait Connect: Handler {
    /// The route to the peer is known: make the QP of `id`, post receives, and return the
    /// parameters of the connection. The crate then asks the peer (`rdma_connect_locked`).
    ///
    /// Called in process context, once, before any event. An error ends the connection: it becomes
    /// [`Event::Failed`].
    fn resolved(&self, id: &Id, cx: &Sleepable) -> Result<ConnParam<'_>>;
}

/// A connection that is made by its events. Holds the id until the peer was asked.
pub(crate) struct AsyncConnect {
    id: Id,
    connect: Arc<dyn Connect>,
    timeout_ms: u32,
}

impl Id {
    /// Begins to connect to an address and does not wait, as ULPs do that must not block.
    ///
    /// `handler` is asked for a QP when the route to the peer is known, and then gets all events:
    /// the connection is established, is disconnected, or could not be made. Each of finding the
    /// address and finding the route may take `timeout_ms`. What was begun goes on until then also
    /// if the id that is returned is dropped; [`Id::disconnect`] gives it up.
    ///
    /// # Errors
    ///
    /// As [`Id::create_with`], or what is wrong with the address. The handler is then released, and
    /// gets no event.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core::net::SocketAddr;
    /// # use rdma::{cm::{self, Id}, prelude::*};
    /// struct Connection {
    ///     qp: kernel::sync::SetOnce<Qp<Softirq>>,
    ///     pd: Pd,
    ///     cq: Cq<Softirq>,
    /// }
    ///
    /// impl cm::Handler for Connection {
    ///     fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
    ///         pr_info!("{event}\n");
    ///     }
    /// }
    ///
    /// impl cm::Connect for Connection {
    ///     fn resolved(&self, id: &Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
    ///         let qp = Qp::create(id, &self.pd, &self.cq, &self.cq, &Caps::new(8, 8), cx)?;
    ///         self.qp.populate(qp);
    ///         Ok(cm::ConnParam::default())
    ///     }
    /// }
    ///
    /// fn begin(
    ///     client: &ClientRef,
    ///     peer: SocketAddr,
    ///     connection: Arc<Connection>,
    ///     cx: &Sleepable,
    /// ) -> Result<Id> {
    ///     Id::connect_to(client, peer, 2_000, &cm::Options::default(), connection, cx)
    /// }
    /// ```
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
        handler: Arc<dyn Handler>,
        connect: Arc<dyn Connect>,
    ) -> Result {
        let mut dst = SockAddr::from(dst);
        let timeout = timeout_ms.try_into()?;
        let connect = AsyncConnect {
            id: self.clone(),
            connect,
            timeout_ms,
        };
        let conn = self.conn();
        conn.begin_async(handler, Arc::new(connect, GFP_KERNEL)?)?;
        let (id, src) = (self.inner.as_raw(), core::ptr::null_mut());
        // SAFETY: The id is alive by the invariant of `State`, and the address is copied by the
        // call.
        let ret = unsafe { bindings::rdma_resolve_addr(id, src, dst.as_mut_ptr(), timeout) };
        to_result(ret).inspect_err(|_| drop(conn.end_async()))
    }
}

impl AsyncConnect {
    /// Takes the next step after an event of the id, whose callback this is.
    fn step(&self, event: bindings::rdma_cm_event_type) -> Result {
        match event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => self.resolve_route(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => self.connect(),
            _ => Ok(()),
        }
    }

    fn resolve_route(&self) -> Result {
        self.id.inner.bind()?;
        let timeout = self.timeout_ms.try_into()?;
        // SAFETY: The id is alive by the invariant of `State`, and its callback, which this is, has
        // found the address.
        to_result(unsafe { bindings::rdma_resolve_route(self.id.inner.as_raw(), timeout) })
    }

    fn connect(&self) -> Result {
        // SAFETY: This is in the id's callback, and the connection manager calls back in process
        // context.
        let cx = unsafe { Sleepable::assume() };
        let param = self.connect.resolved(&self.id, &cx)?;
        let mut param = self.id.qp_param(&param)?;
        let id = self.id.inner.as_raw();
        let disconnect = self.id.conn().ask(|| {
            // SAFETY: The id is alive by the invariant of `State`, and locked as this is its
            // callback. The parameters are copied by the call.
            to_result(unsafe { bindings::rdma_connect_locked(id, &raw mut param) })
        })?;
        if disconnect {
            // SAFETY: The id is alive by the invariant of `State`, and was connected above.
            let _ = unsafe { RdmaCm::disconnect(id) };
        }
        Ok(())
    }
}

/// The RDMA connection manager.
pub(crate) struct RdmaCm;

impl Manager for RdmaCm {
    type Id = bindings::rdma_cm_id;
    type Handler = dyn Handler;
    type Reply = PrivateData;
    type Error = Error;
    type Async = AsyncConnect;

    const WAITER_ONLY: bool = false;

    unsafe fn disconnect(id: *mut Self::Id) -> Result {
        // SAFETY: The caller says that the id is alive, and that it has had a connection of the
        // device's own manager. An id that is not connected is left alone.
        to_result(unsafe { bindings::rdma_disconnect(id) })
    }

    unsafe fn notify(id: *mut Self::Id) -> Result<bool> {
        // SAFETY: The caller says that the id is alive, and that it has had a connection, so it has
        // its device.
        if unsafe { (*(*id).device).node_type } != NodeType::Ca as u8 {
            // C does nothing.
            return Ok(false);
        }
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        // SAFETY: The caller says that the id is alive.
        to_result(unsafe { bindings::rdma_notify(id, event) })?;
        Ok(true)
    }

    unsafe fn end(conn: &Conn<Self>, id: *mut Self::Id) -> Result {
        if !conn.begin_disconnect()? {
            return Ok(());
        }
        // SAFETY: The caller says that the id is alive. `begin_disconnect` has found its state.
        let disconnected = unsafe { Self::disconnect(id) };
        if conn.is_being_made_async() {
            // The connection manager goes on asking the peer for long.
            conn.release_handler();
        }
        disconnected
    }

    fn device_removal(handler: &dyn Handler, cx: &Sleepable) {
        handler.event(Event::DeviceRemoval, cx);
    }
}

/// Handles an event, and returns whether the id is to be disconnected.
///
/// # Safety
///
/// This is the callback of `id`, whose connection is `conn`, and `raw` its event.
unsafe fn handle(
    conn: &Conn<RdmaCm>,
    id: *mut bindings::rdma_cm_id,
    raw: &bindings::rdma_cm_event,
) -> bool {
    use bindings::{
        rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED as ADDR_RESOLVED,
        rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_RESPONSE as CONNECT_RESPONSE,
        rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED as ROUTE_RESOLVED, //
    };

    // SAFETY: The caller says that `raw` is an event of `id`. All ids with this callback are of a
    // connected service, and the private data of an event are valid during the callback.
    let event = unsafe { Event::from_raw(id, raw) };
    let (change, result) = match event {
        Event::Established { private_data } => (Change::Established, Some(Ok(private_data))),
        Event::Failed(e) => (Change::Failed, Some(Err(e))),
        Event::Rejected(_) => (Change::Closed, Some(Err(ECONNREFUSED))),
        Event::Disconnected => (Change::Closed, Some(Err(ENOTCONN))),
        Event::DeviceRemoval => (Change::Closed, Some(Err(ENODEV))),
        Event::Other(ADDR_RESOLVED | ROUTE_RESOLVED) => (Change::Resolved, Some(Ok(&[][..]))),
        // The peer answered, but the QP is gone.
        Event::Other(CONNECT_RESPONSE) => (Change::None, Some(Err(ENOTCONN))),
        Event::Other(_) => (Change::None, None),
    };
    let fill = |sent| move |reply: &mut PrivateData| *reply = PrivateData::new(sent);
    let _events = conn.lock_events();
    let effects = conn.advance(change, raw.event, result.map(|sent| sent.map(fill)));
    // SAFETY: Callbacks run in process context, with mutexes of their own only.
    let cx = unsafe { Sleepable::assume() };
    if let Some(handler) = effects.handler {
        handler.event(event, &cx);
    }
    if let Some(Err(e)) = effects.connect.map(|connect| connect.step(raw.event)) {
        if let Some(handler) = conn.end_async() {
            handler.event(Event::Failed(e), &cx);
        }
    }
    // A peer that has disconnected waits for an answer, and the QP for its requests to be flushed.
    effects.disconnect || matches!(event, Event::Disconnected)
}

/// The callback of every connection's id.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Conn`].
pub(super) unsafe extern "C" fn on_event(
    id: *mut bindings::rdma_cm_id,
    event: *mut bindings::rdma_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Conn`, which lives until the id is
    // destroyed, and the event is valid during the call.
    let (conn, event) = unsafe { (&*(*id).context.cast::<Conn<RdmaCm>>(), &*event) };
    let _in_callback = InCallback::enter();
    conn.set_callback_task(true);
    // SAFETY: This is the callback of `id`, and `event` the event that it is called with.
    if unsafe { handle(conn, id, event) } {
        // SAFETY: The id is alive during its callback, and was established or asked for.
        let _ = unsafe { RdmaCm::disconnect(id) };
    }
    conn.set_callback_task(false);
    // The id is never destroyed by its callback's return.
    0
}
