// SPDX-License-Identifier: GPL-2.0

//! Socket addresses for C.

use crate::bindings;
use core::net::{
    SocketAddr,
    SocketAddrV4,
    SocketAddrV6, //
};

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
pub(super) union SockAddr {
    v4: In,
    v6: In6,
}

impl SockAddr {
    pub(super) fn as_mut_ptr(&mut self) -> *mut bindings::sockaddr {
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
pub(super) unsafe fn read(addr: &bindings::__kernel_sockaddr_storage) -> Option<SocketAddr> {
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
