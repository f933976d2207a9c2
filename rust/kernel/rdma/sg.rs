// SPDX-License-Identifier: GPL-2.0

//! Scatter lists.
//!
//! [`Pages`] is memory in pages, as large as needed, that no device knows yet. An [`SgBuf`] is such
//! memory mapped for a device, in a direction that is part of its type: it gives the entries of a
//! request, one a page at the most, and can be a [`Region`](crate::mr::Region). The CPU sees either
//! through [`CpuPages`], which needs exclusive access.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h) (`struct
//! sg_table`)

mod pages;
mod raw;

pub use pages::{
    CpuPages,
    Pages, //
};
pub(crate) use raw::RawSg;

use crate::{
    bindings,
    context::Sleepable,
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    pd::Pd,
    wr::{
        Sge,
        SgeMut, //
    }, //
};
use core::{
    marker::PhantomData,
    ops::Range, //
};
use kernel::prelude::*;

/// DMA-mapped memory in pages.
pub struct SgBuf<D: Direction> {
    raw: RawSg,
    _direction: PhantomData<D>,
}

impl<D: Direction> SgBuf<D> {
    /// Allocates `len` zeroed bytes and maps them, see [`Pages::alloc`] and [`SgBuf::map`].
    ///
    /// Process context.
    ///
    /// # Errors
    ///
    /// As these.
    pub fn alloc(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Self> {
        Self::map(Pages::alloc(len, cx)?, pd).map_err(|(_, e)| e)
    }

    /// Maps pages for the device (`ib_dma_map_sg`).
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// Gives the pages back with `EIO`.
    pub fn map(pages: Pages, pd: &Pd) -> Result<Self, (Pages, Error)> {
        Ok(Self {
            raw: RawSg::map_pages(pages, pd, D::RAW)?,
            _direction: PhantomData,
        })
    }

    /// Unmaps the pages (`ib_dma_unmap_sg`).
    ///
    /// Any context.
    pub fn unmap(self) -> Pages {
        self.raw.unmap()
    }

    /// Returns the length, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.raw.pages.len()
    }

    /// Lets the CPU see the bytes, until the view ends.
    pub fn cpu(&mut self) -> CpuPages<'_> {
        let raw = &mut self.raw;
        // SAFETY: By the invariant of `RawSg` the table is mapped for the device in this direction;
        // it is only read.
        unsafe { bindings::rdma_helper_dma_sync_sgtable_for_cpu(raw.dev(), raw.table(), raw.dir) };
        CpuPages::of_mapped(raw)
    }

    /// Returns how many entries a request for the bytes in `range` has.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or not inside of the memory.
    pub fn entries(&self, range: Range<usize>) -> Result<usize> {
        let mut count = 0;
        self.raw.each(range, |_, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }

    pub(crate) fn raw(&self) -> &RawSg {
        &self.raw
    }

    pub(crate) fn into_raw(self) -> RawSg {
        self.raw
    }
}

impl<D: DeviceReads> SgBuf<D> {
    /// Returns entries for the bytes in `range`, for the device to read.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty, not inside of the memory, or has not `N` entries: see
    /// [`SgBuf::entries`].
    pub fn sges<const N: usize>(&self, range: Range<usize>) -> Result<[Sge<'_>; N]> {
        self.raw.sges(range)
    }
}

impl<D: DeviceWrites> SgBuf<D> {
    /// Returns entries for the bytes in `range`, for the device to write.
    ///
    /// # Errors
    ///
    /// As [`SgBuf::sges`].
    pub fn sges_mut<const N: usize>(&self, range: Range<usize>) -> Result<[SgeMut<'_>; N]> {
        Ok(self.raw.sges(range)?.map(SgeMut))
    }
}
