// SPDX-License-Identifier: GPL-2.0

//! What a port speaks.

use crate::bindings;

/// What is spoken on the wire of a port.
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

    /// Says whether the port is one of InfiniBand (`rdma_protocol_ib`).
    pub fn ib(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_IB)
    }

    /// Says whether the port is one of RoCE (`rdma_protocol_roce`).
    pub fn roce(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE)
    }

    /// Says whether the port has RoCE version 1, on Ethernet (`rdma_protocol_roce_eth_encap`).
    pub fn roce_v1(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V1)
    }

    /// Says whether the port has RoCE version 2, on UDP (`rdma_protocol_roce_udp_encap`).
    pub fn roce_v2(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V2)
    }

    /// Says whether the port is one of InfiniBand or RoCE (`rdma_ib_or_roce`).
    pub fn ib_or_roce(self) -> bool {
        self.ib() || self.roce()
    }

    /// Says whether the port is one of iWARP (`rdma_protocol_iwarp`), where an RDMA READ needs a
    /// remotely writable MR.
    pub fn iwarp(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_IWARP)
    }

    /// Says whether addresses are those of Omni-Path (`rdma_cap_opa_ah`).
    pub fn opa_addresses(self) -> bool {
        self.has(bindings::rdma_helper_protocol_RDMA_HELPER_OPA_AH)
    }
}
