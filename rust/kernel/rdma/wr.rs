// SPDX-License-Identifier: GPL-2.0

//! Work requests.
//!
//! A request is described by a closure that borrows from its owner, so that its scatter entries can
//! only be memory that the owner keeps: see [`Qp::post_send`](crate::qp::Qp::post_send).
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_send_wr`,
//! `struct ib_recv_wr`)

use crate::bindings;
use core::marker::PhantomData;
use kernel::error::Error;

/// A scatter/gather entry of memory that the device may read.
///
/// # Invariants
///
/// `addr` and `length` are DMA-mapped memory of `pd`, with the key `lkey`, that lives for `'a`.
#[derive(Clone, Copy)]
pub struct Sge<'a> {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
    pub(crate) pd: *const bindings::ib_pd,
    pub(crate) _memory: PhantomData<&'a ()>,
}

impl Sge<'_> {
    #[inline]
    pub(crate) fn to_raw(self) -> bindings::ib_sge {
        bindings::ib_sge {
            addr: self.addr,
            length: self.length,
            lkey: self.lkey,
        }
    }
}

/// A scatter/gather entry of memory that the device may write.
///
/// # Invariants
///
/// As [`Sge`].
#[derive(Clone, Copy)]
pub struct SgeMut<'a>(pub(crate) Sge<'a>);

/// Where a peer's memory is, and the key to it: what an advertisement carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address at the peer.
    pub addr: u64,
    /// The remote key.
    pub rkey: u32,
}

/// A request for the send queue, with `N` scatter/gather entries.
///
/// All requests are signaled: their owner comes back when they complete.
pub struct SendWr<'a, const N: usize = 1> {
    pub(crate) sges: [Sge<'a>; N],
    pub(crate) opcode: bindings::ib_wr_opcode,
    pub(crate) flags: bindings::ib_send_flags,
    pub(crate) imm_data: u32,
    pub(crate) remote: Option<Remote>,
}

impl<'a, const N: usize> SendWr<'a, N> {
    #[inline]
    fn new(opcode: bindings::ib_wr_opcode, sges: [Sge<'a>; N], remote: Option<Remote>) -> Self {
        Self {
            sges,
            opcode,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            imm_data: 0,
            remote,
        }
    }

    /// A message (`IB_WR_SEND`).
    #[inline]
    pub fn send(sges: [Sge<'a>; N]) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_SEND, sges, None)
    }

    /// An RDMA WRITE of local memory to `remote` (`IB_WR_RDMA_WRITE`).
    #[inline]
    pub fn rdma_write(sges: [Sge<'a>; N], remote: Remote) -> Self {
        Self::new(bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, sges, Some(remote))
    }

    /// An RDMA READ of `remote` to local memory (`IB_WR_RDMA_READ`).
    #[inline]
    pub fn rdma_read(sges: [SgeMut<'a>; N], remote: Remote) -> Self {
        Self::new(
            bindings::ib_wr_opcode_IB_WR_RDMA_READ,
            sges.map(|sge| sge.0),
            Some(remote),
        )
    }

    /// Adds immediate data, in host byte order, to a message or an RDMA WRITE
    /// (`IB_WR_SEND_WITH_IMM`, `IB_WR_RDMA_WRITE_WITH_IMM`). An RDMA READ carries none; it stays as
    /// it is.
    #[inline]
    pub fn with_imm(mut self, imm_data: u32) -> Self {
        self.opcode = match self.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => {
                bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
            }
            other => other,
        };
        self.imm_data = imm_data.to_be();
        self
    }

    /// Asks the peer for an event when the message arrives (`IB_SEND_SOLICITED`).
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.flags |= bindings::ib_send_flags_IB_SEND_SOLICITED;
        self
    }

    /// Starts the request only after all earlier RDMA READs have completed (`IB_SEND_FENCE`).
    #[inline]
    pub fn fenced(mut self) -> Self {
        self.flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        self
    }
}

/// A request for the receive queue, with `N` scatter entries.
pub struct RecvWr<'a, const N: usize = 1> {
    pub(crate) sges: [SgeMut<'a>; N],
}

impl<'a, const N: usize> RecvWr<'a, N> {
    /// A receive into local memory.
    #[inline]
    pub fn new(sges: [SgeMut<'a>; N]) -> Self {
        Self { sges }
    }
}

/// A request that was not posted, with its owner.
pub struct PostError<P> {
    /// What the request owned.
    pub owner: P,
    /// Why it was not posted.
    pub error: Error,
}

impl<P> From<PostError<P>> for Error {
    fn from(e: PostError<P>) -> Self {
        e.error
    }
}
