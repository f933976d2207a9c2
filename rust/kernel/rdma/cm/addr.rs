// SPDX-License-Identifier: GPL-2.0

//! Socket addresses, as the connection manager takes and writes them.

use crate::prelude::internal::*;
use core::net::{
    self,
    SocketAddr, //
};

/// A socket address as the connection manager takes it.
#[repr(C, align(8))]
pub(super) union SockAddr {
    v4: bindings::sockaddr_in,
    v6: bindings::sockaddr_in6,
}

impl SockAddr {
    const V4: u16 = bindings::AF_INET as u16;
    const V6: u16 = bindings::AF_INET6 as u16;

    pub(super) fn as_mut_ptr(&mut self) -> *mut bindings::sockaddr {
        ptr::from_mut(self).cast()
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
pub(super) unsafe fn socket_addr(
    addr: &bindings::__kernel_sockaddr_storage,
    scope: u32,
) -> Option<SocketAddr> {
    let addr: *const SockAddr = ptr::from_ref(addr).cast();
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
