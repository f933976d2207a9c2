// SPDX-License-Identifier: GPL-2.0

//! What storage protocols have in common, between the verbs and their own messages.
//!
//! Receives that are posted again, tags of requests, credits, room in a send queue, sizes of
//! queues and ends of connections, each usable without the others.
//! See Documentation/session.rst.

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod credits;
mod recv;
mod room;
mod sizes;
pub mod tags;

pub use credits::{
    Credit,
    Grant,
    RecvCredits,
    SendCredits, //
};
pub use recv::{
    Kept,
    Received,
    RecvHandler,
    RecvRing, //
};
pub use room::Room;
pub use sizes::{
    Limit,
    Load,
    Misfit,
    Sizes, //
};

use crate::{
    cm,
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    }, //
};

/// Ends a connection, which may not be established yet, or be gone: disconnects it, and drains its
/// QP, so that all owners are back (`rdma_disconnect`, `ib_drain_qp`). Fails as [`Qp::drain`].
pub fn end<S: PollContext, R: PollContext>(id: &cm::Id, qp: &Qp<S, R>, cx: &Sleepable) -> Result {
    end_inner(id, &qp.inner, cx)
}

/// As [`end`]; not generic, so that it is not in each ULP.
fn end_inner(id: &cm::Id, qp: &qp::Inner, cx: &Sleepable) -> Result {
    // If there is no connection, the drain flushes the requests.
    let _ = id.disconnect(cx);
    qp.drain_posted(cx)
}

/// A guard of a connection that is being made: unless it was [connected](Connecting::connected),
/// its drop [ends](end) the connection. If that fails, the receives give up their references
/// ([`Qp::release_recvs`]).
#[must_use = "the connection is ended when this is dropped"]
pub struct Connecting<'a, S: PollContext, R: PollContext> {
    id: &'a cm::Id,
    qp: &'a Qp<S, R>,
    cx: &'a Sleepable,
}

impl<'a, S: PollContext, R: PollContext> Connecting<'a, S, R> {
    /// Makes the guard. Called before the first receive is posted.
    pub fn new(id: &'a cm::Id, qp: &'a Qp<S, R>, cx: &'a Sleepable) -> Self {
        Self { id, qp, cx }
    }

    /// Disarms the guard, once the connection is made.
    pub fn connected(self) {
        core::mem::forget(self);
    }
}

impl<S: PollContext, R: PollContext> Drop for Connecting<'_, S, R> {
    fn drop(&mut self) {
        abandon(self.id, &self.qp.inner, self.cx);
    }
}

/// Ends a connection that was not made. Not generic, as [`end_inner`].
fn abandon(id: &cm::Id, qp: &qp::Inner, cx: &Sleepable) {
    if let Err(e) = end_inner(id, qp, cx) {
        crate::pr_err_ratelimited!("QP {} was not drained ({e:?})\n", qp.num());
        if let Err(e) = qp.release_recvs(cx) {
            crate::pr_err_ratelimited!("QP {} keeps its receives ({e:?})\n", qp.num());
        }
    }
}
