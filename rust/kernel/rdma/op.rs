// SPDX-License-Identifier: GPL-2.0

//! Operations with a context, as those of librpma.
//!
//! For ULPs that have no request types of their own. An [`Op`] is a buffer and a context. Posting
//! moves it into the queue, and its completion gives it back as a [`Done`] with the result; it can
//! then be posted again as another operation. Completions are taken from a CQ that the ULP polls;
//! operations that are not taken are dropped.
//!
//! # Examples
//!
//! ```
//! use rdma::{context::*, cq::*, dma::*, op::*, qp::Qp, wr::Remote};
//!
//! /// Copies 64 bytes of a peer to another of its addresses, and sends it the first eight.
//! fn copy(qp: &Qp<Waited>, cq: &Cq<Waited>, op: Op<u32>, from: Remote, to: Remote) -> Result {
//!     let cx = Sleepable::current()?;
//!     let mut batch = WcArray::<4>::new();
//!     op.read(qp, 0..64, from)?;
//!     while let Some(completion) = cq.next(&mut batch, 1_000, &cx)? {
//!         let Ok(done) = Op::<u32>::take(completion) else {
//!             continue;
//!         };
//!         match done.result? {
//!             Outcome::Read => done.op.write_with_imm(qp, 0..64, to, 1)?,
//!             Outcome::Write => done.op.send_with_imm(qp, 0..8, 2)?,
//!             _ => return Ok(()),
//!         }
//!     }
//!     Err(ETIMEDOUT)
//! }
//! ```

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    context::Atomic,
    cq::Completion,
    cqe::{
        self,
        Cqe,
        CqeHandler, //
    },
    dma::{
        self,
        Bidirectional,
        Buf,
        FromDevice, //
    },
    pd::Pd,
    prelude::internal::*,
    qp::Qp,
    wc::{
        Opcode,
        Success,
        Wc,
        WcError, //
    },
    wr::{
        PostError,
        RecvWr,
        Remote,
        SendWr, //
    }, //
};
use core::ops::Range;

/// The result of an operation that has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The peer's memory was read into the buffer.
    Read,
    /// The peer's device has the data.
    Write,
    /// The peer's memory has the data.
    Flush,
    /// The message was sent.
    Send,
    /// A message was received.
    Recv {
        /// Its length, in bytes.
        len: usize,
        /// Its immediate data, in host byte order.
        imm: Option<u32>,
    },
    /// The peer has written elsewhere, with immediate data; the receive's buffer is unchanged.
    RecvWrite {
        /// The number of bytes that were written.
        len: usize,
        /// The immediate data, in host byte order.
        imm: u32,
    },
}

impl Outcome {
    /// That of a receive, before its completion.
    const RECV: Self = Self::Recv { len: 0, imm: None };

    /// Adds what the completion has, which does not tell the type of the operation.
    fn complete(self, wc: Success<'_>) -> Self {
        let len = wc.byte_len();
        match (self, wc.imm_data()) {
            (Self::Recv { .. }, Some(imm)) if wc.opcode() == Opcode::RecvRdmaWithImm => {
                Self::RecvWrite { len, imm }
            }
            (Self::Recv { .. }, imm) => Self::Recv { len, imm },
            (sent, _) => sent,
        }
    }
}

/// The owner of the posted request.
struct OpInner<C, D: dma::Direction> {
    cqe: Cqe<Self>,
    /// The outcome if it succeeds.
    outcome: Outcome,
    buf: Buf<D>,
    context: C,
    pad: Option<Arc<Pad>>,
}

// Only a posted request depends on its address, and a request is posted in a box.
impl<C, D: dma::Direction> Unpin for OpInner<C, D> {}

impl<C, D: dma::Direction> cqe::HasCqe for OpInner<C, D> {
    const FIELD: cqe::Field<Self, 0> = crate::cqe_field!(cqe);
}

impl<C: Send + 'static, D: dma::Direction> CqeHandler for OpInner<C, D> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {}
}

/// A buffer, used by the device in the direction `D`, and a context `C`, to be posted as one
/// operation after the other.
///
/// # Invariants
///
/// This is invariant in `C`, as `OpInner` embeds its callback.
pub struct Op<C, D: dma::Direction = Bidirectional>(Pin<KBox<OpInner<C, D>>>);

/// An operation that has completed.
pub struct Done<C, D: dma::Direction = Bidirectional> {
    /// The operation, which can be posted again.
    pub op: Op<C, D>,
    /// The result.
    pub result: Result<Outcome, WcError>,
}

impl<C: Send + 'static, D: dma::Direction> Op<C, D> {
    /// Allocates an operation. Fails with `ENOMEM`.
    pub fn new(buf: Buf<D>, context: C, _cx: &Sleepable) -> Result<Self> {
        let state = OpInner {
            cqe: Cqe::new(),
            outcome: Outcome::RECV,
            buf,
            context,
            pad: None,
        };
        Ok(Self(KBox::pin(state, GFP_KERNEL)?))
    }

    /// Returns the context.
    pub fn context(&mut self) -> &mut C {
        &mut self.0.context
    }

    /// Returns the buffer.
    pub fn buf(&mut self) -> &mut Buf<D> {
        &mut self.0.buf
    }

    /// Takes the operation of a completion. Gives the completion back if it is of another owner.
    #[inline]
    pub fn take(completion: Completion<'_>) -> Result<Done<C, D>, Completion<'_>> {
        let (mut state, wc) = completion.take::<OpInner<C, D>, 0>()?;
        state.pad = None;
        let result = wc.result().map(|wc| state.outcome.complete(wc));
        Ok(Done {
            op: Self(state),
            result,
        })
    }
}

type PostResult<T> = Result<(), PostError<T>>;

/// Posting moves the operation into the queue, or gives it back in the error: that of
/// [`Qp::post_send`], and `EINVAL` if the range is empty or not inside of the buffer. Any context.
impl<C: Send + 'static, D: dma::Direction> Op<C, D> {
    #[inline]
    fn post_send(
        mut self,
        outcome: Outcome,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        wr: impl for<'a> FnOnce(&'a OpInner<C, D>) -> Result<SendWr<'a>>,
    ) -> PostResult<Self> {
        self.0.outcome = outcome;
        qp.post_send(self.0, wr).map_err(|e| e.map(Self))
    }

    /// Completes when all that this QP has written before to the `len` bytes from `to` on is in the
    /// peer's memory (`rpma_flush`): see [`Pad`]. The buffer is not accessed.
    ///
    /// The peer must have allowed reading, and the connection at least one outstanding RDMA READ
    /// ([`ConnParam::initiator_depth`](crate::cm::ConnParam::initiator_depth)). Fails also with
    /// `EINVAL` if the range wraps around.
    #[inline]
    pub fn flush(
        mut self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        pad: &Arc<Pad>,
        to: Remote,
        len: usize,
    ) -> PostResult<Self> {
        self.0.pad = Some(pad.clone());
        self.post_send(Outcome::Flush, qp, |op| {
            let pad = op.pad.as_ref().ok_or(EINVAL)?;
            let last = (len as u64).checked_sub(1).ok_or(EINVAL)?;
            let addr = to.addr.checked_add(last).ok_or(EINVAL)?;
            let last = Remote { addr, ..to };
            Ok(SendWr::rdma_read([pad.0.whole_mut()], last))
        })
    }
}

impl<C: Send + 'static, D: dma::DeviceReads> Op<C, D> {
    /// Writes a range of the buffer to the peer's memory at `to` (`rpma_write`).
    #[inline]
    pub fn write(
        self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        range: Range<usize>,
        to: Remote,
    ) -> PostResult<Self> {
        self.post_send(Outcome::Write, qp, |op| {
            Ok(SendWr::rdma_write([op.buf.sge(range)?], to))
        })
    }

    /// Writes as [`Op::write`], and completes a receive of the peer (`rpma_write_with_imm`). The
    /// immediate data are in host byte order.
    #[inline]
    pub fn write_with_imm(
        self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        range: Range<usize>,
        to: Remote,
        imm: u32,
    ) -> PostResult<Self> {
        self.post_send(Outcome::Write, qp, |op| {
            Ok(SendWr::rdma_write([op.buf.sge(range)?], to).with_imm(imm))
        })
    }

    /// Sends a range of the buffer (`rpma_send`).
    #[inline]
    pub fn send(
        self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        range: Range<usize>,
    ) -> PostResult<Self> {
        self.post_send(Outcome::Send, qp, |op| {
            Ok(SendWr::send([op.buf.sge(range)?]))
        })
    }

    /// Sends as [`Op::send`], with immediate data, in host byte order (`rpma_send_with_imm`).
    #[inline]
    pub fn send_with_imm(
        self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        range: Range<usize>,
        imm: u32,
    ) -> PostResult<Self> {
        self.post_send(Outcome::Send, qp, |op| {
            Ok(SendWr::send([op.buf.sge(range)?]).with_imm(imm))
        })
    }
}

impl<C: Send + 'static, D: dma::DeviceWrites> Op<C, D> {
    /// Reads the peer's memory at `from` into a range of the buffer (`rpma_read`).
    #[inline]
    pub fn read(
        self,
        qp: &Qp<impl Provides<Atomic>, impl PollContext>,
        range: Range<usize>,
        from: Remote,
    ) -> PostResult<Self> {
        self.post_send(Outcome::Read, qp, |op| {
            Ok(SendWr::rdma_read([op.buf.sge_mut(range)?], from))
        })
    }

    /// Receives a message into a range of the buffer, or the immediate data of an RDMA WRITE
    /// (`rpma_recv`).
    #[inline]
    pub fn recv(
        mut self,
        qp: &Qp<impl PollContext, impl Provides<Atomic>>,
        range: Range<usize>,
    ) -> PostResult<Self> {
        self.0.outcome = Outcome::RECV;
        qp.post_recv(self.0, |op| Ok(RecvWr::new([op.buf.sge_mut(range)?])))
            .map_err(|e| e.map(Self))
    }
}

/// The memory that flushes of RDMA WRITEs read into. Any number of them can use one at once.
///
/// A flush is an RDMA READ of the last byte of the range: see Documentation/cq.rst.
/// After it the data are visible to the peer's CPUs and to all other QPs
/// (`RPMA_FLUSH_TYPE_VISIBILITY` in librpma). They survive a loss of power only if the peer's
/// platform has its caches in the persistence domain, or its device bypasses them
/// (`RPMA_FLUSH_TYPE_PERSISTENT`).
pub struct Pad(Buf<FromDevice>);

impl Pad {
    /// Allocates a pad for flushes by QPs of `pd`. Fails as [`Buf::alloc`].
    pub fn alloc(pd: &Pd, cx: &Sleepable) -> Result<Arc<Self>> {
        Ok(Arc::new(Self(Buf::alloc(pd, 1, cx)?), GFP_KERNEL)?)
    }
}
