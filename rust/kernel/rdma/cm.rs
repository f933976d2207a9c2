// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::create`],
//! [`Id::resolve_addr`], [`Id::resolve_route`], a QP, receives, [`Id::connect`]. A ULP that must
//! not wait begins with [`Id::connect_to`] instead. A passive connection comes as a [`Request`] to
//! a [`Listener`] and is accepted with [`Id::accept`]. A [`Handler`] gets the events.
//!
//! An id is destroyed by a work item when its last handle is dropped, which may be in its own
//! handler. [`Id::destroy`] waits for that. Its QP keeps it.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

pub(crate) mod callback;
mod event;
mod id;
mod listener;
pub(crate) mod state;
pub(crate) mod timeouts;

pub use event::Event;
pub use event::Handler;
pub use event::RejectReason;
pub use event::Rejected;
pub use id::Connect;
pub use id::Id;
pub use id::Options;
pub(crate) use id::QpClaim;
pub(crate) use id::Shared;
pub use listener::Accept;
pub use listener::Listener;
pub use listener::Request;

use crate::prelude::*;
use core::net::{
    Ipv4Addr,
    SocketAddrV6, //
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
                let ip = Ipv4Addr::from_bits(u32::from_be(addr.sin_addr.s_addr));
                Some((ip, u16::from_be(addr.sin_port)).into())
            }
            SockAddr::V6 => {
                let addr = (*addr).v6;
                let (ip, port) = (addr.sin6_addr.in6_u.u6_addr8, u16::from_be(addr.sin6_port));
                Some(SocketAddrV6::new(ip.into(), port, 0, addr.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}
