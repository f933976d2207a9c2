// SPDX-License-Identifier: GPL-2.0

//! Work requests.
//!
//! A request is described by a closure that borrows from its owner, so that its scatter entries can
//! only be memory that the owner keeps: see [`Qp::post_send`](crate::qp::Qp::post_send).
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_send_wr`,
//! `struct ib_recv_wr`)

use crate::{
    cq,
    cqe::CqeHandler,
    pd::{
        Pd,
        PdId, //
    },
    prelude::internal::*,
    qp_id::QpId,
    sync::RwState,
    trace, //
};
use core::num::NonZero;
use kernel::sync::{
    SpinLockIrq,
    SpinLockIrqGuard, //
};

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
    pub(crate) pd: PdId,
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

/// The number of entries that a request has at most: they are on the stack.
const MAX_SGES: usize = 64;

/// Entries whose number, at least one and at most `N`, is known at run time only. `N` is at most
/// 64.
///
/// # Examples
///
/// ```
/// # use rdma::{dma::*, wr::{SendWr, SgeList}};
/// /// Sends a header and as many pieces as there are.
/// fn gather<'a>(head: &'a Buf<ToDevice>, data: &'a [Buf<ToDevice>]) -> Result<SendWr<'a, 8>> {
///     let mut list = SgeList::new(head.whole());
///     for piece in data {
///         list.push(piece.whole())?;
///     }
///     Ok(SendWr::send(list))
/// }
/// ```
#[derive(Clone, Copy)]
pub struct SgeList<E, const N: usize> {
    /// Behind the first `len` there are copies of one of them.
    pub(crate) sges: [E; N],
    pub(crate) len: usize,
}

impl<E: Copy, const N: usize> SgeList<E, N> {
    /// A list of one entry.
    #[inline]
    pub fn new(first: E) -> Self {
        const {
            assert!(
                N > 0 && N <= MAX_SGES,
                "a list has 1 to 64 entries, on the stack"
            )
        };
        let sges = [first; N];
        Self { sges, len: 1 }
    }

    /// Adds an entry at the end. Fails with `ENOSPC` if the list is full.
    #[inline]
    pub fn push(&mut self, entry: E) -> Result {
        *self.sges.get_mut(self.len).ok_or(ENOSPC)? = entry;
        self.len += 1;
        Ok(())
    }
}

/// The entries of a request: an array, or a list whose length is known at run time only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of `{E}`",
    note = "entries for the device to write are from `whole_mut()` and `sge_mut()`"
)]
pub trait Entries<E, const N: usize>: private::Sealed {
    #[doc(hidden)]
    fn into_list(self) -> SgeList<E, N>;
}

impl<E, const N: usize> private::Sealed for [E; N] {}
impl<E, const N: usize> Entries<E, N> for [E; N] {
    #[inline]
    fn into_list(self) -> SgeList<E, N> {
        const {
            assert!(
                N <= MAX_SGES,
                "a request has up to 64 entries, on the stack"
            )
        };
        SgeList { sges: self, len: N }
    }
}

impl<E, const N: usize> private::Sealed for SgeList<E, N> {}
impl<E, const N: usize> Entries<E, N> for SgeList<E, N> {
    #[inline]
    fn into_list(self) -> Self {
        self
    }
}

/// The address of a peer's memory and its key, as an advertisement carries them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address at the peer.
    pub addr: u64,
    /// The remote key.
    pub rkey: u32,
}

/// The QP that requests are posted to, with its attributes that posts and regions need.
///
/// # Invariants
///
/// - `raw` is a QP of the PD `pd`. No other QP has or had the number `qp_id`.
/// - `raw`, `recv_cq`, which is the CQ of its receives, and `reg_lock` are valid until the QP is
///   destroyed, when it has no handle. This is not used after that.
/// - `post_send` is the driver's operation. `iwarp` is set if the device is one of iWARP.
/// - Unless `rw_idle` is `RwState::NEVER`, QP and device have the limits that `rdma_rw` divides by,
///   and the QP has a port.
#[doc(hidden)]
#[repr(C)]
pub struct PostTarget {
    pub(crate) raw: NonNull<bindings::ib_qp>,
    /// Kept here, as it takes two loads to find it.
    pub(crate) post_send: trace::Post<bindings::ib_qp, bindings::ib_send_wr>,
    pub(crate) pd: PdId,
    pub(crate) qp_id: QpId,
    // Not read by each post.
    recv_cq: NonNull<cq::Inner>,
    reg_lock: NonNull<SpinLockIrq<()>>,
    pub(crate) iwarp: bool,
    /// [`RwState::IDLE`] if transfers by `rdma_rw` of all of a context's memory need no look: the
    /// driver has set all that C divides by, no peer gets a key, and the QP was created with
    /// contexts. [`RwState::NEVER`] otherwise.
    pub(crate) rw_idle: usize,
}

impl PostTarget {
    /// The number of bytes at the beginning that each post reads.
    pub(crate) const READ_BY_POSTS: usize = core::mem::offset_of!(Self, recv_cq);

    /// # Safety
    ///
    /// `raw` is a new QP of this PD and of this CQ for receives. It is destroyed when there is no
    /// handle of it; until then it is valid, with CQ and lock, and what is returned is not used
    /// after that. `qp_id` is a new number.
    pub(crate) unsafe fn new(
        raw: NonNull<bindings::ib_qp>,
        qp_id: QpId,
        pd: &Pd,
        recv_cq: &cq::Shared,
        reg_lock: &SpinLockIrq<()>,
    ) -> Self {
        // SAFETY: The QP is valid, as the caller promises.
        let (write_sge, read_sge, port) = unsafe {
            let qp = raw.as_ptr();
            ((*qp).max_write_sge, (*qp).max_read_sge, (*qp).port)
        };
        let dev = pd.device();
        let iwarp = dev.is_iwarp();
        let pages = dev.attrs().max_fast_reg_page_list_len;
        let is_checked = iwarp || [write_sge, read_sge, pages].contains(&0);
        // INVARIANT: By the caller's promise. The limits were just looked at.
        Self {
            raw,
            // SAFETY: The QP is valid, as the caller promises.
            post_send: unsafe { trace::PostVerb::op(raw.as_ptr()) },
            recv_cq: NonNull::from(&**recv_cq),
            reg_lock: NonNull::from(reg_lock),
            pd: pd.id(),
            qp_id,
            iwarp,
            rw_idle: if is_checked || port == 0 {
                RwState::NEVER
            } else {
                RwState::IDLE
            },
        }
    }

    /// Returns the CQ of the receives.
    #[inline]
    pub(crate) fn recv_cq(&self) -> &cq::Inner {
        // SAFETY: By the type invariant the CQ is valid.
        unsafe { self.recv_cq.as_ref() }
    }

    /// Takes the lock that is held while registrations of shared regions are posted. A thread that
    /// holds it and finds a region registered through this QP posts behind that registration. Only
    /// the driver's own locks are taken under it.
    pub(crate) fn lock_regs(&self) -> SpinLockIrqGuard<'_, ()> {
        // SAFETY: By the type invariant the lock is valid.
        unsafe { self.reg_lock.as_ref() }.lock()
    }
}

/// Returns the list of `N` entries that a C request points to. Without entries that is one of
/// nothing: some drivers look at the first entry before their number (irdma, cxgb4).
#[inline]
fn sg_list<const N: usize>(sges: *mut [bindings::ib_sge; N]) -> *mut bindings::ib_sge {
    static NO_ENTRIES: bindings::ib_sge = bindings::ib_sge {
        addr: 0,
        length: 0,
        lkey: 0,
    };
    if const { N == 0 } {
        (&raw const NO_ENTRIES).cast_mut()
    } else {
        sges.cast()
    }
}

/// Writes a C request, all but its entries, its callback and its successor.
///
/// # Safety
///
/// `to` is valid for writes.
#[inline]
pub(crate) unsafe fn write_header(
    to: *mut bindings::ib_send_wr,
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    ex: u32,
) {
    // SAFETY: The caller promises that `to` is valid for writes.
    unsafe {
        (*to).opcode = opcode;
        (*to).send_flags = flags as c_int;
        (*to).ex.imm_data = ManuallyDrop::new(ex);
    }
}

/// Writes what [`write_header`] leaves out, of the last request of a list, which completes to
/// `cqe`.
///
/// # Safety
///
/// `to` is valid for writes.
#[inline]
pub(crate) unsafe fn write_tail(to: *mut bindings::ib_send_wr, cqe: *mut bindings::ib_cqe) {
    // SAFETY: The caller promises that `to` is valid for writes.
    unsafe {
        (*to).next = ptr::null_mut();
        (*to).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    }
}

/// A request for the send queue, with up to `N` scatter/gather entries, of the operation `O`. One
/// that is posted by itself is signaled: when it completes, the handler `ID` of its owner gets that
/// back. That is handler 0, unless [`SendWr::done_by`] names another one.
///
/// # Examples
///
/// ```
/// # use rdma::{dma::*, wr::SendWr};
/// /// Tells the peer, by an event, that its memory was read: after the RDMA READs have completed.
/// fn release(note: &Buf<ToDevice>) -> SendWr<'_> {
///     SendWr::send([note.whole()]).fenced().solicited()
/// }
/// ```
pub struct SendWr<'a, const N: usize = 1, O = RdmaOp, const ID: u64 = 0> {
    pub(crate) sges: SgeList<Sge<'a>, N>,
    pub(crate) op: O,
}

/// An operation for the send queue of a connected QP that a closure of type `F` may describe:
/// [`RdmaOp`], [`AtomicOp`], [`RegOp`](crate::mr::RegOp) or [`InvOp`](crate::mr::InvOp).
pub trait SendOp<F>: SendOpFor<F> {}
impl<F, O: SendOpFor<F>> SendOp<F> for O {}

pub(crate) use private::{
    SendOpFor,
    WrOp, //
};

mod private {
    use super::*;

    pub trait Sealed {}

    /// The meaning of [`SendOp`], which no ULP can implement: `F` has no reference to what the
    /// completion of this operation may change in another thread.
    pub trait SendOpFor<F>: WrOp {}

    /// An operation of a send queue.
    pub trait WrOp: Sized {
        /// The result of posting.
        type Output;
        /// The C request, which begins with a `struct ib_send_wr`.
        type Raw;
        /// The state by which a request that was not posted is taken back.
        type Undo;

        /// Checks that the request, whose entries are of the PD of `target`, is one for its QP, and
        /// prepares what it changes. Refuses requests that iWARP does not have. siw does so too,
        /// but keeps the callback in the slot and calls it when the QP is flushed.
        ///
        /// # Safety
        ///
        /// The memory that the operation refers to lives until the request has completed. If it is
        /// not posted, [`WrOp::undo`] is called before that.
        unsafe fn prepare<const N: usize>(
            &mut self,
            sges: &[Sge<'_>; N],
            target: &PostTarget,
        ) -> Result<(Self::Output, Self::Undo)>;

        /// Writes the C request, all but its entries, its callback and its successor.
        ///
        /// # Safety
        ///
        /// `to` is valid for writes, and [`WrOp::prepare`] has succeeded.
        unsafe fn write(self, to: *mut Self::Raw);

        /// Takes the lock under which the request is posted, if it needs one, and commits under it
        /// what was prepared.
        ///
        /// # Safety
        ///
        /// `undo` is from [`WrOp::prepare`] for the QP of `target`, and the request is about to be
        /// posted.
        #[inline]
        unsafe fn lock<'t>(
            _undo: &Self::Undo,
            _target: &'t PostTarget,
        ) -> Option<SpinLockIrqGuard<'t, ()>> {
            None
        }

        /// Returns the callback of the request, whose owner was given up for `user`.
        ///
        /// # Safety
        ///
        /// `user` is from an owner of type `T`, by its callback `ID`, and `undo` from
        /// [`WrOp::prepare`].
        #[inline]
        unsafe fn callback<T: CqeHandler<ID>, const ID: u64>(
            _undo: &Self::Undo,
            user: *mut bindings::ib_cqe,
        ) -> *mut bindings::ib_cqe {
            user
        }

        /// Takes back what was prepared, and replaces the callback of the request, which is from
        /// [`WrOp::callback`], by that of its owner.
        ///
        /// # Safety
        ///
        /// `undo` is from [`WrOp::prepare`], and the request, `wr`, was not posted.
        #[inline]
        unsafe fn undo(_undo: Self::Undo, _wr: *mut bindings::ib_send_wr) {}
    }
}

/// A request that is prepared, and what [`WrOp::prepare`] has returned.
type PreparedWr<O, const N: usize> = (
    SendWr<'static, N, O>,
    (<O as WrOp>::Output, <O as WrOp>::Undo),
);

impl<'a, const N: usize, O> SendWr<'a, N, O> {
    /// Names the handler of the owner that the request completes to, by the `ID` of its
    /// [`CqeHandler`] (`wr_cqe`): `SendWr::send(..).done_by::<1>()` is for `CqeHandler<1>`.
    #[inline]
    pub fn done_by<const ID: u64>(self) -> SendWr<'a, N, O, ID> {
        let Self { sges, op } = self;
        SendWr { sges, op }
    }
}

impl<'a, const N: usize, O: WrOp, const ID: u64> SendWr<'a, N, O, ID> {
    /// Checks that the request is one for the QP of `target`, prepares what it changes, and erases
    /// the lifetime of what it refers to.
    ///
    /// # Safety
    ///
    /// That lives until the request has completed. If it is not posted, [`WrOp::undo`] is called
    /// before that.
    #[inline]
    pub(crate) unsafe fn prepare(self, target: &PostTarget) -> Result<PreparedWr<O, N>> {
        let SgeList { sges, len } = self.sges;
        let mut op = self.op;
        if sges.iter().any(|sge| sge.pd != target.pd) {
            return Err(EINVAL);
        }
        // SAFETY: What the request refers to lives until it has completed, and `undo` is called if
        // it is not posted, as the caller promises.
        let prepared = unsafe { op.prepare(&sges, target) }?;
        // INVARIANT: The memory lives as long as it has to, as the caller promises.
        let sges = sges.map(|sge| Sge {
            _memory: PhantomData,
            ..sge
        });
        let sges = SgeList { sges, len };
        Ok((SendWr { sges, op }, prepared))
    }

    /// Writes the C request and its entries, all but the callback and the successor.
    ///
    /// # Safety
    ///
    /// `to` and `sges` are valid for writes, and the request is prepared.
    #[inline]
    pub(crate) unsafe fn write(self, to: *mut O::Raw, sges: *mut [bindings::ib_sge; N]) {
        let wr: *mut bindings::ib_send_wr = to.cast();
        // SAFETY: Both are valid for writes and the request is prepared, as the caller promises. A
        // request of every kind begins with a `struct ib_send_wr`.
        unsafe {
            sges.write(self.sges.sges.map(Sge::to_raw));
            (*wr).sg_list = sg_list(sges);
            (*wr).num_sge = self.sges.len as c_int;
            self.op.write(to);
        }
    }
}

/// Messages, RDMA WRITEs and RDMA READs.
pub struct RdmaOp {
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    /// Immediate data, in network byte order, or the key that the peer is to invalidate.
    ex: u32,
    remote: Option<Remote>,
}

impl<F> SendOpFor<F> for RdmaOp {}
impl WrOp for RdmaOp {
    type Output = ();
    type Raw = bindings::ib_rdma_wr;
    type Undo = ();

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[Sge<'_>; N],
        target: &PostTarget,
    ) -> Result<((), ())> {
        // iWARP has no immediate data, and an RDMA READ goes to one entry.
        let is_for_iwarp = match self.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM
            | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM => false,
            bindings::ib_wr_opcode_IB_WR_RDMA_READ => const { N == 1 },
            _ => true,
        };
        if !is_for_iwarp && target.iwarp {
            return Err(EOPNOTSUPP);
        }
        Ok(((), ()))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_rdma_wr) {
        let wr = to.cast();
        // SAFETY: `to` is valid for writes, as the caller promises. A driver reads what follows the
        // `struct ib_send_wr` of RDMA requests only.
        unsafe {
            write_header(wr, self.opcode, self.flags, self.ex);
            if let Some(remote) = self.remote {
                (*to).remote_addr = remote.addr;
                (*to).rkey = remote.rkey;
            }
        }
    }
}

impl<'a, const N: usize> SendWr<'a, N> {
    #[inline]
    fn rdma(
        opcode: bindings::ib_wr_opcode,
        sges: SgeList<Sge<'a>, N>,
        remote: Option<Remote>,
    ) -> Self {
        let op = RdmaOp {
            opcode,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            ex: 0,
            remote,
        };
        Self { sges, op }
    }

    /// A message (`IB_WR_SEND`).
    #[inline]
    pub fn send(sges: impl Entries<Sge<'a>, N>) -> Self {
        Self::rdma(bindings::ib_wr_opcode_IB_WR_SEND, sges.into_list(), None)
    }

    /// An RDMA WRITE of local memory to `remote` (`IB_WR_RDMA_WRITE`).
    #[inline]
    pub fn rdma_write(sges: impl Entries<Sge<'a>, N>, remote: Remote) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
        Self::rdma(opcode, sges.into_list(), Some(remote))
    }

    /// An RDMA READ of `remote` to local memory (`IB_WR_RDMA_READ`). On iWARP, `N` is one: posting
    /// another is `EOPNOTSUPP`.
    #[inline]
    pub fn rdma_read(sges: impl Entries<SgeMut<'a>, N>, remote: Remote) -> Self {
        let SgeList { sges, len } = sges.into_list();
        let sges = sges.map(|sge| sge.0);
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_READ;
        Self::rdma(opcode, SgeList { sges, len }, Some(remote))
    }
}

impl<const N: usize, const ID: u64> SendWr<'_, N, RdmaOp, ID> {
    /// Adds immediate data, in host byte order, to a message or an RDMA WRITE
    /// (`IB_WR_SEND_WITH_IMM`, `IB_WR_RDMA_WRITE_WITH_IMM`). An RDMA READ carries none; it stays as
    /// it is. iWARP has none: posting such a request there is `EOPNOTSUPP`.
    #[inline]
    pub fn with_imm(mut self, imm_data: u32) -> Self {
        self.op.opcode = match self.op.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => {
                bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
            }
            _ => return self,
        };
        self.op.ex = imm_data.to_be();
        self
    }

    /// Makes the peer invalidate its key `rkey` when the message arrives (`IB_WR_SEND_WITH_INV`).
    /// Only a message without immediate data can; other requests stay as they are.
    #[inline]
    pub fn invalidating(mut self, rkey: u32) -> Self {
        if self.op.opcode == bindings::ib_wr_opcode_IB_WR_SEND {
            self.op.opcode = bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV;
            self.op.ex = rkey;
        }
        self
    }

    /// Asks the peer for an event when the message arrives (`IB_SEND_SOLICITED`).
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.op.flags |= bindings::ib_send_flags_IB_SEND_SOLICITED;
        self
    }

    /// Starts the request only after all earlier RDMA READs have completed (`IB_SEND_FENCE`). RDMA
    /// READs, which are answered in their order anyway, stay as they are.
    #[inline]
    pub fn fenced(mut self) -> Self {
        if self.op.opcode != bindings::ib_wr_opcode_IB_WR_RDMA_READ {
            self.op.flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        }
        self
    }
}

/// An atomic operation on eight bytes of a peer's memory, aligned to eight. Their old value goes to
/// eight bytes of local memory, in the byte order of this CPU. It is atomic with respect to the
/// device's other operations, and to the peer's CPU where the peer's device has that. iWARP has
/// none: posting one there is `EOPNOTSUPP`.
///
/// # Examples
///
/// ```
/// # use rdma::{dma::*, wr::{AtomicWr, Remote}};
/// /// Takes a ticket, after earlier RDMA READs.
/// fn ticket(old: &Buf<FromDevice>, next: Remote) -> AtomicWr<'_> {
///     AtomicWr::fetch_add(old.whole_mut(), next, 1).fenced()
/// }
///
/// /// Takes a lock, if it is free.
/// fn lock(old: &Buf<FromDevice>, word: Remote) -> AtomicWr<'_> {
///     AtomicWr::cmp_swap(old.whole_mut(), word, 0, 1)
/// }
/// ```
pub type AtomicWr<'a> = SendWr<'a, 1, AtomicOp>;

/// The operation of an [`AtomicWr`].
pub struct AtomicOp {
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    remote: Remote,
    compare_add: u64,
    swap: u64,
}

impl<F> SendOpFor<F> for AtomicOp {}
impl WrOp for AtomicOp {
    type Output = ();
    type Raw = bindings::ib_atomic_wr;
    type Undo = ();

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        sges: &[Sge<'_>; N],
        target: &PostTarget,
    ) -> Result<((), ())> {
        if sges.iter().any(|old| old.length != 8) || self.remote.addr % 8 != 0 {
            return Err(EINVAL);
        }
        if target.iwarp {
            return Err(EOPNOTSUPP);
        }
        Ok(((), ()))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_atomic_wr) {
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe {
            write_header(to.cast(), self.opcode, self.flags, 0);
            (*to).remote_addr = self.remote.addr;
            (*to).compare_add = self.compare_add;
            (*to).swap = self.swap;
            (*to).compare_add_mask = 0;
            (*to).swap_mask = 0;
            (*to).rkey = self.remote.rkey;
        }
    }
}

impl<'a> AtomicWr<'a> {
    #[inline]
    fn atomic(
        opcode: bindings::ib_wr_opcode,
        old: SgeMut<'a>,
        remote: Remote,
        compare_add: u64,
        swap: u64,
    ) -> Self {
        let op = AtomicOp {
            opcode,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            remote,
            compare_add,
            swap,
        };
        let sges = [old.0].into_list();
        Self { sges, op }
    }

    /// Adds to the value at `remote` (`IB_WR_ATOMIC_FETCH_AND_ADD`).
    #[inline]
    pub fn fetch_add(old: SgeMut<'a>, remote: Remote, add: u64) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD;
        Self::atomic(opcode, old, remote, add, 0)
    }

    /// Sets the value at `remote` to `swap` if it is `compare` (`IB_WR_ATOMIC_CMP_AND_SWP`).
    #[inline]
    pub fn cmp_swap(old: SgeMut<'a>, remote: Remote, compare: u64, swap: u64) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP;
        Self::atomic(opcode, old, remote, compare, swap)
    }

    /// Starts the operation only after all earlier RDMA READs have completed (`IB_SEND_FENCE`).
    #[inline]
    pub fn fenced(mut self) -> Self {
        self.op.flags |= bindings::ib_send_flags_IB_SEND_FENCE;
        self
    }
}

/// A request for the receive queue, with up to `N` scatter entries, which completes to the handler
/// `ID` of its owner.
pub struct RecvWr<'a, const N: usize = 1, const ID: u64 = 0> {
    sges: SgeList<SgeMut<'a>, N>,
}

impl<'a, const N: usize> RecvWr<'a, N> {
    /// A receive into local memory.
    #[inline]
    pub fn new(sges: impl Entries<SgeMut<'a>, N>) -> Self {
        let sges = sges.into_list();
        Self { sges }
    }

    /// Names the handler of the owner: see [`SendWr::done_by`].
    #[inline]
    pub fn done_by<const ID: u64>(self) -> RecvWr<'a, N, ID> {
        RecvWr { sges: self.sges }
    }
}

impl<const N: usize, const ID: u64> RecvWr<'_, N, ID> {
    /// Returns whether all entries are of this PD.
    #[inline]
    pub(crate) fn is_of(&self, pd: PdId) -> bool {
        self.sges.sges.iter().all(|sge| sge.0.pd == pd)
    }

    /// Makes the C request, which has no callback yet, and its entries.
    #[inline]
    pub(crate) fn into_raw(
        self,
        sges: &mut MaybeUninit<[bindings::ib_sge; N]>,
    ) -> bindings::ib_recv_wr {
        sges.write(self.sges.sges.map(|sge| sge.0.to_raw()));
        bindings::ib_recv_wr {
            sg_list: sg_list(sges.as_mut_ptr()),
            num_sge: self.sges.len as c_int,
            ..Default::default()
        }
    }
}

/// The refusal of a request, the only one of its call.
#[derive(Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// Set if the driver has named the request. Otherwise it may have queued it before it failed,
    /// as siw does.
    pub(crate) named: bool,
}

impl Refusal {
    /// Fails if the driver has returned `ret` other than 0. `next` is the successor of the request,
    /// which was null, and the place for the driver to name it.
    #[inline]
    pub(crate) fn check<T>(ret: c_int, next: *const T) -> Result<(), Self> {
        match ret {
            0 => Ok(()),
            _ => Err(Self {
                error: Error::from_errno(ret),
                named: !next.is_null(),
            }),
        }
    }
}

/// Requests that were not posted, or not all of them.
///
/// # Examples
///
/// ```
/// # use rdma::wr::PostError;
/// fn report<P>(e: PostError<P>) -> Option<P> {
///     pr_err!("refused after {} requests: {:?}\n", e.posted(), e.error());
///     e.owner
/// }
/// ```
pub struct PostError<P> {
    /// The owner, if nothing was posted.
    ///
    /// If some requests of a chain or a transfer were posted, the QP keeps it and drops it once a
    /// drain has proved that it is out of use. If the driver did not name the request that it has
    /// refused, as siw does after it has queued one, the last request may complete yet, which gives
    /// the owner to its handler, or never, and the owner is leaked, with a message in the log.
    pub owner: Option<P>,
    /// The number of requests that were posted, above the error number. In one word, so that a post
    /// returns two registers.
    why: NonZero<u64>,
}

impl<P> PostError<P> {
    #[inline]
    pub(crate) fn new(owner: P, error: Error) -> Self {
        Self::in_part(Some(owner), 0, error)
    }

    /// Requests of which so many were posted.
    #[inline]
    pub(crate) fn in_part(owner: Option<P>, posted: u32, error: Error) -> Self {
        let errno = u64::from(error.to_errno().unsigned_abs());
        // An error number is not zero.
        let why = NonZero::new(u64::from(posted) << 32 | errno).unwrap_or(NonZero::<u64>::MIN);
        Self { owner, why }
    }

    /// Makes something else of the owner.
    #[inline]
    pub(crate) fn map<Q>(self, f: impl FnOnce(P) -> Q) -> PostError<Q> {
        PostError {
            owner: self.owner.map(f),
            why: self.why,
        }
    }

    /// Returns the number of requests, from the first, that were posted, as far as the driver
    /// reports so.
    pub fn posted(&self) -> u32 {
        (self.why.get() >> 32) as u32
    }

    /// Returns why the next request was not posted.
    #[inline]
    pub fn error(&self) -> Error {
        Error::from_errno((self.why.get() as u32 as c_int).wrapping_neg())
    }
}

impl<P> From<PostError<P>> for Error {
    #[inline]
    fn from(e: PostError<P>) -> Self {
        e.error()
    }
}
