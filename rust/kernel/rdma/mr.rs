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

mod frwr;
mod memory;
mod state;

pub(crate) use frwr::{
    undo_invalidated,
    Registration, //
};
pub use frwr::{
    InvOp,
    InvWr,
    RegOp,
    RegWr, //
};
use memory::{
    AnyMemory,
    MemoryRef, //
};
pub use memory::{
    Memory,
    OwnMemory, //
};
pub use state::{
    Exclusive,
    Shared,
    State, //
};

use crate::{
    cqe::Sealed,
    deferred::Deferred,
    dma::Direction,
    objects,
    prelude::*,
    wc::Success, //
};
use core::ops::Range;
use kernel::error::from_err_ptr;

/// A fast-registration MR without memory, ready to map some.
///
/// When it is dropped, a work item deregisters it.
///
/// # Invariants
///
/// Outside of a [`Region`] it is idle and has no memory.
pub struct Mr(Deferred<frwr::FastRegMr>);

impl Mr {
    /// Allocates an MR that can map `pages` pages (`ib_alloc_mr`). Fails with `EINVAL` if the
    /// device has no such MRs; `ENOMEM`, or the driver's error.
    // Not inlined, so that its end is code of this module.
    #[inline(never)]
    pub fn alloc(pd: &Pd, pages: u32, _cx: &Sleepable) -> Result<Self> {
        let dev = pd.device();
        if pages == 0 || pages > dev.attrs().max_fast_reg_page_list_len {
            return Err(EINVAL);
        }
        let reserved = Deferred::reserve()?;
        let mut object = dev.object(crate::refs::Kind::Mr);
        // SAFETY: The PD is alive, as there is a reference to it, and the number of pages is in
        // range.
        let mr = from_err_ptr(unsafe {
            bindings::ib_alloc_mr(pd.as_raw(), bindings::ib_mr_type_IB_MR_TYPE_MEM_REG, pages)
        })?;
        let mr = NonNull::new(mr).ok_or(ENOMEM)?;
        // SAFETY: The MR was just allocated, and its number does not change.
        object.set_num(unsafe { mr.as_ref() }.res.id);
        object.set_sizes(objects::Sizes::Mr { pages });
        // INVARIANT: The MR is new.
        Ok(Self(reserved.fill(frwr::FastRegMr::new(
            mr,
            pages,
            pd.clone(),
            object,
        ))))
    }

    /// Allocates an MR for memory and maps that, and returns where it is to peers.
    ///
    /// # Safety
    ///
    /// The memory is not used meanwhile.
    #[inline(never)]
    unsafe fn alloc_for(memory: MemoryRef<'_>, cx: &Sleepable) -> Result<(Self, u64)> {
        let mr = Self::alloc(memory.pd(), memory.pages().try_into()?, cx)?;
        // SAFETY: The MR is new, and the memory is not used meanwhile, as the caller promises. It
        // is not empty, and the range is all of it.
        let iova = unsafe { mr.map(memory, 0..memory.len()) }?;
        Ok((mr, iova))
    }

    /// Maps a range of memory (`ib_map_mr_sg`), and returns where it is to peers. Fails with
    /// `EINVAL` if the memory is of another PD, or too large.
    ///
    /// # Safety
    ///
    /// The MR is idle, and neither it nor the memory is used meanwhile. The range is not empty, and
    /// inside of the memory.
    #[inline(never)]
    unsafe fn map(&self, memory: MemoryRef<'_>, range: Range<usize>) -> Result<u64> {
        if memory.pages() > self.0.pages as usize || *memory.pd() != self.0.pd {
            return Err(EINVAL);
        }
        let raw = self.0.raw.as_ptr();
        // SAFETY: `raw` is an MR of the memory's device, as both are of one PD, and is idle, so it
        // is not registered. Neither is used meanwhile, and the range is one of the memory, as the
        // caller promises.
        unsafe { memory.map(raw, range) }?;
        // SAFETY: `raw` is the MR, which is not used meanwhile.
        Ok(unsafe { (*raw).iova })
    }

    /// Drops an MR and its memory, which is kept until the MR is deregistered unless it is `idle`.
    #[inline(never)]
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
/// state `S`. Both are there until this is dropped.
pub struct Region<D: Direction, M: Memory<D> = Buf<D>, S: State = Exclusive> {
    mr: ManuallyDrop<Mr>,
    memory: ManuallyDrop<M>,
    iova: u64,
    // If the state is exclusive, this is not `Sync`.
    _types: PhantomData<(D, S)>,
}

/// A [`Region`] that threads share. A lock of the QP is taken for its registrations and
/// invalidations.
pub type SharedRegion<D, M = Buf<D>> = Region<D, M, Shared>;

impl<D: Direction, M: Memory<D>> Region<D, M> {
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
        let range = 0..memory.get().len();
        // SAFETY: By the invariant of `Mr` it is idle, as it is not in a region. Both are owned
        // here. Memory is not empty, and the range is all of it.
        match unsafe { mr.map(memory.get(), range) } {
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
        // SAFETY: The MR, which maps the memory at `iova`, is owned here, so that its state may
        // become another type.
        unsafe { Region::from_parts(mr, memory, iova) }
    }
}

impl<D: Direction, M: Memory<D>, S: State> Region<D, M, S> {
    /// # Safety
    ///
    /// `mr` maps a range of `memory`, which is at `iova` to peers, or is claimed for ever; it may
    /// have the state `S`.
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
        // SAFETY: By the type invariant both are there. They are not used again, as the caller
        // promises.
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
    /// empty or not inside of the memory; or the driver's error: the region can only be dropped
    /// then.
    pub fn set_range(&mut self, range: Range<usize>) -> Result {
        if range.start >= range.end || range.end > self.len() {
            return Err(EINVAL);
        }
        if !self.is_idle() {
            return Err(EBUSY);
        }
        // SAFETY: The MR is idle, and the region is borrowed exclusively, so neither is used
        // otherwise. The range was checked.
        let mapped = unsafe { self.mr.map(self.memory.get(), range) };
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
    /// [`WcArray`], is dispatching it. Documentation/mr.rst has what else it takes. A region whose
    /// end is not proved can be invalidated locally, as in the example of [`InvWr`].
    pub fn remote_invalidated<C: PollContext, R: PollContext>(
        &self,
        wc: &Success<'_>,
        qp: &Qp<C, R>,
    ) -> bool {
        match (wc.invalidated_rkey(), qp.recv_cq_at(wc.completion())) {
            (Some(key), Some(cq)) => {
                let mr = &self.mr.0;
                mr.remote_invalidated(self.state(), key, qp.id(), cq)
            }
            _ => false,
        }
    }

    /// Returns the length, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.memory.get().len()
    }
}

impl<D: Direction, M: OwnMemory<D>, S: State> Region<D, M, S> {
    /// Copies bytes from `offset` on out of the region. Bytes that a peer is writing meanwhile may
    /// be old or new. Fails with `EINVAL` if the range is not inside of the region.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.memory.copy_out(offset, to, Sealed::new())
    }

    /// Copies bytes into the region from `offset` on. A peer that reads them meanwhile may get old
    /// or new ones. Fails with `EINVAL` if the range is not inside of the region.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result {
        self.memory.copy_in(offset, from, Sealed::new())
    }
}

impl<D: Direction, M: Memory<D>, S: State> Drop for Region<D, M, S> {
    #[inline(never)]
    fn drop(&mut self) {
        let idle = self.is_idle();
        // SAFETY: The region is being dropped, and is not used after this.
        let (mr, memory) = unsafe { self.take() };
        mr.release(memory.keep(), idle);
    }
}
