// SPDX-License-Identifier: GPL-2.0

//! What happens to connections.

use crate::{
    bindings,
    cm::PrivateData,
    context::Sleepable, //
};
use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};

/// Why a connection was rejected, as `enum ib_cm_rej_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason(pub u32);

impl Reason {
    /// The peer has no QP for it.
    pub const NO_QP: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_QP);
    /// The peer has not the resources.
    pub const NO_RESOURCES: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_RESOURCES);
    /// The peer has waited too long.
    pub const TIMEOUT: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_TIMEOUT);
    /// The peer cannot do what was asked for.
    pub const UNSUPPORTED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_UNSUPPORTED);
    /// Nobody listens on the service id.
    pub const INVALID_SERVICE_ID: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_SERVICE_ID);
    /// The peer knows an older connection of this QP.
    pub const STALE_CONN: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_STALE_CONN);
    /// The ULP has said so, and may say why in the private data.
    pub const CONSUMER_DEFINED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = c_int::try_from(self.0).unwrap_or(0);
        // SAFETY: Any number will do; the string is static.
        let text = unsafe { CStr::from_char_ptr(bindings::ibcm_reject_msg(reason)) };
        fmt::Display::fmt(text, f)
    }
}

/// What the peer has answered.
#[derive(Clone, Copy)]
pub struct Answer {
    /// What it sent along, 196 bytes.
    pub private_data: PrivateData,
    /// RDMA READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that it lets this side have outstanding.
    pub initiator_depth: u8,
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The peer did not want it.
    Rejected {
        /// Why.
        reason: Reason,
        /// What it sent along, 148 bytes; nothing, if there was no memory for it.
        private_data: KVec<u8>,
    },
    /// It could not be made.
    Failed(Error),
}

impl From<Error> for ConnectError {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

impl From<ConnectError> for Error {
    fn from(e: ConnectError) -> Self {
        match e {
            ConnectError::Rejected { .. } => ECONNREFUSED,
            ConnectError::Failed(e) => e,
        }
    }
}

/// What happened to a connection, as `struct ib_cm_event`.
///
/// Whatever [`Connection::connect`](super::Connection::connect) waits for is not passed on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer knows that its request was accepted (`IB_CM_RTU_RECEIVED`), or
    /// [`Connection::established`](super::Connection::established) has said so
    /// (`IB_CM_USER_ESTABLISHED`).
    Established,
    /// The connection has ended: the peer asked for that, and was answered (`IB_CM_DREQ_RECEIVED`),
    /// or it has answered, or not, to [`Connection::disconnect`](super::Connection::disconnect)
    /// (`IB_CM_DREP_RECEIVED`, `IB_CM_DREQ_ERROR`). The QP does not know: see
    /// [`Qp::drain`](crate::qp::Qp::drain). The last event.
    Disconnected,
    /// The peer has not confirmed the connection in time (`IB_CM_REP_ERROR`), or has rejected it
    /// after all (`IB_CM_REJ_RECEIVED`). The last event.
    Failed,
    /// The device goes, or the module: after the handler the crate asks the peer to disconnect, and
    /// the removal waits until the connection is dropped. The last event.
    DeviceRemoval,
}

impl Event {
    /// Says whether nothing more will happen.
    pub(super) fn is_last(self) -> bool {
        !matches!(self, Self::Established)
    }
}

/// What is told of the events of a connection.
pub trait Handler: Send + Sync + 'static {
    /// Something happened. Events of one connection come one after the other, in process context;
    /// others wait for this to return.
    ///
    /// The handler is released after the last event, so that it may own the connection.
    fn event(&self, event: Event, cx: &Sleepable);
}
