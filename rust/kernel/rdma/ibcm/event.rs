// SPDX-License-Identifier: GPL-2.0

//! What happens to connections.

use crate::{
    cm::{
        PrivateData,
        RejectReason, //
    },
    context::Sleepable, //
};
use kernel::prelude::*;

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

impl Answer {
    /// Has nothing sent along.
    pub(super) fn none() -> Self {
        Self {
            private_data: PrivateData::new(&[]),
            responder_resources: 0,
            initiator_depth: 0,
        }
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The peer did not want it.
    Rejected {
        /// Why.
        reason: RejectReason,
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
