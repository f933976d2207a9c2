// SPDX-License-Identifier: GPL-2.0

//! The attributes of a QP.

use super::state::{
    AttrMask,
    State, //
};
use crate::{
    ah,
    bindings,
    device::Device, //
};
use core::ops::BitOr;
use kernel::prelude::*;

/// What peers may do by way of a QP, to memory that is registered for it, as `enum
/// ib_access_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// Peers may send messages, nothing else.
    pub const NONE: Self = Self(0);
    /// Peers may read.
    pub const REMOTE_READ: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_READ);
    /// Peers may write.
    pub const REMOTE_WRITE: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE);
    /// Peers may use atomics.
    pub const REMOTE_ATOMIC: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC);

    pub(crate) const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// Says whether all of the other set is allowed.
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// How much a packet carries on a path, as `enum ib_mtu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mtu {
    /// 256 bytes.
    B256 = bindings::ib_mtu_IB_MTU_256,
    /// 512 bytes.
    B512 = bindings::ib_mtu_IB_MTU_512,
    /// 1024 bytes.
    B1024 = bindings::ib_mtu_IB_MTU_1024,
    /// 2048 bytes.
    B2048 = bindings::ib_mtu_IB_MTU_2048,
    /// 4096 bytes.
    B4096 = bindings::ib_mtu_IB_MTU_4096,
}

impl Mtu {
    pub(crate) fn from_raw(raw: bindings::ib_mtu) -> Option<Self> {
        [
            Self::B256,
            Self::B512,
            Self::B1024,
            Self::B2048,
            Self::B4096,
        ]
        .into_iter()
        .find(|mtu| *mtu as u32 == raw)
    }
}

/// What [`Qp::modify`](super::Qp::modify) changes: a state to go to and attributes, as `struct
/// ib_qp_attr` with its mask.
///
/// There is no way to the reset state here: see [`Qp::reset`](super::Qp::reset).
pub struct Attr {
    pub(super) to: State,
    pub(super) mask: AttrMask,
    pub(super) raw: bindings::ib_qp_attr,
    pub(super) path: Option<ah::Attr>,
}

impl Attr {
    fn new(to: State) -> Self {
        Self {
            to,
            mask: AttrMask::NONE,
            raw: bindings::ib_qp_attr {
                qp_state: to as u32,
                ..Default::default()
            },
            path: None,
        }
    }

    /// Goes to [`State::Init`]. Needs a port, a P_Key index, and access flags (RC, UC) or a Q_Key
    /// (UD).
    pub fn init() -> Self {
        Self::new(State::Init)
    }

    /// Goes to [`State::Rtr`]. Needs the path, its MTU, the peer's QP and first PSN (RC, UC), and
    /// the limits of the peer's RDMA READs and RNR timer (RC).
    pub fn rtr() -> Self {
        Self::new(State::Rtr)
    }

    /// Goes to [`State::Rts`]. Needs the first PSN, and, of RC, the timeout, both retry counts and
    /// the limit of RDMA READs.
    pub fn rts() -> Self {
        Self::new(State::Rts)
    }

    /// Goes to [`State::Sqd`].
    pub fn sqd() -> Self {
        Self::new(State::Sqd)
    }

    /// Goes to [`State::Err`].
    pub fn error() -> Self {
        Self::new(State::Err)
    }

    fn set(mut self, attr: AttrMask, set: impl FnOnce(&mut bindings::ib_qp_attr)) -> Self {
        self.mask = self.mask.or(attr);
        set(&mut self.raw);
        self
    }

    /// Sets the port; the first is 1.
    pub fn port(self, port: u32) -> Self {
        self.set(AttrMask::PORT, |raw| raw.port_num = port)
    }

    /// Sets the index of the partition key in the port's table.
    pub fn pkey_index(self, index: u16) -> Self {
        self.set(AttrMask::PKEY_INDEX, |raw| raw.pkey_index = index)
    }

    /// Sets what peers may do.
    pub fn access(self, access: Access) -> Self {
        let flags = access.0 as c_int;
        self.set(AttrMask::ACCESS, |raw| raw.qp_access_flags = flags)
    }

    /// Sets the key that datagrams must carry.
    pub fn qkey(self, qkey: u32) -> Self {
        self.set(AttrMask::QKEY, |raw| raw.qkey = qkey)
    }

    /// Sets the path to the peer.
    pub fn path(mut self, path: &ah::Attr) -> Self {
        self.path = Some(*path);
        self.set(AttrMask::PATH, |_| ())
    }

    /// Sets the MTU of the path.
    pub fn path_mtu(self, mtu: Mtu) -> Self {
        self.set(AttrMask::PATH_MTU, |raw| raw.path_mtu = mtu as u32)
    }

    /// Sets the number of the peer's QP, 24 bits.
    pub fn dest_qp(self, num: u32) -> Self {
        self.set(AttrMask::DEST_QPN, |raw| raw.dest_qp_num = num)
    }

    /// Sets the number of the first packet from the peer, 24 bits: the peer's [`Attr::sq_psn`].
    pub fn rq_psn(self, psn: u32) -> Self {
        self.set(AttrMask::RQ_PSN, |raw| raw.rq_psn = psn)
    }

    /// Sets the number of the first packet to the peer, 24 bits.
    pub fn sq_psn(self, psn: u32) -> Self {
        self.set(AttrMask::SQ_PSN, |raw| raw.sq_psn = psn)
    }

    /// Sets how many RDMA READs and atomics may be outstanding at the peer. With 0 they wait for
    /// ever.
    pub fn max_rd_atomic(self, max: u8) -> Self {
        self.set(AttrMask::MAX_RD_ATOMIC, |raw| raw.max_rd_atomic = max)
    }

    /// Sets how many RDMA READs and atomics the peer may have outstanding here.
    pub fn max_dest_rd_atomic(self, max: u8) -> Self {
        self.set(AttrMask::MAX_DEST_RD_ATOMIC, |raw| {
            raw.max_dest_rd_atomic = max;
        })
    }

    /// Sets how long a peer that found no receive is to wait, by `enum ib_rnr_timeout`, up to 31.
    pub fn min_rnr_timer(self, timer: u8) -> Self {
        self.set(AttrMask::MIN_RNR_TIMER, |raw| raw.min_rnr_timer = timer)
    }

    /// Sets how long an answer may take: 4.096 µs times two to the `timeout`, up to 31; 0 is for
    /// ever.
    pub fn timeout(self, timeout: u8) -> Self {
        self.set(AttrMask::TIMEOUT, |raw| raw.timeout = timeout)
    }

    /// Sets how often an unanswered packet is sent again, up to 7. rxe takes 7 for "always".
    pub fn retry_count(self, count: u8) -> Self {
        self.set(AttrMask::RETRY_COUNT, |raw| raw.retry_cnt = count)
    }

    /// Sets how often a message is sent again when the peer has posted no receive, up to 7, which
    /// means "always".
    pub fn rnr_retry(self, count: u8) -> Self {
        self.set(AttrMask::RNR_RETRY, |raw| raw.rnr_retry = count)
    }

    /// Sets whether there is an [`Event::SQ_DRAINED`](super::Event::SQ_DRAINED) once the send queue
    /// is drained.
    pub fn sqd_notify(self, notify: bool) -> Self {
        self.set(AttrMask::SQD_NOTIFY, |raw| {
            raw.en_sqd_async_notify = notify.into();
        })
    }

    /// Returns the attributes whose values are beyond their fields or the device: not all drivers
    /// look.
    pub(super) fn out_of_range(&self, dev: &Device) -> AttrMask {
        let (raw, limits) = (&self.raw, dev.attrs());
        let rd_atomic = |count: u8, max: u32| u32::from(count) <= max;
        [
            (AttrMask::PORT, dev.port(raw.port_num).is_some()),
            (AttrMask::DEST_QPN, raw.dest_qp_num < 1 << 24),
            (AttrMask::RQ_PSN, raw.rq_psn < 1 << 24),
            (AttrMask::SQ_PSN, raw.sq_psn < 1 << 24),
            (AttrMask::MIN_RNR_TIMER, raw.min_rnr_timer < 32),
            (AttrMask::TIMEOUT, raw.timeout < 32),
            (AttrMask::RETRY_COUNT, raw.retry_cnt < 8),
            (AttrMask::RNR_RETRY, raw.rnr_retry < 8),
            (
                AttrMask::MAX_RD_ATOMIC,
                rd_atomic(raw.max_rd_atomic, limits.max_qp_init_rd_atom),
            ),
            (
                AttrMask::MAX_DEST_RD_ATOMIC,
                rd_atomic(raw.max_dest_rd_atomic, limits.max_qp_rd_atom),
            ),
            (AttrMask::PKEY_INDEX, raw.pkey_index < limits.max_pkeys),
        ]
        .into_iter()
        .filter(|(attr, in_range)| self.mask.contains(*attr) && !in_range)
        .fold(AttrMask::NONE, |all, (attr, _)| all.or(attr))
    }
}
