// SPDX-License-Identifier: GPL-2.0

//! Connects QPs by their numbers and GIDs, without the connection manager: the two devices may be
//! in two network namespaces.

use crate::{
    end::End,
    poll::Qp, //
};
use core::net::IpAddr;
use kernel::prelude::*;
use rdma::{
    ah,
    device::{
        GidAttr,
        GidType, //
    },
    prelude::*,
    qp::{
        Access,
        Attr,
        Mtu, //
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

/// Returns the path from one device to another.
fn path(from: &Device, to: &Device) -> Result<ah::Attr> {
    let path = ah::Attr::new(PORT);
    match (gid(from)?, gid(to)?) {
        (Some(from), Some(to)) => {
            let grh = Some(ah::Grh::new(to.gid(), from.index().try_into()?));
            let dmac = to.l2()?.mac;
            Ok(ah::Attr { grh, dmac, ..path })
        }
        _ => Ok(path),
    }
}

/// Takes a QP from the reset state to where it can send, to QP number `peer`.
#[inline(never)]
fn connect_qp(
    qp: &Qp,
    peer: u32,
    path: &ah::Attr,
    rd_atomic: u8,
    timeout: u8,
    cx: &Sleepable,
) -> Result {
    let init = Attr::Init {
        port: PORT,
        pkey_index: 0,
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
    };
    let rtr = Attr::Rtr {
        path: *path,
        path_mtu: Mtu::B1024,
        dest_qp: peer,
        rq_psn: 0,
        max_dest_rd_atomic: rd_atomic,
        min_rnr_timer: 1,
    };
    let rts = Attr::Rts {
        timeout,
        retry_count: 7,
        rnr_retry: 7,
        sq_psn: 0,
        max_rd_atomic: rd_atomic,
    };
    for attr in [init, rtr, rts] {
        qp.modify(attr, cx)?;
    }
    Ok(())
}

/// Returns how many READs a QP of one device can have outstanding at another.
fn rd_atomic(from: &Device, to: &Device) -> u8 {
    let limit = from
        .attrs()
        .max_qp_init_rd_atom
        .min(to.attrs().max_qp_rd_atom);
    limit.clamp(1, 128) as u8
}

/// Connects each QP of an end to one of the other, or to none.
fn connect_one(end: &End, dev: &Device, to: Option<&End>, timeout: u8, cx: &Sleepable) -> Result {
    let from = end.cq.device();
    let path = path(from, dev)?;
    let rd_atomic = rd_atomic(from, dev);
    for (n, qp) in end.qps.iter().enumerate() {
        let peer = to.and_then(|to| to.qps.get(n)).map_or(0, |qp| qp.num());
        connect_qp(qp, peer, &path, rd_atomic, timeout, cx)?;
    }
    Ok(())
}

/// Connects two ends to each other.
#[inline(never)]
pub(crate) fn connect(a: &End, b: &End, timeout: u8, cx: &Sleepable) -> Result {
    connect_one(a, b.cq.device(), Some(b), timeout, cx)?;
    connect_one(b, a.cq.device(), Some(a), timeout, cx)
}

/// Connects the QPs of a device to none.
pub(crate) struct Nowhere {
    path: ah::Attr,
    rd_atomic: u8,
}

impl Nowhere {
    pub(crate) fn new(dev: &Device) -> Result<Self> {
        Ok(Self {
            path: path(dev, dev)?,
            rd_atomic: rd_atomic(dev, dev),
        })
    }

    pub(crate) fn connect(&self, qp: &Qp, cx: &Sleepable) -> Result {
        connect_qp(qp, 0, &self.path, self.rd_atomic, TIMEOUT, cx)
    }
}

/// Connects an end to no peer: on a null device, requests then only complete.
pub(crate) fn connect_to_none(end: &End, cx: &Sleepable) -> Result {
    connect_one(end, end.cq.device(), None, TIMEOUT, cx)
}
