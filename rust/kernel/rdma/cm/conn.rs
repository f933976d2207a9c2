// SPDX-License-Identifier: GPL-2.0

//! The state of connections, of either connection manager.

use crate::{
    cm::{
        Event,
        Handler,
        InCallback,
        Pending,
        PrivateData, //
    },
    completion::{
        wait_event,
        Completion, //
    },
    deferred,
    device::Device,
    prelude::internal::*,
    removal, //
};
use core::mem::replace;
use kernel::{
    error::from_err_ptr,
    new_mutex,
    sync,
    workqueue, //
};

/// A connection manager of C.
pub(crate) trait Manager: Sized + Send + Sync + 'static {
    type Id;
    /// A connection that is made by its events.
    type Async: Send + Sync;
    /// The part of a connection that only this manager has.
    type Data: Send + Sync;

    /// Returns that part of a new connection.
    fn data() -> impl PinInit<Self::Data>;

    /// Disconnects the id of a connection, if it is connected.
    ///
    /// # Safety
    ///
    /// The id is alive and the connection's, and its state is Requested or a later one.
    unsafe fn disconnect(conn: &Conn<Self>, id: *mut Self::Id) -> Result;

    /// Tells the manager that the peer uses the connection. Does not sleep. Returns whether an
    /// event comes.
    ///
    /// # Safety
    ///
    /// The id is alive, and its state is Requested or a later one.
    unsafe fn notify(id: *mut Self::Id) -> bool;

    /// Destroys an id, and waits for its callback.
    ///
    /// # Safety
    ///
    /// The id is alive, and is not used after this.
    unsafe fn destroy(id: *mut Self::Id);
}

/// The state of a connection of either connection manager, rdma_cm or ib_cm.
///
/// ```text
/// state        left by                                                for
/// -----        -------                                                ---
/// Idle         address resolved                                       Resolved
/// Resolved     connect() has asked the peer                           Connecting
///              connect_to() begins to ask the peer                    Asking
/// Asking       asked                                                  Connecting
///              refused by C                                           Resolved
/// Requested    accept()                                               Connecting
///              reject(), the peer gives up                            Closed
/// Connecting   established                                            Established
///              notify_established(), by its work item                 Notified
///              rejected, failed, disconnected, not confirmed in time  Closed
/// Notified     established                                            Established
///              rejected, failed, disconnected                         Closed
/// Established  rejected, disconnected                                 Closed
/// Closed       established late, and disconnected at once              Established
/// any          its id destroyed                                        Destroyed
/// ```
///
/// A passive connection begins as Requested, and one of ib_cm as Connecting. What fails before the
/// peer was asked leaves the state as it is.
///
/// A disconnection is remembered: if the connection is established only afterwards, the callback
/// ends it, as C does nothing while the peer's last message is still to come (`ib_send_cm_dreq()`
/// in core/cm.c). Notified leaves it to the callback altogether: the manager's worker cancels the
/// message that waits for the peer's last one only if the state of the C id has not changed
/// (`cm_establish_handler()`), and otherwise the id lives on for a minute. While Asking, C is
/// called without the lock, as an iWARP driver may take long. That task disconnects.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(crate) enum State {
    /// The device and the addresses are not known, or C may still change them.
    Idle,
    /// The device and the addresses are known, and C no longer changes them.
    Resolved,
    /// The peer is being asked by the callback.
    Asking,
    /// A request has come that was neither accepted nor rejected. The id can be disconnected.
    Requested,
    /// The peer was asked, or a request accepted.
    Connecting,
    /// The ULP has reported that the connection is established, which the manager's worker has yet
    /// to note.
    Notified,
    Established,
    /// The last event has come, or the request was rejected.
    Closed,
    /// The C id is destroyed. There is no handle of it left, and no event comes.
    Destroyed,
}

/// The call that waits for an event, or the connection that is made by events.
enum Awaited<M: Manager> {
    None,
    /// A call waits for the event with this C value. The data that come along go into the box, if
    /// it wants them.
    Event(u32, Option<KBox<PrivateData>>),
    Done(Result<Option<KBox<PrivateData>>>),
    /// No call ever waits: the connection is made by its events. Kept until the peer was asked.
    Async(Option<Arc<M::Async>>),
}

struct Inner<M: Manager> {
    state: State,
    /// The connection is to be disconnected, which the callback does if it cannot be done yet.
    end: bool,
    /// The device goes: no handler is set, and no call waits.
    gone: bool,
    wait: Awaited<M>,
    handler: Option<Arc<dyn Handler>>,
}

impl<M: Manager> Inner<M> {
    fn set_handler(&mut self, handler: &Arc<dyn Handler>) -> Result {
        if self.gone {
            return Err(ENODEV);
        }
        if self.handler.is_some() {
            return Err(EBUSY);
        }
        self.handler = Some(handler.clone());
        Ok(())
    }

    /// Changes to the state that an event leads to. Returns whether it is the last event, and
    /// whether to disconnect.
    fn change_state(&mut self, event: &Event<'_>, is_resolved: bool) -> (bool, bool) {
        let was = self.state;
        let (state, is_last, disconnect) = match event {
            Event::Other(_) if is_resolved && was == State::Idle => (State::Resolved, false, false),
            Event::AddrChange | Event::Other(_) => (was, false, false),
            // After the last event there is no handler left for a connection.
            Event::Established { .. } => {
                let disconnect = self.end || was == State::Closed;
                (State::Established, false, disconnect)
            }
            // The peer's hardware address has changed: rdma_cm reports that, but does not end the
            // connection.
            Event::Failed(_) if was == State::Established => (was, false, true),
            // Where the end was left to an event, that will not come.
            _ if was >= State::Requested => {
                let disconnect = was == State::Notified && self.end;
                (State::Closed, true, disconnect)
            }
            _ => (was, true, false),
        };
        self.state = state;
        (is_last, disconnect)
    }

    /// Takes the result of the event that a call waits for, if it has come.
    fn take_result(&mut self) -> Option<Result<Option<KBox<PrivateData>>>> {
        match replace(&mut self.wait, Awaited::None) {
            Awaited::Done(result) => return Some(result),
            waiting => self.wait = waiting,
        }
        None
    }

    /// Takes the connection that is made by its events, unless it has begun to ask the peer.
    fn take_async(&mut self) -> Option<Arc<M::Async>> {
        match &mut self.wait {
            Awaited::Async(connect) if self.state != State::Asking => connect.take(),
            _ => None,
        }
    }
}

/// What an event leaves to the callback, in this order.
pub(crate) struct Effects<M: Manager> {
    pub(crate) handler: Option<Arc<dyn Handler>>,
    /// The connection that is made by its events, to take its next step.
    pub(crate) connect: Option<Arc<M::Async>>,
    pub(crate) disconnect: bool,
}

/// The C id of a connection.
///
/// # Invariants
///
/// The id is not destroyed before the teardown of its owner, or, of a copy from
/// [`Conn::with_id`], while that has the lock.
pub(crate) struct RawId<M: Manager>(pub(crate) NonNull<M::Id>);

impl<M: Manager> Clone for RawId<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Manager> Copy for RawId<M> {}

// SAFETY: An id may be used and destroyed from any thread.
unsafe impl<M: Manager> Send for RawId<M> {}
// SAFETY: An id may be used by several threads at once: the connection manager locks it.
unsafe impl<M: Manager> Sync for RawId<M> {}

impl<M: Manager> RawId<M> {
    /// # Safety
    ///
    /// `raw` is an id that was just created, and is the caller's, or the error of that.
    pub(crate) unsafe fn new(raw: *mut M::Id) -> Result<Self> {
        // INVARIANT: The caller gives the id to an owner, whose teardown destroys it.
        Ok(Self(NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?))
    }

    pub(crate) fn as_ptr(self) -> *mut M::Id {
        self.0.as_ptr()
    }
}

/// A connection: the context of its C id. Lives as long as that, at least.
///
/// Its locks, in the order in which they are taken, after the handler lock of the C id:
///
/// - `event_lock` is held while the handler of the ULP runs, which may call functions that take the
///   others.
///   Removal and [`Pending`] call the handler, too, and must not take the handler lock of the id:
///   ib_cm has none, and that of rdma_cm is held while siw connects.
/// - `id` is held by work items that disconnect. On iWARP that waits until a callback, which takes
///   `event_lock`, has returned (`iw_cm_disconnect()`). So no callback takes `id`.
/// - The QP's, of rdma_cm alone, is held while the QP is destroyed, or siw connects, which a work
///   item that disconnects does not wait for.
/// - `inner` is the state, and is held for moments only.
#[pin_data]
pub(crate) struct Conn<M: Manager> {
    /// The id, until it is about to be destroyed: for work items, and the removal of the device.
    /// Not destroyed while this is locked.
    #[pin]
    id: sync::Mutex<Option<RawId<M>>>,
    /// No reference to a value of the ULP is dropped with it locked.
    #[pin]
    inner: sync::Mutex<Inner<M>>,
    /// The wait of a call has ended.
    #[pin]
    changed: sync::CondVar,
    /// Completed, except in the state Notified.
    #[pin]
    found: Completion,
    /// Held while an event is handled, and so while the handler is called.
    #[pin]
    pub(crate) event_lock: sync::Mutex<()>,
    /// What only this manager has.
    #[pin]
    pub(super) data: M::Data,
    #[pin]
    disconnect: workqueue::Work<Self, DISCONNECT>,
    #[pin]
    notify: workqueue::Work<Self, NOTIFY>,
    index: removal::Index,
}

const DISCONNECT: u64 = 0;
const NOTIFY: u64 = 1;

kernel::impl_has_work! {
    impl{M: Manager} HasWork<Self, DISCONNECT> for Conn<M> { self.disconnect }
    impl{M: Manager} HasWork<Self, NOTIFY> for Conn<M> { self.notify }
}

impl<M: Manager> workqueue::WorkItem<DISCONNECT> for Conn<M> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        removal::OnRemoval::disconnect(&*this);
    }
}

impl<M: Manager> workqueue::WorkItem<NOTIFY> for Conn<M> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.with_id(|id| {
            let mut inner = this.inner.lock();
            if inner.state == State::Connecting && !inner.end {
                // SAFETY: `with_id` passes the id, alive meanwhile, whose state is Connecting.
                if unsafe { M::notify(id.as_ptr()) } {
                    inner.state = State::Notified;
                    this.found.try_wait();
                }
            }
        });
    }
}

/// The state: "connecting" until the peer has answered, or confirmed that its request was accepted.
impl<M: Manager> fmt::Display for Conn<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state() {
            State::Idle => "idle",
            State::Resolved => "resolved",
            State::Requested => "requested",
            State::Asking | State::Connecting | State::Notified => "connecting",
            State::Established => "established",
            State::Closed => "closed",
            State::Destroyed => "destroyed",
        })
    }
}

impl<M: Manager> removal::OnRemoval for Conn<M> {
    fn index(&self) -> &removal::Index {
        &self.index
    }

    fn gone(self: Arc<Self>) {
        let mut inner = self.inner.lock();
        inner.gone = true;
        self.fail_wait(&mut inner, ENODEV);
    }

    fn removed(&self, cx: &Sleepable) {
        // Callbacks may wait for the handler that is called here.
        pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
        let connect = self.inner.lock().take_async();
        drop(connect);
        let _events = self.event_lock.lock();
        let handler = self.inner.lock().handler.take();
        if let Some(handler) = handler {
            handler.as_arc_borrow().event(Event::DeviceRemoval, cx);
        }
    }

    fn disconnect(&self) {
        // A handler that is dropped here must not wait for the id, which is locked.
        pin_init::stack_pin_init!(let _in_callback = InCallback::enter());
        self.with_id(|id| {
            // SAFETY: `with_id` passes the id of this connection, alive meanwhile.
            let _ = unsafe { self.end(id.as_ptr()) };
        });
    }
}

/// The time that the end of an id waits for the manager's worker, in milliseconds. It runs at once,
/// unless the callback of another id keeps it.
const NOTIFIED_MS: u32 = 10_000;

impl<M: Manager> Conn<M> {
    /// Never inlined, so that the code of the work items is this module's.
    #[inline(never)]
    pub(crate) fn new(state: State) -> Result<Arc<Self>> {
        let inner = Inner {
            state,
            end: false,
            gone: false,
            wait: Awaited::None,
            handler: None,
        };
        let conn = Arc::pin_init(
            pin_init!(Self {
                id <- new_mutex!(None),
                inner <- new_mutex!(inner),
                changed <- kernel::new_condvar!(),
                found <- Completion::new(),
                event_lock <- new_mutex!(()),
                data <- M::data(),
                disconnect <- kernel::new_work!("rdma::cm::Conn::disconnect"),
                notify <- kernel::new_work!("rdma::cm::Conn::notify"),
                index: removal::Index::new(),
            }),
            GFP_KERNEL,
        )?;
        conn.found.complete();
        Ok(conn)
    }

    pub(crate) fn set_id(&self, id: Option<RawId<M>>) {
        *self.id.lock() = id;
    }

    /// Calls a function with the id, unless it is about to be destroyed.
    pub(crate) fn with_id<R>(&self, f: impl FnOnce(RawId<M>) -> R) -> Option<R> {
        // The id is not destroyed while it is locked.
        let id = self.id.lock();
        (*id).map(f)
    }

    pub(crate) fn state(&self) -> State {
        self.inner.lock().state
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.inner.lock().gone
    }

    pub(crate) fn set_handler(&self, handler: &Arc<dyn Handler>) -> Result {
        self.inner.lock().set_handler(handler)
    }

    /// Lets go of the handler. A call of it that has begun goes on.
    pub(crate) fn release_handler(&self) {
        let handler = self.inner.lock().handler.take();
        drop(handler);
    }

    /// Ends the wait of a call, if there is one, with an error.
    fn fail_wait(&self, inner: &mut Inner<M>, error: Error) {
        if matches!(inner.wait, Awaited::Event(..)) {
            inner.wait = Awaited::Done(Err(error));
            self.changed.notify_all();
        }
    }

    /// Calls `start` and waits for an event, or for a failure. Fails with `EDEADLK` in a callback,
    /// `EBUSY` if another call waits or the connection is made by its events, `ENODEV` if the
    /// device goes, and `ERESTARTSYS` on a signal.
    pub(crate) fn wait_for(
        &self,
        event: u32,
        start: impl FnOnce() -> Result,
        cx: &Sleepable,
    ) -> Result {
        self.wait(event, None, start, None, cx).map(drop)
    }

    /// As [`Conn::wait_for`] the event of the peer's answer. Returns the data that came along.
    /// Fails with `ETIMEDOUT` when the time is over.
    pub(crate) fn wait_for_answer(
        &self,
        event: u32,
        start: impl FnOnce() -> Result,
        timeout_ms: u32,
        cx: &Sleepable,
    ) -> Result<PrivateData> {
        let reply = KBox::new(PrivateData::new(&[]), GFP_KERNEL)?;
        let reply = self.wait(event, Some(reply), start, Some(timeout_ms), cx)?;
        Ok(reply.map_or_else(|| PrivateData::new(&[]), KBox::into_inner))
    }

    fn wait(
        &self,
        event: u32,
        reply: Option<KBox<PrivateData>>,
        start: impl FnOnce() -> Result,
        timeout_ms: Option<u32>,
        cx: &Sleepable,
    ) -> Result<Option<KBox<PrivateData>>> {
        InCallback::refuse()?;
        {
            let mut inner = self.inner.lock();
            if !matches!(inner.wait, Awaited::None) {
                return Err(EBUSY);
            }
            if inner.gone {
                return Err(ENODEV);
            }
            inner.wait = Awaited::Event(event, reply);
        }
        let started = start();
        let mut inner = self.inner.lock();
        started.inspect_err(|_| inner.wait = Awaited::None)?;
        let result = |inner: &mut Inner<M>| inner.take_result();
        let waited = wait_event(&self.changed, &mut inner, timeout_ms, result, cx);
        waited.inspect_err(|_| inner.wait = Awaited::None)?
    }

    /// Handles an event, whose C value is `raw`, with the events locked.
    pub(crate) fn advance(&self, event: &Event<'_>, raw: u32) -> Effects<M> {
        use bindings::{
            rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED as ADDR_RESOLVED,
            rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_RESPONSE as CONNECT_RESPONSE,
            rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED as ROUTE_RESOLVED, //
        };

        let is_resolved = matches!(event, Event::Other(ADDR_RESOLVED | ROUTE_RESOLVED));
        let reply: Result<&[u8]> = match *event {
            Event::Established { private_data } => Ok(private_data),
            Event::Failed(e) => Err(e),
            Event::Rejected(_) => Err(ECONNREFUSED),
            Event::Disconnected => Err(ENOTCONN),
            Event::DeviceRemoval => Err(ENODEV),
            // The peer answered, but the QP is gone.
            Event::Other(CONNECT_RESPONSE) => Err(ENOTCONN),
            Event::AddrChange | Event::Other(_) => Ok(&[]),
        };
        let mut inner = self.inner.lock();
        let was = inner.state;
        let (is_last, disconnect) = inner.change_state(event, is_resolved);
        if was == State::Notified && inner.state != was {
            self.found.complete();
        }
        inner.wait = match (replace(&mut inner.wait, Awaited::None), reply) {
            (Awaited::Event(..), Err(e)) => Awaited::Done(Err(e)),
            (Awaited::Event(success, mut to), Ok(sent)) if success == raw => {
                if let Some(to) = &mut to {
                    **to = PrivateData::new(sent);
                }
                Awaited::Done(Ok(to))
            }
            (wait, _) => wait,
        };
        let connect = match &mut inner.wait {
            // Returned, to be dropped without the lock.
            Awaited::Async(connect) if is_last => connect.take(),
            Awaited::Async(connect) if is_resolved => connect.clone(),
            _ => None,
        };
        // The handler is taken before the call that waits may let go of it.
        let handler = match event {
            _ if is_resolved => None,
            _ if is_last => inner.handler.take(),
            _ => inner.handler.clone(),
        };
        // The task that is woken up finds it unlocked.
        drop(inner);
        self.changed.notify_all();
        Effects {
            handler,
            connect,
            disconnect,
        }
    }

    /// Sets the handler of a connection that is made by its events, and the value that makes it.
    pub(crate) fn begin_async(&self, handler: Arc<dyn Handler>, connect: Arc<M::Async>) -> Result {
        let mut inner = self.inner.lock();
        inner.set_handler(&handler)?;
        inner.wait = Awaited::Async(Some(connect));
        Ok(())
    }

    /// Ends a connection that is made by its events and has failed. Returns its handler, if any.
    pub(crate) fn end_async(&self) -> Option<Arc<dyn Handler>> {
        let mut inner = self.inner.lock();
        let connect = inner.take_async();
        let handler = connect.as_ref().and_then(|_| inner.handler.take());
        drop(inner);
        drop(connect);
        handler
    }

    /// Asks the peer by calling `ask`, in the callback of a connection that is made by its events,
    /// unless that was given up (`ECANCELED`). Returns whether to disconnect now.
    pub(crate) fn ask(&self, ask: impl FnOnce() -> Result) -> Result<bool> {
        {
            let mut inner = self.inner.lock();
            if !matches!(inner.wait, Awaited::Async(Some(_))) {
                return Err(ECANCELED);
            }
            inner.state = State::Asking;
        }
        let asked = ask();
        let mut inner = self.inner.lock();
        inner.state = State::Resolved;
        asked?;
        let connect = inner.take_async();
        inner.state = State::Connecting;
        let end = inner.end;
        drop(inner);
        drop(connect);
        Ok(end)
    }

    /// Asks the peer by calling `ask`, which locks the QP, with the id's handler lock, so that no
    /// event has come. Fails with `EINVAL` if the peer was asked already, without a wait for the
    /// QP: its destruction may wait for a callback that waits for the handler lock.
    pub(crate) fn connect_qp(&self, ask: impl FnOnce() -> Result) -> Result {
        if self.state() >= State::Requested {
            return Err(EINVAL);
        }
        ask()?;
        self.inner.lock().state = State::Connecting;
        Ok(())
    }

    /// Begins to accept the request that has come with a handler, or to reject it without one.
    /// Fails with `EINVAL` if none is still to be answered, as C would reject an id that has asked
    /// or accepted itself, and go on sending that message for a minute; and with `ENODEV` if one
    /// that is to be accepted can only be rejected, as the device goes.
    pub(crate) fn begin_answer(&self, handler: Option<Arc<dyn Handler>>) -> Result {
        let mut inner = self.inner.lock();
        if inner.state != State::Requested {
            return Err(EINVAL);
        }
        inner.state = match &handler {
            Some(handler) => {
                inner.set_handler(handler)?;
                State::Connecting
            }
            None => State::Closed,
        };
        Ok(())
    }

    /// Begins to disconnect: ends the wait of a call with `ECANCELED`, and gives up a connection
    /// that is made by its events. Returns whether to disconnect now; `EINVAL` if never connected.
    pub(crate) fn begin_disconnect(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        self.fail_wait(&mut inner, ECANCELED);
        let connect = inner.take_async();
        if connect.is_some() || inner.state == State::Asking {
            inner.end = true;
            let handler = inner.handler.take();
            drop(inner);
            drop((connect, handler));
            return Ok(false);
        }
        if inner.state < State::Requested {
            return Err(EINVAL);
        }
        inner.end = true;
        Ok(inner.state != State::Notified)
    }

    /// Disconnects, or leaves that to the callback. `EINVAL` if the id was never connected.
    ///
    /// # Safety
    ///
    /// `id` is the id of this connection and alive.
    pub(crate) unsafe fn end(&self, id: *mut M::Id) -> Result {
        if !self.begin_disconnect()? {
            return Ok(());
        }
        // SAFETY: The caller promises that the id is alive. `begin_disconnect` has found its state.
        let disconnected = unsafe { M::disconnect(self, id) };
        let mut inner = self.inner.lock();
        if matches!(inner.wait, Awaited::Async(_)) && inner.state != State::Established {
            // C sends the request again for a long time, so the handler does not wait for the end.
            let handler = inner.handler.take();
            drop(inner);
            drop(handler);
        }
        disconnected
    }

    /// Gives up a connection that the peer has not confirmed, with the events locked. Returns the
    /// handler to call; none if the end is left to the event that is about to come.
    ///
    /// # Safety
    ///
    /// `id` is the id of this connection and alive.
    pub(crate) unsafe fn give_up(&self, id: *mut M::Id) -> Option<Arc<dyn Handler>> {
        if !self.begin_disconnect().unwrap_or(false) {
            return None;
        }
        // SAFETY: The caller promises that the id is alive. `begin_disconnect` has found its state.
        let _ = unsafe { M::disconnect(self, id) };
        let mut inner = self.inner.lock();
        inner.state = State::Closed;
        inner.handler.take()
    }

    /// Ends the connection when there is no handle of its id left. `destroy` destroys the id, which
    /// nothing else uses then, and waits for the callbacks that `M::destroy` does not wait for.
    pub(crate) fn teardown(
        &self,
        device: Option<&Device>,
        pending: Option<&Arc<Pending<M>>>,
        destroy: impl FnOnce(),
        cx: &Sleepable,
    ) {
        // If the device goes, the handler still gets that event.
        let is_gone = self.is_gone();
        if let Some(device) = device.filter(|_| !is_gone) {
            device.inner().removal.remove(self);
        }
        self.set_id(None);
        if let Some(pending) = pending {
            pending.disarm();
        }
        // The manager's worker has yet to note that the connection is established. A signal does
        // not interrupt the teardown, and so not this wait.
        self.found.wait_timeout(NOTIFIED_MS, cx);
        destroy();
        self.inner.lock().state = State::Destroyed;
        if !is_gone {
            self.release_handler();
        }
        // A work item that has given the connection up may still be in the handler.
        drop(self.event_lock.lock());
    }

    pub(crate) fn disconnect_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = deferred::CoreWorkqueue::get().enqueue::<_, DISCONNECT>(self.clone());
    }

    /// Tells the manager from a work item that the peer uses the connection, if it is being made.
    pub(crate) fn notify_established(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = deferred::CoreWorkqueue::get().enqueue::<_, NOTIFY>(self.clone());
    }
}
