// SPDX-License-Identifier: GPL-2.0

//! Paths.

use crate::{
    bindings,
    context::Sleepable,
    device::{
        Gid,
        GidAttr,
        GidType, //
    },
    way::Datagram, //
};
use core::mem::ManuallyDrop;
use kernel::{
    error::to_result,
    prelude::*, //
};

/// The path between two ports (`struct sa_path_rec`), from an entry of a GID table of this host.
pub struct Path<'a> {
    from: &'a GidAttr,
    raw: bindings::sa_path_rec,
}

impl<'a> Path<'a> {
    /// Finds the path from one GID to another. That asks the network for the way, which may take a
    /// second.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` if the GID is not of RoCE: elsewhere paths are known to the subnet
    /// administrator. `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` without a way; or the driver's
    /// error.
    pub fn new(from: &'a GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        // As the connection manager for IP addresses does.
        const PACKET_LIFE_TIME: u8 = 16;
        const ALL_PARTITIONS: u16 = 0xffff;

        let rec_type = match from.gid_type() {
            GidType::RoceV1 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V1,
            GidType::RoceV2 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V2,
            _ => return Err(EPROTONOSUPPORT),
        };
        let (dev, port) = (from.device(), from.port_num());
        let mtu = dev.port(port).ok_or(ENODEV)?.query(cx)?.active_mtu;
        let datagram = Datagram::new(from, to)?;
        let mut attr = bindings::rdma_ah_attr::default();
        // SAFETY: The device is registered by the invariant of `device::Inner`, and has the port.
        // Completion and header belong together.
        to_result(unsafe {
            bindings::ib_init_ah_attr_from_wc(
                dev.as_raw(),
                port,
                &raw const datagram.wc,
                datagram.header(),
                &raw mut attr,
            )
        })?;
        // SAFETY: The call has filled in an address for RoCE, which is released after this.
        let dmac = unsafe {
            bindings::rdma_destroy_ah_attr(&raw mut attr);
            attr.__bindgen_anon_1.roce.dmac
        };
        let equal = bindings::ib_sa_selector_IB_SA_EQ as u8;
        let raw_gid = |gid: Gid| bindings::ib_gid {
            raw: ManuallyDrop::new(gid.0),
        };
        let raw = bindings::sa_path_rec {
            rec_type,
            sgid: raw_gid(from.gid()),
            dgid: raw_gid(to),
            hop_limit: attr.grh.hop_limit,
            reversible: 1,
            pkey: ALL_PARTITIONS.to_be(),
            mtu_selector: equal,
            // `enum ib_mtu` is 1 for 256 bytes.
            mtu: (mtu / 128).checked_ilog2().ok_or(EINVAL)?.try_into()?,
            rate_selector: equal,
            rate: bindings::ib_rate_IB_RATE_PORT_CURRENT as u8,
            packet_life_time_selector: equal,
            packet_life_time: PACKET_LIFE_TIME,
            __bindgen_anon_1: bindings::sa_path_rec__bindgen_ty_1 {
                roce: ManuallyDrop::new(bindings::sa_path_rec_roce {
                    route_resolved: true,
                    dmac,
                }),
            },
            ..Default::default()
        };
        Ok(Self { from, raw })
    }

    /// Returns where the path begins.
    pub fn from(&self) -> &GidAttr {
        self.from
    }

    pub(super) fn to_raw(&self) -> bindings::sa_path_rec {
        // SAFETY: The record is plain data.
        unsafe { core::ptr::read(&raw const self.raw) }
    }
}
