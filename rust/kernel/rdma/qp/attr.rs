// SPDX-License-Identifier: GPL-2.0

//! The states of a QP, and what it takes to go from one to another.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`qp_state_table`)

use crate::{
    ah,
    bindings,
    context::{
        PollContext,
        Sleepable, //
    },
    device::Device,
    qp::{
        Inner,
        Qp, //
    }, //
};
use core::ops::BitOr;
use kernel::{
    error::to_result,
    fmt,
    prelude::*, //
};

/// The state of a QP, as `enum ib_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// New, or reset: nothing can be posted.
    Reset = bindings::ib_qp_state_IB_QPS_RESET,
    /// Receives can be posted.
    Init = bindings::ib_qp_state_IB_QPS_INIT,
    /// Ready to receive: what peers send arrives.
    Rtr = bindings::ib_qp_state_IB_QPS_RTR,
    /// Ready to send: all works.
    Rts = bindings::ib_qp_state_IB_QPS_RTS,
    /// The send queue is drained: what is posted to it waits.
    Sqd = bindings::ib_qp_state_IB_QPS_SQD,
    /// A send of an unreliable QP has failed: sends are flushed, receives work.
    Sqe = bindings::ib_qp_state_IB_QPS_SQE,
    /// What is posted is flushed.
    Err = bindings::ib_qp_state_IB_QPS_ERR,
}

impl State {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::Reset,
        Self::Init,
        Self::Rtr,
        Self::Rts,
        Self::Sqd,
        Self::Sqe,
        Self::Err,
    ];

    pub(crate) fn from_raw(raw: bindings::ib_qp_state) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u32 == raw)
    }
}

/// The service of a QP, as `enum ib_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Service {
    /// Reliable connected.
    Rc = bindings::ib_qp_type_IB_QPT_RC,
    /// Unreliable connected.
    Uc = bindings::ib_qp_type_IB_QPT_UC,
    /// Unreliable datagrams.
    Ud = bindings::ib_qp_type_IB_QPT_UD,
}

impl Service {
    pub(crate) fn from_raw(raw: bindings::ib_qp_type) -> Option<Self> {
        [Self::Rc, Self::Uc, Self::Ud]
            .into_iter()
            .find(|service| *service as u32 == raw)
    }
}

/// A set of attributes, as `enum ib_qp_attr_mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttrMask(u32);

macro_rules! attrs {
    ($($(#[$doc:meta])* $name:ident = $raw:ident, $text:literal;)*) => {
        impl AttrMask {
            $($(#[$doc])* pub const $name: Self = Self(bindings::$raw);)*

            const NAMES: &'static [(Self, &'static str)] = &[$((Self::$name, $text)),*];
        }
    };
}

attrs! {
    /// Whether there is an event once the send queue is drained.
    SQD_NOTIFY = ib_qp_attr_mask_IB_QP_EN_SQD_ASYNC_NOTIFY, "SQD notification";
    /// What peers may do.
    ACCESS = ib_qp_attr_mask_IB_QP_ACCESS_FLAGS, "access flags";
    /// The index of the partition key.
    PKEY_INDEX = ib_qp_attr_mask_IB_QP_PKEY_INDEX, "P_Key index";
    /// The port.
    PORT = ib_qp_attr_mask_IB_QP_PORT, "port";
    /// The key of datagrams.
    QKEY = ib_qp_attr_mask_IB_QP_QKEY, "Q_Key";
    /// The path.
    PATH = ib_qp_attr_mask_IB_QP_AV, "path";
    /// The path's MTU.
    PATH_MTU = ib_qp_attr_mask_IB_QP_PATH_MTU, "path MTU";
    /// How long an answer may take.
    TIMEOUT = ib_qp_attr_mask_IB_QP_TIMEOUT, "timeout";
    /// How often to send again what was not answered.
    RETRY_COUNT = ib_qp_attr_mask_IB_QP_RETRY_CNT, "retry count";
    /// How often to send again what found no receive.
    RNR_RETRY = ib_qp_attr_mask_IB_QP_RNR_RETRY, "RNR retry count";
    /// The number of the first packet received.
    RQ_PSN = ib_qp_attr_mask_IB_QP_RQ_PSN, "receive PSN";
    /// RDMA READs and atomics outstanding at the peer.
    MAX_RD_ATOMIC = ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC, "max RD atomic";
    /// The alternate path.
    ALT_PATH = ib_qp_attr_mask_IB_QP_ALT_PATH, "alternate path";
    /// How long a peer that found no receive is to wait.
    MIN_RNR_TIMER = ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER, "min RNR timer";
    /// The number of the first packet sent.
    SQ_PSN = ib_qp_attr_mask_IB_QP_SQ_PSN, "send PSN";
    /// RDMA READs and atomics of the peer outstanding here.
    MAX_DEST_RD_ATOMIC = ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC, "max destination RD atomic";
    /// The state of path migration.
    PATH_MIG_STATE = ib_qp_attr_mask_IB_QP_PATH_MIG_STATE, "path migration state";
    /// The peer's QP.
    DEST_QPN = ib_qp_attr_mask_IB_QP_DEST_QPN, "destination QP";
}

impl AttrMask {
    /// No attribute.
    pub const NONE: Self = Self(0);

    /// Returns the attributes of both sets.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the attributes of this set that are not in the other.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Says whether all attributes of the other set are in this one.
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Returns the C value.
    pub const fn as_raw(self) -> u32 {
        self.0
    }

    /// Returns each attribute by itself.
    pub fn each() -> impl Iterator<Item = Self> {
        Self::NAMES.iter().map(|(attr, _)| *attr)
    }
}

impl fmt::Display for AttrMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (_, name) in Self::NAMES.iter().filter(|(attr, _)| self.contains(*attr)) {
            write!(f, "{separator}{name}")?;
            separator = ", ";
        }
        Ok(())
    }
}

/// A transition of the state table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The attributes that it needs.
    pub required: AttrMask,
    /// The attributes that it may change besides.
    pub optional: AttrMask,
}

impl Transition {
    /// Looks a transition up, if there is one. The attributes are those that
    /// [`Attr`](crate::qp::Attr) can set; C also takes the current state, for which the driver is asked
    /// here.
    pub const fn find(service: Service, from: State, to: State) -> Option<Self> {
        use AttrMask as A;
        use Service::*;
        use State::*;

        const PKEY_PORT: A = A::PKEY_INDEX.or(A::PORT);
        const CONNECT: A = A::PATH.or(A::PATH_MTU).or(A::DEST_QPN).or(A::RQ_PSN);
        const MIGRATE: A = A::ALT_PATH.or(A::ACCESS).or(A::PATH_MIG_STATE);
        const RETRY: A = A::TIMEOUT.or(A::RETRY_COUNT).or(A::RNR_RETRY);
        const SEND: A = RETRY.or(A::MAX_RD_ATOMIC);
        const NONE: A = A::NONE;

        let own = match service {
            Ud => A::QKEY,
            Rc | Uc => A::ACCESS,
        };
        let (required, optional) = match (from, to, service) {
            (_, Reset, _) => (NONE, NONE),
            (Init | Rtr | Rts | Sqd | Sqe | Err, Err, _) => (NONE, NONE),
            (Reset, Init, _) => (PKEY_PORT.or(own), NONE),
            (Init, Init, _) => (NONE, PKEY_PORT.or(own)),
            (Init, Rtr, Ud) => (NONE, A::PKEY_INDEX.or(A::QKEY)),
            (Init, Rtr, Uc) => (CONNECT, A::ALT_PATH.or(A::ACCESS).or(A::PKEY_INDEX)),
            (Init, Rtr, Rc) => (
                CONNECT.or(A::MAX_DEST_RD_ATOMIC).or(A::MIN_RNR_TIMER),
                A::ALT_PATH.or(A::ACCESS).or(A::PKEY_INDEX),
            ),
            (Rtr, Rts, Ud) => (A::SQ_PSN, A::QKEY),
            (Rtr, Rts, Uc) => (A::SQ_PSN, MIGRATE),
            (Rtr, Rts, Rc) => (SEND.or(A::SQ_PSN), MIGRATE.or(A::MIN_RNR_TIMER)),
            (Rts | Sqd, Rts, Ud) => (NONE, A::QKEY),
            (Rts | Sqd, Rts, Uc) => (NONE, MIGRATE),
            (Rts | Sqd, Rts, Rc) => (NONE, MIGRATE.or(A::MIN_RNR_TIMER)),
            (Rts, Sqd, _) => (NONE, A::SQD_NOTIFY),
            (Sqd, Sqd, Ud) => (NONE, A::PKEY_INDEX.or(A::QKEY)),
            (Sqd, Sqd, Uc) => (NONE, MIGRATE.or(A::PATH).or(A::PKEY_INDEX)),
            (Sqd, Sqd, Rc) => (
                NONE,
                MIGRATE
                    .or(SEND)
                    .or(A::PATH)
                    .or(PKEY_PORT)
                    .or(A::MAX_DEST_RD_ATOMIC)
                    .or(A::MIN_RNR_TIMER),
            ),
            (Sqe, Rts, Ud) => (NONE, A::QKEY),
            (Sqe, Rts, Uc) => (NONE, A::ACCESS),
            (Sqe, Rts, Rc) => (NONE, NONE),
            _ => return None,
        };
        Some(Self { required, optional })
    }
}

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

/// What [`Qp::modify`](crate::qp::Qp::modify) changes: a state to go to and attributes, as `struct
/// ib_qp_attr` with its mask.
///
/// There is no way to the reset state here: see [`Qp::reset`](crate::qp::Qp::reset).
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

    /// Sets whether there is an [`Event::SQ_DRAINED`](crate::qp::Event::SQ_DRAINED) once the send queue
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

/// The sizes of a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Requests that can be outstanding on the send queue.
    pub send_wr: u32,
    /// Requests that can be outstanding on the receive queue.
    pub recv_wr: u32,
    /// Entries of a send request.
    pub send_sge: u32,
    /// Entries of a receive request.
    pub recv_sge: u32,
}

impl Caps {
    /// Returns the sizes of queues whose requests have one entry each.
    pub const fn new(send_wr: u32, recv_wr: u32) -> Self {
        Self {
            send_wr,
            recv_wr,
            send_sge: 1,
            recv_sge: 1,
        }
    }

    /// Returns how many CQ entries a QP of this size leases, at the most, from a CQ that serves
    /// both its queues.
    ///
    /// That is one for each request and one for the drain of each queue, rounded up as drivers do.
    pub const fn entries(&self) -> u32 {
        const fn round_up(wr: u32) -> u32 {
            match wr.saturating_add(2).checked_next_power_of_two() {
                Some(entries) => entries,
                None => u32::MAX,
            }
        }
        round_up(self.send_wr).saturating_add(round_up(self.recv_wr))
    }
}

/// The attributes of a QP, as `struct ib_qp_attr`. Those that the QP has not been given mean
/// nothing.
pub struct Info {
    raw: bindings::ib_qp_attr,
    caps: bindings::ib_qp_cap,
    state: State,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $field:ident;)*) => {
        $($(#[$doc])*
        pub fn $name(&self) -> $ty {
            self.raw.$field
        })*
    };
}

impl Info {
    /// Returns the state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Says whether the send queue is still being drained, in [`State::Sqd`].
    pub fn is_sq_draining(&self) -> bool {
        self.raw.sq_draining != 0
    }

    /// Returns the path to the peer. Not every driver tells all of it.
    pub fn path(&self) -> ah::Attr {
        ah::Attr::from_raw(&self.raw.ah_attr)
    }

    /// Returns the path's MTU.
    pub fn path_mtu(&self) -> Option<Mtu> {
        Mtu::from_raw(self.raw.path_mtu)
    }

    /// Returns what peers may do.
    pub fn access(&self) -> Access {
        Access::from_raw(self.raw.qp_access_flags as u32)
    }

    /// Returns the sizes of the queues, the places of the crate's own requests included.
    pub fn caps(&self) -> Caps {
        Caps {
            send_wr: self.caps.max_send_wr,
            recv_wr: self.caps.max_recv_wr,
            send_sge: self.caps.max_send_sge,
            recv_sge: self.caps.max_recv_sge,
        }
    }

    fields! {
        /// Returns the port.
        port: u32 = port_num;
        /// Returns the index of the partition key.
        pkey_index: u16 = pkey_index;
        /// Returns the key that datagrams must carry.
        qkey: u32 = qkey;
        /// Returns the number of the peer's QP.
        dest_qp: u32 = dest_qp_num;
        /// Returns the number of the packet that is expected from the peer.
        rq_psn: u32 = rq_psn;
        /// Returns the number of the next packet to the peer.
        sq_psn: u32 = sq_psn;
        /// Returns how many RDMA READs and atomics may be outstanding at the peer.
        max_rd_atomic: u8 = max_rd_atomic;
        /// Returns how many RDMA READs and atomics the peer may have outstanding here.
        max_dest_rd_atomic: u8 = max_dest_rd_atomic;
        /// Returns how long a peer that found no receive is to wait.
        min_rnr_timer: u8 = min_rnr_timer;
        /// Returns how long an answer may take.
        timeout: u8 = timeout;
        /// Returns how often an unanswered packet is sent again.
        retry_count: u8 = retry_cnt;
        /// Returns how often a message that found no receive is sent again.
        rnr_retry: u8 = rnr_retry;
    }
}

impl Inner {
    /// Asks the driver for the attributes in `mask` and for the sizes of the queues.
    pub(super) fn query(&self, mask: u32) -> Result<(bindings::ib_qp_attr, bindings::ib_qp_cap)> {
        let mut attr = bindings::ib_qp_attr::default();
        let mut init = bindings::ib_qp_init_attr::default();
        // SAFETY: The QP is valid by the type invariant.
        to_result(unsafe {
            bindings::ib_query_qp(
                self.raw.as_ptr(),
                &raw mut attr,
                mask as c_int,
                &raw mut init,
            )
        })?;
        Ok((attr, init.cap))
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Asks the driver for the QP's state, attributes and sizes (`ib_query_qp`).
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the driver cannot tell, or its error.
    pub fn query(&self, _cx: &Sleepable) -> Result<Info> {
        let (raw, caps) = self
            .inner
            .query(bindings::ib_qp_attr_mask_IB_QP_ATTR_STANDARD_BITS)?;
        let state = State::from_raw(raw.qp_state).ok_or(EIO)?;
        Ok(Info { raw, caps, state })
    }
}
