// SPDX-License-Identifier: GPL-2.0

//! Listeners, and the requests of connections that come to them.

use crate::{
    client::ClientRef,
    cm::{
        self,
        id::{
            on_event,
            Id,
            Options,
            OwnedId,
            RdmaCm, //
        },
        pending::Pending,
        Conn,
        InCallback,
        Manager,
        RawId, //
    },
    code::HasCode,
    deferred,
    objects,
    prelude::internal::*,
    refs, //
};
use core::{
    cell::Cell,
    net::SocketAddr, //
};
use kernel::{
    error::from_result,
    sync::{
        self,
        atomic, //
    },
    workqueue, //
};

/// The handler of a listener's events. A work item that a method starts gets a reference by
/// `Arc::from(self)`.
pub trait Accept: HasCode + Send + Sync {
    /// A peer wants to connect: take the id with [`Request::into_id`], or drop the request.
    fn request(self: ArcBorrow<'_, Self>, request: Request<'_>, cx: &Sleepable);

    /// The network interface whose address the listener is on has another hardware address, as that
    /// of a bond after a failover (`RDMA_CM_EVENT_ADDR_CHANGE`). The listener is still bound to the
    /// old one: have a work item [destroy](Listener::destroy) it, and make another. Not called for
    /// listeners on `0.0.0.0` and `::`.
    fn addr_changed(self: ArcBorrow<'_, Self>) {}

    /// The device that the listener was bound to, if it was to one, is being removed, and the
    /// listener has stopped. If the ULP has made others since, as after [`Accept::addr_changed`],
    /// [`Listener::has_stopped`] tells which one this is.
    fn stopped(self: ArcBorrow<'_, Self>) {}
}

/// A function that is called with each request. Its errors are reported, ten in each five seconds
/// for all ULPs together.
impl<F: Fn(Request<'_>, &Sleepable) -> Result + Send + Sync + 'static> Accept for F {
    fn request(self: ArcBorrow<'_, Self>, request: Request<'_>, cx: &Sleepable) {
        request.verdict.report(self(request, cx));
    }
}

/// What a ULP does with a request, in the callback of the request's id.
pub(crate) struct Verdict<M: Manager> {
    /// Set if the ULP takes the id: a work item destroys that, and not the callback's return.
    pub(crate) taken: Cell<Option<Arc<Pending<M>>>>,
    /// The request counts as refused, although the ULP may have taken the id.
    refused: Cell<bool>,
}

impl<M: Manager> Verdict<M> {
    /// Reports the error of a function that was called with the request.
    pub(crate) fn report(&self, result: Result) {
        if let Err(e) = result {
            self.refused.set(true);
            crate::pr_warn_ratelimited!("a connection request was refused: {e:?}\n");
        }
    }
}

/// The connections of a listener that are not confirmed, or whose requests are not answered.
#[pin_data]
pub(crate) struct Backlog<M: Manager> {
    #[pin]
    list: sync::Mutex<KVec<Arc<Pending<M>>>>,
    /// The number of those that may wait, at least one. As many again may be ending.
    max: usize,
}

impl<M: Manager> Backlog<M> {
    pub(crate) fn new(max: u32) -> impl PinInit<Self> {
        pin_init!(Self {
            list <- kernel::new_mutex!(KVec::new()),
            max: max.max(1) as usize,
        })
    }

    /// Returns whether there is room for one more connection, if need be by giving up the one that
    /// waits for longest. There is none if as many are given up or unanswered, or without memory.
    fn make_room(&self) -> bool {
        let mut list = self.list.lock();
        // A connection that is confirmed or destroyed waits no longer.
        list.retain(|it| !it.is_over());
        let most = self.max.saturating_mul(2);
        if list.len() >= most || list.reserve(1, GFP_KERNEL | __GFP_NOWARN).is_err() {
            return false;
        }
        let mut waiting = list.iter().filter(|it| it.is_waiting());
        if waiting.clone().count() >= self.max {
            match waiting.find(|it| it.is_due()) {
                Some(oldest) => oldest.clone().give_up_later(),
                None => return false,
            }
        }
        true
    }

    /// Has the ULP handle a request, by `handle`, in the callback of the request's id. Fails with
    /// `ECONNREFUSED` without room, or if the ULP does not take the id: the callback returns that,
    /// and C destroys the id, which refuses the request. Counts what is refused for the `listener`.
    pub(crate) fn admit(
        &self,
        listener: &objects::Object,
        handle: impl FnOnce(&Verdict<M>),
    ) -> Result {
        let verdict = Verdict {
            taken: Cell::new(None),
            refused: Cell::new(false),
        };
        if self.make_room() {
            handle(&verdict);
        }
        let pending = verdict.taken.take();
        if verdict.refused.get() || pending.is_none() {
            listener.add_count(1);
        }
        let pending = pending.ok_or(ECONNREFUSED)?;
        let listed = self.list.lock().push(pending.clone(), GFP_KERNEL);
        if listed.is_err() {
            // Another has taken the room, and one that cannot be counted may not wait.
            pending.give_up_later();
        }
        Ok(())
    }
}

/// The C id of a listener, until it is destroyed.
///
/// # Invariants
///
/// The id is alive, and nothing else destroys it.
#[pin_data]
pub(crate) struct ListenId<M: Manager> {
    #[pin]
    raw: sync::Mutex<Option<RawId<M>>>,
}

impl<M: Manager> ListenId<M> {
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no id.
        pin_init!(Self {
            raw <- kernel::new_mutex!(None, "rdma::cm::ListenId"),
        })
    }

    /// Sets the id, which was just created and is given away.
    pub(crate) fn set(&self, id: RawId<M>) {
        // INVARIANT: The owner of the listener destroys the id by this only.
        *self.raw.lock() = Some(id);
    }

    /// Destroys the id, once, and waits for its callback.
    pub(crate) fn destroy(&self) {
        // Locked meanwhile, so that a second task waits for it too. No callback locks it.
        let mut raw = self.raw.lock();
        if let Some(raw) = raw.take() {
            // SAFETY: The id is alive by the type invariant, and this task has taken it.
            unsafe { M::destroy(raw.as_ptr()) };
        }
    }
}

/// The context of a listener's C id, which lives as long as that.
///
/// # Invariants
///
/// `id` is one whose callback is [`on_listener_event`] with this as its context.
#[pin_data]
struct Listening {
    #[pin]
    id: ListenId<RdmaCm>,
    accept: Arc<dyn Accept>,
    client: ClientRef,
    #[pin]
    backlog: Backlog<RdmaCm>,
    /// Set before [`Accept::stopped`] is called.
    has_stopped: atomic::Atomic<bool>,
    #[pin]
    stop: workqueue::Work<Self>,
    // Dropped last: the client may be gone after that.
    object: objects::Object,
}

kernel::impl_has_work! {
    impl HasWork<Self> for Listening { self.stop }
}

impl workqueue::WorkItem for Listening {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.id.destroy();
        this.has_stopped.store(true, atomic::Relaxed);
        this.accept.as_arc_borrow().stopped();
    }
}

/// The callback of every listener's id, and of a request's until it is taken.
///
/// # Safety
///
/// Called by the connection manager for an id whose context is a [`Listening`].
unsafe extern "C" fn on_listener_event(
    id: *mut bindings::rdma_cm_id,
    event: *mut bindings::rdma_cm_event,
) -> c_int {
    let Some(id) = NonNull::new(id) else { return 0 };
    // SAFETY: The context of a listener is its `Listening`, which lives until the id is destroyed,
    // and a request's id inherits it. The event is valid during the call, in process context.
    let (this, event, cx) = unsafe {
        let this = sync::ArcBorrow::<Listening>::from_raw(id.as_ref().context.cast());
        (Arc::from(this), &*event, Sleepable::assume())
    };
    pin_init::stack_pin_init!(let _in_callback = InCallback::enter_locked(id.as_ptr()));
    from_result(|| {
        match event.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_REQUEST => {
                this.backlog.admit(&this.object, |verdict| {
                    // INVARIANT: This is the callback of the request's id, with its event.
                    let request = Request {
                        id,
                        event,
                        client: &this.client,
                        verdict,
                    };
                    this.accept.as_arc_borrow().request(request, &cx);
                })?;
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE => {
                this.accept.as_arc_borrow().addr_changed();
            }
            // The id has to go for the device to go, but not in its own callback.
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => {
                let _ = this.object.queue().enqueue(this.clone());
            }
            _ => {}
        }
        Ok(0)
    })
}

impl deferred::Teardown for Arc<Listening> {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        self.id.destroy();
        Ok(())
    }
}

/// Listens for connections on an address (`rdma_listen`). Dropping it stops listening, from a work
/// item. Connections that were taken go on.
pub struct Listener {
    state: deferred::Deferred<Arc<Listening>>,
}

impl Listener {
    /// Listens on `addr`, in the initial network namespace (`rdma_bind_addr`, `rdma_listen`). On
    /// `0.0.0.0` or `::` that is on all devices, those to come included; on IPv6, for that only.
    ///
    /// `backlog` is the number of connections that may wait for their peers to confirm them, at
    /// least one: one more gives up that which has waited for longest, with [`cm::Event::Failed`].
    /// Data from the peer are a confirmation, too, if the ULP reports them
    /// ([`Id::notify_established`]).
    /// Requests are refused while as many again are being given up, or the ULP has not answered
    /// those that wait. Fails with `EADDRINUSE`, `EADDRNOTAVAIL`, `ENODEV` if no device has it,
    /// `EPERM` if `client` is another module's, `ENOMEM`, or the connection manager's error.
    ///
    /// # Examples
    ///
    /// ```
    /// use rdma::prelude::*;
    ///
    /// const VERSION: &[u8] = b"v1";
    ///
    /// /// Accepts peers that speak the same version.
    /// fn listen(
    ///     client: &ClientRef,
    ///     addr: SocketAddr,
    ///     (pd, cq): (Pd, Cq<Softirq>),
    ///     cx: &Sleepable,
    /// ) -> Result<cm::Listener> {
    ///     let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
    ///         // On InfiniBand and RoCE zeros follow.
    ///         let is_known = request.private_data().starts_with(VERSION);
    ///         let id = request.into_id(cx)?; // An error before this refuses the peer.
    ///         if !is_known {
    ///             return id.reject(VERSION, cx);
    ///         }
    ///         pr_info!("a connection from {}\n", id.gids()?.1);
    ///         let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(16, 16), cx)?;
    ///         id.accept(Arc::new(qp, GFP_KERNEL)?, &cm::ConnParam::default(), cx)
    ///     };
    ///     cm::Listener::new(client, addr, 8, Arc::new(accept, GFP_KERNEL)?, cx)
    /// }
    /// ```
    pub fn new(
        client: &ClientRef,
        addr: SocketAddr,
        backlog: u32,
        accept: Arc<dyn Accept>,
        cx: &Sleepable,
    ) -> Result<Self> {
        Self::new_with(client, addr, backlog, &Options::default(), accept, cx)
    }

    /// Listens on `addr`, as [`Listener::new`], with options. Fails as that does; with `EINVAL` for
    /// a source address; and with `ENODEV` if the namespace is being dismantled.
    pub fn new_with(
        client: &ClientRef,
        addr: SocketAddr,
        backlog: u32,
        options: &Options<'_>,
        accept: Arc<dyn Accept>,
        _cx: &Sleepable,
    ) -> Result<Self> {
        if options.src.is_some() {
            return Err(EINVAL);
        }
        client.module().check_handler(&accept)?;
        let reserved = deferred::Deferred::reserve()?;
        let mut object = client.object(refs::ObjectKind::Id);
        object.summary = objects::Summary::Listener;
        object.set_peer(objects::PeerAddr::On(addr.ip(), addr.port()));
        let listening = Arc::pin_init(
            pin_init!(Listening {
                id <- ListenId::new(),
                accept,
                client: client.clone(),
                backlog <- Backlog::new(backlog),
                has_stopped: atomic::Atomic::new(false),
                stop <- kernel::new_work!("rdma::cm::Listener::stop"),
                object,
            }),
            GFP_KERNEL,
        )?;
        let context = Arc::as_ptr(&listening).cast_mut().cast();
        // SAFETY: The context is a `Listening`. The teardown of the listener, which keeps it,
        // destroys the id.
        let raw = unsafe { options.create(client, on_listener_event, context) }?;
        listening.id.set(raw);
        let this = Self {
            state: reserved.fill(listening),
        };
        // Once the id is bound, the removal of the device destroys it; it waits for the lock.
        let locked = this.state.id.raw.lock();
        let options = Options {
            src: Some(addr),
            ..*options
        };
        // SAFETY: The id was just created. Until it is bound it gets no event, and then it is not
        // destroyed while it is locked.
        unsafe {
            if addr.is_ipv6() {
                let only = (!options.dual_stack).into();
                to_result(bindings::rdma_set_afonly(raw.as_ptr(), only))?;
            }
            options.apply(raw)?;
            to_result(bindings::rdma_listen(raw.as_ptr(), backlog.try_into()?))?;
        }
        drop(locked);
        Ok(this)
    }

    /// Returns whether the listener has stopped because its device is being removed. Set before
    /// [`Accept::stopped`] is called, so that it tells which of several listeners that is for.
    ///
    /// # Examples
    ///
    /// A device may go before the handle of its listener is stored. So the lock is held from before
    /// the listener is made: [`Accept::stopped`] waits, and finds it.
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// struct Port {
    ///     listener: Pin<KBox<Mutex<Option<cm::Listener>>>>,
    /// }
    /// # use kernel::sync::Mutex;
    ///
    /// impl cm::Accept for Port {
    ///     fn request(self: ArcBorrow<'_, Self>, _request: cm::Request<'_>, _cx: &Sleepable) {}
    ///
    ///     fn stopped(self: ArcBorrow<'_, Self>) {
    ///         // Another one may be there already, on another device.
    ///         let gone = self.listener.lock().take_if(|it| it.has_stopped());
    ///         drop(gone);
    ///     }
    /// }
    ///
    /// fn listen(port: &Arc<Port>, on: &ClientRef, addr: SocketAddr, cx: &Sleepable) -> Result {
    ///     let mut listener = port.listener.lock();
    ///     *listener = Some(cm::Listener::new(on, addr, 8, port.clone(), cx)?);
    ///     Ok(())
    /// }
    /// ```
    pub fn has_stopped(&self) -> bool {
        self.state.has_stopped.load(atomic::Relaxed)
    }

    /// Stops listening and waits for that, so that the address is free. Fails with `EDEADLK` in a
    /// callback of the connection manager; it then ends from a work item.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        InCallback::refuse()?;
        self.state.destroy(cx)
    }
}

/// A connection request that waits for an answer.
///
/// # Invariants
///
/// `event` is the connection request of `id`, of a connected service, and this is its callback.
pub struct Request<'a> {
    id: NonNull<bindings::rdma_cm_id>,
    event: &'a bindings::rdma_cm_event,
    client: &'a ClientRef,
    verdict: &'a Verdict<RdmaCm>,
}

impl Request<'_> {
    /// Returns what the peer sent along.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: By the type invariant this is an event of a connected service, in its callback.
        unsafe { cm::private_data(self.event) }
    }

    /// Returns the peer's parameters, which C has turned round: the peer's `responder_resources`
    /// are the `initiator_depth` here.
    fn param(&self) -> &bindings::rdma_conn_param {
        // SAFETY: By the type invariant this is an event of a connected service, which has set it.
        unsafe { &self.event.param.conn }
    }

    /// Returns how many RDMA READs the peer lets this side have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.param().initiator_depth
    }

    /// Returns how many RDMA READs the peer wants to have outstanding here.
    pub fn responder_resources(&self) -> u8 {
        self.param().responder_resources
    }

    /// Takes the connection's id, to be accepted or rejected now or later; dropping it refuses.
    /// Refuses and fails with `ENODEV` if the device is not the client's, or `ENOMEM`.
    pub fn into_id(self, _cx: &Sleepable) -> Result<Id> {
        let conn = Conn::new(cm::State::Requested)?;
        let reserved = deferred::Deferred::reserve()?;
        let mut object = self.client.object(refs::ObjectKind::Id);
        object.summary = objects::Summary::Connection(conn.clone());
        let pending = Pending::new(conn.clone())?;
        let raw = self.id.as_ptr();
        // SAFETY: By the type invariant this is the id's callback, the only one that runs, for a
        // request.
        unsafe {
            conn.set_addrs(raw);
            (*raw).context = Arc::as_ptr(&conn).cast_mut().cast();
            (*raw).event_handler = Some(on_event);
        }
        // The id is ours: a work item will destroy it, never this callback, which has its lock.
        self.verdict.taken.set(Some(pending.clone()));
        // INVARIANT: As the id is taken, `teardown` destroys it, and not the callback's return.
        let raw = RawId(self.id);
        conn.set_id(Some(raw));
        // INVARIANT: Callback and context were set above.
        let state = reserved.fill(OwnedId {
            raw,
            conn,
            device: sync::SetOnce::new(),
            pending: sync::SetOnce::new(),
            client: self.client.clone(),
            object,
        });
        state.pending.populate(pending);
        (state.bind()).inspect_err(|_| self.verdict.refused.set(true))?;
        Ok(Id { state })
    }
}
