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

mod callback;
mod conn;
mod id;
mod listener;
mod pending;

pub(crate) use callback::{
    init,
    InCallback, //
};
pub(crate) use conn::{
    Conn,
    Manager,
    RawId,
    State, //
};
pub(crate) use id::Shared;
pub use id::{
    Connect,
    Id,
    Options, //
};
pub use listener::{
    Accept,
    Listener,
    Request, //
};
pub(crate) use listener::{
    Backlog,
    ListenId,
    Outcome, //
};
pub(crate) use pending::Pending;

use crate::{
    code::HasCode,
    prelude::internal::*,
    rnr_timer::RnrTimer, //
};
use core::{
    net::{
        self,
        SocketAddr, //
    },
    ptr, //
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
    /// for more time. 0 is refused with `EINVAL` by all functions that take these.
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

/// Returns private data that C keeps, none if the address is null.
///
/// # Safety
///
/// Unless it is null, `len` bytes at the address are initialised, and do not change during `'a`.
pub(crate) unsafe fn private_data_at<'a>(data: *const c_void, len: usize) -> &'a [u8] {
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
/// `addr` is zero, or an address of the family that its first field names.
unsafe fn socket_addr(
    addr: &bindings::__kernel_sockaddr_storage,
    scope: u32,
) -> Option<SocketAddr> {
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
                    let sent = (!sent.is_null()).then(|| private_data_at(sent, len.into()));
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
        private_data_at(conn.private_data, conn.private_data_len.into())
    }
}

/// The handler of the events of a connection. What takes one fails with `EPERM` if the client, or
/// the device, of the connection is another module's.
pub trait Handler: HasCode + Send + Sync {
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
