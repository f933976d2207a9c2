// SPDX-License-Identifier: GPL-2.0

//! Senders of datagrams.

use crate::{
    bindings,
    device::Gid, //
};
use kernel::prelude::*;

/// The length of the header in front of each received datagram, in bytes.
pub(crate) const HEADER: usize = 40;

/// A received network header, as `union rdma_network_hdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Header([u8; HEADER]);

/// Who sent a datagram: what an answer needs, copied from its completion and its header.
#[derive(Clone, Copy)]
pub struct Source {
    qpn: u32,
    port: u32,
    slid: u32,
    flags: c_int,
    vlan_id: u16,
    sl: u8,
    dlid_path_bits: u8,
    network: u8,
    header: Header,
}

impl Source {
    /// `wc` is that of a datagram that was received by a QP of `port`, with this header.
    pub(crate) fn new(wc: &bindings::ib_wc, header: &[u8; HEADER], port: u32) -> Self {
        Self {
            qpn: wc.src_qp,
            port,
            slid: wc.slid,
            flags: wc.wc_flags,
            vlan_id: wc.vlan_id,
            sl: wc.sl,
            dlid_path_bits: wc.dlid_path_bits,
            network: wc.network_hdr_type,
            header: Header(*header),
        }
    }

    /// Returns the number of the QP that sent.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Returns the number of the port that received.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Returns the sender's LID, on InfiniBand.
    pub fn lid(&self) -> u32 {
        self.slid
    }

    /// Returns the service level that the datagram came with.
    pub fn service_level(&self) -> u8 {
        self.sl
    }

    /// Returns the GIDs of the sender and of where it sent to, a port or a multicast group, if the
    /// datagram came with a global route (`ib_get_gids_from_rdma_hdr`): on RoCE always.
    pub fn gids(&self) -> Option<(Gid, Gid)> {
        if !self.has(bindings::ib_wc_flags_IB_WC_GRH) {
            return None;
        }
        let network = if self.has(bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE) {
            self.network.into()
        } else {
            bindings::rdma_network_type_RDMA_NETWORK_IB
        };
        let (mut from, mut to) = (bindings::ib_gid::default(), bindings::ib_gid::default());
        // SAFETY: The header is as long as the union.
        let ret = unsafe {
            bindings::ib_get_gids_from_rdma_hdr(
                self.header().cast(),
                network,
                &raw mut from,
                &raw mut to,
            )
        };
        (ret == 0).then(|| (Gid::from_raw(&from), Gid::from_raw(&to)))
    }

    fn has(&self, flag: bindings::ib_wc_flags) -> bool {
        u32::try_from(self.flags).is_ok_and(|flags| flags & flag != 0)
    }

    pub(super) fn header(&self) -> *const bindings::ib_grh {
        self.header.0.as_ptr().cast()
    }

    pub(super) fn to_wc(self) -> bindings::ib_wc {
        bindings::ib_wc {
            src_qp: self.qpn,
            slid: self.slid,
            wc_flags: self.flags,
            vlan_id: self.vlan_id,
            sl: self.sl,
            dlid_path_bits: self.dlid_path_bits,
            network_hdr_type: self.network,
            ..Default::default()
        }
    }
}
