// SPDX-License-Identifier: GPL-2.0

//! Memory that an MR can map.

use crate::{
    dma,
    prelude::*,
    sg, //
};
use core::ops::Range;
use kernel::{
    error::to_result,
    page::PAGE_SIZE, //
};

/// Memory that outlives its type, only to be dropped.
pub struct AnyMemory(#[expect(dead_code)] Untyped);

enum Untyped {
    Buf(#[expect(dead_code)] dma::Mapped),
    Sg(#[expect(dead_code)] sg::RawSg),
    Map(#[expect(dead_code)] sg::RawMap<sg::AnyOwner>),
}

/// Memory of any kind, which a device or a peer may be using: only a region knows when it may be
/// copied.
#[derive(Clone, Copy)]
pub struct MemoryRef<'a>(UntypedRef<'a>);

#[derive(Clone, Copy)]
enum UntypedRef<'a> {
    Buf(&'a dma::Mapped),
    Sg(&'a sg::RawSg),
    Map(&'a sg::MappedList),
}

// None is inlined: what maps and copies is not in each ULP.
impl MemoryRef<'_> {
    pub(super) fn pd(&self) -> &Pd {
        match self.0 {
            UntypedRef::Buf(buf) => &buf.pd,
            UntypedRef::Sg(sg) => &sg.pd,
            UntypedRef::Map(map) => &map.pd,
        }
    }

    #[inline(never)]
    pub(super) fn len(&self) -> usize {
        match self.0 {
            UntypedRef::Buf(buf) => buf.len(),
            UntypedRef::Sg(sg) => sg.pages.len(),
            UntypedRef::Map(map) => map.len as usize,
        }
    }

    /// Returns how many pages the memory touches, at the most.
    pub(super) fn pages(&self) -> usize {
        match self.0 {
            // A buffer that does not start on a page covers one more.
            UntypedRef::Buf(buf) => buf.len().div_ceil(PAGE_SIZE) + 1,
            UntypedRef::Sg(sg) => sg.pages.len().div_ceil(PAGE_SIZE),
            UntypedRef::Map(map) => map.pages,
        }
    }

    #[inline(never)]
    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        match self.0 {
            UntypedRef::Buf(buf) => buf.copy_out(offset, to),
            UntypedRef::Sg(sg) => sg.copy_out(offset, to),
            UntypedRef::Map(_) => Err(EOPNOTSUPP),
        }
    }

    #[inline(never)]
    pub(super) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        match self.0 {
            UntypedRef::Buf(buf) => buf.copy_in(offset, from),
            UntypedRef::Sg(sg) => sg.copy_in(offset, from),
            UntypedRef::Map(_) => Err(EOPNOTSUPP),
        }
    }

    /// Makes an MR map a range of the memory (`ib_map_mr_sg`).
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the memory's device, is not registered, and is not used meanwhile, nor is
    /// the memory. The range is not empty, and inside of the memory.
    pub(super) unsafe fn map(&self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        let mapping = match self.0 {
            UntypedRef::Buf(buf) => {
                let (addr, len) = (buf.addr + range.start as u64, range.len() as u32);
                // SAFETY: `mr` is an MR of the buffer's device, is not registered and not used
                // meanwhile, and the range is inside of the buffer, as the caller promises, which
                // is mapped for the device.
                return to_result(unsafe { bindings::rdma_helper_map_mr(mr, addr, len) });
            }
            UntypedRef::Sg(sg) => &sg.mapping,
            UntypedRef::Map(map) => &map.mapping,
        };
        // SAFETY: `mr` is an MR of the memory's device, is not registered and not used meanwhile,
        // nor is the memory, and the range is one of it, as the caller promises.
        unsafe { mapping.map_mr(mr, range) }
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

impl<D: dma::Direction> Raw for sg::SgBuf<D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef(UntypedRef::Sg(&self.raw))
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Sg(self.raw))
    }
}

impl<O: sg::SgOwner<D>, D: dma::Direction> Raw for sg::SgMap<O, D> {
    #[inline]
    fn get(&self) -> MemoryRef<'_> {
        MemoryRef(UntypedRef::Map(&self.raw.list))
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Map(self.raw.erase()))
    }
}

/// DMA-mapped memory, in direction `D`, that an MR can map: [`Buf`], [`SgBuf`](sg::SgBuf), and that
/// of others, an [`SgMap`](sg::SgMap).
pub trait Memory<D: dma::Direction>: Raw {}

impl<D: dma::Direction> Memory<D> for Buf<D> {}
impl<D: dma::Direction> Memory<D> for sg::SgBuf<D> {}
impl<O: sg::SgOwner<D>, D: dma::Direction> Memory<D> for sg::SgMap<O, D> {}

/// [`Memory`] whose bytes the CPU can copy while peers may access them: [`Buf`] and
/// [`SgBuf`](sg::SgBuf).
pub trait OwnMemory<D: dma::Direction>: Memory<D> {}

impl<D: dma::Direction> OwnMemory<D> for Buf<D> {}
impl<D: dma::Direction> OwnMemory<D> for sg::SgBuf<D> {}
