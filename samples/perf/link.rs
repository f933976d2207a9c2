// SPDX-License-Identifier: GPL-2.0

//! Connects QPs by their numbers and GIDs, without the connection manager: the two devices may be
//! in two network namespaces.

use crate::{
    end::End,
    poll::Qp, //
};
use core::net::IpAddr;
use kernel::{
    prelude::*,
    time::Delta, //
};
use rdma::{
    ah,
    device::{
        Device,
        GidAttr,
        GidType, //
    },
    prelude::*,
    qp::{
        Access,
        Attr,
        Mtu,
        RnrTimer, //
    }, //
};

pub(crate) const PORT: u32 = 1;

/// The time to wait for an answer before sending again, as the exponent that verbs have: 4.3 s.
/// Without losses a busy machine answers late, and requests that are then sent twice are not
/// to be measured.
pub(crate) const TIMEOUT: u8 = 20;

/// Returns the GID that stands for the first IPv4 address of a device, if there is one: where there
/// is none, the path needs no GID.
fn gid(dev: &Device) -> Result<Option<GidAttr>> {
    let port = dev.port(PORT).ok_or(ENODEV)?;
    let is_ipv4 = |attr: &GidAttr| matches!(attr.gid().ip(), IpAddr::V4(_));
    Ok(port
        .gids()
        .find(|attr| attr.gid_type() == GidType::RoceV2 && is_ipv4(attr)))
}

/// Returns how many READs a QP of one device can have outstanding at another.
fn rd_atomic(from: &Device, to: &Device) -> u8 {
    let limit = from
        .attrs()
        .max_qp_init_rd_atom
        .min(to.attrs().max_qp_rd_atom);
    limit.clamp(1, 128) as u8
}

/// The path from one device to another, or to itself.
pub(crate) struct Path {
    path: ah::Attr,
    rd_atomic: u8,
    rnr_timer: RnrTimer,
    timeout: u8,
}

impl Path {
    #[inline(never)]
    pub(crate) fn new(from: &Device, to: &Device, timeout: u8) -> Result<Self> {
        let mut path = ah::Attr::new(PORT);
        if let (Some(source), Some(peer)) = (gid(from)?, gid(to)?) {
            path.grh = Some(ah::Grh::new(peer.gid(), source.index().try_into()?));
            path.dmac = peer.l2()?.mac;
        }
        Ok(Self {
            path,
            rd_atomic: rd_atomic(from, to),
            rnr_timer: RnrTimer::at_least(Delta::from_micros(10)),
            timeout,
        })
    }

    /// Takes a QP from the reset state to where it can send, to QP number `peer`.
    #[inline(never)]
    pub(crate) fn connect(&self, qp: &Qp, peer: u32, cx: &Sleepable) -> Result {
        let init = Attr::Init {
            port: PORT,
            pkey_index: 0,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
        };
        qp.modify(init, cx)?;
        let rtr = Attr::Rtr {
            path: self.path,
            path_mtu: Mtu::B1024,
            dest_qp: peer,
            rq_psn: 0,
            max_dest_rd_atomic: self.rd_atomic,
            min_rnr_timer: self.rnr_timer,
        };
        qp.modify(rtr, cx)?;
        let rts = Attr::Rts {
            timeout: self.timeout,
            retry_count: 7,
            rnr_retry: 7,
            sq_psn: 0,
            max_rd_atomic: self.rd_atomic,
        };
        qp.modify(rts, cx)
    }
}

/// Connects the QPs of an end to those of another.
#[inline(never)]
fn connect_to(end: &End, to: &End, timeout: u8, cx: &Sleepable) -> Result {
    let path = Path::new(end.cq.device(), to.cq.device(), timeout)?;
    let mut qps = end.qps.iter().zip(to.qps.iter());
    qps.try_for_each(|(qp, peer)| path.connect(qp, peer.num(), cx))
}

/// Connects two ends to each other.
#[inline(never)]
pub(crate) fn connect(a: &End, b: &End, timeout: u8, cx: &Sleepable) -> Result {
    connect_to(a, b, timeout, cx)?;
    connect_to(b, a, timeout, cx)
}

/// Connects the QPs of an end to no peer: on a null device, requests then only complete.
#[inline(never)]
pub(crate) fn connect_to_none(end: &End, cx: &Sleepable) -> Result {
    let dev = end.cq.device();
    let path = Path::new(dev, dev, TIMEOUT)?;
    end.qps.iter().try_for_each(|qp| path.connect(qp, 0, cx))
}
