// SPDX-License-Identifier: GPL-2.0

//! Ids of connections.

use super::{
    addr::SockAddr,
    callback::{
        on_event,
        Shared, //
    },
    ConnParam,
    Handler,
    PrivateData, //
};
use crate::{
    bindings,
    client::ClientRef,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Queue,
        Teardown, //
    },
    device::Device,
    gate::{
        Hold,
        Kind, //
    }, //
};
use core::{
    net::SocketAddr,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    impl_has_work,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Release, //
            },
            Atomic, //
        },
        Arc,
        SetOnce, //
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// # Invariants
///
/// - `raw` is an id whose callback is [`on_event`] with `shared` as its context.
/// - The id is in the list of `device`.
pub(super) struct State {
    raw: NonNull<bindings::rdma_cm_id>,
    shared: Arc<Shared>,
    device: SetOnce<Device>,
    client: ClientRef,
    _hold: Hold,
}

impl State {
    pub(super) fn new(
        raw: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
        client: &ClientRef,
    ) -> Self {
        // INVARIANT: The caller has set callback and context.
        Self {
            raw,
            shared,
            device: SetOnce::new(),
            client: client.clone(),
            _hold: client.hold(Kind::Id),
        }
    }

    /// Keeps the id's device from going away unnoticed.
    fn bind(&self) -> Result {
        // SAFETY: The id is alive, and its device is set by now.
        let device = self.client.device(unsafe { self.raw.as_ref() }.device)?;
        // SAFETY: `teardown` removes the id, as the device is kept.
        unsafe { device.inner().bound.add(self.raw, self.shared.clone()) }?;
        self.device.populate(device);
        Ok(())
    }
}

// SAFETY: An id may be destroyed from any thread.
unsafe impl Send for State {}
// SAFETY: An id may be used from any thread; the connection manager locks it.
unsafe impl Sync for State {}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        if let Some(device) = self.device.as_ref() {
            device.inner().bound.remove(self.raw);
        }
        // SAFETY: By the type invariant; the QP holds `Inner`, so it is gone. This waits for the
        // callback.
        unsafe { bindings::rdma_destroy_id(self.raw.as_ptr()) };
        Fate::Gone
    }
}

/// What the handles of one id share.
#[pin_data]
pub(crate) struct Inner {
    state: Deferred<State>,
    has_qp: Atomic<bool>,
    #[pin]
    disconnect: Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Inner { self.disconnect }
}

impl WorkItem for Inner {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let _ = this.disconnect();
    }
}

/// The right to have an id's only QP.
pub(crate) struct QpClaim(Arc<Inner>);

impl QpClaim {
    pub(crate) fn as_raw(&self) -> *mut bindings::rdma_cm_id {
        self.0.as_raw()
    }
}

impl Drop for QpClaim {
    fn drop(&mut self) {
        self.0.has_qp.store(false, Release);
    }
}

impl Inner {
    pub(super) fn new(state: Deferred<State>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                state,
                has_qp: Atomic::new(false),
                disconnect <- new_work!("rdma::cm::Id::disconnect"),
            }),
            GFP_KERNEL,
        )
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::rdma_cm_id {
        self.state.raw.as_ptr()
    }

    pub(super) fn bind(&self) -> Result {
        self.state.bind()
    }

    /// Fails unless the id has a connection of the device's own manager, which the calls that work
    /// on it do not look after.
    fn attached(&self) -> Result {
        if self.state.shared.is_attached() {
            Ok(())
        } else {
            Err(EINVAL)
        }
    }

    fn disconnect(&self) -> Result {
        self.state.shared.fail_step(ECANCELED);
        self.attached()?;
        // SAFETY: The id is alive, and what it is attached to stays until it is destroyed. An id
        // that is not connected is left alone.
        to_result(unsafe { bindings::rdma_disconnect(self.as_raw()) })
    }

    /// Returns the device that the id is bound to, or null.
    pub(crate) fn device_raw(&self) -> *mut bindings::ib_device {
        self.state
            .device
            .as_ref()
            .map_or(core::ptr::null_mut(), Device::as_raw)
    }

    pub(crate) fn claim_qp(self: &Arc<Self>) -> Result<QpClaim> {
        if self.has_qp.xchg(true, Full) {
            return Err(EBUSY);
        }
        Ok(QpClaim(self.clone()))
    }
}

/// A connection's id, as `struct rdma_cm_id` of a reliable connected service.
///
/// A counted handle.
#[derive(Clone)]
pub struct Id {
    pub(super) inner: Arc<Inner>,
}

impl Id {
    /// Creates an id for an active connection, in the initial network namespace (`rdma_create_id`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or the connection manager's error.
    #[inline(never)]
    pub fn create(client: &ClientRef, _cx: &Sleepable) -> Result<Self> {
        let reserved = Deferred::reserve()?;
        let shared = Shared::new()?;
        // SAFETY: The callback's context lives until the id is destroyed; so does the client's
        // name.
        let raw = from_err_ptr(unsafe {
            bindings::__rdma_create_kernel_id(
                &raw mut bindings::init_net,
                Some(on_event),
                Arc::as_ptr(&shared).cast_mut().cast(),
                bindings::rdma_ucm_port_space_RDMA_PS_TCP,
                bindings::ib_qp_type_IB_QPT_RC,
                client.name().as_char_ptr(),
            )
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        let state = reserved.fill(State::new(raw, shared, client));
        Ok(Self {
            inner: Inner::new(state)?,
        })
    }

    /// Creates an id and finds the device, the path and the route to an address: what an active
    /// connection begins with. Waits at most `timeout_ms` for each step.
    ///
    /// # Errors
    ///
    /// As [`Id::create`], [`Id::resolve_addr`] and [`Id::resolve_route`].
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

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    fn state(&self) -> &State {
        &self.inner.state
    }

    /// Finds the device and the path to an address (`rdma_resolve_addr`) and waits for that.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` or `EHOSTUNREACH` if nobody has the address, `ENODEV` if the device is not the
    /// client's (any more), `ERESTARTSYS` on a signal, `ECANCELED` after [`Id::disconnect`], `EBUSY` if
    /// another step is waited for, `EDEADLK` in a callback of the connection manager. After an
    /// error drop the id: it may keep the device from going.
    pub fn resolve_addr(&self, dst: SocketAddr, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let mut dst = SockAddr::from(dst);
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED;
        let (id, src) = (self.inner.as_raw(), core::ptr::null_mut());
        self.state().shared.step(resolved, || {
            // SAFETY: The id is alive, and the address is copied by the call.
            to_result(unsafe { bindings::rdma_resolve_addr(id, src, dst.as_mut_ptr(), timeout) })
        })?;
        self.inner.bind()
    }

    /// Finds the route (`rdma_resolve_route`) and waits for that.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_addr`].
    pub fn resolve_route(&self, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED;
        self.state().shared.step(resolved, || {
            // SAFETY: The id is alive.
            to_result(unsafe { bindings::rdma_resolve_route(self.inner.as_raw(), timeout) })
        })?;
        Ok(())
    }

    /// Returns the client's handle of the device that the id was resolved to, or came on.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` before that.
    pub fn device(&self) -> Result<&Device> {
        self.state().device.as_ref().ok_or(ENOTCONN)
    }

    /// Connects the id's QP to the peer (`rdma_connect`), waits until that has worked or failed,
    /// and returns what the peer sent along.
    ///
    /// `handler` is told of everything that happens to the connection, the first event included.
    ///
    /// After an error, what was posted to the QP stays there: [`Qp::drain`](crate::qp::Qp::drain) or
    /// the QP's end gives it back.
    ///
    /// # Errors
    ///
    /// `ECONNREFUSED` if the peer rejects; `EINVAL` without a QP or with too much private data;
    /// `EBUSY` if the id has a handler already; `ENODEV` if its device goes; the errors of waiting as for [`Id::resolve_addr`];
    /// or the connection manager's error.
    pub fn connect(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result<PrivateData> {
        let mut param = self.qp_param(param)?;
        let shared = &self.state().shared;
        let id = self.inner.as_raw();
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        let mut installed = false;
        shared
            .step(established, || {
                shared.set_handler(handler)?;
                installed = true;
                // SAFETY: The id is alive, and not locked by this task, which is in no callback.
                // The parameters are copied by the call.
                to_result(unsafe {
                    bindings::rdma_lock_handler(id);
                    let ret = bindings::rdma_connect_locked(id, &raw mut param);
                    if ret == 0 {
                        shared.attach();
                    }
                    bindings::rdma_unlock_handler(id);
                    ret
                })
            })
            .inspect_err(|_| {
                if installed {
                    shared.release_handler();
                }
            })
    }

    /// Accepts a connection request (`rdma_accept`). The peer may send from here on.
    ///
    /// `handler` is told of everything that happens to the connection.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a QP or with too much private data; `EBUSY` if the id has a handler
    /// already; `ENODEV` if its device goes; or the connection manager's error. The handler is
    /// released.
    pub fn accept(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result {
        let mut param = self.qp_param(param)?;
        let shared = &self.state().shared;
        shared.set_handler(handler)?;
        let id = self.inner.as_raw();
        let locked = shared.is_locked_by_current();
        // SAFETY: The id is alive, and the parameters are copied by the call. It needs the id's
        // handler lock, which a callback of the id has already.
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
        to_result(ret).inspect_err(|_| shared.release_handler())
    }

    fn qp_param(&self, param: &ConnParam<'_>) -> Result<bindings::rdma_conn_param> {
        // SAFETY: The id is alive; the QP's presence is only looked at.
        if unsafe { (*self.inner.as_raw()).qp }.is_null() {
            return Err(EINVAL);
        }
        param.to_raw()
    }

    /// Rejects a connection request (`rdma_reject`).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data or if there is nothing to reject, or the
    /// connection manager's error.
    pub fn reject(&self, private_data: &[u8], _cx: &Sleepable) -> Result {
        self.inner.attached()?;
        let len = private_data.len().try_into()?;
        let reason = bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED as u8;
        // SAFETY: The id is alive, and the data are copied by the call.
        to_result(unsafe {
            bindings::rdma_reject(
                self.inner.as_raw(),
                private_data.as_ptr().cast(),
                len,
                reason,
            )
        })
    }

    /// Ends the connection (`rdma_disconnect`): the QP goes to the error state, its requests are
    /// flushed, and the handler gets [`Event::Disconnected`](super::Event::Disconnected). If another
    /// thread is still making the connection, the step that it waits for fails with `ECANCELED`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the id was never connected, or the driver's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        self.inner.disconnect()
    }

    /// As [`Id::disconnect`], from a work item: for completion handlers that may not sleep.
    pub fn disconnect_later(&self) {
        // Already queued is as good.
        let _ = Queue::get().enqueue(self.inner.clone());
    }

    /// Lets go of the handler before the last event, for an owner of the connection that gives it
    /// up. A call of the handler that has begun goes on.
    pub fn release_handler(&self) {
        self.state().shared.release_handler();
    }
}
