// SPDX-License-Identifier: GPL-2.0

//! DMA-mapped buffers.
//!
//! A [`Buf`] is memory that one device can reach, in a direction that is part of its type. The CPU
//! sees its bytes only through a [`CpuView`], which needs exclusive access: a buffer whose owner is
//! posted cannot be looked at.
//!
//! Buffers are mapped with `ib_dma_map_single`, not with [`kernel::dma`]: software devices have no
//! DMA device.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_dma_map_single`)

mod direction;
mod raw;

pub use direction::{
    Bidirectional,
    DeviceReads,
    DeviceWrites,
    Direction,
    FromDevice,
    ToDevice, //
};
pub(crate) use raw::Mapped;

use crate::{
    bindings,
    context::Sleepable,
    pd::Pd,
    wr::{
        Sge,
        SgeMut, //
    }, //
};
use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::{
        Deref,
        DerefMut,
        Range, //
    }, //
};
use kernel::prelude::*;
use raw::RawBuf;

/// A DMA-mapped buffer.
///
/// # Invariants
///
/// The memory is mapped in direction `D`, and nobody else unmaps or frees it.
pub struct Buf<D: Direction> {
    raw: RawBuf,
    _direction: PhantomData<D>,
}

impl<D: Direction> Buf<D> {
    /// Allocates and maps `len` zeroed bytes (`kzalloc`, `ib_dma_map_single`).
    ///
    /// Process context.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` for a length of zero; `EIO` if the memory could not be mapped.
    pub fn alloc(pd: &Pd, len: usize, _cx: &Sleepable) -> Result<Self> {
        // INVARIANT: Just mapped.
        Ok(Self {
            raw: RawBuf::alloc(pd, len, D::RAW)?,
            _direction: PhantomData,
        })
    }

    /// Returns the length, in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Lets the CPU see the bytes (`ib_dma_sync_single_for_cpu`, and `..._for_device` when the view
    /// ends).
    #[inline]
    pub fn cpu(&mut self) -> CpuView<'_> {
        self.raw.sync_for_cpu(D::RAW);
        CpuView {
            raw: &mut self.raw,
            dir: D::RAW,
        }
    }

    pub(crate) fn pd(&self) -> &Pd {
        self.raw.pd()
    }

    pub(crate) fn addr(&self) -> u64 {
        self.raw.addr()
    }

    /// Copies bytes out while the device may be writing them.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.raw.sync_for_cpu(D::RAW);
        self.raw.copy_out(offset, to)
    }

    /// Copies bytes in while the device may be reading them.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.raw.copy_in(offset, from)?;
        self.raw.sync_for_device(D::RAW);
        Ok(())
    }

    /// Forgets the type.
    pub(crate) fn into_mapped(self) -> Mapped {
        let buf = ManuallyDrop::new(self);
        // SAFETY: `buf` is neither used again nor dropped. By its invariant the memory is mapped in
        // this direction, and now nobody else frees it.
        unsafe { Mapped::new(core::ptr::read(&buf.raw), D::RAW) }
    }
}

impl<D: Direction> Drop for Buf<D> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the memory is mapped in this direction, and nobody else
        // frees it. Who drops a buffer owns it, so no request uses the memory.
        unsafe { self.raw.free(D::RAW) };
    }
}

impl<D: DeviceReads> Buf<D> {
    /// Returns an entry for the whole buffer, for the device to read.
    #[inline]
    pub fn whole(&self) -> Sge<'_> {
        self.raw.whole()
    }

    /// Returns an entry for the bytes in `range`, for the device to read.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or not inside of the buffer. A request without memory has no
    /// entries.
    #[inline]
    pub fn sge(&self, range: Range<usize>) -> Result<Sge<'_>> {
        self.raw.sge(range)
    }
}

impl<D: DeviceWrites> Buf<D> {
    /// Returns an entry for the whole buffer, for the device to write.
    #[inline]
    pub fn whole_mut(&self) -> SgeMut<'_> {
        SgeMut(self.raw.whole())
    }

    /// Returns an entry for the bytes in `range`, for the device to write.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or not inside of the buffer. A request without memory has no
    /// entries.
    #[inline]
    pub fn sge_mut(&self, range: Range<usize>) -> Result<SgeMut<'_>> {
        self.raw.sge(range).map(SgeMut)
    }
}

/// The bytes of a buffer, for the CPU, while the device has no business with them.
pub struct CpuView<'a> {
    raw: &'a mut RawBuf,
    dir: bindings::dma_data_direction,
}

impl Deref for CpuView<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: By the invariant of `RawBuf` this is `len` bytes that were zeroed at first. The
        // borrow of the buffer is exclusive, so neither a request nor another thread uses them.
        unsafe { core::slice::from_raw_parts(self.raw.memory.as_ptr(), self.raw.len()) }
    }
}

impl DerefMut for CpuView<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: By the invariant of `RawBuf` this is `len` bytes that were zeroed at first. The
        // borrows of the buffer and of this view are exclusive, so nobody else uses them.
        unsafe { core::slice::from_raw_parts_mut(self.raw.memory.as_ptr(), self.raw.len()) }
    }
}

impl Drop for CpuView<'_> {
    #[inline]
    fn drop(&mut self) {
        self.raw.sync_for_device(self.dir);
    }
}
