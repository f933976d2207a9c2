// SPDX-License-Identifier: GPL-2.0

//! Memory that an MR can map.

use crate::{
    bindings,
    cqe::Sealed,
    dma::{
        Direction,
        Mapped, //
    },
    prelude::*,
    sg, //
};
use core::ops::Range;
use kernel::{
    error::to_result,
    page::PAGE_SIZE,
    prelude::*, //
};

/// Memory that outlives its type, only to be dropped.
pub struct AnyMemory(#[expect(dead_code)] Untyped);

enum Untyped {
    Buf(#[expect(dead_code)] Mapped),
    Sg(#[expect(dead_code)] sg::RawSg),
    Map(#[expect(dead_code)] sg::RawMap<sg::AnyOwner>),
}

/// Operations on memory of every kind.
pub trait Raw: Sized + Send + Sync + Unpin + 'static {
    fn pd(&self) -> &Pd;

    fn len(&self) -> usize;

    /// Returns how many pages the memory touches, at the most.
    fn pages(&self) -> usize;

    /// Makes an MR map a range of the memory (`ib_map_mr_sg`).
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the memory's device, is not registered, and is not used meanwhile. The
    /// range is not empty, and inside of the memory.
    unsafe fn map(&mut self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result;

    fn keep(self) -> AnyMemory;
}

/// Memory of the crate's own, whose bytes the CPU may copy at any time.
///
/// A device or a peer may be using it, and it may be reached by reference, so the copies are sealed:
/// only a region knows when they are allowed.
pub trait Copies: Raw {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result;

    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result;
}

impl<D: Direction> Raw for Buf<D> {
    fn pd(&self) -> &Pd {
        &self.mapped.pd
    }

    fn len(&self) -> usize {
        self.mapped.len()
    }

    fn pages(&self) -> usize {
        // A buffer that does not start on a page covers one more.
        self.mapped.len().div_ceil(PAGE_SIZE) + 1
    }

    unsafe fn map(&mut self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        let addr = self.mapped.addr + range.start as u64;
        // SAFETY: `mr` is an MR of the buffer's device, is not registered and not used meanwhile,
        // and the range is inside of the buffer, as the caller promises, which is mapped for the
        // device.
        to_result(unsafe { bindings::rdma_helper_map_mr(mr, addr, range.len() as u32) })
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Buf(self.mapped))
    }
}

impl<D: Direction> Copies for Buf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result {
        self.mapped.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result {
        self.mapped.copy_in(offset, from)
    }
}

impl<D: Direction> Raw for sg::SgBuf<D> {
    fn pd(&self) -> &Pd {
        &self.raw.pd
    }

    fn len(&self) -> usize {
        self.raw.pages.len
    }

    fn pages(&self) -> usize {
        self.raw.pages.len.div_ceil(PAGE_SIZE)
    }

    unsafe fn map(&mut self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        // SAFETY: `mr` is an MR of the memory's device, is not registered and not used meanwhile,
        // and the range is one of the memory, as the caller promises.
        unsafe { self.raw.mapping.map_mr(mr, range) }
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Sg(self.raw))
    }
}

impl<D: Direction> Copies for sg::SgBuf<D> {
    fn copy_out(&self, offset: usize, to: &mut [u8], _: Sealed) -> Result {
        self.raw.copy_out(offset, to)
    }

    fn copy_in(&self, offset: usize, from: &[u8], _: Sealed) -> Result {
        self.raw.copy_in(offset, from)
    }
}

impl<O: sg::SgOwner<D>, D: Direction> Raw for sg::SgMap<O, D> {
    fn pd(&self) -> &Pd {
        &self.raw.pd
    }

    fn len(&self) -> usize {
        self.raw.len as usize
    }

    fn pages(&self) -> usize {
        self.raw.pages
    }

    unsafe fn map(&mut self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        // SAFETY: `mr` is an MR of the memory's device, is not registered and not used meanwhile,
        // and the range is one of the memory, as the caller promises.
        unsafe { self.raw.mapping.map_mr(mr, range) }
    }

    fn keep(self) -> AnyMemory {
        AnyMemory(Untyped::Map(self.raw.erase()))
    }
}

/// DMA-mapped memory, in direction `D`, that an MR can map: [`Buf`], [`SgBuf`](sg::SgBuf), and that
/// of others, an [`SgMap`](sg::SgMap).
pub trait Memory<D: Direction>: Raw {}

impl<D: Direction> Memory<D> for Buf<D> {}
impl<D: Direction> Memory<D> for sg::SgBuf<D> {}
impl<O: sg::SgOwner<D>, D: Direction> Memory<D> for sg::SgMap<O, D> {}

/// [`Memory`] whose bytes the CPU can copy while peers may access them: [`Buf`] and
/// [`SgBuf`](sg::SgBuf).
pub trait OwnMemory<D: Direction>: Memory<D> + Copies {}

impl<D: Direction> OwnMemory<D> for Buf<D> {}
impl<D: Direction> OwnMemory<D> for sg::SgBuf<D> {}
