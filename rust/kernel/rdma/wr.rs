// SPDX-License-Identifier: GPL-2.0

//! Work requests.
//!
//! A request is described by a closure that borrows from its owner, so that its scatter entries can
//! only be memory that the owner keeps: see [`Qp::post_send`](crate::qp::Qp::post_send).
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_send_wr`,
//! `struct ib_recv_wr`)

use crate::{
    bindings,
    pd,
    qp::PostTarget, //
};
use core::{
    marker::PhantomData,
    mem::ManuallyDrop, //
};
use kernel::prelude::*;

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
    pub(crate) pd: pd::Id,
    pub(crate) _memory: PhantomData<&'a ()>,
}

impl Sge<'_> {
    /// Forgets how long the memory lives.
    ///
    /// # Safety
    ///
    /// The memory lives as long as what is made of this is used.
    #[inline]
    pub(crate) unsafe fn erase(self) -> Sge<'static> {
        // INVARIANT: By the caller's promise the memory lives as long as it has to.
        Sge {
            _memory: PhantomData,
            ..self
        }
    }

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

/// The list of requests that have no entries.
///
/// Some drivers look at the first entry before they look at how many there are: irdma copies it
/// into what the hardware reads wherever there is a list, cxgb4 reads its length where there may be
/// none. So this is an entry of nothing, for all of them, and there for ever.
static NO_ENTRIES: NoEntries = NoEntries(bindings::ib_sge {
    addr: 0,
    length: 0,
    lkey: 0,
});

#[repr(transparent)]
struct NoEntries(bindings::ib_sge);

// SAFETY: Never written.
unsafe impl Sync for NoEntries {}

/// Returns the list of `N` entries that a C request points to.
#[inline]
pub(crate) fn sg_list<const N: usize>(sges: *mut [bindings::ib_sge; N]) -> *mut bindings::ib_sge {
    if const { N == 0 } {
        (&raw const NO_ENTRIES.0).cast_mut()
    } else {
        sges.cast()
    }
}

/// Writes a C request, all but its callback and its successor.
///
/// # Safety
///
/// `to` is valid for writes.
#[inline]
pub(crate) unsafe fn fill(
    to: *mut bindings::ib_send_wr,
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    ex: u32,
    sg_list: *mut bindings::ib_sge,
    num_sge: c_int,
) {
    // SAFETY: The caller promises that `to` is valid for writes.
    unsafe {
        (*to).sg_list = sg_list;
        (*to).num_sge = num_sge;
        (*to).opcode = opcode;
        (*to).send_flags = flags as c_int;
        (*to).ex.imm_data = ManuallyDrop::new(ex);
    }
}

/// Writes what [`fill`] leaves out, of the last request of a list, which completes to `cqe`.
///
/// # Safety
///
/// `to` is valid for writes.
#[inline]
pub(crate) unsafe fn end(to: *mut bindings::ib_send_wr, cqe: *mut bindings::ib_cqe) {
    // SAFETY: The caller promises that `to` is valid for writes.
    unsafe {
        (*to).next = core::ptr::null_mut();
        (*to).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    }
}

/// A request for the send queue, with `N` scatter/gather entries.
///
/// A request that is posted by itself is signaled: its owner comes back when it completes.
pub struct SendWr<'a, const N: usize = 1> {
    sges: [Sge<'a>; N],
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    /// Immediate data, in network byte order, or the key that the peer is to invalidate.
    ex: u32,
    remote: Option<Remote>,
}

impl<'a, const N: usize> SendWr<'a, N> {
    #[inline]
    fn new(opcode: bindings::ib_wr_opcode, sges: [Sge<'a>; N], remote: Option<Remote>) -> Self {
        Self {
            sges,
            opcode,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            ex: 0,
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

    /// An RDMA READ of `remote` to local memory (`IB_WR_RDMA_READ`). On iWARP, to one entry:
    /// posting another is `EOPNOTSUPP`.
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
    /// it is. iWARP has none: posting such a request there is `EOPNOTSUPP`.
    #[inline]
    pub fn with_imm(mut self, imm_data: u32) -> Self {
        self.opcode = match self.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => {
                bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
            }
            _ => return self,
        };
        self.ex = imm_data.to_be();
        self
    }

    /// Has the peer invalidate a key of its own when the message arrives (`IB_WR_SEND_WITH_INV`):
    /// the `rkey` that it has lent for what the message answers. Only a message without immediate
    /// data can; other requests stay as they are.
    #[inline]
    pub fn invalidating(mut self, rkey: u32) -> Self {
        if self.opcode == bindings::ib_wr_opcode_IB_WR_SEND {
            self.opcode = bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV;
            self.ex = rkey;
        }
        self
    }

    /// Asks the peer for an event when the message arrives (`IB_SEND_SOLICITED`).
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.flags |= bindings::ib_send_flags_IB_SEND_SOLICITED;
        self
    }

    /// Starts the request only after all earlier RDMA READs have completed (`IB_SEND_FENCE`). RDMA
    /// READs are answered in their order anyway, and iWARP has no fence for them; they stay as they
    /// are.
    #[inline]
    pub fn fenced(mut self) -> Self {
        if self.opcode != bindings::ib_wr_opcode_IB_WR_RDMA_READ {
            self.flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        }
        self
    }

    #[inline]
    pub(crate) fn is_read(&self) -> bool {
        self.opcode == bindings::ib_wr_opcode_IB_WR_RDMA_READ
    }

    /// Says whether iWARP has such a request: it has no immediate data, and an RDMA READ goes to
    /// one entry.
    #[inline]
    fn is_for_iwarp(&self) -> bool {
        match self.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM
            | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM => false,
            bindings::ib_wr_opcode_IB_WR_RDMA_READ => const { N == 1 },
            _ => true,
        }
    }

    /// Says whether the peer can take the same request more than once.
    #[inline]
    pub(crate) fn is_repeatable(&self) -> bool {
        // The key is gone with the first.
        self.opcode != bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV
    }

    /// Writes the C request and its entries, all but the callback and the successor, for a QP.
    ///
    /// # Safety
    ///
    /// `to` and `sges` are valid for writes.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_rdma_wr,
        sges: *mut [bindings::ib_sge; N],
        target: &PostTarget,
    ) -> Result {
        // SAFETY: What is made of the borrow is used up here. `to` and `sges` are valid for writes,
        // as the caller promises.
        unsafe { self.check(target)?.put(to, sges) };
        Ok(())
    }

    /// Checks that a request is one for a QP, and forgets how long its memory lives.
    ///
    /// What iWARP does not have is not left to the driver: siw refuses it, but keeps its callback
    /// in the slot, and calls that when the QP is flushed.
    ///
    /// # Safety
    ///
    /// The memory lives as long as what is returned.
    #[inline]
    pub(crate) unsafe fn check(self, target: &PostTarget) -> Result<SendWr<'static, N>> {
        if self.sges.iter().any(|sge| sge.pd != target.pd) {
            return Err(EINVAL);
        }
        if !self.is_for_iwarp() && target.iwarp {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: The caller keeps the memory for as long as what is returned.
        let sges = self.sges.map(|sge| unsafe { sge.erase() });
        Ok(SendWr { sges, ..self })
    }

    /// Writes the C request and its entries as [`SendWr::write`], after [`SendWr::check`].
    ///
    /// # Safety
    ///
    /// `to` and `sges` are valid for writes.
    #[inline]
    pub(crate) unsafe fn put(
        self,
        to: *mut bindings::ib_rdma_wr,
        sges: *mut [bindings::ib_sge; N],
    ) {
        let n = const { N as c_int };
        // SAFETY: The caller promises that both are valid for writes; the request begins with the
        // one that `fill` writes. A driver reads what follows `wr` of RDMA requests only.
        unsafe {
            sges.write(self.sges.map(Sge::to_raw));
            fill(
                &raw mut (*to).wr,
                self.opcode,
                self.flags,
                self.ex,
                sg_list(sges),
                n,
            );
            if let Some(remote) = self.remote {
                (*to).remote_addr = remote.addr;
                (*to).rkey = remote.rkey;
            }
        }
    }
}

/// An atomic operation on eight bytes of a peer's memory, aligned to eight. Their old value goes to
/// eight bytes of local memory, in the byte order of this CPU.
///
/// It is atomic with respect to the device's other operations, and to the peer's CPU where the
/// peer's device says so. iWARP has none: posting one there is `EOPNOTSUPP`.
pub struct AtomicWr<'a> {
    old: SgeMut<'a>,
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    remote: Remote,
    compare_add: u64,
    swap: u64,
}

impl<'a> AtomicWr<'a> {
    /// Adds to the value at `remote` (`IB_WR_ATOMIC_FETCH_AND_ADD`).
    #[inline]
    pub fn fetch_add(old: SgeMut<'a>, remote: Remote, add: u64) -> Self {
        Self {
            old,
            opcode: bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            remote,
            compare_add: add,
            swap: 0,
        }
    }

    /// Sets the value at `remote` to `swap` if it is `compare` (`IB_WR_ATOMIC_CMP_AND_SWP`).
    #[inline]
    pub fn cmp_swap(old: SgeMut<'a>, remote: Remote, compare: u64, swap: u64) -> Self {
        Self {
            opcode: bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP,
            swap,
            ..Self::fetch_add(old, remote, compare)
        }
    }

    /// Starts the operation only after all earlier RDMA READs have completed (`IB_SEND_FENCE`).
    #[inline]
    pub fn fenced(mut self) -> Self {
        self.flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        self
    }

    /// Writes the C request and its entry, all but the callback and the successor, for a QP.
    ///
    /// # Safety
    ///
    /// `to` and `sge` are valid for writes.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_atomic_wr,
        sge: *mut [bindings::ib_sge; 1],
        target: &PostTarget,
    ) -> Result {
        // SAFETY: What is made of the borrow is used up here. `to` and `sge` are valid for writes,
        // as the caller promises.
        unsafe { self.check(target)?.put(to, sge) };
        Ok(())
    }

    /// Checks that a request is for a QP of its PD, not of iWARP, which has no atomic operations,
    /// and that the entry has eight bytes and the peer's address is aligned to them, and forgets
    /// how long the memory lives.
    ///
    /// # Safety
    ///
    /// The memory lives as long as what is returned.
    #[inline]
    pub(crate) unsafe fn check(self, target: &PostTarget) -> Result<AtomicWr<'static>> {
        let old = self.old.0;
        if old.pd != target.pd || old.length != 8 || self.remote.addr % 8 != 0 {
            return Err(EINVAL);
        }
        if target.iwarp {
            // As in `SendWr::check`.
            return Err(EOPNOTSUPP);
        }
        Ok(AtomicWr {
            // SAFETY: The caller keeps the memory for as long as what is returned.
            old: SgeMut(unsafe { old.erase() }),
            ..self
        })
    }

    /// Writes the C request and its entry as [`AtomicWr::write`], after [`AtomicWr::check`].
    ///
    /// # Safety
    ///
    /// `to` and `sge` are valid for writes.
    #[inline]
    pub(crate) unsafe fn put(
        self,
        to: *mut bindings::ib_atomic_wr,
        sge: *mut [bindings::ib_sge; 1],
    ) {
        let old = self.old.0;
        // SAFETY: The caller promises that both are valid for writes; the request begins with the
        // one that `fill` writes.
        unsafe {
            sge.write([old.to_raw()]);
            fill(&raw mut (*to).wr, self.opcode, self.flags, 0, sge.cast(), 1);
            (*to).remote_addr = self.remote.addr;
            (*to).compare_add = self.compare_add;
            (*to).swap = self.swap;
            (*to).compare_add_mask = 0;
            (*to).swap_mask = 0;
            (*to).rkey = self.remote.rkey;
        }
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
    ///
    /// It is not there if the driver has failed without saying that it was this request that it
    /// refused. siw does so after it has queued one. Then it may complete yet, which gives the
    /// owner to its handler, or never, and the owner is leaked; the log says so.
    pub owner: Option<P>,
    /// Why it was not posted.
    pub error: Error,
}

impl<P> PostError<P> {
    /// A request that no driver has seen.
    #[inline]
    pub(crate) fn new(owner: P, error: Error) -> Self {
        Self {
            owner: Some(owner),
            error,
        }
    }
}

impl<P> From<PostError<P>> for Error {
    fn from(e: PostError<P>) -> Self {
        e.error
    }
}
