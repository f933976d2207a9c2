// SPDX-License-Identifier: GPL-2.0

//! Making and ending connections.

use crate::{
    bindings,
    client::ClientRef,
    cm::{
        callback::{
            current_task,
            InCallback, //
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
    device::Device,
    removal::{
        self,
        OnRemoval, //
    }, //
};
use core::{
    mem::replace,
    net::SocketAddr,
    ptr::NonNull, //
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

/// What fits into a rejection, in bytes.
const REJECT_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;

impl Id {
    /// Connects the id's QP to the peer (`rdma_connect`), waits until that has worked or failed,
    /// and returns what the peer sent along.
    ///
    /// `handler` is told of everything that happens to the connection, the first event included.
    ///
    /// After an error, what was posted to the QP stays there: [`Qp::drain`](crate::qp::Qp::drain)
    /// or the QP's end gives it back.
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
        let shared = &self.state().shared;
        let id = self.inner.as_raw();
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        let mut installed = false;
        shared
            .step(established, || {
                shared.set_handler(handler)?;
                installed = true;
                // SAFETY: The id is alive by the invariant of `State`, and not locked by this task,
                // which is in no callback: `step` has looked. The parameters are copied by the
                // call.
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
                // If the device goes, the handler is still to be told that.
                if installed && !shared.is_gone() {
                    shared.release_handler();
                }
            })
    }

    /// Accepts a connection request (`rdma_accept`), once. The peer may send from here on. If the
    /// connection manager fails, it has rejected the request.
    ///
    /// `handler` is told of everything that happens to the connection. A peer that does not confirm
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
        let shared = &self.state().shared;
        let locked = shared.is_locked_by_current();
        if !locked && InCallback::is_current() {
            // Who has the lock of this id may wait for that of the current callback's.
            return Err(EDEADLK);
        }
        shared.take_answer()?;
        // Should the device go, it can still be rejected.
        shared
            .set_handler(handler)
            .inspect_err(|_| shared.set_unanswered())?;
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
        to_result(ret).inspect_err(|_| shared.release_handler())?;
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

    /// Rejects a connection request with data of the ULP's own (`rdma_reject`).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data or if there is no request that is still to
    /// be answered, or the connection manager's error.
    pub fn reject(&self, private_data: &[u8], cx: &Sleepable) -> Result {
        self.reject_for(RejectReason::CONSUMER_DEFINED, private_data, cx)
    }

    /// Rejects a connection request for a reason (`rdma_reject`). iWARP has no reasons: peers get
    /// the data only.
    ///
    /// # Errors
    ///
    /// As [`Id::reject`], and `EINVAL` for a reason above 255.
    pub fn reject_for(&self, reason: RejectReason, private_data: &[u8], _cx: &Sleepable) -> Result {
        if private_data.len() > REJECT_LEN {
            return Err(EINVAL);
        }
        let (len, reason) = (private_data.len().try_into()?, reason.0.try_into()?);
        self.state().shared.take_answer()?;
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
        self.inner.notify_established_later();
    }

    /// Ends the connection (`rdma_disconnect`): the QP goes to the error state, its requests are
    /// flushed, and the handler gets [`Event::Disconnected`](crate::cm::Event::Disconnected). If the
    /// peer has not confirmed yet that the connection is there, it ends as soon as it has, or when
    /// its time is over ([`Id::accept`]); if
    /// [`Id::notify_established`] was just called, as soon as the handler is told. If
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
        self.inner.disconnect_later();
    }

    /// Lets go of the handler before the last event, for an owner of the connection that gives it
    /// up. A call of the handler that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.state().shared.release_handler();
    }
}

/// What is told of a connection that [`Id::connect_to`] makes.
pub trait Connect: Handler {
    /// The way to the peer is known: make the QP of `id`, post receives, and say how to connect.
    /// The crate then asks the peer (`rdma_connect_locked`).
    ///
    /// Called in process context, once, before any event. An error ends the connection: it becomes
    /// [`Event::Failed`].
    fn resolved(&self, id: &Id, cx: &Sleepable) -> Result<ConnParam<'_>>;
}

/// How the connection of an id is made. Holds the id until the peer was asked.
pub(super) struct Driver {
    id: Id,
    connect: Arc<dyn Connect>,
    timeout_ms: u32,
}

impl Id {
    /// Begins to connect to an address and does not wait, as ULPs do that must not block.
    ///
    /// `handler` is asked for a QP when the way to the peer is known, and is then told of all that
    /// happens: that the connection is there, is gone, or could not be made. Each of finding the
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
        let driver = Driver {
            id: self.clone(),
            connect,
            timeout_ms,
        };
        let driver = Arc::new(driver, GFP_KERNEL)?;
        let shared = &self.state().shared;
        shared.set_driver(handler, driver)?;
        let (id, src) = (self.inner.as_raw(), core::ptr::null_mut());
        // SAFETY: The id is alive by the invariant of `State`, and the address is copied by the
        // call.
        let ret = unsafe { bindings::rdma_resolve_addr(id, src, dst.as_mut_ptr(), timeout) };
        to_result(ret).inspect_err(|_| {
            shared.cancel();
        })
    }
}

impl Driver {
    /// Takes the next step after an event of the id, whose callback this is.
    pub(super) fn step(&self, event: bindings::rdma_cm_event_type, shared: &Shared) -> Result {
        match event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => self.resolve_route(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => self.connect(shared),
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

    fn connect(&self, shared: &Shared) -> Result {
        // SAFETY: This is in the id's callback, and the connection manager calls back in process
        // context.
        let cx = unsafe { Sleepable::assume() };
        let param = self.connect.resolved(&self.id, &cx)?;
        let mut param = self.id.qp_param(&param)?;
        shared.ask(|| {
            // SAFETY: The id is alive by the invariant of `State`, and locked as this is its
            // callback. The parameters are copied by the call.
            to_result(unsafe {
                bindings::rdma_connect_locked(self.id.inner.as_raw(), &raw mut param)
            })
        })
    }
}

impl Shared {
    /// Lets go of what makes the connection.
    pub(super) fn release_driver(&self) {
        if !self.is_driven() {
            return;
        }
        let driver = self.driver.lock().take();
        drop(driver);
    }

    /// Gives up a connection for which the peer was not asked yet, if nobody waits for it, and says
    /// whether there was one.
    pub(super) fn cancel(&self) -> bool {
        let driver = self.driver.lock().take();
        if driver.is_none() {
            return false;
        }
        self.release_handler();
        true
    }

    /// Asks the peer by calling `connect`, unless that was given up.
    pub(super) fn ask(&self, connect: impl FnOnce() -> Result) -> Result {
        let mut driver = self.driver.lock();
        if driver.is_none() {
            return Err(ECANCELED);
        }
        connect()?;
        self.attach();
        let done = driver.take();
        drop(driver);
        drop(done);
        Ok(())
    }

    /// Takes the next step of a connection that is made by its events; says `false` of others.
    pub(super) fn drive(&self, event: bindings::rdma_cm_event_type) -> bool {
        if !self.is_driven() {
            return false;
        }
        let Some(driver) = self.driver.lock().clone() else {
            return false;
        };
        let stepped = {
            let _telling = self.telling.lock();
            driver.step(event, self)
        };
        if let Err(e) = stepped {
            // Unless it was given up, or the handler knows that the device goes.
            let given_up = self.driver.lock().take().is_none();
            if !given_up {
                self.tell(Event::Failed(e), true, || {});
            }
        }
        true
    }
}

/// How long the end of an id waits for the manager's worker, in milliseconds. It runs at once,
/// unless the callback of another id keeps it.
pub(crate) const FOUND_MS: u32 = 10_000;

/// What the callback of an id works with. Lives as long as the C id, at least.
#[pin_data]
pub(crate) struct Shared {
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
    /// The id, until it is about to be destroyed: for the removal of its device.
    #[pin]
    id: Mutex<Option<RawId>>,
    place: removal::Place,
}

/// # Invariants
///
/// An id that is not destroyed.
#[derive(Clone, Copy)]
pub(super) struct RawId(pub(super) NonNull<bindings::rdma_cm_id>);

// SAFETY: An id may be used and destroyed from any thread.
unsafe impl Send for RawId {}

impl OnRemoval for Shared {
    fn place(&self) -> &removal::Place {
        &self.place
    }

    fn gone(self: Arc<Self>) {
        let slot = self.handler.lock();
        self.removed.store(true, Relaxed);
        drop(slot);
        self.fail_step(ENODEV);
    }

    fn removed(&self, _cx: &Sleepable) {
        // A callback may wait for what is told here.
        let _in_callback = InCallback::enter();
        self.release_driver();
        self.tell(Event::DeviceRemoval, true, || {});
    }

    fn disconnect(&self) {
        let id = self.id.lock();
        match *id {
            Some(id) if self.is_attached() && self.end() => {
                // SAFETY: By its invariant the id is not destroyed, nor will it be while it is
                // locked. C leaves ids alone that are not connected any more.
                unsafe { bindings::rdma_disconnect(id.0.as_ptr()) };
            }
            _ => {}
        }
    }
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
                id <- new_mutex!(None),
                place: removal::Place::new(),
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
    pub(crate) fn end(&self) -> bool {
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

    pub(crate) fn is_attached(&self) -> bool {
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

    pub(super) fn set_id(&self, id: Option<RawId>) {
        *self.id.lock() = id;
    }

    pub(super) fn is_gone(&self) -> bool {
        self.removed.load(Relaxed)
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
    let _in_callback = InCallback::enter();
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

/// A step that somebody waits for.
pub(super) enum Step {
    /// Nobody waits.
    Idle,
    /// Started; the event with this C value is its success, and what comes along goes into the box.
    Waiting(bindings::rdma_cm_event_type, KBox<PrivateData>),
    /// Ended as it should.
    Done(KBox<PrivateData>),
    /// Ended otherwise.
    Failed(Error),
}

impl Shared {
    /// Starts a step and waits for the event that is its success, or for a failure.
    pub(super) fn step(
        &self,
        success: bindings::rdma_cm_event_type,
        start: impl FnOnce() -> Result,
    ) -> Result<PrivateData> {
        if InCallback::is_current() {
            return Err(EDEADLK);
        }
        let private_data = KBox::new(PrivateData::new(&[]), GFP_KERNEL)?;
        {
            let mut step = self.step.lock();
            if !matches!(*step, Step::Idle) {
                return Err(EBUSY);
            }
            if self.is_gone() {
                return Err(ENODEV);
            }
            *step = Step::Waiting(success, private_data);
        }
        let started = start();
        let mut step = self.step.lock();
        if let Err(e) = started {
            *step = Step::Idle;
            return Err(e);
        }
        loop {
            match replace(&mut *step, Step::Idle) {
                Step::Done(private_data) => return Ok(*private_data),
                Step::Failed(e) => return Err(e),
                waiting => *step = waiting,
            }
            if self.changed.wait_interruptible(&mut step) {
                *step = Step::Idle;
                return Err(ERESTARTSYS);
            }
        }
    }

    /// Ends the step that is waited for, if a result of this event does that: what the peer sent
    /// along, or an error.
    pub(super) fn end_step(&self, event: bindings::rdma_cm_event_type, result: Result<&[u8]>) {
        let mut step = self.step.lock();
        let mut ends = false;
        *step = match replace(&mut *step, Step::Idle) {
            Step::Waiting(success, mut to) if result.is_err() || success == event => {
                ends = true;
                match result {
                    Ok(sent) => {
                        *to = PrivateData::new(sent);
                        Step::Done(to)
                    }
                    Err(e) => Step::Failed(e),
                }
            }
            other => other,
        };
        drop(step);
        // Who waits is not to be woken up only to wait for the lock.
        if ends {
            self.changed.notify_all();
        }
    }

    /// Fails the step that is waited for, if there is one.
    pub(super) fn fail_step(&self, error: Error) {
        self.end_step(
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE,
            Err(error),
        );
    }
}
