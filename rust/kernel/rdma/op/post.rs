// SPDX-License-Identifier: GPL-2.0

//! Posting operations.

use super::{
    Kind,
    Op,
    OpHandler,
    State, //
};
use crate::{
    context::{
        PollContext,
        Provides, //
    },
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    flush::Pad,
    qp::Qp,
    wr::{
        PostError,
        RecvWr,
        Remote,
        SendWr, //
    }, //
};
use core::ops::Range;
use kernel::{
    prelude::*,
    sync::Arc, //
};

type Posted<T> = Result<(), PostError<T>>;

/// Each of these takes the operation away until its completion, or gives it back in the error: that
/// of [`Qp::post_send`], and `EINVAL` if the range is empty or not inside of the buffer. Any
/// context.
impl<C, D, H> Op<C, D, H>
where
    C: Send + 'static,
    D: Direction,
    H: OpHandler<C, D>,
{
    #[inline]
    fn post(
        mut self,
        kind: Kind,
        post: impl FnOnce(Pin<KBox<State<C, D, H>>>) -> Posted<Pin<KBox<State<C, D, H>>>>,
    ) -> Posted<Self> {
        self.0.kind = kind;
        post(self.0).map_err(|e| PostError {
            owner: e.owner.map(Self),
            error: e.error,
        })
    }

    #[inline]
    fn post_send<S, R>(
        self,
        kind: Kind,
        qp: &Qp<S, R>,
        wr: impl for<'a> FnOnce(&'a State<C, D, H>) -> Result<SendWr<'a>>,
    ) -> Posted<Self>
    where
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post(kind, |state| qp.post_send(state, wr))
    }

    /// Reads the peer's memory at `from` into a range of the buffer (`rpma_read`).
    #[inline]
    pub fn read<S, R>(self, qp: &Qp<S, R>, range: Range<usize>, from: Remote) -> Posted<Self>
    where
        D: DeviceWrites,
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post_send(Kind::Read, qp, |op| {
            Ok(SendWr::rdma_read([op.buf.sge_mut(range)?], from))
        })
    }

    /// Writes a range of the buffer to the peer's memory at `to` (`rpma_write`).
    #[inline]
    pub fn write<S, R>(self, qp: &Qp<S, R>, range: Range<usize>, to: Remote) -> Posted<Self>
    where
        D: DeviceReads,
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post_send(Kind::Write, qp, |op| {
            Ok(SendWr::rdma_write([op.buf.sge(range)?], to))
        })
    }

    /// Writes as [`Op::write`], and tells the peer, which needs a receive for that
    /// (`rpma_write_with_imm`). The immediate data are in host byte order.
    #[inline]
    pub fn write_with_imm<S, R>(
        self,
        qp: &Qp<S, R>,
        range: Range<usize>,
        to: Remote,
        imm: u32,
    ) -> Posted<Self>
    where
        D: DeviceReads,
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post_send(Kind::Write, qp, |op| {
            Ok(SendWr::rdma_write([op.buf.sge(range)?], to).with_imm(imm))
        })
    }

    /// Completes when all that was written to the `len` bytes from `to` on, by this QP and before,
    /// is in the peer's memory (`rpma_flush`): see [`crate::flush`], also for what that means. The
    /// buffer is not touched.
    #[inline]
    pub fn flush<S, R>(
        mut self,
        qp: &Qp<S, R>,
        pad: &Arc<Pad>,
        to: Remote,
        len: usize,
    ) -> Posted<Self>
    where
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.0.pad = Some(pad.clone());
        self.post_send(Kind::Flush, qp, |op| {
            let pad = op.pad.as_ref().ok_or(EINVAL)?;
            SendWr::flush(pad, to, len)
        })
    }

    /// Sends a range of the buffer (`rpma_send`).
    #[inline]
    pub fn send<S, R>(self, qp: &Qp<S, R>, range: Range<usize>) -> Posted<Self>
    where
        D: DeviceReads,
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post_send(Kind::Send, qp, |op| {
            Ok(SendWr::send([op.buf.sge(range)?]))
        })
    }

    /// Sends as [`Op::send`], with immediate data, in host byte order (`rpma_send_with_imm`).
    #[inline]
    pub fn send_with_imm<S, R>(self, qp: &Qp<S, R>, range: Range<usize>, imm: u32) -> Posted<Self>
    where
        D: DeviceReads,
        S: Provides<H::Needs>,
        R: PollContext,
    {
        self.post_send(Kind::Send, qp, |op| {
            Ok(SendWr::send([op.buf.sge(range)?]).with_imm(imm))
        })
    }

    /// Receives a message, or the notice of an RDMA WRITE, into a range of the buffer
    /// (`rpma_recv`).
    #[inline]
    pub fn recv<S, R>(self, qp: &Qp<S, R>, range: Range<usize>) -> Posted<Self>
    where
        D: DeviceWrites,
        S: PollContext,
        R: Provides<H::Needs>,
    {
        self.post(Kind::Recv, |state| {
            qp.post_recv(state, |op| Ok(RecvWr::new([op.buf.sge_mut(range)?])))
        })
    }
}
