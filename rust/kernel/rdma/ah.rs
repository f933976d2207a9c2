// SPDX-License-Identifier: GPL-2.0

//! Addresses of packets.
//!
//! An [`Attr`] says where packets go; an [`Ah`] is made from it, or from a GID, or from whoever
//! sent a datagram, and names the destination of datagrams.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct rdma_ah_attr`)

mod handle;
mod source;

pub(crate) use handle::destroy;
pub use handle::Ah;
pub use source::Source;
pub(crate) use source::HEADER;

use crate::{
    bindings,
    device::{
        Device,
        Gid, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;

/// The route of packets between subnets, as `struct ib_global_route`; on RoCE, their IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// The destination's GID.
    pub dgid: Gid,
    /// The index of the source's GID in the table of the port.
    pub sgid_index: u8,
    /// How many routers may pass a packet on.
    pub hop_limit: u8,
    /// The class of traffic.
    pub traffic_class: u8,
    /// What tells the flow from others, 20 bits.
    pub flow_label: u32,
}

impl Grh {
    /// Returns the route to a GID, from the GID at an index of the port's table.
    pub const fn new(dgid: Gid, sgid_index: u8) -> Self {
        Self {
            dgid,
            sgid_index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
        }
    }
}

/// Where packets go and how, as `struct rdma_ah_attr`: the address vector of a QP, or what an
/// address handle is made from.
///
/// # Examples
///
/// ```
/// use rdma::{ah::{Attr, Grh}, device::Gid};
///
/// # let (dgid, mac) = (Gid([0; 16]), [0; 6]);
/// let path = Attr::new(1).grh(Grh::new(dgid, 0)).dmac(mac);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    port: u32,
    grh: Option<Grh>,
    dlid: u16,
    dmac: [u8; 6],
    service_level: u8,
    static_rate: u8,
}

impl Attr {
    /// An address that is reached by a port of the device; the first is 1.
    pub const fn new(port: u32) -> Self {
        Self {
            port,
            grh: None,
            dlid: 0,
            dmac: [0; 6],
            service_level: 0,
            static_rate: 0,
        }
    }

    /// Sets the global route: a must on RoCE, and between subnets of InfiniBand.
    pub const fn grh(mut self, grh: Grh) -> Self {
        self.grh = Some(grh);
        self
    }

    /// Sets the destination's LID: a must on InfiniBand.
    pub const fn dlid(mut self, dlid: u16) -> Self {
        self.dlid = dlid;
        self
    }

    /// Sets the Ethernet address of the destination or the next router: a must on RoCE. The core
    /// resolves it for userspace only; [`Ah::resolve`] does for datagrams, and a peer can tell its
    /// own, as [`GidAttr::l2`](crate::device::GidAttr::l2) returns it.
    pub const fn dmac(mut self, dmac: [u8; 6]) -> Self {
        self.dmac = dmac;
        self
    }

    /// Sets the service level, up to 15.
    pub const fn service_level(mut self, service_level: u8) -> Self {
        self.service_level = service_level;
        self
    }

    /// Limits the rate of packets, by `enum ib_rate`; 0 stands for the port's own.
    pub const fn static_rate(mut self, static_rate: u8) -> Self {
        self.static_rate = static_rate;
        self
    }

    /// Returns the port.
    pub const fn port(&self) -> u32 {
        self.port
    }

    /// Returns the global route.
    pub const fn route(&self) -> Option<Grh> {
        self.grh
    }

    /// Makes the C attributes, for the kind of port that it is.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device has no such port, or if a value is too large for its field.
    pub(crate) fn to_raw(self, dev: &Device) -> Result<bindings::rdma_ah_attr> {
        let grh = self.grh.unwrap_or(Grh::new(Gid([0; 16]), 0));
        if dev.port(self.port).is_none()
            || self.service_level > 15
            || u32::from(self.static_rate) > bindings::ib_rate_IB_RATE_1600_GBPS
            || grh.flow_label >= 1 << 20
        {
            return Err(EINVAL);
        }
        // SAFETY: The device is registered while `dev` lives, and has the port.
        let type_ = unsafe { bindings::rdma_helper_ah_type(dev.as_raw(), self.port) };
        let link = match type_ {
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE => {
                bindings::rdma_ah_attr__bindgen_ty_1 {
                    roce: ManuallyDrop::new(bindings::roce_ah_attr { dmac: self.dmac }),
                }
            }
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_OPA => {
                bindings::rdma_ah_attr__bindgen_ty_1 {
                    opa: ManuallyDrop::new(bindings::opa_ah_attr {
                        dlid: self.dlid.into(),
                        ..Default::default()
                    }),
                }
            }
            _ => bindings::rdma_ah_attr__bindgen_ty_1 {
                ib: ManuallyDrop::new(bindings::ib_ah_attr {
                    dlid: self.dlid,
                    ..Default::default()
                }),
            },
        };
        let flags = match self.grh {
            Some(_) => bindings::ib_ah_flags_IB_AH_GRH,
            None => 0,
        };
        Ok(bindings::rdma_ah_attr {
            grh: bindings::ib_global_route {
                sgid_attr: core::ptr::null(),
                dgid: bindings::ib_gid {
                    raw: ManuallyDrop::new(grh.dgid.0),
                },
                flow_label: grh.flow_label,
                sgid_index: grh.sgid_index,
                hop_limit: grh.hop_limit,
                traffic_class: grh.traffic_class,
            },
            sl: self.service_level,
            static_rate: self.static_rate,
            port_num: self.port,
            ah_flags: flags as u8,
            type_,
            __bindgen_anon_1: link,
        })
    }

    /// Reads C attributes.
    pub(crate) fn from_raw(raw: &bindings::rdma_ah_attr) -> Self {
        let mut this = Self::new(raw.port_num)
            .service_level(raw.sl)
            .static_rate(raw.static_rate);
        if u32::from(raw.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0 {
            this.grh = Some(Grh {
                dgid: Gid::from_raw(&raw.grh.dgid),
                sgid_index: raw.grh.sgid_index,
                hop_limit: raw.grh.hop_limit,
                traffic_class: raw.grh.traffic_class,
                flow_label: raw.grh.flow_label,
            });
        }
        match raw.type_ {
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE => {
                // SAFETY: The type says which member of the union is set; all are integers.
                this.dmac(unsafe { raw.__bindgen_anon_1.roce.dmac })
            }
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB => {
                // SAFETY: The type says that this member of the union is set; all are integers.
                this.dlid(unsafe { raw.__bindgen_anon_1.ib.dlid })
            }
            _ => this,
        }
    }
}
