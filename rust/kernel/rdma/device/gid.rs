// SPDX-License-Identifier: GPL-2.0

//! GIDs: the addresses of ports.

use super::{
    Device,
    Netdev,
    Port, //
};
use crate::bindings;
use core::{
    net::{
        IpAddr,
        Ipv4Addr,
        Ipv6Addr, //
    },
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    fmt,
    prelude::*, //
};

/// A GID. On RoCE it is an IPv6 address or a mapped IPv4 address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    pub(crate) fn from_raw(raw: &bindings::ib_gid) -> Self {
        // SAFETY: All members of the union are 16 bytes.
        Self(unsafe { *raw.raw })
    }

    /// Returns the IP address that the GID stands for on RoCE.
    pub fn ip(&self) -> IpAddr {
        let ip = Ipv6Addr::from(self.0);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::fmt::Display::fmt(&Ipv6Addr::from(self.0), f)
    }
}

/// The protocol that a GID is for, as `enum ib_gid_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidType {
    /// InfiniBand.
    Ib,
    /// RoCE version 1.
    RoceV1,
    /// RoCE version 2.
    RoceV2,
    /// Anything else, by its C value.
    Other(u32),
}

/// Where packets of a GID come from on Ethernet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct L2 {
    /// The MAC address.
    pub mac: [u8; 6],
    /// The VLAN, if any.
    pub vlan: Option<u16>,
}

/// An entry of a GID table, which stays while this is held, but may lose its network interface
/// (`struct ib_gid_attr`).
///
/// # Invariants
///
/// `raw` is an entry of a table of `dev`, with a reference that this owns.
pub struct GidAttr {
    raw: NonNull<bindings::ib_gid_attr>,
    dev: Device,
}

// SAFETY: References are counted, and may be given back in any thread.
unsafe impl Send for GidAttr {}
// SAFETY: Of the entry, only the network interface changes, which only C reads, under RCU.
unsafe impl Sync for GidAttr {}

impl GidAttr {
    pub(crate) fn as_raw(&self) -> *const bindings::ib_gid_attr {
        self.raw.as_ptr()
    }

    /// Returns the GID.
    pub fn gid(&self) -> Gid {
        // SAFETY: `raw` is an entry by the type invariant, and its GID does not change.
        Gid::from_raw(unsafe { &(*self.as_raw()).gid })
    }

    /// Returns the protocol that the GID is for.
    pub fn gid_type(&self) -> GidType {
        // SAFETY: `raw` is an entry by the type invariant, and its type does not change.
        match unsafe { (*self.as_raw()).gid_type } {
            bindings::ib_gid_type_IB_GID_TYPE_IB => GidType::Ib,
            bindings::ib_gid_type_IB_GID_TYPE_ROCE => GidType::RoceV1,
            bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP => GidType::RoceV2,
            other => GidType::Other(other),
        }
    }

    /// Returns the index of the entry in its port's table.
    pub fn index(&self) -> u16 {
        // SAFETY: `raw` is an entry by the type invariant, and its index does not change.
        unsafe { (*self.as_raw()).index }
    }

    /// Returns the number of the port.
    pub fn port_num(&self) -> u32 {
        // SAFETY: `raw` is an entry by the type invariant, and its port does not change.
        unsafe { (*self.as_raw()).port_num }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.dev
    }

    /// Returns the network interface that the GID is an address of
    /// (`rdma_read_gid_attr_ndev_rcu`). Any context.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is none, `EINVAL` if the address has been removed from it.
    pub fn netdev(&self) -> Result<Netdev> {
        let mut netdev = bindings::rdma_helper_netdev::default();
        // SAFETY: `raw` is an entry by the type invariant; the helper reads its interface under
        // RCU.
        to_result(unsafe { bindings::rdma_helper_gid_netdev(self.raw.as_ptr(), &raw mut netdev) })?;
        Ok(Netdev(netdev))
    }

    /// Returns the first global IPv4 address of the GID's interface, if there is one.
    fn ipv4(&self) -> Option<Ipv4Addr> {
        // SAFETY: `raw` is an entry by the type invariant; the helper reads its interface under
        // RCU.
        let ip = unsafe { bindings::rdma_helper_gid_ipv4(self.raw.as_ptr()) };
        (ip != 0).then(|| Ipv4Addr::from(ip))
    }

    /// Returns the MAC address and the VLAN of the GID (`rdma_read_gid_l2_fields`). Any context.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the GID has no network interface (any more).
    pub fn l2(&self) -> Result<L2> {
        let (mut vlan, mut mac) = (NO_VLAN, [0; 6]);
        // SAFETY: `raw` is an entry by the type invariant; a MAC address has six bytes.
        to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(self.raw.as_ptr(), &raw mut vlan, mac.as_mut_ptr())
        })?;
        Ok(L2 {
            mac,
            vlan: (vlan != NO_VLAN).then_some(vlan),
        })
    }
}

/// What C says when there is no VLAN.
const NO_VLAN: u16 = 0xffff;

impl Drop for GidAttr {
    fn drop(&mut self) {
        // SAFETY: The reference is `self`'s by the type invariant, and is not used again.
        unsafe { bindings::rdma_put_gid_attr(self.raw.as_ptr()) };
    }
}

impl Port<'_> {
    /// Returns the GID at an index of the port's table, if the entry is in use
    /// (`rdma_query_gid`). Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the table.
    pub fn gid(&self, index: u16) -> Result<Option<Gid>> {
        let mut gid = bindings::ib_gid::default();
        // SAFETY: The device is registered by the invariant of `Inner`.
        let ret = unsafe {
            bindings::rdma_query_gid(self.dev.as_raw(), self.num, index.into(), &raw mut gid)
        };
        match to_result(ret) {
            Ok(()) => Ok(Some(Gid::from_raw(&gid))),
            Err(ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns what is known of the GID at an index of the port's table (`rdma_get_gid_attr`). Any
    /// context.
    ///
    /// # Errors
    ///
    /// `ENODATA` if the entry is not in use, `EINVAL` beyond the table.
    pub fn gid_attr(&self, index: u16) -> Result<GidAttr> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let raw = unsafe { bindings::rdma_get_gid_attr(self.dev.as_raw(), self.num, index.into()) };
        let raw = from_err_ptr(raw.cast_mut())?;
        // INVARIANT: The call has taken a reference.
        Ok(GidAttr {
            raw: NonNull::new(raw).ok_or(ENODATA)?,
            dev: self.dev.clone(),
        })
    }

    /// Returns the entries of the port's table that are in use. Any context.
    ///
    /// # Examples
    ///
    /// The entry of an address:
    ///
    /// ```
    /// # use core::net::IpAddr;
    /// # use rdma::device::{GidAttr, GidType, Port};
    /// fn find(port: &Port<'_>, ip: IpAddr) -> Option<GidAttr> {
    ///     port.gids()
    ///         .find(|attr| attr.gid_type() == GidType::RoceV2 && attr.gid().ip() == ip)
    /// }
    /// ```
    pub fn gids(&self) -> Gids<'_> {
        Gids {
            port: *self,
            next: 0,
        }
    }
}

/// The entries of a port's GID table that are in use: see [`Port::gids`].
pub struct Gids<'a> {
    port: Port<'a>,
    next: u16,
}

impl Iterator for Gids<'_> {
    type Item = GidAttr;

    fn next(&mut self) -> Option<GidAttr> {
        loop {
            let attr = self.port.gid_attr(self.next);
            self.next = self.next.checked_add(1)?;
            match attr {
                Ok(attr) => return Some(attr),
                Err(EINVAL) => return None,
                Err(_) => {}
            }
        }
    }
}

impl Device {
    /// Returns the first IP address that one of the device's ports has: on RoCE, where GIDs are IP
    /// addresses, and on iWARP, where it is the first IPv4 address of the interface. Any context.
    ///
    /// Link-local addresses are passed over: they need a scope to be of use.
    pub fn ip_addr(&self) -> Option<IpAddr> {
        for port in self.ports() {
            let protocols = port.protocols();
            for attr in port.gids() {
                let ip = if protocols.roce() {
                    Some(attr.gid().ip())
                } else if protocols.iwarp() {
                    attr.ipv4().map(IpAddr::V4)
                } else {
                    None
                };
                match ip {
                    None => {}
                    Some(IpAddr::V6(ip)) if ip.is_unspecified() || ip.is_unicast_link_local() => {}
                    Some(_) => return ip,
                }
            }
        }
        None
    }
}
