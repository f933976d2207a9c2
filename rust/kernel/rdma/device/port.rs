// SPDX-License-Identifier: GPL-2.0

//! Ports of a device.

use crate::prelude::*;
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr, //
};
use kernel::error::from_err_ptr;

/// A port of a device.
///
/// # Examples
///
/// ```
/// # use rdma::{context::Sleepable, device::{Device, PortState, Protocol}};
/// fn show_active_ports(dev: &Device, cx: &Sleepable) -> Result {
///     for port in dev.ports() {
///         let active = port.query(cx)?.state == PortState::Active;
///         let roce = port.has(Protocol::Roce);
///         if let (true, true, Some(netdev)) = (active, roce, port.netdev(cx)) {
///             let (num, gid) = (port.num(), port.gid(0)?.ok_or(ENOENT)?);
///             pr_info!("{num}: {gid} of {} ({})\n", netdev.name(), netdev.index());
///             pr_info!("{num}: P_Key 0xffff at {}\n", port.find_pkey(0xffff)?);
///         }
///     }
///     Ok(())
/// }
/// ```
///
/// # Invariants
///
/// The device has a port `num`.
#[derive(Clone, Copy)]
pub struct Port<'a> {
    dev: &'a Device,
    num: u32,
}

/// The state of a port's link, as `enum ib_port_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// There is no link.
    Down,
    /// The link is up and not configured yet.
    Init,
    /// The link is configured and carries no data yet.
    Armed,
    /// The link carries data.
    Active,
    /// Anything else, by its C value.
    Other(u32),
}

/// The attributes of a port, as `struct ib_port_attr`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PortAttr {
    /// The state of the link.
    pub state: PortState,
    /// The maximum MTU of the port, in bytes.
    pub max_mtu: u32,
    /// The MTU of the link, in bytes.
    pub active_mtu: u32,
    /// The number of entries of the GID table.
    pub gid_table_len: u32,
    /// The number of entries of the P_Key table.
    pub pkey_table_len: u16,
    /// The port's LID, on InfiniBand.
    pub lid: u32,
    /// The LID of the subnet manager.
    pub sm_lid: u32,
}

impl PortAttr {
    fn from_raw(raw: &bindings::ib_port_attr) -> Self {
        Self {
            state: match raw.state {
                bindings::ib_port_state_IB_PORT_DOWN => PortState::Down,
                bindings::ib_port_state_IB_PORT_INIT => PortState::Init,
                bindings::ib_port_state_IB_PORT_ARMED => PortState::Armed,
                bindings::ib_port_state_IB_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            max_mtu: mtu_bytes(raw.max_mtu),
            active_mtu: mtu_bytes(raw.active_mtu),
            gid_table_len: raw.gid_tbl_len.try_into().unwrap_or(0),
            pkey_table_len: raw.pkey_tbl_len,
            lid: raw.lid,
            sm_lid: raw.sm_lid,
        }
    }
}

/// Returns an `enum ib_mtu` in bytes, or zero if it is not known (`ib_mtu_enum_to_int`).
fn mtu_bytes(mtu: bindings::ib_mtu) -> u32 {
    match mtu {
        bindings::ib_mtu_IB_MTU_256..=bindings::ib_mtu_IB_MTU_4096 => 128 << mtu,
        _ => 0,
    }
}

/// A protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Protocol {
    /// InfiniBand (`rdma_protocol_ib`).
    Ib = bindings::rdma_helper_protocol_RDMA_HELPER_IB,
    /// RoCE of any version (`rdma_protocol_roce`).
    Roce = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE,
    /// RoCE version 1, on Ethernet (`rdma_protocol_roce_eth_encap`).
    RoceV1 = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V1,
    /// RoCE version 2, on UDP (`rdma_protocol_roce_udp_encap`).
    RoceV2 = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V2,
    /// iWARP (`rdma_protocol_iwarp`), on which an RDMA READ needs a remotely writable MR.
    Iwarp = bindings::rdma_helper_protocol_RDMA_HELPER_IWARP,
    /// The addresses of Omni-Path (`rdma_cap_opa_ah`).
    OpaAh = bindings::rdma_helper_protocol_RDMA_HELPER_OPA_AH,
}

/// A copy of the name and the index of a network interface.
pub struct Netdev(bindings::rdma_helper_netdev);

impl Netdev {
    /// Returns the name, which an administrator may have changed since.
    pub fn name(&self) -> &CStr {
        // SAFETY: The helper has filled in a string that ends in the array.
        unsafe { CStr::from_char_ptr(self.0.name.as_ptr()) }
    }

    /// Returns the index, which identifies the interface in its network namespace.
    pub fn index(&self) -> u32 {
        self.0.index.try_into().unwrap_or(0)
    }
}

impl Device {
    /// Returns the port with this number, if the device has it (`rdma_is_port_valid`). The first
    /// is 1, except on a switch, whose only port is 0.
    pub fn port(&self, num: u32) -> Option<Port<'_>> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let exists = unsafe { bindings::rdma_helper_is_port_valid(self.as_raw(), num) };
        // INVARIANT: The device has the port.
        exists.then_some(Port { dev: self, num })
    }

    /// Returns the first IP address of the device's ports: on RoCE, where GIDs are IP addresses,
    /// and on iWARP, where it is the first IPv4 address of the interface. Any context. Link-local
    /// addresses are skipped, as they need a scope.
    pub fn ip_addr(&self) -> Option<IpAddr> {
        for port in self.ports() {
            for attr in port.gids() {
                let ip = if port.has(Protocol::Roce) {
                    Some(attr.gid().ip())
                } else if port.has(Protocol::Iwarp) {
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

    /// Returns whether the device is one of iWARP: those are all and the only ones of this type.
    pub(crate) fn is_iwarp(&self) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; its type does not change.
        unsafe { (*self.as_raw()).node_type == super::NodeType::Rnic as u8 }
    }

    /// Returns the device's ports (`rdma_for_each_port`).
    pub fn ports(&self) -> impl Iterator<Item = Port<'_>> {
        // A switch has its port 0 only.
        let first = if self.port(0).is_some() { 0 } else { 1 };
        (first..).map_while(|num| self.port(num))
    }
}

impl<'a> Port<'a> {
    /// Returns the number of the port.
    pub fn num(&self) -> u32 {
        self.num
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.dev
    }

    /// Queries the attributes of the port (`ib_query_port`). Fails with the driver's error.
    pub fn query(&self, _cx: &Sleepable) -> Result<PortAttr> {
        let mut attr = bindings::ib_port_attr::default();
        // SAFETY: The device is registered by the invariant of `Inner`, and the caller may sleep.
        let ret = unsafe { bindings::ib_query_port(self.dev.as_raw(), self.num, &raw mut attr) };
        to_result(ret)?;
        Ok(PortAttr::from_raw(&attr))
    }

    /// Returns `true` if the port has a protocol. Any context.
    pub fn has(&self, protocol: Protocol) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`, and has this port.
        let all = unsafe { bindings::rdma_helper_port_protocols(self.dev.as_raw(), self.num) };
        all & protocol as u32 != 0
    }

    /// Returns the network interface of the port, if it has one (`ib_device_get_netdev`).
    pub fn netdev(&self, _cx: &Sleepable) -> Option<Netdev> {
        let mut netdev = bindings::rdma_helper_netdev::default();
        // SAFETY: The device is registered by the invariant of `Inner`.
        let ret = unsafe {
            bindings::rdma_helper_port_netdev(self.dev.as_raw(), self.num, &raw mut netdev)
        };
        (ret == 0).then_some(Netdev(netdev))
    }

    /// Returns the index of a P_Key in the port's table, preferably that of a full member
    /// (`ib_find_cached_pkey`). Any context. Fails with `ENOENT` if the table does not have it.
    pub fn find_pkey(&self, pkey: u16) -> Result<u16> {
        let mut index = 0;
        // SAFETY: The device is registered by the invariant of `Inner`.
        to_result(unsafe {
            bindings::ib_find_cached_pkey(self.dev.as_raw(), self.num, pkey, &raw mut index)
        })?;
        Ok(index)
    }

    /// Returns the GID at an index of the port's table, if it is in use (`rdma_query_gid`). Any
    /// context. Fails with `EINVAL` beyond the table.
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

    /// Returns the entries of the port's table that are in use (`rdma_get_gid_attr`). Any context.
    pub fn gids(&self) -> impl Iterator<Item = GidAttr> + 'a {
        let (port, mut indices) = (*self, 0..=u16::MAX);
        core::iter::from_fn(move || loop {
            match port.gid_attr(indices.next()?) {
                Ok(attr) => return Some(attr),
                Err(EINVAL) => return None,
                Err(_) => {}
            }
        })
    }

    /// Fails with `ENODATA` if the entry is not in use, `EINVAL` beyond the table.
    fn gid_attr(&self, index: u16) -> Result<GidAttr> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let raw = unsafe { bindings::rdma_get_gid_attr(self.dev.as_raw(), self.num, index.into()) };
        let raw = from_err_ptr(raw.cast_mut())?;
        // INVARIANT: The call has taken a reference.
        Ok(GidAttr {
            raw: NonNull::new(raw).ok_or(ENODATA)?,
            dev: self.dev.clone(),
        })
    }
}

/// A GID, which on RoCE is an IPv6 address or a mapped IPv4 address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    pub(crate) fn from_raw(raw: &bindings::ib_gid) -> Self {
        // SAFETY: All members of the union are 16 bytes.
        Self(unsafe { *raw.raw })
    }

    pub(crate) fn to_raw(self) -> bindings::ib_gid {
        bindings::ib_gid {
            raw: core::mem::ManuallyDrop::new(self.0),
        }
    }

    /// Returns the IP address that the GID is on RoCE.
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

/// The Ethernet address of a GID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct L2 {
    /// The MAC address.
    pub mac: [u8; 6],
    /// The VLAN, if any.
    pub vlan: Option<u16>,
}

/// A reference to an entry of a GID table (`struct ib_gid_attr`). The entry is not reused while
/// this lives, but may lose its network interface.
///
/// # Invariants
///
/// `raw` is an entry of a table of `dev`, with a reference that this owns.
pub struct GidAttr {
    raw: NonNull<bindings::ib_gid_attr>,
    dev: Device,
}

// SAFETY: A reference to an entry may be released in any thread.
unsafe impl Send for GidAttr {}
// SAFETY: Only the network interface of the entry changes, which only C reads, under RCU.
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

    /// Returns the protocol of the GID.
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

    /// Returns the first global IPv4 address of the GID's interface, if there is one.
    fn ipv4(&self) -> Option<Ipv4Addr> {
        // SAFETY: `raw` is an entry by the type invariant; the helper takes the RCU read lock.
        let ip = unsafe { bindings::rdma_helper_gid_ipv4(self.raw.as_ptr()) };
        (ip != 0).then(|| Ipv4Addr::from(ip))
    }

    /// Returns the MAC address and the VLAN of the GID (`rdma_read_gid_l2_fields`). Any context.
    /// Fails with `ENODEV` if the GID has no network interface (any more).
    pub fn l2(&self) -> Result<L2> {
        let (mut vlan, mut mac) = (NO_VLAN, [0; 6]);
        // SAFETY: `raw` is an entry by the type invariant; a MAC address has six bytes.
        to_result(unsafe {
            bindings::rdma_helper_gid_l2(self.raw.as_ptr(), &raw mut vlan, mac.as_mut_ptr())
        })?;
        Ok(L2 {
            mac,
            vlan: (vlan != NO_VLAN).then_some(vlan),
        })
    }
}

/// The VLAN id of C that stands for no VLAN.
const NO_VLAN: u16 = 0xffff;

impl Drop for GidAttr {
    fn drop(&mut self) {
        // SAFETY: The reference is this value's by the type invariant, and is not used again.
        unsafe { bindings::rdma_put_gid_attr(self.raw.as_ptr()) };
    }
}
