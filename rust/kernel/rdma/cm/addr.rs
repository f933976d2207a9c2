// SPDX-License-Identifier: GPL-2.0

//! Socket addresses for C.

use crate::bindings;
use core::net::SocketAddr;

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
