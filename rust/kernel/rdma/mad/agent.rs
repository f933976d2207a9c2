// SPDX-License-Identifier: GPL-2.0

//! Agents.

use crate::{
    bindings,
    cm::callback::InCallback,
    context::{
        Context as _,
        Sleepable, //
    },
    deferred::{
        self,
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    mad::{
        Class,
        Message,
        Methods,
        Outgoing,
        Peer,
        Received,
        MAD_LEN, //
    },
    objects::Listed,
    refs::{
        Kind, //
        Ref,
        Refs,
    },
    removal::{
        self,
        OnRemoval, //
    }, //
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
    impl_has_work,
    new_condvar,
    new_mutex,
    new_spinlock,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        CondVar,
        CondVarTimeoutResult,
        Mutex,
        SpinLock,
        UniqueArc, //
    },
    task::MAX_SCHEDULE_TIMEOUT,
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Jiffies, //
    },
    types::Opaque,
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// A registration with the MAD layer.
///
/// # Invariants
///
/// `raw` is registered, with `queue` as its context, until [`Self::end`] unregisters it, once,
/// after it has closed `gate`.
#[pin_data]
pub(super) struct Registered {
    raw: NonNull<bindings::ib_mad_agent>,
    queue: Arc<Queue>,
    #[pin]
    refs: Refs,
    #[pin]
    ended: Mutex<bool>,
    #[pin]
    end: Work<Self>,
    place: removal::Place,
}

impl_has_work! {
    impl HasWork<Self> for Registered { self.end }
}

impl WorkItem for Registered {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.end(ENODEV, &cx);
    }
}

// SAFETY: An agent may be used and unregistered from any thread, and the rest is `Send`.
unsafe impl Send for Registered {}
// SAFETY: An agent may be used by several threads at once: the MAD layer locks it. The rest is
// `Sync`.
unsafe impl Sync for Registered {}

impl Registered {
    /// Unregisters the agent, unless that was done, and waits for it: all that waits for the agent
    /// fails, and its handlers have returned.
    fn end(&self, reason: Error, cx: &Sleepable) {
        let mut ended = self.ended.lock();
        if core::mem::replace(&mut *ended, true) {
            return;
        }
        self.queue.close(reason);
        self.refs.kill_and_wait(&"MAD agent", cx);
        // SAFETY: The agent is still registered by the type invariant; with the gate closed, nobody
        // uses it.
        unsafe { bindings::ib_unregister_mad_agent(self.raw.as_ptr()) };
    }
}

impl OnRemoval for Registered {
    fn place(&self) -> &removal::Place {
        &self.place
    }

    fn gone(self: Arc<Self>) {
        self.queue.close(ENODEV);
        // Who waits for a reply is told by the MAD layer, when the agent is unregistered.
        let _ = deferred::Queue::get().enqueue(self);
    }

    fn removed(&self, cx: &Sleepable) {
        self.end(ENODEV, cx);
    }
}

/// An agent that does not end while this lives.
///
/// # Invariants
///
/// The agent is registered.
pub(super) struct Live<'a> {
    registered: &'a Registered,
    _ref: Ref,
}

impl Live<'_> {
    pub(super) fn as_raw(&self) -> *mut bindings::ib_mad_agent {
        self.registered.raw.as_ptr()
    }
}

struct State {
    registered: Arc<Registered>,
    device: Device,
    _listed: Listed,
}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        self.device.inner().removal.remove(&self.registered);
        self.registered.end(ECANCELED, cx);
        Fate::Gone
    }
}

/// The classes of subnet management (`IB_MGMT_CLASS_SUBN_LID_ROUTED`,
/// `IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE`).
const SUBN_LID_ROUTED: u8 = 0x01;
const SUBN_DIRECTED_ROUTE: u8 = 0x81;

/// Sends and receives MADs of one class through one port (`struct ib_mad_agent`).
///
/// Dropping it ends it, from a work item.
pub struct Agent {
    state: Deferred<State>,
    class: Class,
    port: u32,
    pub(super) next_tid: Atomic<u32>,
}

impl Agent {
    /// Registers an agent of QP 1 of a port (`ib_register_mad_agent`).
    ///
    /// It receives the requests of others for `methods`, of which at most `backlog` wait for
    /// [`Agent::recv`]; more are dropped and counted. An agent that serves no methods receives
    /// replies only, and there may be any number of those in a class.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such class or port, or if another agent serves one of the methods;
    /// `EPROTONOSUPPORT` if the port has no MADs; `ENODEV` if the device goes; `ENOMEM`.
    #[inline(never)]
    pub fn register(
        dev: &Device,
        port: u32,
        class: Class,
        methods: Methods,
        backlog: usize,
        _cx: &Sleepable,
    ) -> Result<Self> {
        // The C function looks at the port before it checks it.
        dev.port(port).ok_or(EINVAL)?;
        // These are QP 0's. The C function refuses them only to who serves methods; one that is
        // sent by QP 1 all the same would come back with a source that is no more there.
        if matches!(class.id, SUBN_LID_ROUTED | SUBN_DIRECTED_ROUTE) {
            return Err(EINVAL);
        }
        let mut request = bindings::ib_mad_reg_req {
            mgmt_class: class.id,
            mgmt_class_version: class.version,
            oui: class.oui,
            ..Default::default()
        };
        methods.write_mask(&mut request.method_mask);
        let request = if methods.is_empty() {
            core::ptr::null_mut()
        } else {
            &raw mut request
        };
        let reserved = Deferred::reserve()?;
        let listed = dev.list(Kind::Mad)?;
        let queue = Arc::pin_init(Queue::new(backlog)?, GFP_KERNEL)?;
        let place = UniqueArc::new_uninit(GFP_KERNEL)?;
        // SAFETY: The device is registered by the invariant of `device::Inner`. The request is
        // copied, and the context lives until the agent is unregistered.
        let raw = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev.as_raw(),
                port,
                bindings::ib_qp_type_IB_QPT_GSI,
                request,
                0,
                Some(on_sent),
                Some(on_recv),
                Arc::as_ptr(&queue).cast_mut().cast(),
                0,
            )
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // INVARIANT: Just registered.
        let registered: Arc<_> = match place.pin_init_with::<Infallible>(pin_init!(Registered {
            raw,
            queue,
            refs <- Refs::new(),
            ended <- new_mutex!(false),
            end <- new_work!("rdma::mad::Agent::end"),
            place: removal::Place::new(),
        })) {
            Ok(registered) => registered.into(),
            Err(never) => match never {},
        };
        let state = reserved.fill(State {
            registered: registered.clone(),
            device: dev.clone(),
            _listed: listed,
        });
        dev.inner().removal.add(registered)?;
        Ok(Self {
            state,
            class,
            port,
            next_tid: Atomic::new(0),
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.state.device
    }

    /// Returns the number of the port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Returns the class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Returns how many MADs were dropped because the backlog was full.
    pub fn dropped(&self) -> u64 {
        self.queue().dropped()
    }

    fn queue(&self) -> &Queue {
        &self.state.registered.queue
    }

    /// Keeps the agent from ending.
    pub(super) fn enter(&self) -> Result<Live<'_>> {
        let registered = &*self.state.registered;
        // SAFETY: `State` closes the refs, by `end`, before it lets go of the registration.
        let held = unsafe { registered.refs.try_get(Kind::Mad) }.map_err(|e| self.reason(e))?;
        // INVARIANT: `end` waits for the hold before it unregisters the agent.
        Ok(Live {
            registered,
            _ref: held,
        })
    }

    /// Returns why the agent has ended, or the given error if it has not.
    pub(super) fn reason(&self, error: Error) -> Error {
        self.queue().closed().unwrap_or(error)
    }

    /// Takes the MAD that came first, or waits for one: for `timeout_ms`, or for ever. Does not
    /// wait at all for 0.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `ERESTARTSYS` on a signal; `ENODEV` if the device goes, `ECANCELED` after
    /// [`Agent::stop`].
    pub fn recv(&self, timeout_ms: Option<u32>, _cx: &Sleepable) -> Result<Received> {
        self.queue().pop(timeout_ms)
    }

    /// Ends the agent and waits for that (`ib_unregister_mad_agent`): all waits, and all that is
    /// still tried, fail with `ECANCELED`.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a callback of a connection manager, which may be that of a message that nobody
    /// has answered: it is one of those that this waits for. The agent goes on; dropping it ends it
    /// from a work item.
    pub fn stop(&self, cx: &Sleepable) -> Result {
        if InCallback::is_current() {
            return Err(EDEADLK);
        }
        self.state.registered.end(ECANCELED, cx);
        Ok(())
    }
}

impl Agent {
    /// Sends a request and waits for the reply, at most `timeout_ms` each time that it is sent:
    /// once, and up to `retries` times again.
    ///
    /// A reply may say that the request has failed: see [`Received::status`].
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT` if no reply comes.
    /// - `ERESTARTSYS` on a signal. The request is given up.
    /// - `EIO` if the request cannot be sent.
    /// - `ENODEV` if the device goes, `ECANCELED` after [`Agent::stop`].
    /// - `EINVAL` without a timeout, for a method that is a reply's, or if the peer is not seen
    ///   from the agent's port; `EMSGSIZE` if the payload is too long.
    /// - `EPROTONOSUPPORT` if the peer has an IPv4 address: the MAD layer cannot match replies over
    ///   RoCE v2 with IPv4. It can with IPv6.
    /// - `EDEADLK` in a callback of a connection manager, which may keep the timeouts of the port.
    /// - `ENOMEM`.
    pub fn request(
        &self,
        peer: &Peer,
        message: &Message<'_>,
        timeout_ms: u32,
        retries: u32,
        _cx: &Sleepable,
    ) -> Result<Received> {
        if InCallback::is_current() {
            return Err(EDEADLK);
        }
        if timeout_ms == 0 || message.method.is_response() {
            return Err(EINVAL);
        }
        if !peer.matches_replies() {
            return Err(EPROTONOSUPPORT);
        }
        let request = self.post(peer, self.tid()?, 0, *message, timeout_ms, retries)?;
        request.wait().map_err(|error| {
            if error == ERESTARTSYS {
                error
            } else {
                self.reason(error)
            }
        })
    }

    /// Sends a MAD that nobody answers. It may be lost.
    ///
    /// # Errors
    ///
    /// `ENODEV`, `ECANCELED`, `EINVAL` and `EMSGSIZE` as for [`Agent::request`], `ENOMEM`, or the
    /// driver's error.
    pub fn send(&self, peer: &Peer, message: &Message<'_>, _cx: &Sleepable) -> Result {
        self.post(peer, self.tid()?, 0, *message, 0, 0)?;
        Ok(())
    }

    /// Answers a request, with a status that is 0 for success. The answer may be lost.
    ///
    /// # Errors
    ///
    /// As [`Agent::send`]; `EINVAL` too if the MAD is a reply, of another class, or did not come
    /// through this port; or an error of finding the way back.
    pub fn reply(&self, to: &Received, status: u16, payload: &[u8], cx: &Sleepable) -> Result {
        let header = to.header();
        if header.is_response()
            || header.mgmt_class != self.class().id
            || !to.is_from(self.device().as_raw(), self.port())
        {
            return Err(EINVAL);
        }
        let message = Message {
            method: to.method().response(),
            attr_id: header.attr_id.get(),
            attr_mod: header.attr_mod.get(),
            payload,
        };
        let peer = Peer::sender(self, to, cx)?;
        self.post(&peer, header.tid.get(), status, message, 0, 0)?;
        Ok(())
    }

    /// Returns a transaction id, by which the MAD layer finds the agent when the reply comes.
    fn tid(&self) -> Result<u64> {
        let live = self.enter()?;
        // SAFETY: The agent is registered by the invariant of `Live`, and this does not change.
        let high = unsafe { (*live.as_raw()).hi_tid };
        Ok(u64::from(high) << 32 | u64::from(self.next_tid.fetch_add(1, Relaxed)))
    }

    fn post(
        &self,
        peer: &Peer,
        tid: u64,
        status: u16,
        message: Message<'_>,
        timeout_ms: u32,
        retries: u32,
    ) -> Result<Arc<Request>> {
        if !peer.is_seen_from(self.device(), self.port()) {
            return Err(EINVAL);
        }
        let outgoing = Outgoing {
            class: self.class(),
            message,
            status,
            tid,
        };
        let request = Request::new(peer)?;
        let live = self.enter()?;
        let mut buf = Buf::new(&live, peer, self.class())?;
        outgoing.write(buf.mad())?;
        request.post(buf, timeout_ms.try_into()?, retries.try_into()?)?;
        Ok(request)
    }
}

/// A MAD to be sent, as its `struct ib_mad_send_buf`.
///
/// # Invariants
///
/// A buffer of an agent that is registered, and which this owns.
pub(super) struct Buf(NonNull<bindings::ib_mad_send_buf>);

// SAFETY: A buffer may be used and freed from any thread.
unsafe impl Send for Buf {}

impl Buf {
    pub(super) fn new(agent: &Live<'_>, peer: &Peer, class: Class) -> Result<Self> {
        // SAFETY: The agent is registered while `agent` lives; and until its buffers are freed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_create_send_mad(
                agent.as_raw(),
                peer.qpn(),
                peer.pkey_index(),
                0,
                class.payload_at().try_into()?,
                class.payload_len().try_into()?,
                bindings::GFP_KERNEL,
                bindings::IB_MGMT_BASE_VERSION as u8,
            )
        })?;
        // INVARIANT: Just created.
        Ok(Self(NonNull::new(raw).ok_or(ENOMEM)?))
    }

    /// Returns the MAD, to be written. Its memory is zero.
    pub(super) fn mad(&mut self) -> &mut [u8; MAD_LEN] {
        // SAFETY: By the type invariant this is a buffer, whose MAD has this length: header and
        // data, as `new` has asked. Nobody else uses it before the buffer is posted, and that takes
        // `self`.
        unsafe { &mut *self.0.as_ref().mad.cast() }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // SAFETY: The buffer is this value's by the type invariant, and is not used again. Freeing
        // it lets go of the agent.
        unsafe { bindings::ib_free_send_mad(self.0.as_ptr()) };
    }
}

/// How far a request is.
///
/// `buf` is what was posted, until the MAD layer is done with it.
struct Progress {
    buf: Option<Buf>,
    reply: Option<Received>,
    status: Option<bindings::ib_wc_status>,
}

/// A MAD on its way, with what it needs there. The MAD layer has a reference to it as the send
/// buffer's context, until its send handler takes that back.
#[pin_data]
pub(super) struct Request {
    #[pin]
    progress: SpinLock<Progress>,
    #[pin]
    done: Opaque<bindings::completion>,
    /// The buffer points to its address handle.
    peer: Peer,
}

// SAFETY: A completion may be used from any thread, and the rest is `Send`.
unsafe impl Send for Request {}
// SAFETY: A completion has its own lock, and the rest is `Sync`.
unsafe impl Sync for Request {}

impl Request {
    pub(super) fn new(peer: &Peer) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                progress <- new_spinlock!(Progress {
                    buf: None,
                    reply: None,
                    status: None,
                }),
                done <- Opaque::ffi_init(|slot| {
                    // SAFETY: `slot` is valid for writes; a completion is initialised in place and
                    // stays pinned.
                    unsafe { bindings::init_completion(slot) }
                }),
                peer: peer.clone(),
            }),
            GFP_KERNEL,
        )
    }

    /// Gives a MAD to the MAD layer (`ib_post_send_mad`).
    pub(super) fn post(self: &Arc<Self>, buf: Buf, timeout_ms: c_int, retries: c_int) -> Result {
        let raw = buf.0.as_ptr();
        // SAFETY: `raw` is a buffer by the invariant of `Buf`, and is not posted yet.
        unsafe {
            (*raw).ah = self.peer.as_raw();
            (*raw).timeout_ms = timeout_ms;
            (*raw).retries = retries;
            (*raw).context[0] = Arc::into_raw(self.clone()).cast_mut().cast();
        }
        self.progress.lock().buf = Some(buf);
        // SAFETY: `raw` is a buffer by the invariant of `Buf`, ready to be posted. It may be freed
        // before this returns.
        let posted = to_result(unsafe { bindings::ib_post_send_mad(raw, core::ptr::null_mut()) });
        if posted.is_err() {
            // SAFETY: There will be no call of the send handler, so the context is ours again.
            unsafe { Self::take(raw) }.complete(bindings::ib_wc_status_IB_WC_GENERAL_ERR);
        }
        posted
    }

    /// Takes a posted buffer's reference back.
    ///
    /// # Safety
    ///
    /// The buffer was posted by [`Request::post`]; to be called once.
    pub(super) unsafe fn take(raw: *mut bindings::ib_mad_send_buf) -> Arc<Self> {
        // SAFETY: `post` has set the context to what `into_raw` made, and the caller says that this
        // is the only call for it.
        unsafe { Arc::from_raw((*raw).context[0].cast()) }
    }

    /// The reply has come.
    pub(super) fn replied(&self, reply: Received) {
        self.progress.lock().reply = Some(reply);
    }

    /// The MAD layer is done.
    pub(super) fn complete(&self, status: bindings::ib_wc_status) {
        let mut progress = self.progress.lock();
        progress.status = Some(status);
        let buf = progress.buf.take();
        drop(progress);
        drop(buf);
        // SAFETY: `done` is initialised and pinned.
        unsafe { bindings::complete(self.done.get()) };
    }

    /// Waits for the reply, or until the MAD layer has sent the request often enough. On a signal
    /// the MAD layer is told to give it up.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, `ERESTARTSYS`, or `EIO` if the MAD layer has given the request up.
    pub(super) fn wait(&self) -> Result<Received> {
        // SAFETY: `done` is initialised and pinned. The result says no more than `status`.
        let _ = unsafe { bindings::wait_for_completion_interruptible(self.done.get()) };
        let mut progress = self.progress.lock();
        match (progress.reply.take(), progress.status) {
            // A reply that is there before the request is known to be sent is as good.
            (Some(reply), _) => Ok(reply),
            (None, None) => {
                if let Some(buf) = &progress.buf {
                    // SAFETY: By the invariant of `Buf` this is a buffer that is not freed: it is
                    // in `progress`, which is locked. This is `ib_cancel_mad()`, which only marks
                    // the request.
                    unsafe { bindings::ib_modify_mad(buf.0.as_ptr(), 0) };
                }
                Err(ERESTARTSYS)
            }
            (None, Some(bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR)) => Err(ETIMEDOUT),
            (None, Some(_)) => Err(EIO),
        }
    }
}

/// A ring of MADs, with as many places as it was made with: a peer cannot make it grow.
struct Ring {
    places: KVec<Option<Received>>,
    first: usize,
    len: usize,
    closed: Option<Error>,
}

impl Ring {
    fn push(&mut self, mad: Received) -> Result<(), Received> {
        let capacity = self.places.len();
        if self.closed.is_some() || self.len == capacity {
            return Err(mad);
        }
        let mut at = self.first + self.len;
        if at >= capacity {
            at -= capacity;
        }
        match self.places.get_mut(at) {
            Some(place) => *place = Some(mad),
            None => return Err(mad),
        }
        self.len += 1;
        Ok(())
    }

    fn pop(&mut self) -> Option<Received> {
        let mad = self.places.get_mut(self.first)?.take()?;
        self.first += 1;
        if self.first == self.places.len() {
            self.first = 0;
        }
        self.len -= 1;
        Some(mad)
    }
}

/// A bounded queue of MADs that many threads may wait at.
#[pin_data]
pub(super) struct Queue {
    #[pin]
    ring: SpinLock<Ring>,
    #[pin]
    changed: CondVar,
    /// Not in the ring, whose lock is not for softirqs.
    dropped: Atomic<u64>,
}

impl Queue {
    pub(super) fn new(capacity: usize) -> Result<impl PinInit<Self>> {
        let mut places = KVec::with_capacity(capacity, GFP_KERNEL)?;
        for _ in 0..capacity {
            places.push_within_capacity(None)?;
        }
        Ok(pin_init!(Self {
            ring <- new_spinlock!(Ring {
                places,
                first: 0,
                len: 0,
                closed: None,
            }),
            changed <- new_condvar!(),
            dropped: Atomic::new(0),
        }))
    }

    /// Adds a MAD, or drops it where there is no room, and wakes up one thread.
    pub(super) fn push(&self, mad: Received) {
        let pushed = self.ring.lock().push(mad);
        match pushed {
            Ok(()) => self.changed.notify_one(),
            Err(_) => self.dropped.add(1, Relaxed),
        }
    }

    /// Returns how many MADs were dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Takes the MAD that came first, or waits for one, for ever if there is no time limit.
    pub(super) fn pop(&self, timeout_ms: Option<u32>) -> Result<Received> {
        let mut left: Jiffies = match timeout_ms {
            Some(ms) => msecs_to_jiffies(ms),
            None => MAX_SCHEDULE_TIMEOUT as Jiffies,
        };
        let mut ring = self.ring.lock();
        loop {
            // First of all, as whoever was woken up for a MAD has to take it.
            if let Some(mad) = ring.pop() {
                return Ok(mad);
            }
            if let Some(reason) = ring.closed {
                return Err(reason);
            }
            if left == 0 {
                return Err(ETIMEDOUT);
            }
            match self.changed.wait_interruptible_timeout(&mut ring, left) {
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                CondVarTimeoutResult::Timeout => left = 0,
                CondVarTimeoutResult::Signal { .. } => return ring.pop().ok_or(ERESTARTSYS),
            }
        }
    }

    /// Drops what is queued and what is still to come, and gives all threads the reason.
    pub(super) fn close(&self, reason: Error) {
        let mut ring = self.ring.lock();
        ring.closed = Some(reason);
        let places = core::mem::take(&mut ring.places);
        ring.len = 0;
        drop(ring);
        drop(places);
        self.changed.notify_all();
    }

    /// Returns why the queue was closed, if it was.
    pub(super) fn closed(&self) -> Option<Error> {
        self.ring.lock().closed
    }
}

// It does so in process context: from the work item of its CQ, from its timeouts, or from whoever
// unregisters the agent. Only spinlocks are taken here, and only wake-ups done.

/// The context of an agent: where its unsolicited MADs go.
///
/// # Safety
///
/// `agent` is one of [`Agent::register`](crate::mad::Agent::register).
unsafe fn queue<'a>(agent: *mut bindings::ib_mad_agent) -> &'a Queue {
    // SAFETY: By the invariant of `Registered` the context of such an agent is a queue that
    // outlives it.
    unsafe { &*(*agent).context.cast::<Queue>() }
}

/// A MAD has come: the reply to `buf`, or an unsolicited one.
///
/// # Safety
///
/// Called by the MAD layer for an agent of this crate.
pub(super) unsafe extern "C" fn on_recv(
    agent: *mut bindings::ib_mad_agent,
    buf: *mut bindings::ib_mad_send_buf,
    mad: *mut bindings::ib_mad_recv_wc,
) {
    let Some(mad) = NonNull::new(mad) else {
        return;
    };
    // SAFETY: The agent is alive while its handler runs, and the MAD is the handler's.
    let mad = unsafe { Received::new(&*agent, mad) };
    if buf.is_null() {
        // SAFETY: The agent is one of `Agent::register`: no other agent of this crate has a receive
        // handler.
        unsafe { queue(agent) }.push(mad);
        return;
    }
    // SAFETY: The MAD layer calls the send handler, which takes the context back, after this.
    unsafe { &*(*buf).context[0].cast::<Request>() }.replied(mad);
}

/// The MAD layer is done with a MAD that was sent: it was sent and there is no reply to wait for,
/// the reply has come, it has timed out, or it was given up.
///
/// # Safety
///
/// Called by the MAD layer for an agent of this crate, once for each buffer that was posted.
pub(super) unsafe extern "C" fn on_sent(
    _agent: *mut bindings::ib_mad_agent,
    wc: *mut bindings::ib_mad_send_wc,
) {
    // SAFETY: Both are valid during this call, which is the only one for the buffer.
    unsafe { Request::take((*wc).send_buf).complete((*wc).status) };
}

/// How long to wait for memory.
const NAP: Delta = Delta::from_millis(10);

/// Waits for the timeouts of a port that have begun: until the send handlers that were called
/// before have returned.
///
/// The MAD layer has one ordered workqueue a port, and calls the send handlers of all agents on it
/// when nobody has answered in time (`timeout_sends()` in core/mad.c). To unregister an agent is
/// all that flushes it, so one is registered that neither sends nor receives. That fails for want
/// of memory, or of numbers, which is waited for. A port that the MAD layer does not know
/// (`ENODEV`) has no agents: it opens ports when a device is added, and closes them after all
/// clients of this crate have let go of it.
///
/// Not to be called in a callback of a connection manager, which may be called by one of them.
///
/// # Safety
///
/// `dev` is registered, and stays so during the call.
pub(crate) unsafe fn flush_timeouts(dev: *mut bindings::ib_device, port: u32, _cx: &Sleepable) {
    let agent = loop {
        // SAFETY: The caller says that the device is registered. An agent without a request
        // receives nothing but replies, and this one sends nothing, so no handler is called.
        let agent = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev,
                port,
                bindings::ib_qp_type_IB_QPT_GSI,
                core::ptr::null_mut(),
                0,
                Some(on_sent),
                None,
                core::ptr::null_mut(),
                0,
            )
        });
        match agent {
            Ok(agent) => break agent,
            // The port has no MADs, or the MAD layer could not open it when the device was added:
            // so there are no timeouts.
            Err(EPROTONOSUPPORT | ENODEV) => return,
            Err(_) => fsleep(NAP),
        }
    };
    // SAFETY: Just registered. `unregister_mad_agent()` flushes the port's workqueue.
    unsafe { bindings::ib_unregister_mad_agent(agent) };
}
