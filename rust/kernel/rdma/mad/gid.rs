// SPDX-License-Identifier: GPL-2.0

//! The way to a GID.
//!
//! The RDMA core finds the way back to the sender of a datagram, and exports nothing else that does
//! so for kernel users. So the way to a peer is that to the sender of a datagram which the peer
//! might have sent.

use super::Agent;
use crate::{
    bindings,
    device::Device, //
};
use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*, //
};

/// The kind of header that a datagram comes with, as `enum rdma_network_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Network(bindings::rdma_network_type);

impl Network {
    pub(super) const IPV4: Self = Self(bindings::rdma_network_type_RDMA_NETWORK_IPV4);
    const IPV6: Self = Self(bindings::rdma_network_type_RDMA_NETWORK_IPV6);
    const ROCE_V1: Self = Self(bindings::rdma_network_type_RDMA_NETWORK_ROCE_V1);
}

/// A received network header, as `union rdma_network_hdr`.
#[repr(C, align(8))]
pub(super) struct NetworkHeader(pub(super) [u8; 40]);

impl NetworkHeader {
    const IPV4_ADDRS_AT: usize = 32;
    const GIDS_AT: usize = 8;
    /// Where a GID that stands for an IPv4 address has it.
    const IPV4_IN_GID: usize = 12;

    fn new(network: Network, source: &[u8; 16], destination: &[u8; 16]) -> Self {
        let (at, skip) = if network == Network::IPV4 {
            (Self::IPV4_ADDRS_AT, Self::IPV4_IN_GID)
        } else {
            (Self::GIDS_AT, 0)
        };
        let mut header = [0; 40];
        let mut rest = header.iter_mut().skip(at);
        for gid in [source, destination] {
            for byte in gid.iter().skip(skip) {
                if let Some(place) = rest.next() {
                    *place = *byte;
                }
            }
        }
        Self(header)
    }
}

/// An entry of a port's GID table.
///
/// # Invariants
///
/// A counted reference to the entry, whose device is alive.
pub(super) struct SourceGid {
    raw: NonNull<bindings::ib_gid_attr>,
    _device: Device,
}

impl SourceGid {
    /// Finds an entry for RoCE, version 2 first.
    pub(super) fn find(agent: &Agent, gid: [u8; 16]) -> Result<Self> {
        let (device, port) = (agent.device(), agent.port());
        let gid = bindings::ib_gid {
            raw: core::mem::ManuallyDrop::new(gid),
        };
        let find = |gid_type| {
            // SAFETY: The device is registered while there is a handle; any network device will do.
            from_err_ptr(unsafe {
                bindings::rdma_find_gid_by_port(
                    device.as_raw(),
                    &raw const gid,
                    gid_type,
                    port,
                    core::ptr::null_mut(),
                )
                .cast_mut()
            })
        };
        let raw = find(bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP)
            .or_else(|_| find(bindings::ib_gid_type_IB_GID_TYPE_ROCE))?;
        // INVARIANT: The reference was just taken.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOENT)?,
            _device: device.clone(),
        })
    }

    /// Returns the header that datagrams to and from this GID have (`rdma_gid_attr_network_type`).
    pub(super) fn network(&self) -> Network {
        // SAFETY: By the type invariant; all members of the union are 16 bytes.
        let (gid_type, gid) = unsafe { (self.raw.as_ref().gid_type, *self.raw.as_ref().gid.raw) };
        if gid_type == bindings::ib_gid_type_IB_GID_TYPE_ROCE {
            Network::ROCE_V1
        } else if core::net::Ipv6Addr::from(gid).to_ipv4_mapped().is_some() {
            Network::IPV4
        } else {
            Network::IPV6
        }
    }

    /// Returns the completion and the header of a datagram that `to` might have sent to `from`.
    pub(super) fn as_if_received(
        &self,
        from: [u8; 16],
        to: [u8; 16],
    ) -> Result<(bindings::ib_wc, NetworkHeader)> {
        const NO_VLAN: u16 = 0xffff;

        let mut vlan_id = NO_VLAN;
        // SAFETY: By the type invariant; the MAC address is not asked for.
        to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(
                self.raw.as_ptr(),
                &raw mut vlan_id,
                core::ptr::null_mut(),
            )
        })?;
        let network = self.network();
        let mut flags =
            bindings::ib_wc_flags_IB_WC_GRH | bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE;
        if vlan_id != NO_VLAN {
            flags |= bindings::ib_wc_flags_IB_WC_WITH_VLAN;
        }
        let wc = bindings::ib_wc {
            src_qp: 1,
            wc_flags: flags as c_int,
            vlan_id,
            network_hdr_type: network.0 as u8,
            ..Default::default()
        };
        Ok((wc, NetworkHeader::new(network, &to, &from)))
    }
}

impl Drop for SourceGid {
    fn drop(&mut self) {
        // SAFETY: By the type invariant.
        unsafe { bindings::rdma_put_gid_attr(self.raw.as_ptr()) };
    }
}
