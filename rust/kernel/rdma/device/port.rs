// SPDX-License-Identifier: GPL-2.0

//! Ports of a device.

use crate::{
    bindings,
    context::Sleepable,
    device::{
        Device,
        Netdev, //
    }, //
};
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

/// A port of a device.
///
/// # Invariants
///
/// The device has a port `num`.
#[derive(Clone, Copy)]
pub struct Port<'a> {
    pub(super) dev: &'a Device,
    pub(super) num: u32,
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
    /// The size of the largest message, in bytes.
    pub max_msg: u32,
    /// The number of entries of the GID table.
    pub gid_table_len: u32,
    /// The number of entries of the P_Key table.
    pub pkey_table_len: u16,
    /// The port's LID, on InfiniBand.
    pub lid: u32,
    /// The LID of the subnet manager.
    pub sm_lid: u32,
    /// The number of low bits of the LID that select a path (LID mask control).
    pub lmc: u8,
    /// The prefix of the subnet.
    pub subnet_prefix: u64,
    /// The number of lanes, if known.
    pub lanes: Option<u32>,
    /// The speed of a lane, in Mbit/s, if known.
    pub lane_mbps: Option<u32>,
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
            max_msg: raw.max_msg_sz,
            gid_table_len: raw.gid_tbl_len.try_into().unwrap_or(0),
            pkey_table_len: raw.pkey_tbl_len,
            lid: raw.lid,
            sm_lid: raw.sm_lid,
            lmc: raw.lmc,
            subnet_prefix: raw.subnet_prefix,
            lanes: lanes(raw.active_width.into()),
            lane_mbps: lane_mbps(raw.active_speed.into()),
        }
    }

    /// Returns the speed of the link, in Mbit/s, if known.
    pub fn mbps(&self) -> Option<u32> {
        self.lanes?.checked_mul(self.lane_mbps?)
    }
}

/// Returns an `enum ib_mtu` in bytes, or zero if it is not known (`ib_mtu_enum_to_int`).
fn mtu_bytes(mtu: bindings::ib_mtu) -> u32 {
    match mtu {
        bindings::ib_mtu_IB_MTU_256 => 256,
        bindings::ib_mtu_IB_MTU_512 => 512,
        bindings::ib_mtu_IB_MTU_1024 => 1024,
        bindings::ib_mtu_IB_MTU_2048 => 2048,
        bindings::ib_mtu_IB_MTU_4096 => 4096,
        _ => 0,
    }
}

/// Returns the number of lanes of an `enum ib_port_width` (`ib_width_enum_to_int`).
fn lanes(width: bindings::ib_port_width) -> Option<u32> {
    match width {
        bindings::ib_port_width_IB_WIDTH_1X => Some(1),
        bindings::ib_port_width_IB_WIDTH_2X => Some(2),
        bindings::ib_port_width_IB_WIDTH_4X => Some(4),
        bindings::ib_port_width_IB_WIDTH_8X => Some(8),
        bindings::ib_port_width_IB_WIDTH_12X => Some(12),
        _ => None,
    }
}

/// Returns the speed of a lane of an `enum ib_port_speed`, in Mbit/s, as IPoIB shows it.
fn lane_mbps(speed: bindings::ib_port_speed) -> Option<u32> {
    match speed {
        bindings::ib_port_speed_IB_SPEED_SDR => Some(2_500),
        bindings::ib_port_speed_IB_SPEED_DDR => Some(5_000),
        bindings::ib_port_speed_IB_SPEED_QDR | bindings::ib_port_speed_IB_SPEED_FDR10 => {
            Some(10_000)
        }
        bindings::ib_port_speed_IB_SPEED_FDR => Some(14_000),
        bindings::ib_port_speed_IB_SPEED_EDR => Some(25_000),
        bindings::ib_port_speed_IB_SPEED_HDR => Some(50_000),
        bindings::ib_port_speed_IB_SPEED_NDR => Some(100_000),
        bindings::ib_port_speed_IB_SPEED_XDR => Some(200_000),
        _ => None,
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

    /// Returns `true` if the device is one of iWARP.
    pub(crate) fn is_iwarp(&self) -> bool {
        self.ports().any(|port| port.protocols().iwarp())
    }

    /// Returns the device's ports (`rdma_for_each_port`).
    pub fn ports(&self) -> Ports<'_> {
        // A switch has its port 0 only.
        let next = if self.port(0).is_some() { 0 } else { 1 };
        Ports { dev: self, next }
    }
}

/// The iterator of [`Device::ports`].
pub struct Ports<'a> {
    dev: &'a Device,
    next: u32,
}

impl<'a> Iterator for Ports<'a> {
    type Item = Port<'a>;

    fn next(&mut self) -> Option<Port<'a>> {
        let port = self.dev.port(self.next)?;
        self.next = self.next.checked_add(1)?;
        Some(port)
    }
}

impl<'a> Port<'a> {
    /// Returns the number of the port.
    pub fn num(&self) -> u32 {
        self.num
    }

    /// Returns the device.
    pub fn device(&self) -> &'a Device {
        self.dev
    }

    /// Queries the attributes of the port (`ib_query_port`).
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::Sleepable, device::{Device, PortState}};
    /// fn active_ports(dev: &Device, cx: &Sleepable) -> usize {
    ///     let attrs = dev.ports().filter_map(|port| port.query(cx).ok());
    ///     attrs.filter(|attr| attr.state == PortState::Active).count()
    /// }
    /// ```
    pub fn query(&self, _cx: &Sleepable) -> Result<PortAttr> {
        let mut attr = bindings::ib_port_attr::default();
        // SAFETY: The device is registered by the invariant of `Inner`, and the caller may sleep.
        let ret = unsafe { bindings::ib_query_port(self.dev.as_raw(), self.num, &raw mut attr) };
        to_result(ret)?;
        Ok(PortAttr::from_raw(&attr))
    }

    /// Returns the protocols of the port. Any context.
    pub fn protocols(&self) -> Protocols {
        // SAFETY: The device is registered by the invariant of `Inner`, and has this port.
        Protocols(unsafe { bindings::rdma_helper_port_protocols(self.dev.as_raw(), self.num) })
    }

    /// Returns the link layer of the port (`rdma_port_get_link_layer`). Any context.
    pub fn link_layer(&self) -> LinkLayer {
        // SAFETY: The device is registered by the invariant of `Inner`, and has this port.
        match unsafe { bindings::rdma_port_get_link_layer(self.dev.as_raw(), self.num) } {
            bindings::rdma_link_layer_IB_LINK_LAYER_INFINIBAND => LinkLayer::Infiniband,
            bindings::rdma_link_layer_IB_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
            _ => LinkLayer::Unspecified,
        }
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

    /// Queries the P_Key at an index of the port's table (`ib_query_pkey`).
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the table, `EOPNOTSUPP` if the port has none, or the driver's error.
    pub fn pkey(&self, index: u16, _cx: &Sleepable) -> Result<u16> {
        let mut pkey = 0;
        // SAFETY: The device is registered by the invariant of `Inner`, and the caller may sleep.
        to_result(unsafe {
            bindings::ib_query_pkey(self.dev.as_raw(), self.num, index, &raw mut pkey)
        })?;
        Ok(pkey)
    }

    /// Returns the index of a P_Key in the port's table, preferably that of a full member
    /// (`ib_find_cached_pkey`). Any context.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the table does not have it.
    pub fn find_pkey(&self, pkey: u16) -> Result<u16> {
        let mut index = 0;
        // SAFETY: The device is registered by the invariant of `Inner`.
        to_result(unsafe {
            bindings::ib_find_cached_pkey(self.dev.as_raw(), self.num, pkey, &raw mut index)
        })?;
        Ok(index)
    }
}

/// The link layer of a port, as `enum rdma_link_layer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    Infiniband,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// Not known.
    Unspecified,
}

/// The protocols of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols(pub(super) u32);

impl Protocols {
    fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }

    /// Returns `true` for InfiniBand (`rdma_protocol_ib`).
    pub fn ib(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_IB)
    }

    /// Returns `true` for RoCE (`rdma_protocol_roce`).
    pub fn roce(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE)
    }

    /// Returns `true` for RoCE version 1, on Ethernet (`rdma_protocol_roce_eth_encap`).
    pub fn roce_v1(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V1)
    }

    /// Returns `true` for RoCE version 2, on UDP (`rdma_protocol_roce_udp_encap`).
    pub fn roce_v2(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V2)
    }

    /// Returns `true` for InfiniBand or RoCE (`rdma_ib_or_roce`).
    pub fn ib_or_roce(self) -> bool {
        self.ib() || self.roce()
    }

    /// Returns `true` for iWARP (`rdma_protocol_iwarp`), on which an RDMA READ needs a remotely
    /// writable MR.
    pub fn iwarp(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_IWARP)
    }

    /// Returns `true` if addresses are those of Omni-Path (`rdma_cap_opa_ah`).
    pub fn opa_addresses(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_OPA_AH)
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

/// The VLAN id of C that stands for no VLAN.
const NO_VLAN: u16 = 0xffff;

impl Drop for GidAttr {
    fn drop(&mut self) {
        // SAFETY: The reference is this value's by the type invariant, and is not used again.
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

    /// Returns a reference to the entry at an index of the port's table (`rdma_get_gid_attr`). Any
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

/// The iterator of [`Port::gids`].
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
    /// Returns the first IP address of the device's ports: on RoCE, where GIDs are IP addresses, and
    /// on iWARP, where it is the first IPv4 address of the interface. Any context.
    ///
    /// Link-local addresses are skipped, as they need a scope.
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
