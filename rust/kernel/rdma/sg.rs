// SPDX-License-Identifier: GPL-2.0

//! Scatter lists.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h) (`struct
//! sg_table`)

use crate::{
    bindings,
    dma::Direction,
    prelude::*, //
};
use core::marker::PhantomData;
use kernel::{
    alloc::flags::__GFP_ZERO,
    error::to_result,
    page::{
        Page,
        PAGE_SIZE, //
    },
    prelude::*, //
};

/// DMA-mapped memory in pages, for a [`Region`]. The CPU accesses its bytes through
/// [`SgBuf::cpu`], which borrows it exclusively.
pub struct SgBuf<D: Direction> {
    pub(crate) raw: RawSg,
    _direction: PhantomData<D>,
}

impl<D: Direction> SgBuf<D> {
    /// Allocates `len` zeroed bytes, in as many pages as that takes, and maps them (`alloc_page`,
    /// `sg_alloc_table_from_pages`, `ib_dma_map_sg`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` for a length of zero or of 4 GiB and more; `EIO` if the memory could not
    /// be mapped.
    pub fn alloc(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            raw: RawSg::alloc(pd, len, D::RAW, cx)?,
            _direction: PhantomData,
        })
    }

    /// Returns the bytes, for the CPU (`dma_sync_sgtable_for_cpu`, and `..._for_device` when the
    /// view is dropped).
    pub fn cpu(&mut self) -> CpuPages<'_> {
        self.raw.sync_for_cpu();
        // INVARIANT: Both are borrowed exclusively.
        CpuPages {
            pages: Some(&self.raw.pages),
            mapped: Some(&self.raw),
        }
    }
}

/// Memory in pages, with the table that lists them.
///
/// # Invariants
///
/// `table` lists `pages`, one entry each, and the entries are `len` bytes in all. The pages are
/// initialised, and not in high memory.
pub(crate) struct Pages {
    pub(crate) table: KBox<bindings::sg_table>,
    pages: KVec<Page>,
    pub(crate) len: usize,
}

// SAFETY: It owns plain memory.
unsafe impl Send for Pages {}
// SAFETY: A shared reference gives access to the bytes only by copies that may race.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates `len` zeroed bytes.
    pub(crate) fn alloc(len: usize, _cx: &Sleepable) -> Result<Self> {
        if len == 0 || u32::try_from(len).is_err() {
            return Err(EINVAL);
        }
        let count = len.div_ceil(PAGE_SIZE);
        let mut pages = KVec::with_capacity(count, GFP_KERNEL)?;
        let mut raw = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            let page = Page::alloc_page(GFP_KERNEL | __GFP_ZERO)?;
            raw.push_within_capacity(page.as_ptr())?;
            pages.push_within_capacity(page)?;
        }
        let mut table = KBox::new(bindings::sg_table::default(), GFP_KERNEL)?;
        // Every device can use entries of one page; an IOMMU may merge them.
        //
        // SAFETY: There are `count` pages, at least one, and the table is valid for writes.
        to_result(unsafe {
            bindings::sg_alloc_table_from_pages_segment(
                &raw mut *table,
                raw.as_mut_ptr(),
                count.try_into()?,
                0,
                len,
                PAGE_SIZE as u32,
                bindings::GFP_KERNEL,
            )
        })?;
        // INVARIANT: The table was just made of the pages, which are zeroed. GFP_KERNEL allocates
        // no high memory.
        Ok(Self { table, pages, len })
    }

    /// Copies bytes out while a device may be writing them.
    fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        // SAFETY: `to` is valid for writes of its length.
        unsafe { self.copy(offset, to.as_mut_ptr(), to.len(), true) }
    }

    /// Copies bytes in while a device may be reading them.
    fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        // SAFETY: `from` is valid for reads of its length.
        unsafe { self.copy(offset, from.as_ptr().cast_mut(), from.len(), false) }
    }

    /// # Safety
    ///
    /// `bytes` is valid for reads of `len` bytes; for writes, if the copy is `out` of the pages.
    unsafe fn copy(&self, offset: usize, bytes: *mut u8, len: usize, out: bool) -> Result {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(EINVAL);
        }
        let (sgl, count, skip) = (
            self.table.sgl,
            self.table.orig_nents,
            offset as bindings::off_t,
        );
        // SAFETY: The range is inside of the table's entries, and `bytes` is valid, as the caller
        // promises. The copy is C's, so bytes that a device changes meanwhile are torn at worst.
        unsafe { bindings::sg_copy_buffer(sgl, count, bytes.cast(), len, skip, out) };
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the table was made of the pages. It is not used again.
        unsafe { bindings::sg_free_table(&raw mut *self.table) };
    }
}

/// The bytes of pages, for the CPU, while no device accesses them.
///
/// # Invariants
///
/// The pages are borrowed exclusively for `'a`, with `mapped`, which they are part of.
pub struct CpuPages<'a> {
    /// `None` of a [`Ctx`](crate::rw::Ctx) that has lost them.
    pages: Option<&'a Pages>,
    mapped: Option<&'a RawSg>,
}

impl<'a> CpuPages<'a> {
    /// Makes the view of pages that are not mapped.
    pub(crate) fn of(pages: Option<&'a mut Pages>) -> Self {
        // INVARIANT: The pages are borrowed exclusively.
        Self {
            pages: pages.map(|pages| &*pages),
            mapped: None,
        }
    }

    /// Copies bytes from `offset` on out.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the memory.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_out(offset, to)
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the memory.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_in(offset, from)
    }

    /// Returns the pages one after the other, the last one up to the end of the memory.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, len) = match self.pages {
            Some(pages) => (&pages.pages[..], pages.len),
            None => (&[][..], 0),
        };
        pages.iter().enumerate().map(move |(i, page)| {
            let len = PAGE_SIZE.min(len - i * PAGE_SIZE);
            // SAFETY: By the invariant of `Pages` the page is initialised and, not being in high
            // memory, has an address. By the type invariant and that of `self` the borrow is
            // exclusive, and each page is returned once.
            unsafe {
                let start = bindings::rdma_helper_page_address(page.as_ptr());
                core::slice::from_raw_parts_mut(start.cast(), len)
            }
        })
    }
}

impl Drop for CpuPages<'_> {
    fn drop(&mut self) {
        if let Some(mapped) = self.mapped {
            mapped.sync_for_device();
        }
    }
}

/// Pages that are mapped.
///
/// # Invariants
///
/// The table of `pages` is mapped in direction `dir` for the device of `pd`.
pub(crate) struct RawSg {
    pub(crate) pages: Pages,
    dir: bindings::dma_data_direction,
    pub(crate) pd: Pd,
}

// SAFETY: It owns plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for RawSg {}
// SAFETY: A shared reference gives access to the bytes only by copies that may race.
unsafe impl Sync for RawSg {}

impl RawSg {
    fn alloc(
        pd: &Pd,
        len: usize,
        dir: bindings::dma_data_direction,
        cx: &Sleepable,
    ) -> Result<Self> {
        let (mut pages, dev) = (Pages::alloc(len, cx)?, pd.device().as_raw());
        // SAFETY: The table is valid and not mapped; the device is registered while `pd` lives.
        to_result(unsafe {
            bindings::rdma_helper_dma_map_sgtable(dev, &raw mut *pages.table, dir)
        })?;
        // INVARIANT: The table was just mapped.
        Ok(Self {
            pages,
            dir,
            pd: pd.clone(),
        })
    }

    fn dev(&self) -> *mut bindings::ib_device {
        self.pd.device().as_raw()
    }

    fn table(&self) -> *mut bindings::sg_table {
        core::ptr::from_ref(&*self.pages.table).cast_mut()
    }

    fn sync_for_cpu(&self) {
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe {
            bindings::rdma_helper_dma_sync_sgtable_for_cpu(self.dev(), self.table(), self.dir)
        };
    }

    fn sync_for_device(&self) {
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe {
            bindings::rdma_helper_dma_sync_sgtable_for_device(self.dev(), self.table(), self.dir)
        };
    }

    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.sync_for_cpu();
        self.pages.copy_out(offset, to)
    }

    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.pages.copy_in(offset, from)?;
        self.sync_for_device();
        Ok(())
    }

    /// Maps the pages by an MR (`ib_map_mr_sg`). Returns the number of entries that were mapped, or
    /// an error, and the number of entries.
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the device, is not registered, and is not used by anything else.
    pub(crate) unsafe fn map_mr(&self, mr: *mut bindings::ib_mr) -> (c_int, u32) {
        let table = &self.pages.table;
        // SAFETY: `mr` is an MR of the device, is not registered and not used by anything else, as
        // the caller promises. By the type invariant the table is mapped.
        let mapped = unsafe {
            bindings::ib_map_mr_sg(
                mr,
                table.sgl,
                table.nents as c_int,
                core::ptr::null_mut(),
                PAGE_SIZE as u32,
            )
        };
        (mapped, table.nents)
    }
}

impl Drop for RawSg {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the table is mapped. A request borrows the memory from its
        // owner, so none uses it. The pages are freed after this.
        unsafe { bindings::rdma_helper_dma_unmap_sgtable(self.dev(), self.table(), self.dir) };
    }
}
