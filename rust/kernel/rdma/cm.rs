// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::resolve`], a
//! QP, receives, [`Id::connect`]; or without waiting, by [`Id::connect_to`]. A passive connection
//! comes as a [`Request`] to a [`Listener`] and is accepted with [`Id::accept`]. A [`Handler`] gets
//! the events. See Documentation/cm.rst.
//!
//! An id is destroyed by a work item when its last handle is dropped, which may be in its own
//! handler. Its QP keeps it.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod id;
mod pending;

pub use crate::rnr_timer::RnrTimer;
pub use id::Accept;
pub use id::Connect;
pub use id::Id;
pub use id::Listener;
pub use id::Options;
pub use id::Request;
pub(crate) use id::Shared;
pub(crate) use pending::Pending;

use crate::{
    completion::wait_event,
    deferred,
    objects,
    prelude::internal::*,
    removal, //
};
use core::{
    mem::replace,
    net::{
        self,
        SocketAddr, //
    },
    ptr, //
};
use kernel::{
    error::from_err_ptr,
    new_mutex,
    sync::{
        self,
        atomic::{
            Atomic,
            Relaxed, //
        }, //
    },
    workqueue, //
};

/// Parameters of a connection, as `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
pub struct ConnParam<'a> {
    /// Data for the peer: at most 56 bytes along with a request, 196 with an answer.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding. With 0 they wait for ever.
    pub initiator_depth: u8,
    /// The number of times that an unanswered packet is sent again, up to 7: for rxe, "always".
    pub retry_count: u8,
    /// The number of times that a message without a receive is sent again, up to 7: "always". The
    /// peer's `min_rnr_timer` is the time between them.
    pub rnr_retry_count: u8,
    /// The time that the peer waits when there is no receive for its message, before it sends that
    /// again (`rdma_set_min_rnr_timer`). On iWARP the connection ends instead.
    pub min_rnr_timer: RnrTimer,
    /// The time that the peer has to answer a request, or to confirm that its own was accepted, in
    /// milliseconds. C's connection managers give up after 74 s, or after hours if the peer asks
    /// for more time. With 0 what has the parameters fails with `EINVAL`.
    pub timeout_ms: u32,
}

impl Default for ConnParam<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 7,
            min_rnr_timer: RnrTimer::default(),
            timeout_ms: 90_000,
        }
    }
}

impl ConnParam<'_> {
    /// Fails with `EINVAL` for too much private data, or without time for the peer.
    pub(crate) fn to_raw(self) -> Result<bindings::rdma_conn_param> {
        if self.timeout_ms == 0 {
            return Err(EINVAL);
        }
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

/// The private data of a peer's answer.
#[derive(Clone, Copy)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; Self::MAX],
}

impl PrivateData {
    const MAX: usize = 255;

    pub(crate) fn new(from: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        let copied = bytes.iter_mut().zip(from).map(|(to, from)| *to = *from);
        Self {
            len: copied.count() as u8,
            bytes,
        }
    }
}

impl core::ops::Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or(&[])
    }
}

/// Returns data that C keeps, none if the address is null.
///
/// # Safety
///
/// Unless it is null, `len` bytes at the address are initialised, and do not change during `'a`.
pub(crate) unsafe fn data<'a>(data: *const c_void, len: usize) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: The address is not null, so the caller promises that the data are valid.
    unsafe { core::slice::from_raw_parts(data.cast(), len) }
}

/// A socket address as the connection manager takes it.
#[repr(C, align(8))]
union SockAddr {
    v4: bindings::sockaddr_in,
    v6: bindings::sockaddr_in6,
}

impl SockAddr {
    const V4: u16 = bindings::AF_INET as u16;
    const V6: u16 = bindings::AF_INET6 as u16;

    fn as_mut_ptr(&mut self) -> *mut bindings::sockaddr {
        core::ptr::from_mut(self).cast()
    }
}

impl From<SocketAddr> for SockAddr {
    #[inline(never)]
    fn from(addr: SocketAddr) -> Self {
        let port = addr.port().to_be();
        match addr {
            SocketAddr::V4(addr) => Self {
                v4: bindings::sockaddr_in {
                    sin_family: Self::V4,
                    sin_port: port,
                    sin_addr: bindings::in_addr {
                        s_addr: addr.ip().to_bits().to_be(),
                    },
                    ..Default::default()
                },
            },
            SocketAddr::V6(addr) => Self {
                v6: bindings::sockaddr_in6 {
                    sin6_family: Self::V6,
                    sin6_port: port,
                    sin6_flowinfo: addr.flowinfo().to_be(),
                    sin6_addr: bindings::in6_addr {
                        in6_u: bindings::in6_addr__bindgen_ty_1 {
                            u6_addr8: addr.ip().octets(),
                        },
                    },
                    sin6_scope_id: addr.scope_id(),
                },
            },
        }
    }
}

/// Reads an address that C has written; `None` if it is none of IP. A link-local one without a
/// scope id, as that of a request is, gets the `scope` in which it was used.
///
/// # Safety
///
/// `addr` is zero, or an address of the family that it says.
unsafe fn read(addr: &bindings::__kernel_sockaddr_storage, scope: u32) -> Option<SocketAddr> {
    let addr: *const SockAddr = core::ptr::from_ref(addr).cast();
    // SAFETY: A `sockaddr_storage` is as large as any address and aligned for it, and is
    // initialised; the family is at the same place in all of them.
    unsafe {
        match (*addr).v4.sin_family {
            SockAddr::V4 => {
                let addr = (*addr).v4;
                let ip = net::Ipv4Addr::from_bits(u32::from_be(addr.sin_addr.s_addr));
                Some((ip, u16::from_be(addr.sin_port)).into())
            }
            SockAddr::V6 => {
                let addr = (*addr).v6;
                let ip = net::Ipv6Addr::from(addr.sin6_addr.in6_u.u6_addr8);
                let scope = match addr.sin6_scope_id {
                    0 if ip.is_unicast_link_local() => scope,
                    given => given,
                };
                let port = u16::from_be(addr.sin6_port);
                Some(net::SocketAddrV6::new(ip, port, 0, scope).into())
            }
            _ => None,
        }
    }
}

// Events of the connection manager.

/// An event of a connection, as `struct rdma_cm_event`. Those of resolving are not passed on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The connection is established (`RDMA_CM_EVENT_ESTABLISHED`).
    Established {
        /// The data that the peer sent along.
        private_data: &'a [u8],
    },
    /// The connection is gone (`RDMA_CM_EVENT_DISCONNECTED`). The last event of an id: the crate
    /// then answers the peer and moves the QP to the error state, which flushes what is posted.
    Disconnected,
    /// The peer does not want the connection (`RDMA_CM_EVENT_REJECTED`). The last event of an id.
    Rejected(Rejected<'a>),
    /// The connection could not be made (`RDMA_CM_EVENT_CONNECT_ERROR`, `..._UNREACHABLE`,
    /// `..._ADDR_ERROR`, `..._ROUTE_ERROR`). The last event of an id, unless it was established:
    /// the peer's address has moved, and it is being disconnected.
    Failed(Error),
    /// The device goes (`RDMA_CM_EVENT_DEVICE_REMOVAL`), or the module. The last event of an id:
    /// the crate then ends the connection, and the removal waits until its objects are gone.
    DeviceRemoval,
    /// The network interface of this end has another hardware address, as that of a bond after a
    /// failover (`RDMA_CM_EVENT_ADDR_CHANGE`). The connection still uses the old one: most ULPs
    /// disconnect.
    AddrChange,
    /// Any other event, by its C value.
    Other(u32),
}

impl<'a> Event<'a> {
    /// Returns whether this is the last event of its id, so that the connection is over.
    pub fn is_last(&self) -> bool {
        let goes_on = matches!(
            self,
            Self::Established { .. } | Self::AddrChange | Self::Other(_)
        );
        !goes_on
    }

    /// # Safety
    ///
    /// `raw` is an event of `id`, of a connected service, and its private data live as long as it.
    unsafe fn from_raw(id: *mut bindings::rdma_cm_id, raw: &'a bindings::rdma_cm_event) -> Self {
        match raw.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => Self::Established {
                // SAFETY: The caller promises so of the event and its private data.
                private_data: unsafe { private_data(raw) },
            },
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => {
                let mut len = 0;
                let event = ptr::from_ref(raw).cast_mut();
                // SAFETY: The caller promises that this is an event of `id`, which has a device
                // then, and that the private data live as long as it. The message is never freed.
                let (message, private_data) = unsafe {
                    let message = bindings::rdma_reject_msg(id, raw.status);
                    let sent = bindings::rdma_consumer_reject_data(id, event, &raw mut len);
                    let sent = (!sent.is_null()).then(|| data(sent, len.into()));
                    (CStr::from_char_ptr(message), sent)
                };
                Self::Rejected(Rejected {
                    reason: raw.status.try_into().ok().map(RejectReason),
                    message,
                    private_data,
                })
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR => {
                Self::Failed(to_result(raw.status).err().unwrap_or(EHOSTUNREACH))
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE => Self::AddrChange,
            other => Self::Other(other),
        }
    }
}

/// The event's name (`rdma_event_msg`), and why.
impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = match self {
            Self::Established { .. } => bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED,
            Self::Disconnected => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED,
            Self::Rejected(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED,
            Self::Failed(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR,
            Self::DeviceRemoval => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL,
            Self::AddrChange => bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE,
            Self::Other(raw) => *raw,
        };
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::rdma_event_msg(raw)) };
        fmt::Display::fmt(text, f)?;
        match self {
            Self::Rejected(rejected) => f.write_fmt(fmt!(": {rejected}")),
            Self::Failed(error) => f.write_fmt(fmt!(": {error:?}")),
            _ => Ok(()),
        }
    }
}

/// Returns the private data of an event.
///
/// # Safety
///
/// `raw` is an event of a connected service, and its private data live as long as it.
unsafe fn private_data(raw: &bindings::rdma_cm_event) -> &[u8] {
    // SAFETY: The caller promises that this is an event of a connected service, in which `conn` is
    // the member that is set, and that its private data live as long as it.
    unsafe {
        let conn = &*raw.param.conn;
        data(conn.private_data, conn.private_data_len.into())
    }
}

/// The handler of the events of a connection.
pub trait Handler: Send + Sync + 'static {
    /// Handles an event. Events of one connection come one after the other, in process context. The
    /// handler is released after the last event, so that it may own the connection. A work item
    /// that is started here gets a reference by `Arc::from(self)`.
    fn event(self: ArcBorrow<'_, Self>, event: Event<'_>, cx: &Sleepable);
}

/// The reason of a rejection, as `enum ib_cm_rej_reason`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RejectReason(pub u32);

/// The length of the private data of a rejection by the InfiniBand connection manager.
pub(crate) const REJ_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;

impl RejectReason {
    /// There is no QP left.
    pub const NO_QP: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_QP);
    /// There is no room for another connection.
    pub const NO_RESOURCES: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_RESOURCES);
    /// There is no listener on the port, or the service id.
    pub const INVALID_SERVICE_ID: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_SERVICE_ID);
    /// There is an older connection of this QP.
    pub const STALE_CONN: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_STALE_CONN);
    /// The reason is the ULP's own; the data that are sent along say it.
    pub const CONSUMER_DEFINED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

/// A peer's rejection of a connection request. Can be printed (`rdma_reject_msg`).
///
/// # Examples
///
/// ```
/// # use rdma::{cm::RejectReason, prelude::*};
/// fn is_stale(rejected: &cm::Rejected<'_>) -> bool {
///     pr_info!("{rejected}, with {:?}\n", rejected.private_data());
///     rejected.reason() == Some(RejectReason::STALE_CONN)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rejected<'a> {
    reason: Option<RejectReason>,
    message: &'static CStr,
    private_data: Option<&'a [u8]>,
}

impl<'a> Rejected<'a> {
    /// Returns the rejection of an id of the InfiniBand connection manager.
    pub(crate) fn new(reason: RejectReason, private_data: &'a [u8]) -> Self {
        let raw = c_int::try_from(reason.0).unwrap_or(0);
        // SAFETY: Any number will do; the string is static.
        let message = unsafe { CStr::from_char_ptr(bindings::ibcm_reject_msg(raw)) };
        Self {
            reason: Some(reason),
            message,
            private_data: (reason == RejectReason::CONSUMER_DEFINED).then_some(private_data),
        }
    }

    /// Returns the reason, on InfiniBand and RoCE.
    pub fn reason(&self) -> Option<RejectReason> {
        self.reason
    }

    /// Returns what the peer's ULP sent along, if it was the peer's ULP that has rejected
    /// (`rdma_consumer_reject_data`). On InfiniBand and RoCE zeroes fill it up to 148 bytes.
    pub fn private_data(&self) -> Option<&'a [u8]> {
        self.private_data
    }
}

impl fmt::Display for Rejected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.message, f)
    }
}

// The tasks that are in a callback of a connection manager.
//
// Callbacks share a few work queues, some of them ordered, so a task that waits in a callback for
// another event may wait for ever: what would wait returns `EDEADLK`.

/// The tasks that are in callbacks, and zeroes. A task looks for its own stores only.
static TASKS: [Atomic<usize>; 256] = [const { Atomic::new(0) }; 256];

/// The number of tasks that are in callbacks. A task that is has counted itself.
static ENTERED: Atomic<u32> = Atomic::new(0);

/// The tasks for which there was no room. Until they return, every task is taken for one.
static UNLISTED: Atomic<u32> = Atomic::new(0);

/// Returns the address of the current task, to be compared.
fn current_task() -> usize {
    // SAFETY: There is a current task.
    unsafe { bindings::get_current() as usize }
}

/// A mark that the current task is in a callback, or in a handler that callbacks may wait for.
pub(crate) struct InCallback(Option<&'static Atomic<usize>>);

impl InCallback {
    pub(crate) fn enter() -> Self {
        let task = current_task();
        ENTERED.add(1, Relaxed);
        let is_free = |slot: &&Atomic<usize>| slot.cmpxchg(0, task, Relaxed).is_ok();
        let slot = TASKS.iter().find(is_free);
        if slot.is_none() {
            UNLISTED.add(1, Relaxed);
        }
        Self(slot)
    }

    /// Returns whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        if ENTERED.load(Relaxed) == 0 {
            return false;
        }
        let task = current_task();
        UNLISTED.load(Relaxed) != 0 || TASKS.iter().any(|slot| slot.load(Relaxed) == task)
    }

    /// Fails with `EDEADLK` if the current task is in a callback.
    pub(crate) fn refuse() -> Result {
        (!Self::is_current()).then_some(()).ok_or(EDEADLK)
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        match self.0 {
            Some(slot) => slot.store(0, Relaxed),
            None => drop(UNLISTED.fetch_sub(1, Relaxed)),
        }
        ENTERED.fetch_sub(1, Relaxed);
    }
}

// The state of connections, of either connection manager.

/// A connection manager of C.
pub(crate) trait Manager: Sized + Send + Sync + 'static {
    type Id;
    /// A connection that is made by its events.
    type Async: Send + Sync;

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
/// ```
///
/// A passive connection begins as Requested, and one of ib_cm as Connecting. What fails before the
/// peer was asked leaves the state as it is.
///
/// A disconnection is remembered: if the connection is established only afterwards, the callback
/// ends it, as C does nothing while the peer's last message is still to come (`ib_send_cm_dreq()`
/// in core/cm.c). Notified leaves it to the callback altogether: if the state of the C id changes
/// before the manager's worker has run, that does not cancel the message which waits for the peer's
/// last one (`cm_establish_handler()`), and the id lives on for a minute. While Asking, C is called
/// without the lock, as an iWARP driver may take long. That task disconnects.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(crate) enum State {
    /// The device and the addresses are not known, or C may still change them.
    Idle,
    /// They are, and C no longer changes them.
    Resolved,
    /// The peer is being asked by the callback.
    Asking,
    /// A request has come that was neither accepted nor rejected. The id can be disconnected.
    Requested,
    /// The peer was asked, or a request accepted.
    Connecting,
    /// The ULP has said that the connection is established. The manager's worker has yet to find
    /// that.
    Notified,
    Established,
    /// The last event has come, or the request was rejected.
    Closed,
}

/// A call that waits for an event, or what is done instead of waiting.
enum Wait<M: Manager> {
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
    wait: Wait<M>,
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

    /// Takes the result of the event that a call waits for, if it has come.
    fn take_result(&mut self) -> Option<Result<Option<KBox<PrivateData>>>> {
        match replace(&mut self.wait, Wait::None) {
            Wait::Done(result) => return Some(result),
            waiting => self.wait = waiting,
        }
        None
    }

    /// Takes the connection that is made by its events, unless it has begun to ask the peer.
    fn take_async(&mut self) -> Option<Arc<M::Async>> {
        match &mut self.wait {
            Wait::Async(connect) if self.state != State::Asking => connect.take(),
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
        // INVARIANT: The caller makes the owner.
        Ok(Self(NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?))
    }

    pub(crate) fn as_ptr(self) -> *mut M::Id {
        self.0.as_ptr()
    }
}

/// A connection: the context of its C id. Lives as long as that, at least.
#[pin_data]
pub(crate) struct Conn<M: Manager> {
    /// The id, until it is about to be destroyed: for work items, and the removal of the device.
    #[pin]
    id: sync::Mutex<Option<RawId<M>>>,
    /// No reference to a value of the ULP is dropped with it locked.
    #[pin]
    inner: sync::Mutex<Inner<M>>,
    /// Locked where C uses the QP of the id without a reference: it is created or destroyed, the
    /// connection is asked for, accepted, or on iWARP disconnected. Taken after the handler lock.
    #[pin]
    qp: sync::Mutex<()>,
    /// The wait of a call has ended, or the state is no longer Notified.
    #[pin]
    changed: sync::CondVar,
    /// Held while an event is handled, and so while the handler is called. Taken before `inner`.
    #[pin]
    pub(crate) event_lock: sync::Mutex<()>,
    /// The task that is in the callback of the id, with its handler lock, or zero.
    callback_task: Atomic<usize>,
    /// The addresses of this end and the other, once C knows them and the device: for functions
    /// that any context may call. Those of ib_cm have none.
    addrs: sync::SetOnce<(SocketAddr, SocketAddr)>,
    /// The connection was there, and a message of the peer has ended it.
    peer_ended: Atomic<bool>,
    #[pin]
    disconnect: workqueue::Work<Self, DISCONNECT>,
    #[pin]
    notify: workqueue::Work<Self, NOTIFY>,
    place: removal::Place,
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
        })
    }
}

impl<M: Manager> removal::OnRemoval for Conn<M> {
    fn place(&self) -> &removal::Place {
        &self.place
    }

    fn gone(self: Arc<Self>) {
        let mut inner = self.inner.lock();
        inner.gone = true;
        self.fail_wait(&mut inner, ENODEV);
    }

    fn removed(&self, cx: &Sleepable) {
        // Callbacks may wait for the handler that is called here.
        let _in_callback = InCallback::enter();
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
        let _in_callback = InCallback::enter();
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
            wait: Wait::None,
            handler: None,
        };
        Arc::pin_init(
            pin_init!(Self {
                id <- new_mutex!(None),
                inner <- new_mutex!(inner),
                qp <- new_mutex!(()),
                changed <- kernel::new_condvar!(),
                event_lock <- new_mutex!(()),
                callback_task: Atomic::new(0),
                addrs: sync::SetOnce::new(),
                peer_ended: Atomic::new(false),
                disconnect <- kernel::new_work!("rdma::cm::Conn::disconnect"),
                notify <- kernel::new_work!("rdma::cm::Conn::notify"),
                place: removal::Place::new(),
            }),
            GFP_KERNEL,
        )
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

    pub(crate) fn set_callback_task(&self, in_callback: bool) {
        let task = if in_callback { current_task() } else { 0 };
        self.callback_task.store(task, Relaxed);
    }

    /// Returns whether the current task is in the callback of the id, and has its handler lock.
    pub(crate) fn is_in_own_callback(&self) -> bool {
        self.callback_task.load(Relaxed) == current_task()
    }

    pub(crate) fn state(&self) -> State {
        self.inner.lock().state
    }

    /// Returns what the list of objects shows of the connection: its state.
    pub(crate) fn shown(self: &Arc<Self>) -> objects::Sizes {
        objects::Sizes::Connection(self.clone())
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
        if matches!(inner.wait, Wait::Event(..)) {
            inner.wait = Wait::Done(Err(error));
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
            if !matches!(inner.wait, Wait::None) {
                return Err(EBUSY);
            }
            if inner.gone {
                return Err(ENODEV);
            }
            inner.wait = Wait::Event(event, reply);
        }
        let started = start();
        let mut inner = self.inner.lock();
        started.inspect_err(|_| inner.wait = Wait::None)?;
        let result = |inner: &mut Inner<M>| inner.take_result();
        let waited = wait_event(&self.changed, &mut inner, timeout_ms, result, cx);
        waited.inspect_err(|_| inner.wait = Wait::None)?
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
        let mut disconnect = false;
        let mut is_last = false;
        inner.state = match event {
            Event::Other(_) if is_resolved && was == State::Idle => State::Resolved,
            Event::AddrChange | Event::Other(_) => was,
            Event::Established { .. } => {
                // Nobody hears of a connection that exists after the last event.
                disconnect = inner.end || was == State::Closed;
                State::Established
            }
            // A neighbour got another address: the connection exists for the manager only.
            Event::Failed(_) if was == State::Established => {
                disconnect = true;
                was
            }
            _ => {
                is_last = true;
                // The end was left to an event that will not come.
                disconnect = was == State::Notified && inner.end;
                if was >= State::Requested {
                    State::Closed
                } else {
                    was
                }
            }
        };
        inner.wait = match (replace(&mut inner.wait, Wait::None), reply) {
            (Wait::Event(..), Err(e)) => Wait::Done(Err(e)),
            (Wait::Event(success, mut to), Ok(sent)) if success == raw => {
                if let Some(to) = &mut to {
                    **to = PrivateData::new(sent);
                }
                Wait::Done(Ok(to))
            }
            (wait, _) => wait,
        };
        let connect = match &mut inner.wait {
            // Returned, to be dropped without the lock.
            Wait::Async(connect) if is_last => connect.take(),
            Wait::Async(connect) if is_resolved => connect.clone(),
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
        inner.wait = Wait::Async(Some(connect));
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
            if !matches!(inner.wait, Wait::Async(Some(_))) {
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
        if matches!(inner.wait, Wait::Async(_)) && inner.state != State::Established {
            // The connection manager goes on asking the peer for long.
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

    /// Waits until the manager's worker has found that the connection is established, if it is to.
    pub(crate) fn wait_notified(&self) {
        let mut inner = self.inner.lock();
        let mut left = kernel::time::msecs_to_jiffies(NOTIFIED_MS);
        while inner.state == State::Notified {
            match self.changed.wait_interruptible_timeout(&mut inner, left) {
                sync::CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                _ => return,
            }
        }
    }

    pub(crate) fn disconnect_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = deferred::Queue::get().enqueue::<_, DISCONNECT>(self.clone());
    }

    /// Tells the manager from a work item that the peer uses the connection, if it is being made.
    pub(crate) fn notify_established(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = deferred::Queue::get().enqueue::<_, NOTIFY>(self.clone());
    }
}
