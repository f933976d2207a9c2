// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::create`],
//! [`Id::resolve_addr`], [`Id::resolve_route`], a QP, receives, [`Id::connect`]. A passive one
//! comes as a [`Request`] to a [`Listener`] and is accepted with [`Id::accept`]. What happens
//! afterwards is told to a [`Handler`].
//!
//! A ULP that must not wait begins with [`Id::connect_to`], and all the rest is told to it.
//!
//! An id is destroyed by a work item when its last handle is dropped, which may be in its own
//! handler. [`Id::destroy`] waits for that. Its QP keeps it.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

mod addr;
pub(crate) mod bound;
pub(crate) mod callback;
mod confirm;
mod connect;
mod driver;
mod event;
mod id;
mod inner;
mod listener;
mod options;
mod reject;
mod request;
pub(crate) mod running;
mod step;

pub use driver::Connect;
pub use event::{
    Event,
    Handler, //
};
pub use id::Id;
pub(crate) use inner::{
    Inner,
    QpClaim, //
};
pub use listener::{
    Accept,
    Listener, //
};
pub use options::Options;
pub use reject::{
    RejectReason,
    Rejected, //
};
pub use request::Request;

use crate::bindings;
use kernel::prelude::*;

/// How a connection is to be made, as `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
pub struct ConnParam<'a> {
    /// What the peer gets along with the request or the answer; at most 56 bytes in a request, 196
    /// in an answer.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding at the peer. With 0 they wait for
    /// ever.
    pub initiator_depth: u8,
    /// How often an unanswered packet is sent again, up to 7. rxe takes 7 for "always".
    pub retry_count: u8,
    /// How often a message is sent again when the peer has posted no receive, up to 7, which means
    /// "always".
    pub rnr_retry_count: u8,
}

impl Default for ConnParam<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 6,
        }
    }
}

impl ConnParam<'_> {
    fn to_raw(self) -> Result<bindings::rdma_conn_param> {
        Ok(bindings::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len().try_into()?,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: self.retry_count.min(7),
            rnr_retry_count: self.rnr_retry_count.min(7),
            ..Default::default()
        })
    }
}

/// What a peer sent along with its answer.
#[derive(Clone, Copy)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; Self::MAX],
}

impl PrivateData {
    const MAX: usize = 255;

    pub(crate) fn new(from: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        let mut len = 0;
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = *from;
            len += 1;
        }
        Self { len, bytes }
    }
}

impl core::ops::Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or(&[])
    }
}
