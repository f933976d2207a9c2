// SPDX-License-Identifier: GPL-2.0

//! The way to a GID of RoCE.
//!
//! The RDMA core finds the way back to the sender of a datagram, and exports nothing else that does
//! so for kernel users. So the way to a peer is that to the sender of a datagram which the peer
//! might have sent.

use crate::{
    bindings,
    device::{
        Gid,
        GidAttr,
        GidType, //
    }, //
};
use core::net::IpAddr;
use kernel::prelude::*;

/// Where the addresses are in a received IPv4 header.
const IPV4_ADDRS_AT: usize = 32;
/// Where a GID that stands for an IPv4 address has it.
const IPV4_IN_GID: usize = 12;
/// Where the GIDs are in all other headers.
const GIDS_AT: usize = 8;

/// A datagram, as far as the way back to its sender needs it.
pub(crate) struct Datagram {
    pub(crate) wc: bindings::ib_wc,
    header: RoceHeader,
}

/// A received network header, as `union rdma_network_hdr`.
#[repr(C, align(8))]
struct RoceHeader([u8; 40]);

impl Datagram {
    /// Makes the datagram that QP 1 at `to` might have sent to `from`.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` if `from` is not of RoCE: elsewhere a GID is not enough of an address;
    /// `ENODEV` if it has no network interface (any more).
    pub(crate) fn new(from: &GidAttr, to: Gid) -> Result<Self> {
        let (network, at, skip) = match (from.gid_type(), from.gid().ip()) {
            (GidType::RoceV1, _) => (bindings::rdma_network_type_RDMA_NETWORK_ROCE_V1, GIDS_AT, 0),
            (GidType::RoceV2, IpAddr::V4(_)) => (
                bindings::rdma_network_type_RDMA_NETWORK_IPV4,
                IPV4_ADDRS_AT,
                IPV4_IN_GID,
            ),
            (GidType::RoceV2, IpAddr::V6(_)) => {
                (bindings::rdma_network_type_RDMA_NETWORK_IPV6, GIDS_AT, 0)
            }
            _ => return Err(EPROTONOSUPPORT),
        };
        let mut header = [0; 40];
        let mut rest = header.iter_mut().skip(at);
        for gid in [to, from.gid()] {
            for byte in gid.0.iter().skip(skip) {
                if let Some(place) = rest.next() {
                    *place = *byte;
                }
            }
        }
        let vlan = from.l2()?.vlan;
        let mut flags =
            bindings::ib_wc_flags_IB_WC_GRH | bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE;
        if vlan.is_some() {
            flags |= bindings::ib_wc_flags_IB_WC_WITH_VLAN;
        }
        Ok(Self {
            wc: bindings::ib_wc {
                src_qp: 1,
                wc_flags: flags as c_int,
                vlan_id: vlan.unwrap_or(0),
                network_hdr_type: network as u8,
                ..Default::default()
            },
            header: RoceHeader(header),
        })
    }

    pub(crate) fn header(&self) -> *const bindings::ib_grh {
        self.header.0.as_ptr().cast()
    }
}

/// Says whether datagrams of this GID have an IPv4 header.
pub(crate) fn is_ipv4(from: &GidAttr) -> bool {
    from.gid_type() == GidType::RoceV2 && from.gid().ip().is_ipv4()
}
