// SPDX-License-Identifier: GPL-2.0

//! Memory that an MR can map.

use crate::{
    cqe::Sealed,
    dma,
    prelude::*,
    sg, //
};
use core::ops::Range;
use kernel::page::PAGE_SIZE;

/// Memory that outlives its type, only to be dropped.
pub struct AnyMemory(#[expect(dead_code)] Untyped);

#[expect(dead_code)]
enum Untyped {
    Buf(dma::Mapped),
    /// The list is unmapped before its owner is dropped.
    Map(sg::MappedList, sg::AnyOwner),
}

/// Memory of any kind, which a device or a peer may be using.
#[derive(Clone, Copy)]
pub struct MemoryRef<'a>(UntypedRef<'a>);

#[derive(Clone, Copy)]
enum UntypedRef<'a> {
    Buf(&'a dma::Mapped),
    Map(&'a sg::MappedList),
}

// None is inlined: what maps is not in each ULP.
impl MemoryRef<'_> {
    pub(super) fn pd(&self) -> &Pd {
        match self.0 {
            UntypedRef::Buf(buf) => &buf.pd,
            UntypedRef::Map(map) => &map.pd,
        }
    }

    #[inline(never)]
    pub(super) fn len(&self) -> usize {
        match self.0 {
            UntypedRef::Buf(buf) => buf.len(),
            UntypedRef::Map(map) => map.len as usize,
        }
    }

    /// Returns how many pages the memory touches, at the most.
    pub(super) fn pages(&self) -> usize {
        match self.0 {
            // A buffer that does not start on a page covers one more.
            UntypedRef::Buf(buf) => buf.len().div_ceil(PAGE_SIZE) + 1,
            UntypedRef::Map(map) => map.pages,
        }
    }

    /// Makes an MR map a range of the memory (`ib_map_mr_sg`).
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the memory's device, is not registered, and is not used meanwhile, nor is
    /// the memory. The range is not empty, and inside of the memory.
    pub(super) unsafe fn map(&self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        match self.0 {
            UntypedRef::Buf(buf) => {
                let (addr, len) = (buf.addr + range.start as u64, range.len() as u32);
                // SAFETY: `mr` is an MR of the buffer's device, is not registered and not used
                // meanwhile, and the range is inside of the buffer, which is mapped for the device.
                to_result(unsafe { bindings::rdma_helper_map_mr(mr, addr, len) })
            }
            // SAFETY: `mr` is an MR of the memory's device, is not registered and not used
            // meanwhile, nor is the memory, and the range is one of it, as the caller promises.
            UntypedRef::Map(map) => unsafe { map.mapping.0.map_mr(mr, range) },
        }
    }
}

/// Memory of any kind, by its type.
pub trait Raw: Sized + Send + Sync + Unpin + 'static {
    fn get(&self) -> MemoryRef<'_>;

    fn keep(self) -> AnyMemory;
}

impl<D: dma::Direction> Raw for Buf<D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef(UntypedRef::Buf(&self.mapped))
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Buf(self.mapped))
    }
}

impl<O: sg::SgOwner<D>, D: dma::Direction> Raw for sg::SgMap<O, D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef(UntypedRef::Map(&self.list))
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Map(self.list, sg::AnyOwner::new(self.owner)))
    }
}

/// DMA-mapped memory, in direction `D`, that an MR can map: [`Buf`], [`SgBuf`], and that of others,
/// an [`SgMap`](sg::SgMap).
pub trait Memory<D: dma::Direction>: Raw {}

impl<D: dma::Direction> Memory<D> for Buf<D> {}
impl<O: sg::SgOwner<D>, D: dma::Direction> Memory<D> for sg::SgMap<O, D> {}

/// [`Memory`] whose bytes the CPU can copy while peers may access them: [`Buf`] and [`SgBuf`]. Only
/// a region knows when it may.
pub trait OwnMemory<D: dma::Direction>: Memory<D> {
    #[doc(hidden)]
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result;

    #[doc(hidden)]
    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result;
}

impl<D: dma::Direction> OwnMemory<D> for Buf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result {
        self.mapped.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result {
        self.mapped.copy_in(offset, from)
    }
}

impl<D: dma::Direction> OwnMemory<D> for SgBuf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result {
        self.list.mapping.0.sync_for_cpu();
        self.owner.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result {
        self.owner.copy_in(offset, from)?;
        self.list.mapping.0.sync_for_device();
        Ok(())
    }
}
