// SPDX-License-Identifier: GPL-2.0

//! Listening for connections.

use crate::{
    bindings,
    cm::{
        callback::InCallback,
        state::RawId,
        RejectReason, //
    },
    context::{
        Context as _,
        PollContext,
        Sleepable, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    ibcm::{
        connection::{
            establish,
            number,
            on_event,
            private_data,
            starting_psn,
            IbCm,
            NewConnection,
            REQ_LEN, //
        },
        Connection,
        Handler,
        Param, //
    },
    objects::Object,
    qp::{
        self,
        Qp, //
    },
    refs::Kind,
    removal::{
        self,
        OnRemoval, //
    }, //
};
use core::{
    cell::Cell,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// The handler of a listener's events.
pub trait Accept: Send + Sync + 'static {
    /// A peer wants to connect: [`Request::accept`] it, [`Request::reject`] it, or drop it, which
    /// rejects it as well ([`CONSUMER_DEFINED`](crate::cm::RejectReason::CONSUMER_DEFINED)).
    ///
    /// Called in process context; others wait for this to return.
    fn request(&self, request: Request<'_>, cx: &Sleepable);

    /// The device goes, and the listener with it.
    fn stopped(&self) {}
}

/// A function that is called with each request. Its errors are reported.
impl<F: Fn(Request<'_>, &Sleepable) -> Result + Send + Sync + 'static> Accept for F {
    fn request(&self, request: Request<'_>, cx: &Sleepable) {
        if let Err(e) = self(request, cx) {
            pr_warn!("a connection request was refused: {e:?}\n");
        }
    }
}

/// The context of a listener's C id, which lives as long as that.
///
/// # Invariants
///
/// `id` has [`on_listener_event`] as its callback and this as its context, until it is taken to be
/// destroyed.
#[pin_data]
struct Listening {
    #[pin]
    id: Mutex<Option<RawId<IbCm>>>,
    accept: Arc<dyn Accept>,
    device: Device,
    place: removal::Place,
}

impl Listening {
    /// Destroys the C id, unless that was done, and waits for its callback.
    fn stop(&self) {
        // Locked meanwhile, so that a second task waits for it too.
        let mut id = self.id.lock();
        if let Some(id) = id.take() {
            // SAFETY: The id is not destroyed yet by the invariant of `RawId`, and this task
            // alone destroys it, as it has taken it.
            unsafe { bindings::ib_destroy_cm_id(id.as_ptr()) };
        }
    }

    fn on_request(&self, id: RawId<IbCm>, event: &bindings::ib_cm_event) -> c_int {
        let taken = Cell::new(false);
        // INVARIANT: This is the callback of the request's id, with its event.
        let request = Request {
            id,
            event,
            device: &self.device,
            taken: &taken,
        };
        // SAFETY: The connection manager calls back in process context.
        let cx = unsafe { Sleepable::assume() };
        self.accept.request(request, &cx);
        // An id that was not taken is destroyed on return, and rejected if that was not done.
        if taken.get() {
            0
        } else {
            ECONNREFUSED.to_errno()
        }
    }
}

impl OnRemoval for Listening {
    fn place(&self) -> &removal::Place {
        &self.place
    }

    fn removed(&self, _cx: &Sleepable) {
        self.stop();
        // A handler that waits here holds up all others.
        let _in_callback = InCallback::enter();
        self.accept.stopped();
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
    // SAFETY: The context of an id with this callback is its listener's, which lives until that is
    // destroyed; and that waits for this. The event is valid during the call.
    let (listening, event) = unsafe { (&*(*id).context.cast::<Listening>(), &*event) };
    let _in_callback = InCallback::enter();
    match NonNull::new(id) {
        Some(id) if event.event == bindings::ib_cm_event_type_IB_CM_REQ_RECEIVED => {
            // INVARIANT: The id of a request is destroyed after this callback at the earliest.
            listening.on_request(RawId(id), event)
        }
        _ => 0,
    }
}

struct State {
    listening: Arc<Listening>,
    _listed: Object,
}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        let device = &self.listening.device;
        device.inner().removal.remove(&self.listening);
        self.listening.stop();
        Fate::Gone
    }
}

/// Listens for connections to a service id on one device (`ib_cm_listen`).
///
/// Dropping it stops listening, from a work item. Connections that were accepted go on.
pub struct Listener {
    state: Deferred<State>,
}

impl Listener {
    /// Listens on a service id.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there is a listener on it; `EPROTONOSUPPORT` if the device is one of iWARP, which
    /// this connection manager does not hear; `ENODEV` if the device goes; `ENOMEM`; or the
    /// connection manager's error.
    #[inline(never)]
    pub fn new(
        device: &Device,
        service_id: u64,
        accept: Arc<dyn Accept>,
        _cx: &Sleepable,
    ) -> Result<Self> {
        if device.is_iwarp() {
            return Err(EPROTONOSUPPORT);
        }
        let reserved = Deferred::reserve()?;
        let listed = device.list(Kind::Id)?;
        let listening = Arc::pin_init(
            pin_init!(Listening {
                id <- new_mutex!(None),
                accept,
                device: device.clone(),
                place: removal::Place::new(),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The device is registered by the invariant of `device::Inner`, and the context
        // lives until the id is destroyed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_create_cm_id(
                device.as_raw(),
                Some(on_listener_event),
                Arc::as_ptr(&listening).cast_mut().cast(),
            )
        })?;
        // INVARIANT: Just created.
        *listening.id.lock() = NonNull::new(raw).map(RawId);
        let this = Self {
            state: reserved.fill(State {
                listening: listening.clone(),
                _listed: listed,
            }),
        };
        // SAFETY: The id is alive: `this` has it, and the removal of the device does not know it
        // yet.
        to_result(unsafe { bindings::ib_cm_listen(raw, service_id.to_be()) })?;
        device.inner().removal.add(listening)?;
        Ok(this)
    }

    /// Stops listening and waits for that, so that the service id is free.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a callback of a connection manager; it then ends from a work item.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        if InCallback::is_current() {
            return Err(EDEADLK);
        }
        self.state.destroy(cx);
        Ok(())
    }
}

/// A connection request that waits for an answer.
///
/// # Invariants
///
/// `event` is the connection request of `id`, and this is the callback that tells it.
pub struct Request<'a> {
    pub(super) id: RawId<IbCm>,
    pub(super) event: &'a bindings::ib_cm_event,
    pub(super) device: &'a Device,
    pub(super) taken: &'a Cell<bool>,
}

impl Request<'_> {
    /// Returns what the peer sent along, 92 bytes.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: By the type invariant this is the event of a request, whose private data have
        // this length.
        unsafe { private_data(self.event, REQ_LEN) }
    }

    /// Returns what the peer asks for, which the connection manager has made the view of the
    /// recipient.
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

    /// Takes the QP to RTS and accepts the connection (`ib_send_cm_rep`). The peer may send from
    /// here on.
    ///
    /// `handler` gets the events of the connection.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the QP is of another device, or in use already, or with too much private data;
    /// `ENODEV` if the device goes; `ENOMEM`; or the connection manager's or driver's error.
    /// The request is then rejected.
    pub fn accept<S: PollContext, R: PollContext>(
        self,
        qp: &Qp<S, R>,
        handler: Arc<dyn Handler>,
        param: &Param<'_>,
        _cx: &Sleepable,
    ) -> Result<Connection> {
        self.accept_inner(&qp.inner, handler, &param.clamp())
    }

    #[inline(never)]
    fn accept_inner(
        self,
        qp: &qp::Inner,
        handler: Arc<dyn Handler>,
        param: &Param<'_>,
    ) -> Result<Connection> {
        if *qp.pd.device() != *self.device {
            return Err(EINVAL);
        }
        let mut rep = bindings::ib_cm_rep_param {
            qp_num: number(qp),
            starting_psn: starting_psn(qp),
            private_data: param.private_data.as_ptr().cast(),
            private_data_len: param.private_data.len().try_into()?,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: 1,
            rnr_retry_count: param.rnr_retry_count,
            ..Default::default()
        };
        let new = NewConnection::new(self.device, self.port_num(), handler)?;
        let conn = new.conn.clone();
        let raw = self.id.as_ptr();
        // SAFETY: The id is alive by the invariant of `RawId`. By that of the request this is its
        // callback, and no other one runs before this has returned.
        unsafe {
            (*raw).context = Arc::as_ptr(&conn).cast_mut().cast();
            (*raw).cm_handler = Some(on_event);
        }
        // The id is ours: a work item will destroy it, never this callback's return.
        self.taken.set(true);
        // SAFETY: What is taken is not destroyed by the callback's return; callback and context
        // were set above.
        let accepted = unsafe { new.fill(self.id) }.and_then(|connection| {
            establish(qp, self.id)?;
            // SAFETY: The id is alive by the invariant of `RawId`. The parameters are copied by the
            // call.
            to_result(unsafe { bindings::ib_send_cm_rep(raw, &raw mut rep) })?;
            Ok(connection)
        });
        accepted.inspect_err(|_| conn.release_handler())
    }

    /// Rejects the connection (`ib_send_cm_rej`).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data, or the connection manager's error. The
    /// request is rejected all the same.
    pub fn reject(self, reason: RejectReason, private_data: &[u8], _cx: &Sleepable) -> Result {
        let len = private_data.len().try_into()?;
        // SAFETY: The id is alive by the invariant of `RawId`, and the data are copied by the call.
        to_result(unsafe {
            bindings::ib_send_cm_rej(
                self.id.as_ptr(),
                reason.0,
                core::ptr::null_mut(),
                0,
                private_data.as_ptr().cast(),
                len,
            )
        })
    }
}
