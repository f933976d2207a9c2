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

mod reg;
mod state;

pub(crate) use reg::undo_invalidated;
pub use reg::{
    InvOp,
    InvWr,
    PreparedReg,
    RegOp,
    RegWr, //
};
use state::Lent;
pub use state::{
    Exclusive,
    Shared,
    State, //
};

use crate::{
    context::private::Sealed,
    cq,
    cqe,
    deferred,
    dma::{
        self,
        Buf, //
    },
    objects,
    pd::Pd,
    prelude::internal::*,
    qp::Qp,
    qp_id::QpId,
    sg::{
        self,
        SgBuf, //
    },
    sync::Empties,
    wc,
    wr, //
};
use core::cell::UnsafeCell;
use kernel::sync::SetOnce;

/// The size of the pages that an MR maps, whatever those of the CPU are: block drivers split
/// requests by it. MRs of erdma and vmw_pvrdma map pages of the CPU's size: where that is larger, a
/// list that has gaps between such pages is refused, and an MR has more pages than it needs.
pub const PAGE_SIZE: usize = 4096;

/// Memory without its type, which can only be dropped. ULPs get none: see [`Memory::keep`].
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
    #[inline]
    fn pd(&self) -> &Pd {
        match self {
            Self::Buf(buf) => &buf.pd,
            Self::Map(map) => &map.pd,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Buf(buf) => buf.len(),
            Self::Map(map) => map.len as usize,
        }
    }

    /// Returns how many pages the memory touches, at the most.
    #[inline]
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

/// Returns the device's part of a key, which is the same in all keys of an MR.
fn number(rkey: u32) -> u32 {
    rkey >> 8
}

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
///   gone; or of none. `claimed.known` is `claimed.qp`, or none.
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
    /// The same, unless the next registration has to look at its CQ again.
    known: QpId,
    /// The CQ whose completions may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The mark of that CQ at the first registration there that was given one.
    mark: usize,
    /// The order of the last MR that may have had the number of this one.
    before: usize,
    /// The last generation whose key no earlier completion of that CQ can have, by the last proof
    /// there. Zero, which is none, before the first one.
    trusted: u64,
    /// The same before the first proof, once the CQ was found empty since the mark. Zero on iWARP.
    trusted_empty: u64,
}

impl Claimed {
    /// Notes the QP that the MR, whose part this is, is registered through from now on. Returns
    /// `false` if the QP is of another PD.
    fn change_qp(&mut self, mr: &FastRegMr, target: &wr::PostTarget) -> bool {
        if target.pd != mr.pd.id() {
            return false;
        }
        let cq = target.recv_cq();
        let recv_cq = cq.raw.as_ptr();
        if self.recv_cq != recv_cq {
            // Nothing is known of what is left in this CQ, unless it is the MR's first.
            if !self.recv_cq.is_null() {
                self.trusted = 0;
                self.trusted_empty = 0;
            }
            self.recv_cq = recv_cq;
            self.mark = Empties::NEVER;
        }
        // Later it would serve none.
        let wants_mark = self.mark == Empties::NEVER && mr.generation() < self.trusted_empty;
        if wants_mark {
            self.mark = cq.mark(self.before);
        }
        // INVARIANT: `recv_cq` is of this QP, too.
        self.qp = target.qp_id;
        self.known = match wants_mark && self.mark == Empties::NEVER {
            true => QpId::NONE,
            false => target.qp_id,
        };
        true
    }

    /// Ends the registration of this generation, whose end is proved by the device that the key was
    /// valid on, and the claim of `state`.
    #[inline]
    fn end<S: State>(&mut self, state: &S, generation: u64) {
        // Should it wrap, the next ones are not trusted.
        self.trusted = generation.wrapping_add(TRUSTED);
        state.set_idle();
    }
}

// SAFETY: `struct ib_mr` may be used and deregistered from any thread. `claimed` only has
// addresses, which may be compared in any thread, and the memory in `kept` may be dropped in any:
// it was that of a region, which is `Send`. The other fields are `Send`.
unsafe impl Send for FastRegMr {}
// SAFETY: `struct ib_mr` may be used from any thread. By the type invariant `cqe` and `claimed`
// have one user at a time, and `state` is used as a type that is `Sync` if the region is. `kept` is
// set once, and is not read. The other fields are `Sync`.
unsafe impl Sync for FastRegMr {}

impl deferred::Teardown for FastRegMr {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn batch(&self) -> Option<&deferred::Dropped> {
        // With the MR goes the memory that it keeps, by code of the ULP, which may wait.
        let may_wait = self.kept.as_ref().is_some();
        (!may_wait).then(|| &self.pd.device().inner().dropped)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        // SAFETY: By the type invariant `raw` is an MR of `pd`. It is owned by `self`, which is
        // dropped, so no request uses it. After this no peer can reach the memory.
        let dereg = || unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        // SAFETY: `raw` is an MR until then, which nothing else uses.
        let rkey = unsafe { (*self.raw.as_ptr()).rkey };
        let mrs = &self.pd.device().inner().mrs;
        let ret = mrs.during(number(rkey), dereg);
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

    /// Returns the generation that the MR was registered up to. It is claimed.
    fn generation(&self) -> u64 {
        // SAFETY: Nothing writes the state of an MR that is claimed, but who has the claim.
        unsafe { self.state.get().read() & !state::STATE }
    }

    /// As [`Region::remote_invalidated`], where it is no proof, or the first one, or the MR was
    /// registered through another QP of that CQ. `state` was claimed.
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
        claimed.end(state, generation);
        true
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
    // Neither generic nor inlined: see `Reserved::fill`.
    #[inline(never)]
    pub fn alloc(pd: &Pd, pages: u32, _cx: &Sleepable) -> Result<Self> {
        let dev = pd.device();
        if pages == 0 || pages > dev.attrs().max_fast_reg_page_list_len {
            return Err(EINVAL);
        }
        let reserved = deferred::Deferred::reserve()?;
        let mut object = dev.object(crate::refs::ObjectKind::Mr);
        // SAFETY: There is a reference to the PD, and the number of pages is in range.
        let mr = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(pd.as_raw(), bindings::ib_mr_type_IB_MR_TYPE_MEM_REG, pages)
        })?;
        let mr = NonNull::new(mr).ok_or(ENOMEM)?;
        // SAFETY: The MR was just allocated, and its number does not change.
        let (num, rkey) = unsafe { ((*mr.as_ptr()).res.id, (*mr.as_ptr()).rkey) };
        object.num = Some(num);
        object.summary = objects::Summary::Mr { pages };
        // INVARIANT: The MR is new.
        Ok(Self(reserved.fill(FastRegMr {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            claimed: UnsafeCell::new(Claimed {
                user: ptr::null_mut(),
                rkey: 0,
                qp: QpId::NONE,
                known: QpId::NONE,
                recv_cq: ptr::null(),
                mark: Empties::NEVER,
                before: dev.inner().mrs.before(number(rkey)),
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

    /// Maps memory (`ib_map_mr_sg`), and returns where it is to peers. Fails with `EINVAL` if the
    /// memory is of another PD, or too large. Inlined, as the list may be in registers.
    ///
    /// # Safety
    ///
    /// The MR is idle, and neither it nor the memory is used.
    #[inline]
    unsafe fn map(&self, memory: MemoryRef<'_>) -> Result<u64> {
        if memory.pages() > self.0.pages || *memory.pd() != self.0.pd {
            return Err(EINVAL);
        }
        let raw = self.0.raw.as_ptr();
        // SAFETY: `raw` is an MR of the memory's device, as both are of one PD, and is idle, so not
        // registered. As the caller promises, neither it nor the memory is used meanwhile. That is
        // mapped, with as many entries and bytes, by the invariants of `MappedList` and `Mapped`.
        unsafe {
            let ret = match memory {
                MemoryRef::Map(map) => {
                    let table = &map.mapping.0.table;
                    let len = map.len;
                    bindings::rdma_helper_map_mr_list(raw, table.sgl, table.nents as c_int, len)
                }
                MemoryRef::Buf(buf) => bindings::rdma_helper_map_mr(raw, buf.addr, buf.len),
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
/// `mr` maps `memory`, which is at `iova` to peers, and has the state `S`. Both exist until this is
/// dropped, but for the memory if by the state it was taken out. This is covariant in `M`, as it is
/// the only handle of the memory, and gives it away by value, once. States have no supertypes.
pub struct Region<D: dma::AnyDirection, M: Memory<D> = Buf<D>, S: State = Exclusive> {
    mr: ManuallyDrop<Mr>,
    memory: MaybeUninit<M>,
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
    ///     let from_peer = Region::new(Buf::<FromDevice>::alloc(pd, 512, cx)?, cx)?;
    ///     let to_peer = Region::new(SgBuf::<ToDevice>::alloc(pd, 1 << 20, cx)?, cx)?;
    ///     to_peer.write(0, b"for the peer")?;
    ///     from_peer.read(0, &mut [0; 4])
    /// }
    /// ```
    pub fn new(memory: M, cx: &Sleepable) -> Result<Self> {
        let get = memory.get();
        let mr = Mr::alloc(get.pd(), get.pages(), cx)?;
        Ok(Self::map(mr, memory)?)
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
        Self::mapped(mr, memory)
    }

    /// Makes it a region that threads can share.
    pub fn into_shared(self) -> SharedRegion<D, M> {
        let iova = self.iova;
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not lent, so it has its memory. It is neither used again nor dropped.
        let (mr, memory) = unsafe { this.take() };
        // SAFETY: The MR maps the memory at `iova`, and is owned here, so its state may change.
        unsafe { Region::from_parts(mr, memory, iova) }
    }
}

impl<D: dma::AnyDirection, M: Memory<D>> LentRegion<D, M> {
    /// As [`Region::map`], of memory that [`Region::take_memory`] gives back.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{mr::LentRegion, prelude::*};
    /// /// The region of a request, whose page the caller wants back with the reply.
    /// fn region(mr: Mr, page: Buf<FromDevice>) -> Result<LentRegion<FromDevice>> {
    ///     Ok(LentRegion::lend(mr, page)?)
    /// }
    /// ```
    pub fn lend(mr: Mr, memory: M) -> Result<Self, MapError<M>> {
        Self::mapped(mr, memory)
    }

    /// Takes the memory out, if the region is idle and still has it. The region, which may be the
    /// owner's of a request that has not completed, is not registered again. Any context.
    ///
    /// Requests name the MR of a region, never its memory. So only peers can use the memory, until
    /// the end of the registration is proved.
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
    ///     if region.remote_invalidated(wc, qp) {
    ///         region.take_memory()
    ///     } else {
    ///         None
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
        // SAFETY: By the type invariant the memory exists, as the region was idle. By the state
        // it is not used from here on: there is no reference to it outside of methods, and this is
        // not `Sync`, so no other one runs.
        Some(unsafe { self.memory.assume_init_read() })
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
    fn mapped(mr: Mr, memory: M) -> Result<Self, MapError<M>> {
        // SAFETY: By the invariant of `Mr` it is idle, as it is not in a region. Both are owned
        // here.
        match unsafe { mr.map(memory.get()) } {
            // SAFETY: The memory was just mapped. The MR, which is owned here, is idle,
            // and may have each state.
            Ok(iova) => Ok(unsafe { Self::from_parts(mr, memory, iova) }),
            Err(error) => Err(MapError { mr, memory, error }),
        }
    }

    /// # Safety
    ///
    /// `mr` may have the state `S`. It maps `memory`, at `iova`.
    unsafe fn from_parts(mr: Mr, memory: M, iova: u64) -> Self {
        // INVARIANT: As the caller promises.
        Self {
            mr: ManuallyDrop::new(mr),
            memory: MaybeUninit::new(memory),
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
        // SAFETY: By the type invariant the memory exists unless it was taken out.
        (!self.state().is_taken()).then(|| unsafe { self.memory.assume_init_ref() })
    }

    /// Gives the MR and the memory back, or the region if it may be registered. Any context.
    pub fn into_parts(self) -> Result<(Mr, M), Self> {
        if !self.is_idle() {
            return Err(self);
        }
        // SAFETY: The region is idle, so it has its memory, and is neither used again nor dropped.
        Ok(unsafe { ManuallyDrop::new(self).take() })
    }

    /// Takes both parts out.
    ///
    /// # Safety
    ///
    /// The memory was not taken out. The region is neither used again nor dropped.
    unsafe fn take(&mut self) -> (Mr, M) {
        // SAFETY: By the type invariant both are valid. The caller does not use them again.
        unsafe {
            (
                ManuallyDrop::take(&mut self.mr),
                self.memory.assume_init_read(),
            )
        }
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
    /// Except on iWARP it is, if it carries the region's key and the CQ's own poller is dispatching
    /// it, not a [`WcArray`]; the rest is in Documentation/mr.rst. A region
    /// whose end is not proved can be invalidated locally, as in the example of [`InvWr`].
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
        let mr = &self.mr.0;
        let state = self.state();
        if !state.claim_registered() {
            return false;
        }
        let generation = state.generation();
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &mut *mr.claimed.get() };
        // The CQ of that QP is `claimed.recv_cq`. Of any other it is to be seen.
        if key != claimed.rkey || qp.id() != claimed.known || generation > claimed.trusted {
            wc::unlikely();
            return mr.remote_invalidated_first(claimed, state, key, cq);
        }
        claimed.end(state, generation);
        true
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
        // SAFETY: The memory exists, and the region is being dropped, and not used after this.
        let (mr, memory) = unsafe { self.take() };
        mr.release(memory.keep(cqe::Sealed(())), idle);
    }
}
