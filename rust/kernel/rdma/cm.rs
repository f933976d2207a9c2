// SPDX-License-Identifier: GPL-2.0

//! The RDMA connection manager.
//!
//! An active connection is made step by step, each call waiting for its event: [`Id::resolve`], a
//! QP, receives, [`Id::connect`]; or without waiting, by [`Id::connect_to`]. A passive connection
//! comes as a [`Request`] to a [`Listener`] and is accepted with [`Id::accept`]. A [`Handler`] gets
//! the events. See Documentation/cm.rst.
//!
//! An id is destroyed by a work item when its last handle is dropped, which may be in its own
//! handler. Its QP keeps it.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod addr;
mod callback;
mod conn;
mod event;
mod id;
mod listener;
mod pending;

use addr::{
    socket_addr,
    SockAddr, //
};
pub(crate) use callback::{
    init,
    InCallback, //
};
pub(crate) use conn::{
    Conn,
    Manager,
    RawId,
    State, //
};
use event::private_data;
pub(crate) use event::REJ_LEN;
pub use event::{
    Event,
    Handler,
    RejectReason,
    Rejected, //
};
pub(crate) use id::Shared;
pub use id::{
    Connect,
    Id,
    Options, //
};
pub use listener::{
    Accept,
    Listener,
    Request, //
};
pub(crate) use listener::{
    Backlog,
    ListenId,
    Verdict, //
};
pub(crate) use pending::Pending;

use crate::{
    prelude::internal::*,
    rnr_timer::RnrTimer, //
};

/// Parameters of a connection, as `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
pub struct ConnParam<'a> {
    /// Data for the peer: at most 56 bytes along with a request, 196 with an answer.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding. With 0 they wait for ever.
    pub initiator_depth: u8,
    /// The number of times that an unanswered packet is sent again, up to 7: for rxe, "always".
    pub retry_count: u8,
    /// The number of times that a message without a receive is sent again, up to 7: "always". The
    /// peer's `min_rnr_timer` is the time between them.
    pub rnr_retry_count: u8,
    /// The time that the peer waits when there is no receive for its message, before it sends that
    /// again (`rdma_set_min_rnr_timer`). On iWARP the connection ends instead.
    pub min_rnr_timer: RnrTimer,
    /// The time that the peer has to answer a request, or to confirm that its own was accepted, in
    /// milliseconds. C's connection managers give up after 74 s, or after hours if the peer asks
    /// for more time. 0 is refused with `EINVAL` by all functions that take these.
    pub timeout_ms: u32,
}

impl Default for ConnParam<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 7,
            min_rnr_timer: RnrTimer::default(),
            timeout_ms: 90_000,
        }
    }
}

impl ConnParam<'_> {
    /// Fails with `EINVAL` for too much private data, or without time for the peer.
    pub(crate) fn to_raw(self) -> Result<bindings::rdma_conn_param> {
        if self.timeout_ms == 0 {
            return Err(EINVAL);
        }
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

/// The private data of a peer's answer.
#[derive(Clone, Copy)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; Self::MAX],
}

impl PrivateData {
    const MAX: usize = 255;

    pub(crate) fn new(from: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        let copied = bytes.iter_mut().zip(from).map(|(to, from)| *to = *from);
        Self {
            len: copied.count() as u8,
            bytes,
        }
    }
}

impl core::ops::Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or(&[])
    }
}

/// Returns private data that C keeps, none if the address is null.
///
/// # Safety
///
/// Unless it is null, `len` bytes at the address are initialised, and do not change during `'a`.
pub(crate) unsafe fn private_data_at<'a>(data: *const c_void, len: usize) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: The address is not null, so the caller promises that the data are valid.
    unsafe { core::slice::from_raw_parts(data.cast(), len) }
}
