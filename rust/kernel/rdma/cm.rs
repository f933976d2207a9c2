// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::create`],
//! [`Id::resolve_addr`], [`Id::resolve_route`], a QP, receives, [`Id::connect`]. A passive one
//! comes as a [`Request`] to a [`Listener`] and is accepted with [`Id::accept`]. What happens
//! afterwards is told to a [`Handler`].
//!
//! An id is destroyed by a work item when its last handle is dropped, which may be in its own
//! handler. Its QP keeps it.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

mod addr;
mod event;
mod listener;

pub use event::{
    Event,
    Handler, //
};
pub use listener::{
    Accept,
    Listener,
    Request, //
};

use crate::{
    bindings,
    client::ClientRef,
    context::{
        Context as _,
        Sleepable, //
    },
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
use addr::SockAddr;
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
    new_condvar,
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        CondVar,
        Mutex,
        SetOnce, //
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// How a connection is to be made, as `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
pub struct ConnParam<'a> {
    /// What the peer gets along with the request or the answer; at most 56 bytes in a request, 196
    /// in an answer.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding at the peer. With 0 they wait for
    /// ever.
    pub initiator_depth: u8,
    /// How often an unanswered packet is sent again, up to 7. rxe takes 7 for "always".
    pub retry_count: u8,
    /// How often a message is sent again when the peer has posted no receive, up to 7, which means
    /// "always".
    pub rnr_retry_count: u8,
}

impl Default for ConnParam<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 6,
        }
    }
}

impl ConnParam<'_> {
    fn to_raw(self) -> Result<bindings::rdma_conn_param> {
        Ok(bindings::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len().try_into()?,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: self.retry_count.min(7),
            rnr_retry_count: self.rnr_retry_count.min(7),
            ..Default::default()
        })
    }
}

/// What a peer sent along with its answer.
#[derive(Clone, Copy)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; Self::MAX],
}

impl PrivateData {
    const MAX: usize = 255;

    fn new(from: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        let mut len = 0;
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = *from;
            len += 1;
        }
        Self { len, bytes }
    }
}

impl core::ops::Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or(&[])
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
struct Shared {
    #[pin]
    step: Mutex<Step>,
    #[pin]
    changed: CondVar,
    #[pin]
    handler: Mutex<Option<Arc<dyn Handler>>>,
    /// The task that is in a callback of the id, and so has the id's handler lock, or zero.
    in_callback: Atomic<usize>,
}

impl Shared {
    fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                step <- new_mutex!(Step::Idle),
                changed <- new_condvar!(),
                handler <- new_mutex!(None),
                in_callback: Atomic::new(0),
            }),
            GFP_KERNEL,
        )
    }

    /// Ends the step that is waited for, if an event of this type does that.
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

    fn is_in_callback(&self) -> bool {
        self.in_callback.load(Relaxed) == current_task()
    }

    fn on_event(&self, raw: &bindings::rdma_cm_event) {
        // SAFETY: The callback gets events of a connected service, with their private data.
        let event = unsafe { Event::from_raw(raw) };
        match event {
            Event::Established { private_data } => {
                self.end_step(raw.event, Ok(PrivateData::new(private_data)))
            }
            Event::Failed(e) => self.end_step(raw.event, Err(e)),
            Event::Disconnected => self.end_step(raw.event, Err(ENOTCONN)),
            Event::DeviceRemoval => self.end_step(raw.event, Err(ENODEV)),
            Event::Other(
                bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED
                | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED,
            ) => return self.end_step(raw.event, Ok(PrivateData::new(&[]))),
            Event::Other(_) => {}
        }
        let handler = if event.is_last() {
            self.handler.lock().take()
        } else {
            self.handler.lock().clone()
        };
        if let Some(handler) = handler {
            // SAFETY: The connection manager calls back in process context, holding a mutex of its
            // own only.
            let cx = unsafe { Sleepable::assume() };
            handler.event(event, &cx);
        }
    }
}

/// The callback of every connection's id.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Shared`].
unsafe extern "C" fn on_event(
    id: *mut bindings::rdma_cm_id,
    event: *mut bindings::rdma_cm_event,
) -> c_int {
    // SAFETY: The context of an id with this callback is its `Shared`, which lives until the id is
    // destroyed, and the event is valid during the call.
    let (shared, event) = unsafe { (&*(*id).context.cast::<Shared>(), &*event) };
    shared.in_callback.store(current_task(), Relaxed);
    shared.on_event(event);
    shared.in_callback.store(0, Relaxed);
    // The id is never destroyed by its callback's return.
    0
}

/// Returns the address of the current task, to be compared.
fn current_task() -> usize {
    // SAFETY: There is a current task.
    unsafe { bindings::get_current() as usize }
}

/// # Invariants
///
/// `raw` is an id whose callback is [`on_event`] with `shared` as its context, or null.
struct State {
    raw: NonNull<bindings::rdma_cm_id>,
    shared: Arc<Shared>,
    device: SetOnce<Device>,
    client: ClientRef,
    _hold: Hold,
}

// SAFETY: An id may be destroyed from any thread.
unsafe impl Send for State {}
// SAFETY: An id may be used from any thread; the connection manager locks it.
unsafe impl Sync for State {}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
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
        // SAFETY: The id is alive while `this` lives, and work items may sleep. An id that is not
        // connected is left alone.
        unsafe { bindings::rdma_disconnect(this.as_raw()) };
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
    /// Takes over a C id whose callback and context are set.
    fn new(state: Deferred<State>) -> Result<Arc<Self>> {
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
    inner: Arc<Inner>,
}

impl Id {
    /// Creates an id for an active connection, in the initial network namespace (`rdma_create_id`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or the connection manager's error.
    pub fn create(client: &ClientRef, _cx: &Sleepable) -> Result<Self> {
        let reserved = Deferred::reserve()?;
        let hold = client.hold(Kind::Id);
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
        // INVARIANT: Just created.
        let state = reserved.fill(State {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            shared,
            device: SetOnce::new(),
            client: client.clone(),
            _hold: hold,
        });
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

    /// Starts a step and waits for the event that is its success, or for a failure.
    fn step(
        &self,
        success: bindings::rdma_cm_event_type,
        start: impl FnOnce(*mut bindings::rdma_cm_id) -> c_int,
    ) -> Result<PrivateData> {
        let shared = &self.state().shared;
        if shared.is_in_callback() {
            return Err(EDEADLK);
        }
        {
            let mut step = shared.step.lock();
            if matches!(*step, Step::Waiting(_)) {
                return Err(EBUSY);
            }
            *step = Step::Waiting(success);
        }
        let started = to_result(start(self.inner.as_raw()));
        let mut step = shared.step.lock();
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
            if shared.changed.wait_interruptible(&mut step) {
                *step = Step::Idle;
                return Err(ERESTARTSYS);
            }
        }
    }

    /// Finds the device and the path to an address (`rdma_resolve_addr`) and waits for that.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` or `EHOSTUNREACH` if nobody has the address, `ENODEV` if the device is not the
    /// client's (any more), `ERESTARTSYS` on a signal, `EBUSY` if another step is waited for, `EDEADLK` in a callback of
    /// the id.
    pub fn resolve_addr(&self, dst: SocketAddr, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let mut dst = SockAddr::from(dst);
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED;
        self.step(resolved, |id| {
            // SAFETY: The id is alive, and the address is copied by the call.
            unsafe {
                bindings::rdma_resolve_addr(id, core::ptr::null_mut(), dst.as_mut_ptr(), timeout)
            }
        })?;
        self.bind_device()
    }

    /// Keeps the id's device from going away unnoticed.
    fn bind_device(&self) -> Result {
        // SAFETY: The id is alive, and its device is set by now.
        let raw = unsafe { (*self.inner.as_raw()).device };
        let device = self.state().client.device(raw)?;
        self.state().device.populate(device);
        Ok(())
    }

    /// Finds the route (`rdma_resolve_route`) and waits for that.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_addr`].
    pub fn resolve_route(&self, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED;
        // SAFETY: The id is alive.
        self.step(resolved, |id| unsafe {
            bindings::rdma_resolve_route(id, timeout)
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

    /// Sets what is told of the connection's events from here on.
    fn set_handler(&self, handler: Arc<dyn Handler>) {
        let old = self.state().shared.handler.lock().replace(handler);
        drop(old);
    }

    /// Connects the id's QP to the peer (`rdma_connect`), waits until that has worked or failed,
    /// and returns what the peer sent along.
    ///
    /// `handler` is told of everything that happens to the connection, the first event included.
    ///
    /// # Errors
    ///
    /// `ECONNREFUSED` if the peer rejects; `EINVAL` without a QP or with too much private data;
    /// `ERESTARTSYS` on a signal; or the connection manager's error.
    pub fn connect(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result<PrivateData> {
        let mut raw = self.qp_param(param)?;
        self.set_handler(handler);
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        // SAFETY: The id is alive, and the parameters are copied by the call.
        self.step(established, |id| unsafe {
            bindings::rdma_connect(id, &raw mut raw)
        })
        .inspect_err(|_| self.release_handler())
    }

    /// Accepts a connection request (`rdma_accept`). The peer may send from here on.
    ///
    /// `handler` is told of everything that happens to the connection.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a QP or with too much private data, or the connection manager's error. The
    /// handler is released.
    pub fn accept(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result {
        let mut raw = self.qp_param(param)?;
        self.set_handler(handler);
        let id = self.inner.as_raw();
        let in_callback = self.state().shared.is_in_callback();
        // SAFETY: The id is alive, and the parameters are copied by the call. It needs the id's
        // handler lock, which a callback has already.
        let ret = unsafe {
            if !in_callback {
                bindings::rdma_lock_handler(id);
            }
            let ret = bindings::rdma_accept(id, &raw mut raw);
            if !in_callback {
                bindings::rdma_unlock_handler(id);
            }
            ret
        };
        to_result(ret).inspect_err(|_| self.release_handler())
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
    /// `EINVAL` with more than 148 bytes of private data, or the connection manager's error.
    pub fn reject(&self, private_data: &[u8], _cx: &Sleepable) -> Result {
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
    /// flushed, and the handler gets [`Event::Disconnected`].
    ///
    /// # Errors
    ///
    /// `EINVAL` if the id was never connected, or the driver's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        // SAFETY: The id is alive.
        to_result(unsafe { bindings::rdma_disconnect(self.inner.as_raw()) })
    }

    /// Ends the connection from a work item: for completion handlers that may not sleep.
    pub fn disconnect_later(&self) {
        // Already queued is as good.
        let _ = Queue::get().enqueue(self.inner.clone());
    }

    /// Ends the step that another thread waits for, if there is one: it fails with `ECANCELED`.
    pub fn cancel(&self) {
        let event = bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE;
        self.state().shared.end_step(event, Err(ECANCELED));
    }

    /// Lets go of the handler before the last event, for an owner of the connection that gives it
    /// up. A call of the handler that has begun goes on.
    pub fn release_handler(&self) {
        let handler = self.state().shared.handler.lock().take();
        drop(handler);
    }
}
