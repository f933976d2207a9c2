// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::create`],
//! [`Id::resolve_addr`], [`Id::resolve_route`], a QP, receives, [`Id::connect`]. A passive one
//! comes as a [`Request`] to a [`Listener`] and is accepted with [`Id::accept`]. A [`Handler`]
//! gets the events of a connection.
//!
//! A ULP that must not wait begins with [`Id::connect_to`], and gets the rest as events.
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

pub use event::{
    Event,
    Handler,
    RejectReason,
    Rejected, //
};
pub use id::{
    Connect,
    Id,
    Options, //
};
pub(crate) use id::{
    Inner,
    QpClaim, //
};
pub use listener::{
    Accept,
    Listener,
    Request, //
};

use crate::bindings;
use core::net::{
    SocketAddr,
    SocketAddrV4,
    SocketAddrV6, //
};
use kernel::prelude::*;

/// Parameters of a connection, as `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
pub struct ConnParam<'a> {
    /// Data for the peer along with the request or the answer; at most 56 bytes in a request, 196
    /// in an answer.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding at the peer. With 0 they wait for
    /// ever.
    pub initiator_depth: u8,
    /// The number of times that an unanswered packet is sent again, up to 7. rxe takes 7 for
    /// "always".
    pub retry_count: u8,
    /// The number of times that a message is sent again when the peer has posted no receive, up to
    /// 7, which means "always".
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

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// `struct sockaddr_in`.
#[repr(C)]
#[derive(Clone, Copy)]
struct In {
    family: u16,
    port: [u8; 2],
    addr: [u8; 4],
    zero: [u8; 8],
}

/// `struct sockaddr_in6`.
#[repr(C)]
#[derive(Clone, Copy)]
struct In6 {
    family: u16,
    port: [u8; 2],
    flowinfo: [u8; 4],
    addr: [u8; 16],
    scope_id: u32,
}

/// A socket address as the connection manager takes it.
#[repr(C, align(8))]
union SockAddr {
    v4: In,
    v6: In6,
}

impl SockAddr {
    fn as_mut_ptr(&mut self) -> *mut bindings::sockaddr {
        core::ptr::from_mut(self).cast()
    }
}

impl From<SocketAddr> for SockAddr {
    fn from(addr: SocketAddr) -> Self {
        match addr {
            SocketAddr::V4(addr) => Self {
                v4: In {
                    family: AF_INET,
                    port: addr.port().to_be_bytes(),
                    addr: addr.ip().octets(),
                    zero: [0; 8],
                },
            },
            SocketAddr::V6(addr) => Self {
                v6: In6 {
                    family: AF_INET6,
                    port: addr.port().to_be_bytes(),
                    flowinfo: addr.flowinfo().to_be_bytes(),
                    addr: addr.ip().octets(),
                    scope_id: addr.scope_id(),
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
        match (*addr).v4.family {
            AF_INET => {
                let In { addr, port, .. } = (*addr).v4;
                Some(SocketAddrV4::new(addr.into(), u16::from_be_bytes(port)).into())
            }
            AF_INET6 => {
                let In6 {
                    addr,
                    port,
                    scope_id,
                    ..
                } = (*addr).v6;
                let port = u16::from_be_bytes(port);
                Some(SocketAddrV6::new(addr.into(), port, 0, scope_id).into())
            }
            _ => None,
        }
    }
}
