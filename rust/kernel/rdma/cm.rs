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

mod id;
pub(crate) mod state;

pub use id::Accept;
pub use id::Connect;
pub use id::Id;
pub use id::Listener;
pub use id::Options;
pub use id::Request;
pub(crate) use id::Shared;

use crate::prelude::*;
use core::{
    net,
    ptr, //
};
use kernel::{
    error::from_err_ptr,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
    time, //
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
    /// The number of times that a message without a receive is sent again, up to 7: "always".
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
    pub(crate) fn to_raw(self) -> Result<bindings::rdma_conn_param> {
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
    // SAFETY: The address is not null, so the caller says that the data are there.
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

/// Reads an address that C has written; `None` if it is none of IP.
///
/// # Safety
///
/// `addr` is zero, or an address of the family that it says.
unsafe fn read(addr: &bindings::__kernel_sockaddr_storage) -> Option<SocketAddr> {
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
                let (ip, port) = (addr.sin6_addr.in6_u.u6_addr8, u16::from_be(addr.sin6_port));
                Some(net::SocketAddrV6::new(ip.into(), port, 0, addr.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

// Events of the connection manager.

/// An event of a connection, as `struct rdma_cm_event`. The events of resolving are not passed on:
/// the calls that start it wait for them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The connection is there (`RDMA_CM_EVENT_ESTABLISHED`).
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
    /// Any other event, by its C value.
    Other(u32),
}

impl<'a> Event<'a> {
    /// Returns whether this is the last event of its id, so that the connection is over.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Established { .. } | Self::Other(_))
    }

    /// # Safety
    ///
    /// `raw` is an event of `id`, of a connected service, and its private data live as long as it.
    unsafe fn from_raw(id: *mut bindings::rdma_cm_id, raw: &'a bindings::rdma_cm_event) -> Self {
        match raw.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => Self::Established {
                // SAFETY: The caller says so of the event and its private data.
                private_data: unsafe { private_data(raw) },
            },
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => {
                let mut len = 0;
                let event = ptr::from_ref(raw).cast_mut();
                // SAFETY: The caller says that this is an event of `id`, which has a device then,
                // and that the private data live as long as it. The message is never freed.
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
    // SAFETY: The caller says that this is an event of a connected service, in which `conn` is the
    // member that is set, and that its private data live as long as it.
    unsafe {
        let conn = &*raw.param.conn;
        data(conn.private_data, conn.private_data_len.into())
    }
}

/// The handler of the events of a connection.
pub trait Handler: Send + Sync + 'static {
    /// Handles an event. Events of one connection come one after the other, in process context. The
    /// handler is released after the last event, so that it may own the connection.
    fn event(&self, event: Event<'_>, cx: &Sleepable);
}

/// The reason of a rejection, as `enum ib_cm_rej_reason`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RejectReason(pub u32);

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

// Timeouts of the messages of the connection managers, which are MADs.

/// The time between two attempts to allocate, in milliseconds.
const RETRY_MS: i64 = 10;

/// The MAD layer wants a handler of each agent, and never calls this one.
extern "C" fn on_sent(_: *mut bindings::ib_mad_agent, _: *mut bindings::ib_mad_send_wc) {}

/// Waits for the timeouts of a port that have begun: for the send handlers that were called before.
/// Not in a callback of a connection manager, which may be called by such a timeout.
///
/// The MAD layer calls the send handlers of all agents of a port for requests that have timed out
/// on one ordered workqueue (`timeout_sends()` in core/mad.c). Only unregistering an agent flushes
/// it, so this registers one that neither sends nor receives, and retries while that fails for want
/// of memory or of agent numbers. The port's CQ, which calls the handler of what was not sent, is
/// not waited for: see the limits in Documentation/safety.rst.
///
/// # Safety
///
/// `dev` is registered, and stays so during the call.
pub(crate) unsafe fn flush_timeouts(dev: *mut bindings::ib_device, port: u32, _cx: &Sleepable) {
    let (gsi, no_request) = (bindings::ib_qp_type_IB_QPT_GSI, ptr::null_mut());
    let agent = loop {
        // SAFETY: The caller says that the device is registered. An agent without a request
        // receives nothing but replies, and this one sends nothing, so no handler is called.
        let agent = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev,
                port,
                gsi,
                no_request,
                0,
                Some(on_sent),
                None,
                ptr::null_mut(),
                0,
            )
        });
        match agent {
            Ok(agent) => break agent,
            // The port has no MADs, or is not open: it is closed after all clients of this crate
            // have released the device.
            Err(EPROTONOSUPPORT | ENODEV) => return,
            Err(_) => time::delay::fsleep(time::Delta::from_millis(RETRY_MS)),
        }
    };
    // SAFETY: The agent was just registered. `unregister_mad_agent()` flushes the port's workqueue.
    unsafe { bindings::ib_unregister_mad_agent(agent) };
}
