// SPDX-License-Identifier: GPL-2.0

//! Memory that peers may access.
//!
//! Peers reach the memory of a [`Region`] from the completion of a [`RegWr`] until a local or a
//! remote invalidation has ended the registration, or the MR is deregistered; only then is the
//! memory unmapped and freed. Until [`Region::into_parts`] gives the memory back the CPU has copies
//! of the bytes, never a slice. See Documentation/mr.rst.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_mr`, `struct
//! ib_reg_wr`)

mod state;

pub use state::{
    Exclusive,
    Lent,
    OneThread,
    Shared,
    State, //
};

use crate::{
    context::private::Sealed,
    cq::{
        self,
        Completion, //
    },
    cqe::{
        self,
        CqeHandler,
        CqePointer, //
    },
    debug,
    deferred,
    dma::{
        self,
        Buf, //
    },
    identity,
    objects,
    pd::{
        self,
        Pd, //
    },
    prelude::internal::*,
    qp::Qp,
    qp_id::QpId,
    sg::{
        self,
        SgBuf, //
    },
    trace,
    wc::{
        self,
        Wc, //
    },
    wr::{
        self,
        Entries as _,
        Remote,
        SendWr, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ops::Range,
    ptr, //
};
use kernel::{
    error::from_err_ptr,
    sync::{
        SetOnce,
        SpinLockIrqGuard, //
    }, //
};

/// The size of the pages that an MR maps, whatever those of the CPU are: block drivers split
/// requests by it. MRs of erdma and vmw_pvrdma map pages of the CPU's size: where that is larger, a
/// list that has gaps between such pages is refused, and an MR has more pages than it needs.
pub const PAGE_SIZE: usize = 4096;

/// Memory that outlives its type, only to be dropped. ULPs get none: see [`Memory::keep`].
#[doc(hidden)]
pub enum AnyMemory {
    Buf(dma::Mapped),
    /// The list is unmapped before its owner is dropped.
    Map(sg::MappedList, sg::AnyOwner),
}

/// Memory of any kind, which a device or a peer may be using.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub enum MemoryRef<'a> {
    Buf(&'a dma::Mapped),
    Map(&'a sg::MappedList),
}

impl MemoryRef<'_> {
    fn pd(&self) -> &Pd {
        match self {
            Self::Buf(buf) => &buf.pd,
            Self::Map(map) => &map.pd,
        }
    }

    // Not inlined, as what maps is not in each ULP.
    #[inline(never)]
    fn len(&self) -> usize {
        match self {
            Self::Buf(buf) => buf.len(),
            Self::Map(map) => map.len as usize,
        }
    }

    /// Returns how many pages the memory touches, at the most.
    fn pages(&self) -> u32 {
        match self {
            // A buffer that does not start on a page covers one more; it is at most 4 GiB long.
            Self::Buf(buf) => buf.len().div_ceil(PAGE_SIZE) as u32 + 1,
            Self::Map(map) => map.pages,
        }
    }
}

/// DMA-mapped memory, in direction `D`, that an MR can map: [`Buf`] and [`SgMap`](sg::SgMap).
pub trait Memory<D: dma::AnyDirection>: Sealed + Sized + Send + Sync + Unpin + 'static {
    #[doc(hidden)]
    fn get(&self) -> MemoryRef<'_>;

    #[doc(hidden)]
    fn keep(self, _: cqe::Sealed) -> AnyMemory;
}

impl<D: dma::Direction> Sealed for Buf<D> {}
impl<D: dma::Direction> Memory<D> for Buf<D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef::Buf(&self.mapped)
    }

    fn keep(self, _: cqe::Sealed) -> AnyMemory {
        AnyMemory::Buf(self.mapped)
    }
}

impl<O: sg::SgOwner<D>, D: dma::AnyDirection> Sealed for sg::SgMap<O, D> {}
impl<O: sg::SgOwner<D>, D: dma::AnyDirection> Memory<D> for sg::SgMap<O, D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef::Map(&self.list)
    }

    fn keep(self, _: cqe::Sealed) -> AnyMemory {
        AnyMemory::Map(self.list, sg::AnyOwner::new(self.owner))
    }
}

/// [`Memory`] that a region can copy while peers may access it: [`Buf`] and [`SgBuf`].
pub trait OwnMemory<D: dma::Direction>: Memory<D> {
    #[doc(hidden)]
    fn copy_out(&self, offset: usize, to: &mut [u8], _: cqe::Sealed) -> Result;

    #[doc(hidden)]
    fn copy_in(&self, offset: usize, from: &[u8], _: cqe::Sealed) -> Result;
}

impl<D: dma::Direction> OwnMemory<D> for Buf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: cqe::Sealed) -> Result {
        self.mapped.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: cqe::Sealed) -> Result {
        self.mapped.copy_in(offset, from)
    }
}

impl<D: dma::Direction> OwnMemory<D> for SgBuf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: cqe::Sealed) -> Result {
        self.list.mapping.0.sync_for_cpu();
        self.owner.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: cqe::Sealed) -> Result {
        self.owner.copy_in(offset, from)?;
        self.list.mapping.0.sync_for_device();
        Ok(())
    }
}

/// The number of registrations after a proof for which no completion with the same key can be left:
/// the consumer's part of a key has eight bits.
const TRUSTED: u64 = 255 * state::GENERATION;

/// An MR and what it needs at its end.
///
/// # Invariants
///
/// - `raw` is an MR of `pd`.
/// - `state` is only used as the [`State`] of the region that the MR is part of, or by the owner of
///   an MR that is part of none.
/// - A claim of the state gives exclusive access to `cqe`, `claimed` and the keys of `raw`. While
///   an invalidation is posted its completion has the claim, and `cqe` has the callback for the
///   type of the owner that `claimed.user` is from.
/// - `claimed.qp` and `claimed.recv_cq` are of one QP, whose PD is or was `pd`, and which may be
///   gone; or of none.
#[doc(hidden)]
#[repr(C)]
pub struct FastRegMr {
    /// The callback of a local invalidation. The first field, to get back from it.
    cqe: UnsafeCell<bindings::ib_cqe>,
    claimed: UnsafeCell<Claimed>,
    state: UnsafeCell<u64>,
    /// The number of pages, of [`PAGE_SIZE`] bytes, that it can map.
    pages: u32,
    raw: NonNull<bindings::ib_mr>,
    /// The memory of a region that was dropped; dropped after the MR.
    kept: SetOnce<AnyMemory>,
    pd: Pd,
    object: objects::Object,
}

struct Claimed {
    /// The callback of the owner of the local invalidation.
    user: *mut bindings::ib_cqe,
    /// The key of the last registration.
    rkey: u32,
    /// The QP that the registration was posted to.
    qp: QpId,
    /// The CQ whose completions may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The mark of that CQ at the first registration there.
    mark: usize,
    /// The last generation whose key no earlier completion of that CQ can have, by the last proof
    /// there. Zero, which is none, before the first one.
    trusted: u64,
    /// The same before the first proof, once the CQ was found empty since the mark. Zero on iWARP.
    trusted_empty: u64,
}

impl Claimed {
    /// Notes the QP that the MR, which is of `pd`, is registered through from now on. Returns
    /// `false` if the QP is of another PD.
    #[cold]
    fn change_qp(&mut self, pd: pd::Id, target: &wr::PostTarget) -> bool {
        if target.pd != pd {
            return false;
        }
        let recv_cq = target.recv_cq().raw.as_ptr();
        if self.recv_cq != recv_cq {
            // Nothing is known of what is left in this CQ, unless it is the MR's first.
            if !self.recv_cq.is_null() {
                (self.trusted, self.trusted_empty) = (0, 0);
            }
            self.recv_cq = recv_cq;
            self.mark = target.recv_cq().empties.mark();
        }
        // INVARIANT: `recv_cq` is of this QP, too.
        self.qp = target.qp_id;
        true
    }

    /// Ends the registration of this generation, whose end is proved by the device that the key was
    /// valid on, and the claim of `state`. Returns `true`.
    #[inline]
    fn end<S: State>(&mut self, state: &S, generation: u64) -> bool {
        // Should it wrap, the next ones are not trusted.
        self.trusted = generation.wrapping_add(TRUSTED);
        state.set_idle();
        true
    }
}

// SAFETY: An MR may be used and deregistered from any thread.
unsafe impl Send for FastRegMr {}
// SAFETY: An MR may be used from any thread. By the type invariant `cqe` and `claimed` have one
// user at a time, and `state` is used as a type that is `Sync` if the region is.
unsafe impl Sync for FastRegMr {}

impl deferred::Teardown for FastRegMr {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        // SAFETY: By the type invariant `raw` is an MR of `pd`. It is owned by `self`, which is
        // dropped, so no request uses it. After this no peer can reach the memory.
        let ret = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        deferred::destroyed(fmt!("an MR with its memory"), ret)
    }
}

impl FastRegMr {
    /// # Safety
    ///
    /// `S` is the state of the region that the MR is part of, or the caller owns the MR.
    #[inline]
    unsafe fn state<S: State>(&self) -> &S {
        // SAFETY: `S` is transparent over a `u64`, as each `State` is. As the caller promises, it
        // is the type that all others use, or there are no others.
        unsafe { &*self.state.get().cast() }
    }

    /// As [`Region::remote_invalidated`], where it is no proof, or the first one, or the MR was
    /// registered through another QP of that CQ. `state` was claimed.
    #[cold]
    fn remote_invalidated_first<S: State>(
        &self,
        claimed: &mut Claimed,
        state: &S,
        key: u32,
        cq: &cq::Inner,
    ) -> bool {
        let generation = state.generation();
        // SAFETY: By the type invariant `raw` is an MR; its device does not change.
        let device = unsafe { (*self.raw.as_ptr()).device };
        // Of another device, the CQ may be at the address of one that is gone.
        let proved = key == claimed.rkey
            && ptr::eq(cq.raw.as_ptr(), claimed.recv_cq)
            && ptr::eq(cq.dev.as_raw(), device)
            && (generation <= claimed.trusted
                || generation <= claimed.trusted_empty && cq.empties.since(claimed.mark));
        if !proved {
            state.set_registered();
            return false;
        }
        claimed.end(state, generation)
    }

    /// The invalidation was not posted or has failed.
    ///
    /// # Safety
    ///
    /// The state is an `S`.
    #[cold]
    unsafe fn set_registered<S: State>(&self) {
        // SAFETY: The state is an `S`, as the caller promises.
        unsafe { self.state::<S>() }.set_registered();
    }

    /// Makes the MR idle when its invalidation has completed and was successful. One that is
    /// exclusive becomes idle in any case, so that the compiler makes one test of that in the
    /// caller, which marks it registered, and in the handler.
    ///
    /// # Safety
    ///
    /// `S` is the state of the MR's region. `wc` is the completion, which this is called for once.
    #[inline]
    unsafe fn invalidated<S: State>(&self, wc: &Wc) {
        if !S::SHARED || wc.result().is_ok() {
            // SAFETY: `S` is the state of the MR's region, as the caller promises.
            unsafe { self.state::<S>() }.set_idle();
        }
    }
}

/// A fast-registration MR without memory, ready to map some.
///
/// When it is dropped, a work item deregisters it.
///
/// # Invariants
///
/// Outside of a [`Region`] it is idle and has no memory.
pub struct Mr(deferred::Deferred<FastRegMr>);

impl Mr {
    /// Allocates an MR that can map `pages` pages of [`PAGE_SIZE`] bytes (`ib_alloc_mr`), of which
    /// memory that does not begin with one takes one more. Fails with `EINVAL` if the
    /// device has no such MRs; `ENOMEM`, or the driver's error.
    // Not inlined, so that its end is code of this module.
    #[inline(never)]
    pub fn alloc(pd: &Pd, pages: u32, _cx: &Sleepable) -> Result<Self> {
        let dev = pd.device();
        if pages == 0 || pages > dev.attrs().max_fast_reg_page_list_len {
            return Err(EINVAL);
        }
        let reserved = deferred::Deferred::reserve()?;
        let mut object = dev.object(crate::refs::Kind::Mr);
        // SAFETY: There is a reference to the PD, and the number of pages is in range.
        let mr = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(pd.as_raw(), bindings::ib_mr_type_IB_MR_TYPE_MEM_REG, pages)
        })?;
        let mr = NonNull::new(mr).ok_or(ENOMEM)?;
        // SAFETY: The MR was just allocated, and its number does not change.
        object.num = Some(unsafe { mr.as_ref() }.res.id);
        object.sizes = objects::Sizes::Mr { pages };
        // INVARIANT: The MR is new.
        Ok(Self(reserved.fill(FastRegMr {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            claimed: UnsafeCell::new(Claimed {
                user: ptr::null_mut(),
                rkey: 0,
                qp: QpId::NONE,
                recv_cq: ptr::null(),
                mark: 0,
                trusted: 0,
                trusted_empty: if dev.is_iwarp() { 0 } else { TRUSTED },
            }),
            state: UnsafeCell::new(state::IDLE),
            pages,
            raw: mr,
            kept: SetOnce::new(),
            pd: pd.clone(),
            object,
        })))
    }

    /// Allocates an MR for memory and maps that, and returns where it is to peers.
    ///
    /// # Safety
    ///
    /// The memory is not used meanwhile.
    unsafe fn alloc_for(memory: MemoryRef<'_>, cx: &Sleepable) -> Result<(Self, u64)> {
        let mr = Self::alloc(memory.pd(), memory.pages(), cx)?;
        // SAFETY: The MR is new, and the memory is not used meanwhile, as the caller promises.
        let iova = unsafe { mr.map(memory, None) }?;
        Ok((mr, iova))
    }

    /// Maps memory, or a range of it (`ib_map_mr_sg`), and returns where it is to peers. Fails with
    /// `EINVAL` if the memory is of another PD, or too large.
    ///
    /// # Safety
    ///
    /// The MR is idle, and neither it nor the memory is used. The range is in that, and not empty.
    unsafe fn map(&self, memory: MemoryRef<'_>, range: Option<Range<usize>>) -> Result<u64> {
        if memory.pages() > self.0.pages || *memory.pd() != self.0.pd {
            return Err(EINVAL);
        }
        let raw = self.0.raw.as_ptr();
        // SAFETY: `raw` is an MR of the memory's device, as both are of one PD, and is idle, so not
        // registered. As the caller promises, neither it nor the list, whose ends are changed, is
        // used meanwhile, and the range is one of the memory, which is mapped by its invariant.
        unsafe {
            let ret = match (memory, range) {
                (MemoryRef::Map(map), None) => {
                    let table = map.mapping.0.table();
                    bindings::rdma_helper_map_mr_list(raw, table, map.len)
                }
                (MemoryRef::Map(map), Some(range)) => {
                    let table = map.mapping.0.table();
                    bindings::rdma_helper_map_mr_sg(raw, table, range.start, range.len())
                }
                (MemoryRef::Buf(buf), range) => {
                    let range = range.unwrap_or(0..buf.len());
                    let (addr, len) = (buf.addr + range.start as u64, range.len() as u32);
                    bindings::rdma_helper_map_mr(raw, addr, len)
                }
            };
            match ret {
                0 => Ok((*raw).iova),
                _ => Err(Error::from_errno(ret)),
            }
        }
    }

    /// Drops an MR and its memory, which is kept until the MR is deregistered unless it is `idle`.
    fn release(self, memory: AnyMemory, idle: bool) {
        if !idle {
            self.0.kept.populate(memory);
        }
    }
}

/// Memory that could not be mapped, and the MR.
pub struct MapError<M> {
    /// The MR.
    pub mr: Mr,
    /// The memory.
    pub memory: M,
    /// The cause.
    pub error: Error,
}

impl<M> From<MapError<M>> for Error {
    fn from(e: MapError<M>) -> Self {
        e.error
    }
}

/// Memory that peers can be given access to.
///
/// A region is used by one thread at a time; one that threads share, as in an `Arc`, is a
/// [`SharedRegion`]. It may be dropped in any state.
///
/// # Invariants
///
/// `mr` maps a range of `memory`, which is at `iova` to peers, or is claimed for ever; it has the
/// state `S`. Both exist until this is dropped, but for the memory if the state says that it was
/// taken out. This is covariant in `M`, as it is the only
/// handle of the memory, and gives it back by value. States have no supertypes.
pub struct Region<D: dma::AnyDirection, M: Memory<D> = Buf<D>, S: State = Exclusive> {
    mr: ManuallyDrop<Mr>,
    memory: ManuallyDrop<M>,
    iova: u64,
    // If the state is exclusive, this is not `Sync`.
    _types: PhantomData<(D, S)>,
}

/// A [`Region`] whose memory can be taken out by a reference: see [`Region::take_memory`].
pub type LentRegion<D, M = Buf<D>> = Region<D, M, Lent>;

/// A [`Region`] that threads share. Posts of its registrations and invalidations take a lock.
pub type SharedRegion<D, M = Buf<D>> = Region<D, M, Shared>;

impl<D: dma::AnyDirection, M: Memory<D>> Region<D, M> {
    /// As [`Mr::alloc`] and [`Region::map`]. Fails with `EINVAL` if the memory is too large for the
    /// device's MRs; `ENOMEM`, or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// use rdma::prelude::*;
    ///
    /// /// Memory for a peer to write, in one piece, and some to read, in pages.
    /// fn regions(pd: &Pd, cx: &Sleepable) -> Result {
    ///     let mut from_peer = Region::new(Buf::<FromDevice>::alloc(pd, 512, cx)?, cx)?;
    ///     let to_peer = Region::new(SgBuf::<ToDevice>::alloc(pd, 1 << 20, cx)?, cx)?;
    ///     from_peer.set_range(0..64)?; // It gets a key to this part only.
    ///     to_peer.write(0, b"for the peer")
    /// }
    /// ```
    pub fn new(memory: M, cx: &Sleepable) -> Result<Self> {
        // SAFETY: The memory is owned here.
        let (mr, iova) = unsafe { Mr::alloc_for(memory.get(), cx) }?;
        // SAFETY: The memory was just mapped by the MR, which is new.
        Ok(unsafe { Self::from_parts(mr, memory, iova) })
    }

    /// Maps memory for access by peers (`ib_map_mr_sg`), which cannot reach it yet. Any context,
    /// but hns may sleep. Gives both back with `EINVAL` if they are of two PDs or the MR is too
    /// small, or with the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// /// Gives one MR the memory of one I/O after the other.
    /// fn serve(pd: &Pd, cx: &Sleepable) -> Result {
    ///     let mr = Mr::alloc(pd, 16, cx)?;
    ///     let read = Region::map(mr, SgBuf::<FromDevice>::alloc(pd, 60_000, cx)?)?;
    ///     let (mr, _) = read.into_parts().map_err(|_| EBUSY)?;
    ///     let mut memory = SgBuf::<ToDevice>::alloc(pd, 100, cx)?;
    ///     memory.cpu().write(0, b"answer")?;
    ///     Region::map(mr, memory)?;
    ///     Ok(())
    /// }
    /// ```
    pub fn map(mr: Mr, memory: M) -> Result<Self, MapError<M>> {
        // SAFETY: By the invariant of `Mr` it is idle, as it is not in a region. Both are owned
        // here.
        match unsafe { mr.map(memory.get(), None) } {
            // SAFETY: The memory was just mapped. The MR, which is owned here, is idle.
            Ok(iova) => Ok(unsafe { Self::from_parts(mr, memory, iova) }),
            Err(error) => Err(MapError { mr, memory, error }),
        }
    }

    /// Makes it a region that threads can share.
    pub fn into_shared(self) -> SharedRegion<D, M> {
        let iova = self.iova;
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used again nor dropped.
        let (mr, memory) = unsafe { this.take() };
        // SAFETY: The MR maps the memory at `iova`, and is owned here, so its state may change.
        unsafe { Region::from_parts(mr, memory, iova) }
    }
}

impl<D: dma::AnyDirection, M: Memory<D>> LentRegion<D, M> {
    /// As [`Region::map`], of memory that [`Region::take_memory`] gives back.
    pub fn lend(mr: Mr, memory: M) -> Result<Self, MapError<M>> {
        // SAFETY: By the invariant of `Mr` it is idle, as it is not in a region. Both are owned
        // here.
        match unsafe { mr.map(memory.get(), None) } {
            // SAFETY: The memory was just mapped. The MR, which is owned here, is idle.
            Ok(iova) => Ok(unsafe { Self::from_parts(mr, memory, iova) }),
            Err(error) => Err(MapError { mr, memory, error }),
        }
    }

    /// Takes the memory out, if the region is idle and still has it. The region, which may be the
    /// owner's of a request that has not completed, is not registered again. Any context.
    ///
    /// The memory of a region is in no request: those that register it and end that name its MR. So
    /// a peer has its use only, until a proof has ended that.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{mr::LentRegion, prelude::*, wc::Success};
    /// /// The reply has come, perhaps before it is known that the request has been sent.
    /// fn replied(
    ///     region: &LentRegion<FromDevice>,
    ///     wc: &Success<'_>,
    ///     qp: &Qp<Softirq>,
    /// ) -> Option<Buf<FromDevice>> {
    ///     match region.remote_invalidated(wc, qp) {
    ///         true => region.take_memory(),
    ///         false => None,
    ///     }
    /// }
    ///
    /// /// The request is sent. Another one may use the MR.
    /// fn sent(region: LentRegion<FromDevice>) -> Result<Mr> {
    ///     let (mr, _memory) = region.into_mr().map_err(|_| EBUSY)?;
    ///     Ok(mr)
    /// }
    /// ```
    #[inline]
    pub fn take_memory(&self) -> Option<M> {
        if !self.state().take() {
            return None;
        }
        // SAFETY: By the type invariant the memory is there, as the region was idle. By the state
        // it is not used from here on: there is no reference to it outside of methods, and this is
        // not `Sync`, so no other one runs.
        Some(unsafe { ptr::read(&*self.memory) })
    }

    /// Gives the MR back, and the memory if that was not taken out; or the region if it may be
    /// registered. Any context.
    pub fn into_mr(self) -> Result<(Mr, Option<M>), Self> {
        if self.state().is_taken() {
            self.state().end();
            // SAFETY: The MR is taken once: the region is neither used again nor dropped.
            let mr = unsafe { ManuallyDrop::take(&mut ManuallyDrop::new(self).mr) };
            return Ok((mr, None));
        }
        self.into_parts().map(|(mr, memory)| (mr, Some(memory)))
    }
}

impl<D: dma::AnyDirection, M: Memory<D>, S: State> Region<D, M, S> {
    /// # Safety
    ///
    /// `mr` may have the state `S`. It maps a range of `memory`, at `iova`, or is claimed for ever.
    unsafe fn from_parts(mr: Mr, memory: M, iova: u64) -> Self {
        // INVARIANT: As the caller promises.
        Self {
            mr: ManuallyDrop::new(mr),
            memory: ManuallyDrop::new(memory),
            iova,
            _types: PhantomData,
        }
    }

    #[inline]
    fn state(&self) -> &S {
        // SAFETY: By the type invariant `S` is the state of the MR.
        unsafe { self.mr.0.state() }
    }

    /// Returns the memory, if it was not taken out.
    #[inline]
    fn memory(&self) -> Option<&M> {
        match S::LENT && self.state().is_taken() {
            true => None,
            false => Some(&self.memory),
        }
    }

    /// Gives the MR and the memory back, or the region if it may be registered. Any context.
    pub fn into_parts(self) -> Result<(Mr, M), Self> {
        if !self.is_idle() {
            return Err(self);
        }
        // SAFETY: The region is neither used again nor dropped.
        Ok(unsafe { ManuallyDrop::new(self).take() })
    }

    /// Takes both parts out.
    ///
    /// # Safety
    ///
    /// The region is neither used again nor dropped.
    unsafe fn take(&mut self) -> (Mr, M) {
        // SAFETY: By the type invariant both are valid. The caller does not use them again.
        unsafe {
            (
                ManuallyDrop::take(&mut self.mr),
                ManuallyDrop::take(&mut self.memory),
            )
        }
    }

    /// Limits what peers will be given access to, all of the memory at first, to the bytes in
    /// `range` (`ib_map_mr_sg`); registrations tell the address of the first of them. The contexts
    /// of [`Region::map`]. Fails with `EBUSY` if the region is not idle; `EINVAL` if the range is
    /// empty or not inside of the memory; or the driver's error: it can only be dropped then.
    pub fn set_range(&mut self, range: Range<usize>) -> Result {
        const { assert!(!S::LENT, "the range of a `LentRegion` does not change") };
        if range.start >= range.end || range.end > self.len() {
            return Err(EINVAL);
        }
        if !self.is_idle() {
            return Err(EBUSY);
        }
        // SAFETY: The MR is idle, and the region is borrowed exclusively, so neither is used
        // otherwise. The range was checked.
        let mapped = unsafe { self.mr.map(self.memory.get(), Some(range)) };
        // INVARIANT: The MR maps the range, or is claimed.
        match mapped {
            Ok(iova) => self.iova = iova,
            // SAFETY: The region is borrowed exclusively, and its MR is idle.
            Err(_) => unsafe { *self.mr.0.state.get() = state::BUSY },
        }
        mapped.map(drop)
    }

    /// Returns `true` if the region is idle, so that it can be registered or taken apart: until it
    /// is registered, and again in the handler of an [`InvWr`] that has succeeded, and after
    /// [`Region::remote_invalidated`] has returned `true`.
    pub fn is_idle(&self) -> bool {
        self.state().is_idle()
    }

    /// Takes the completion of a receive of `qp` as proof that the peer has invalidated the region
    /// (SEND with invalidate). Returns `true` if it is proof; the region is idle then.
    ///
    /// It is, but on iWARP, if it carries the region's key and the CQ's own poller, not a
    /// [`WcArray`], is dispatching it; Documentation/mr.rst has the rest.
    /// A region whose end is not proved can be invalidated locally, as in the example of [`InvWr`].
    ///
    /// [`WcArray`]: crate::cq::WcArray
    pub fn remote_invalidated<C: PollContext, R: PollContext>(
        &self,
        wc: &wc::Success<'_>,
        qp: &Qp<C, R>,
    ) -> bool {
        let (key, cq) = match (wc.invalidated_rkey(), qp.recv_cq_at(wc.wc)) {
            (Some(key), Some(cq)) => (key, cq),
            _ => return false,
        };
        let (mr, state) = (&self.mr.0, self.state());
        if !state.claim_registered() {
            return false;
        }
        let generation = state.generation();
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &mut *mr.claimed.get() };
        // The CQ of that QP is `claimed.recv_cq`. Of any other it is to be seen.
        if key != claimed.rkey || qp.id() != claimed.qp || generation > claimed.trusted {
            return mr.remote_invalidated_first(claimed, state, key, cq);
        }
        claimed.end(state, generation)
    }

    /// Returns the length, in bytes; 0 if the memory was taken out.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.memory().map_or(0, |memory| memory.get().len())
    }
}

impl<D: dma::Direction, M: OwnMemory<D>, S: State> Region<D, M, S> {
    /// Copies bytes from `offset` on out of the region. Bytes that a peer is writing meanwhile may
    /// be old or new. Fails with `EINVAL` if the range is not inside of the region.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        let memory = self.memory().ok_or(EINVAL)?;
        memory.copy_out(offset, to, cqe::Sealed(()))
    }

    /// Copies bytes into the region from `offset` on. A peer that reads them meanwhile may get old
    /// or new ones. Fails with `EINVAL` if the range is not inside of the region.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result {
        let memory = self.memory().ok_or(EINVAL)?;
        memory.copy_in(offset, from, cqe::Sealed(()))
    }
}

impl<D: dma::AnyDirection, M: Memory<D>, S: State> Drop for Region<D, M, S> {
    fn drop(&mut self) {
        if self.memory().is_none() {
            // SAFETY: The region is being dropped, and is not used after this.
            return drop(unsafe { ManuallyDrop::take(&mut self.mr) });
        }
        let idle = self.is_idle();
        // SAFETY: The region is being dropped, and is not used after this.
        let (mr, memory) = unsafe { self.take() };
        mr.release(memory.keep(cqe::Sealed(())), idle);
    }
}

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// A request to register a [`Region`], with the access that peers get (`IB_WR_REG_MR`).
///
/// Posting it returns where a peer will find the region, which can be sent at once. It is refused
/// with `EBUSY` if the region is not idle.
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// /// Lets the peer write to a region, as `qp.post_send(io, |io| Ok(writable(&io.region)))`.
/// fn writable(region: &Region<FromDevice>) -> RegWr<'_> {
///     RegWr::remote_write(region)
/// }
/// ```
pub type RegWr<'a, S = Exclusive> = SendWr<'a, 0, RegOp<S>>;

/// The operation of a [`RegWr`].
///
/// # Invariants
///
/// `mr` is a region's with the state `S`.
pub struct RegOp<S: State> {
    mr: NonNull<FastRegMr>,
    _state: PhantomData<S>,
    iova: u64,
    access: u32,
    /// The MR and its new key, once the request is prepared.
    raw: *mut bindings::ib_mr,
    key: u32,
}

// SAFETY: An MR may be used from any thread, and so may a state that is `Sync`.
unsafe impl<S: State + Sync> Send for RegOp<S> {}

impl<'a, S: State> RegWr<'a, S> {
    #[inline]
    fn reg<D: dma::AnyDirection, M: Memory<D>>(region: &'a Region<D, M, S>, access: u32) -> Self {
        // INVARIANT: The MR is the region's.
        let op = RegOp {
            mr: NonNull::from(&*region.mr.0),
            _state: PhantomData,
            iova: region.iova,
            access,
            raw: ptr::null_mut(),
            key: 0,
        };
        let sges = [].into_list();
        Self { sges, op }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: dma::DeviceReads, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::reg(region, REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: dma::DeviceWrites, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::reg(region, LOCAL_WRITE | REMOTE_WRITE)
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: dma::DeviceReads + dma::DeviceWrites,
        M: Memory<D>,
    {
        Self::reg(region, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
    }

    /// Lets peers read the region if the device only reads its memory, and write it if the device
    /// only writes that.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{dma::OneWay, prelude::*, sg::{SgMap, SgOwner}};
    /// /// Starts a read or a write: what the peer may do goes with the request.
    /// fn start<O: SgOwner<OneWay>>(
    ///     region: &Region<OneWay, SgMap<O, OneWay>>,
    /// ) -> RegWr<'_> {
    ///     RegWr::remote_one_way(region)
    /// }
    /// ```
    #[inline]
    pub fn remote_one_way<O>(region: &'a Region<dma::OneWay, sg::SgMap<O, dma::OneWay>, S>) -> Self
    where
        O: sg::SgOwner<dma::OneWay>,
    {
        // Without the memory it is refused.
        let access = match region.memory().is_some_and(sg::SgMap::is_to_device) {
            true => REMOTE_READ,
            false => LOCAL_WRITE | REMOTE_WRITE,
        };
        Self::reg(region, access)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: dma::DeviceReads + dma::DeviceWrites,
        M: Memory<D>,
    {
        Self::reg(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }
}

impl<F, S: State> wr::SendOpFor<F> for RegOp<S> {}
impl<S: State> wr::Op for RegOp<S> {
    type Output = Remote;
    type Raw = bindings::ib_reg_wr;
    type Undo = Registration;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<(Remote, Registration)> {
        // SAFETY: The region lives until the request has completed, as the caller promises.
        let mr = unsafe { self.mr.as_ref() };
        // SAFETY: By the type invariant the state of the region is an `S`.
        let state = unsafe { mr.state::<S>() };
        if !state.claim_idle() {
            wc::unlikely();
            return Err(EBUSY);
        }
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &mut *mr.claimed.get() };
        if claimed.qp != target.qp_id && !claimed.change_qp(mr.pd.id(), target) {
            state.set_idle();
            return Err(EINVAL);
        }
        self.raw = mr.raw.as_ptr();
        // SAFETY: By the invariant of `FastRegMr` `raw` is an MR, and the claim has its keys. The
        // low byte of a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        self.key = unsafe {
            let raw = self.raw;
            let own = (*raw).rkey.wrapping_add(1) & 0xff;
            (*raw).lkey = (*raw).lkey & 0xffff_ff00 | own;
            (*raw).rkey = (*raw).rkey & 0xffff_ff00 | own;
            (*raw).rkey
        };
        claimed.rkey = self.key;
        let remote = Remote {
            addr: self.iova,
            rkey: self.key,
        };
        // INVARIANT: The MR is prepared. `lock` or `Chain::post` commits that, or `undo` aborts it.
        let (mr, generation) = (self.mr, state.prepare());
        Ok((remote, Registration { mr, generation }))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_reg_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe {
            wr::fill(to.cast(), opcode, flags, 0);
            (*to).mr = self.raw;
            (*to).key = self.key;
            (*to).access = self.access as c_int;
        }
    }

    #[inline]
    unsafe fn lock<'t>(
        undo: &Registration,
        target: &'t wr::PostTarget,
    ) -> Option<SpinLockIrqGuard<'t, ()>> {
        S::SHARED.then(|| {
            let guard = target.lock_regs();
            // SAFETY: The region is alive and the lock held until the request is posted.
            unsafe { undo.commit() };
            guard
        })
    }

    #[inline]
    unsafe fn undo(undo: Registration, _wr: *mut bindings::ib_send_wr) {
        // SAFETY: The region is alive, and its registration was not posted, as the caller promises.
        unsafe { undo.abort() };
    }
}

/// A registration that was prepared and is not posted yet.
///
/// # Invariants
///
/// `generation` is from [`State::prepare`] of the state of `mr`: zero if that is exclusive.
#[doc(hidden)]
pub struct Registration {
    mr: NonNull<FastRegMr>,
    generation: u64,
}

impl Registration {
    /// Returns whether the state of the region is shared.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.generation != 0
    }

    /// Marks the region registered. An exclusive one is marked when it is prepared.
    ///
    /// # Safety
    ///
    /// The region is alive. The request is posted next. If the state is shared, the caller holds
    /// the lock of the QP until that has returned.
    #[inline]
    pub(crate) unsafe fn commit(&self) {
        if self.is_shared() {
            // SAFETY: The region is alive, as the caller promises. By the type invariant its state
            // is shared, as the generation is not zero.
            unsafe { self.mr.as_ref().state::<Shared>() }.commit(self.generation);
        }
    }

    /// Ends the registration.
    ///
    /// # Safety
    ///
    /// The region is alive, the request was not posted, and this was not called before.
    #[cold]
    pub(crate) unsafe fn abort(&self) {
        // SAFETY: The region is alive, as the caller promises. By the type invariant the generation
        // is zero if the state is exclusive only.
        unsafe {
            match self.generation {
                0 => self.mr.as_ref().state::<Exclusive>().set_idle(),
                generation => self.mr.as_ref().state::<Shared>().abort(generation),
            }
        }
    }
}

/// A request to invalidate the key of a [`Region`] locally (`IB_WR_LOCAL_INV`).
///
/// When the owner's handler is called for success, the region is idle. On failure (when it was
/// flushed) it may still be registered, and only dropping it ends that.
///
/// Posting it is refused with `EBUSY` if the region is not registered or is being invalidated, and
/// with `EINVAL` if its registration was not posted to the same QP. The closure that makes one for
/// an exclusive region is `Send`, as that may become idle in another thread.
///
/// # Examples
///
/// ```
/// # use rdma::{prelude::*, wc::Success};
/// #[derive(HasCqe)]
/// struct Io {
///     cqe: Cqe<Self>,
///     region: Region<FromDevice>,
/// }
///
/// impl CqeHandler for Io {
///     type Pointer = Pin<KBox<Self>>;
///     type Needs = context::Atomic;
///
///     fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
///         if this.region.is_idle() {
///             complete(&this.region);
///         }
///     }
/// }
///
/// /// The reply has come. Has the key invalidated here if the peer has not done that.
/// fn replied(io: Pin<KBox<Io>>, wc: &Success<'_>, qp: &Qp<Softirq>) -> Result {
///     if io.region.remote_invalidated(wc, qp) {
///         complete(&io.region);
///         return Ok(());
///     }
///     Ok(qp.post_send(io, |io| Ok(InvWr::new(&io.region)))?)
/// }
///
/// fn complete(region: &Region<FromDevice>) {
///     let mut bytes = [0; 4];
///     if region.read(0, &mut bytes).is_ok() {
///         pr_info!("the peer wrote {bytes:?}\n");
///     }
/// }
/// ```
pub type InvWr<'a, S = Exclusive> = SendWr<'a, 0, InvOp<S>>;

/// The operation of an [`InvWr`].
///
/// # Invariants
///
/// `mr` is a region's with the state `S`.
pub struct InvOp<S: State> {
    mr: NonNull<FastRegMr>,
    _state: PhantomData<S>,
    key: u32,
}

// SAFETY: An MR may be used from any thread, and so may a state that is `Sync`.
unsafe impl<S: State + Sync> Send for InvOp<S> {}

impl<'a, S: State> InvWr<'a, S> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: dma::AnyDirection, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        // INVARIANT: The MR is the region's.
        let op = InvOp {
            mr: NonNull::from(&*region.mr.0),
            _state: PhantomData,
            key: 0,
        };
        let sges = [].into_list();
        Self { sges, op }
    }
}

// The completion may change the state of the region in another thread. An exclusive region is not
// `Sync`, so a closure that is `Send` has no reference to one that stays in this thread: it is the
// owner's.
impl<F: Send> wr::SendOpFor<F> for InvOp<Exclusive> {}
impl<F: Send> wr::SendOpFor<F> for InvOp<Lent> {}
impl<F> wr::SendOpFor<F> for InvOp<Shared> {}
impl<S: State> wr::Op for InvOp<S> {
    type Output = ();
    type Raw = bindings::ib_send_wr;
    type Undo = NonNull<FastRegMr>;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<((), NonNull<FastRegMr>)> {
        // One queue keeps the registration and this in order; the lock, if the state is shared.
        let _guard = S::SHARED.then(|| target.lock_regs());
        // SAFETY: The region lives until the request has completed, as the caller promises.
        let mr = unsafe { self.mr.as_ref() };
        // SAFETY: By the type invariant the state of the region is an `S`.
        let state = unsafe { mr.state::<S>() };
        if !state.claim_registered() {
            return Err(EBUSY);
        }
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &*mr.claimed.get() };
        if claimed.qp != target.qp_id {
            // The lock is not that of the QP of the registration, but nothing is posted. The claim
            // of an exclusive state was none.
            if S::SHARED {
                state.set_registered();
            }
            return Err(EINVAL);
        }
        self.key = claimed.rkey;
        state.set_invalidating();
        Ok(((), self.mr))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_send_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_LOCAL_INV;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe { wr::fill(to, opcode, flags, self.key) };
    }

    #[inline]
    unsafe fn callback<T: CqeHandler<ID>, const ID: u64>(
        mr: &NonNull<FastRegMr>,
        user: *mut bindings::ib_cqe,
    ) -> *mut bindings::ib_cqe {
        // INVARIANT: The callback is that for the type of the owner, which is a `T`.
        // SAFETY: The region is alive, as the request is not posted yet. That was prepared, so the
        // state is claimed, and by the invariant of `FastRegMr` these have no other user.
        unsafe {
            (*mr.as_ref().cqe.get()).done = Some(done::<T, S, ID>);
            (*mr.as_ref().claimed.get()).user = user;
        }
        // The callback of the MR, so that nothing but its own completion makes it idle, before the
        // owner's handler runs. The fields that are written through this address are cells.
        mr.as_ptr().cast()
    }

    #[inline]
    unsafe fn undo(_: NonNull<FastRegMr>, wr: *mut bindings::ib_send_wr) {
        // The MR is found by the request, so that what has posted it need not save it.
        //
        // SAFETY: The callback is the first field of an MR that is alive, as the request was not
        // posted. The invalidation was prepared, so the state, an `S`, is claimed, and by the
        // invariant of `FastRegMr` `claimed` has no other user.
        unsafe {
            let cqe = &mut (*wr).__bindgen_anon_1.wr_cqe;
            let mr = &*cqe.cast_const().cast::<FastRegMr>();
            **cqe = (*mr.claimed.get()).user;
            mr.set_registered::<S>();
        }
    }
}

/// Returns the MR whose invalidation has completed, and the callback of its owner.
///
/// # Safety
///
/// `wc` is of an [`InvWr`] that was posted, whose owner was not taken back.
#[inline]
unsafe fn parts(wc: &Wc) -> (&FastRegMr, *mut bindings::ib_cqe) {
    // SAFETY: The request was posted with the address of an MR's first field, and its owner, which
    // is not back, keeps the MR. By the invariant of `FastRegMr` the completion has the claim.
    unsafe {
        let mr = &*wc.cqe().cast_const().cast::<FastRegMr>();
        (mr, (*mr.claimed.get()).user)
    }
}

/// The `done` callback of a local invalidation, of a region with the state `S`, whose owner was
/// given up as a `T` by its callback `ID`.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, once for each [`InvWr`] that was posted with it.
unsafe extern "C" fn done<T: CqeHandler<ID>, S: State, const ID: u64>(
    cq: *mut bindings::ib_cq,
    raw: *mut bindings::ib_wc,
) {
    // `take` tells owners apart by this function's address.
    identity::keep_distinct::<(Callback, cqe::Cqe<T::Pointer, ID>, S)>();
    // SAFETY: As the caller promises, this is the callback of the request, and `raw` its
    // completion, which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, raw) }) else {
        return;
    };
    // SAFETY: The request is an `InvWr`, as it has this callback. It completes once, by the
    // driver's contract, so its owner is not back.
    let (mr, user) = unsafe { parts(wc) };
    if !debug::is_active(user) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: The callback was made for the state of the MR's region, and is called once.
    unsafe { mr.invalidated::<S>(wc) };
    if wc.result().is_err() {
        // SAFETY: `raw` is of such a request, which has failed, and its owner is not back. Both are
        // what this was called with, and `wc` is not used any longer.
        return unsafe { failed::<S>(cq, raw) };
    }
    debug::deactivate(user);
    // SAFETY: The owner was given up as a `T` by its callback `ID`, and is taken back once, as the
    // request completes once.
    let owner = unsafe { T::Pointer::from_cqe(user) };
    // SAFETY: Posting checked that the completion queue is polled in a context that provides this
    // one. `cq` is the CQ, or null if a caller has polled the completion.
    let cx = unsafe { T::Needs::of_completion(cq, wc) };
    T::done(owner, wc, &cx);
}

/// Marks the MR of a failed invalidation registered, and calls the callback of the owner.
///
/// # Safety
///
/// `wc` is of an [`InvWr`] for the state `S`, whose owner was not taken back. `cq` is its CQ, and
/// then C has passed `wc`, which may be written; or null if a caller has polled it.
#[cold]
unsafe fn failed<S: State>(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    let mut copy = MaybeUninit::<bindings::ib_wc>::uninit();
    // SAFETY: The request is an `InvWr` for the state `S`, and its owner, which was given up for
    // `user`, was not taken back, as the caller promises. So `user` is valid, and has a callback by
    // the invariant of `Cqe`. That is called as `trace::completion` requires. Where `cq` is not
    // null `wc` may be written; otherwise `copy` is.
    unsafe {
        let (mr, user) = parts(&*wc.cast::<Wc>());
        mr.set_registered::<S>();
        let wc = match cq.is_null() {
            // One that a caller has polled is borrowed.
            true => {
                copy.as_mut_ptr().copy_from_nonoverlapping(wc, 1);
                copy.as_mut_ptr()
            }
            // A `HandlerCell` knows it by its address.
            false => wc,
        };
        (*wc).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(user);
        (*user).done.unwrap_unchecked()(cq, wc);
    }
}

/// Marks a region registered again whose invalidation came before its registration.
///
/// # Safety
///
/// `wc` is the completion of an [`InvWr`] of a region that its handler was called for, with a state
/// for one thread, and nothing else uses that.
#[cold]
pub(crate) unsafe fn undo_invalidated(wc: &Wc) {
    // SAFETY: The handler was called by `done`, so the request has the address of an MR's first
    // field. What was its owner keeps that still. The state is `Exclusive`, or transparent over it,
    // as the caller promises.
    unsafe { (*wc.cqe().cast_const().cast::<FastRegMr>()).set_registered::<Exclusive>() };
}

type Callback = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

/// Takes the owner of a local invalidation that has completed back, if it is a `T` that was given
/// up by its callback `ID`, and the state of the region an `S`. `None` proves nothing: see
/// [`identity`].
///
/// # Safety
///
/// `wc` is a completion whose owner, if there is one, is not taken back but by this.
#[inline]
unsafe fn take<T: CqeHandler<ID>, S: State, const ID: u64>(wc: &Wc) -> Option<T::Pointer> {
    let cqe = NonNull::new(wc.cqe())?;
    // SAFETY: The owner of the request, which was not taken back, keeps its callback.
    let callback = unsafe { (*cqe.as_ptr()).done }?;
    if !ptr::fn_addr_eq(callback, done::<T, S, ID> as Callback) {
        return None;
    }
    // SAFETY: By the callback the request is an `InvWr` for the state `S` and an owner that was
    // given up as a `T` by its callback `ID`. That was not taken back, and is taken back here once,
    // as the caller promises.
    unsafe {
        let (mr, user) = parts(wc);
        if !debug::deactivate(user) {
            return None;
        }
        mr.invalidated::<S>(wc);
        if wc.result().is_err() {
            mr.set_registered::<S>();
        }
        Some(T::Pointer::from_cqe(user))
    }
}

impl<'a> Completion<'a> {
    /// As [`Completion::take`], of an owner that was posted with a local invalidation ([`InvWr`]):
    /// that completes to a callback in the MR. If it was successful, the region is idle. Gives the
    /// completion back if it is another one, or that of a [`LentRegion`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// #[derive(HasCqe)]
    /// struct Request {
    ///     inv: Cqe<Self>,
    ///     region: Region<FromDevice>,
    /// }
    ///
    /// impl CqeHandler for Request {
    ///     type Pointer = Pin<KBox<Self>>;
    ///     type Needs = context::Atomic;
    ///
    ///     fn done(_request: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
    /// }
    ///
    /// /// Returns the request whose memory no peer uses. There is none if this is of
    /// /// another request, or if the invalidation has failed.
    /// fn ended(completion: cq::Completion<'_>) -> Option<Pin<KBox<Request>>> {
    ///     let (request, wc) = completion.take_inv::<Request, 0>().ok()?;
    ///     wc.result().is_ok().then_some(request)
    /// }
    /// ```
    #[inline]
    pub fn take_inv<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant the owner was not taken back, nor is it if the first call
        // has returned none. If there is one, `this` is not dropped.
        let owner = unsafe {
            take::<T, Exclusive, ID>(this.wc).or_else(|| {
                wc::unlikely();
                take::<T, Shared, ID>(this.wc)
            })
        };
        match owner {
            Some(owner) => Ok((owner, this.wc)),
            None => {
                wc::unlikely();
                Err(ManuallyDrop::into_inner(this))
            }
        }
    }
}
