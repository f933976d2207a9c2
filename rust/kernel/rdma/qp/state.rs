// SPDX-License-Identifier: GPL-2.0

//! The states of a QP, and what it takes to go from one to another.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`qp_state_table`)

use crate::bindings;
use kernel::fmt;

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
    /// [`Attr`](super::Attr) can set; C also takes the current state, for which the driver is asked
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
