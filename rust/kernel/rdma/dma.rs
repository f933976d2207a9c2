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
pub(crate) use raw::RawBuf;

use crate::{
    context::Sleepable,
    pd::Pd,
    wr::{
        Sge,
        SgeMut, //
    }, //
};
use core::{
    marker::PhantomData,
    ops::{
        Deref,
        DerefMut,
        Range, //
    }, //
};
use kernel::prelude::*;

/// A DMA-mapped buffer.
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
        self.raw.sync_for_cpu();
        CpuView(&mut self.raw)
    }

    pub(crate) fn raw(&self) -> &RawBuf {
        &self.raw
    }

    pub(crate) fn into_raw(self) -> RawBuf {
        self.raw
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
pub struct CpuView<'a>(&'a mut RawBuf);

impl Deref for CpuView<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: The memory is valid, initialised, and the borrow of the buffer is exclusive, so
        // neither a request nor another thread uses it.
        unsafe { core::slice::from_raw_parts(self.0.memory.as_ptr(), self.0.len()) }
    }
}

impl DerefMut for CpuView<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: As in `deref`.
        unsafe { core::slice::from_raw_parts_mut(self.0.memory.as_ptr(), self.0.len()) }
    }
}

impl Drop for CpuView<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.sync_for_device();
    }
}
