// SPDX-License-Identifier: GPL-2.0

//! Ports of a device.

use super::{
    Device,
    LinkLayer,
    Netdev,
    Protocols, //
};
use crate::{
    bindings,
    context::Sleepable, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// A port of a device, which exists.
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
    /// There is a link, not yet configured.
    Init,
    /// The link is configured, and carries no data yet.
    Armed,
    /// The port can be used.
    Active,
    /// Anything else, by its C value.
    Other(u32),
}

/// What a port is like now, as `struct ib_port_attr`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PortAttr {
    /// The state of the link.
    pub state: PortState,
    /// The largest MTU that the port can have, in bytes.
    pub max_mtu: u32,
    /// The MTU of the link, in bytes.
    pub active_mtu: u32,
    /// The size of the largest message, in bytes.
    pub max_msg: u32,
    /// The number of entries of the GID table.
    pub gid_table_len: u32,
    /// The number of entries of the P_Key table.
    pub pkey_table_len: u16,
    /// The port's address in its InfiniBand subnet.
    pub lid: u32,
    /// The address of the subnet manager.
    pub sm_lid: u32,
    /// How many low bits of the port's address routes may choose.
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

/// Returns the bytes of an `enum ib_mtu`, zero for one that is not known (`rdma_mtu_enum_to_int`,
/// of InfiniBand and RoCE).
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

/// Returns the lanes of an `enum ib_port_width` (`ib_width_enum_to_int`).
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

/// Returns the speed of a lane of an `enum ib_port_speed`, as IPoIB shows it.
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
    /// one is 1, but for switches, whose only one is 0.
    pub fn port(&self, num: u32) -> Option<Port<'_>> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let exists = unsafe { bindings::rdma_helper_is_port_valid(self.as_raw(), num) };
        // INVARIANT: Just checked.
        exists.then_some(Port { dev: self, num })
    }

    /// Says whether a port of the device is one of iWARP.
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

/// The ports of a device: see [`Device::ports`].
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
    /// Returns the number of the port, which users and peers know it by.
    pub fn num(&self) -> u32 {
        self.num
    }

    /// Returns the device.
    pub fn device(&self) -> &'a Device {
        self.dev
    }

    /// Asks the device what the port is like now (`ib_query_port`).
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

    /// Asks the device for the P_Key at an index of the port's table (`ib_query_pkey`).
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

    /// Returns the index of a P_Key in the port's table, preferring that of a full member
    /// (`ib_find_cached_pkey`). Any context.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the table has not got it.
    pub fn find_pkey(&self, pkey: u16) -> Result<u16> {
        let mut index = 0;
        // SAFETY: The device is registered by the invariant of `Inner`.
        to_result(unsafe {
            bindings::ib_find_cached_pkey(self.dev.as_raw(), self.num, pkey, &raw mut index)
        })?;
        Ok(index)
    }
}
