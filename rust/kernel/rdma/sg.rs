// SPDX-License-Identifier: GPL-2.0

//! Scatter lists.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h) (`struct
//! sg_table`)

mod map;

pub(crate) use map::{
    extent,
    AnyOwner,
    MappedList,
    RawMap, //
};
pub use map::{
    SgList,
    SgMap,
    SgMapError,
    SgOwner, //
};

use crate::{
    dma::Direction,
    prelude::*, //
};
use core::{
    marker::PhantomData,
    ops::Range,
    ptr, //
};
use kernel::{
    alloc::flags::__GFP_ZERO,
    error::to_result,
    page, //
};

/// DMA-mapped memory in pages, for a [`Region`]. The CPU accesses its bytes through
/// [`SgBuf::cpu`], which borrows it exclusively.
pub struct SgBuf<D: Direction> {
    pub(crate) raw: RawSg,
    _direction: PhantomData<D>,
}

impl<D: Direction> SgBuf<D> {
    /// Allocates `len` zeroed bytes, in as many pages as that takes, and maps them (`alloc_page`,
    /// `sg_alloc_table_from_pages`, `ib_dma_map_sg`). Fails with `ENOMEM`; `EINVAL` for a length of
    /// zero or of 4 GiB and more; `EIO` if the memory could not be mapped.
    pub fn alloc(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            raw: RawSg::alloc(pd, len, D::RAW, cx)?,
            _direction: PhantomData,
        })
    }

    /// Returns the bytes, for the CPU (`dma_sync_sgtable_for_cpu`, and `..._for_device` when the
    /// view is dropped).
    pub fn cpu(&mut self) -> CpuPages<'_> {
        CpuPages::new(Some(&mut self.raw.pages), Some(self.raw.mapping))
    }
}

/// Memory in pages, with the table that lists them: the owner of what [`Ctx::alloc`] allocates.
///
/// [`Ctx::alloc`]: crate::rw::Ctx::alloc
pub struct Pages(KBox<Listed>);

/// # Invariants
///
/// `table` lists `pages`, one entry each, and the entries are `len` bytes in all. The pages are
/// initialised, and not in high memory.
struct Listed {
    table: bindings::sg_table,
    pages: KVec<page::Page>,
    len: usize,
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
        let count = len.div_ceil(page::PAGE_SIZE);
        let mut pages = KVec::with_capacity(count, GFP_KERNEL)?;
        let mut raw = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            let page = page::Page::alloc_page(GFP_KERNEL | __GFP_ZERO)?;
            raw.push_within_capacity(page.as_ptr())?;
            pages.push_within_capacity(page)?;
        }
        let mut this = Self(KBox::new(
            Listed {
                table: bindings::sg_table::default(),
                pages,
                len,
            },
            GFP_KERNEL,
        )?);
        // Every device can use entries of one page; an IOMMU may merge them.
        //
        // SAFETY: There are `count` pages, at least one, and the table is valid for writes.
        to_result(unsafe {
            bindings::sg_alloc_table_from_pages_segment(
                this.table(),
                raw.as_mut_ptr(),
                count.try_into()?,
                0,
                len,
                page::PAGE_SIZE as u32,
                bindings::GFP_KERNEL,
            )
        })?;
        // INVARIANT: The table was just made of the pages, which are zeroed. GFP_KERNEL allocates
        // no high memory.
        Ok(this)
    }

    pub(crate) fn table(&mut self) -> *mut bindings::sg_table {
        &raw mut self.0.table
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len
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

    /// Copies page by page, as the entries of the table may be cut meanwhile.
    ///
    /// # Safety
    ///
    /// `bytes` is valid for reads of `len` bytes; for writes, if the copy is `out` of the pages.
    unsafe fn copy(&self, offset: usize, bytes: *mut u8, len: usize, out: bool) -> Result {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(EINVAL);
        }
        let (mut done, mut skip) = (0, offset % page::PAGE_SIZE);
        for page in self.0.pages.iter().skip(offset / page::PAGE_SIZE) {
            let part = (page::PAGE_SIZE - skip).min(len - done);
            // SAFETY: By the type invariant the page is not in high memory, so it has an address.
            // The part is in it, and one of `bytes`, which is valid, as the caller promises. The
            // copy is C's, so bytes that a device changes meanwhile are torn at worst.
            unsafe {
                let page = bindings::rdma_helper_page_address(page.as_ptr()).byte_add(skip);
                let bytes = bytes.add(done).cast();
                let (to, from) = if out { (bytes, page) } else { (page, bytes) };
                bindings::rdma_helper_memcpy(to, from, part);
            }
            (done, skip) = (done + part, 0);
            if done == len {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: The table is empty or was made of the pages, and is not used again.
        unsafe { bindings::sg_free_table(self.table()) };
    }
}

// SAFETY: The table is in a box, and lists pages that nothing else has. Their bytes are accessed by
// `CpuPages` only, and by copies that may race.
unsafe impl<D: Direction> SgOwner<D> for Pages {
    fn table(&mut self) -> *mut bindings::sg_table {
        Pages::table(self)
    }
}

/// The bytes of pages, for the CPU, while no device accesses them.
///
/// # Invariants
///
/// The pages are borrowed exclusively for `'a`, and with them `mapping`, if some of them are
/// mapped.
pub struct CpuPages<'a> {
    /// `None` of a [`Ctx`](crate::rw::Ctx) that has lost them.
    pages: Option<&'a Pages>,
    mapping: Option<Mapping>,
}

impl<'a> CpuPages<'a> {
    /// Makes the view of pages, and of the mapping of some of them, if there is one.
    pub(crate) fn new(pages: Option<&'a mut Pages>, mapping: Option<Mapping>) -> Self {
        if let Some(mapping) = &mapping {
            mapping.sync_for_cpu();
        }
        // INVARIANT: The pages are borrowed exclusively, from what unmaps them.
        Self {
            pages: pages.map(|pages| &*pages),
            mapping,
        }
    }

    /// Copies bytes from `offset` on out. Fails with `EINVAL` if the range is not inside of the
    /// memory.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_out(offset, to)
    }

    /// Copies bytes in, from `offset` on. Fails with `EINVAL` if the range is not inside of the
    /// memory.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_in(offset, from)
    }

    /// Returns the pages one after the other, the last one up to the end of the memory.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, len) = match self.pages {
            Some(pages) => (&pages.0.pages[..], pages.len()),
            None => (&[][..], 0),
        };
        pages.iter().enumerate().map(move |(i, page)| {
            let len = page::PAGE_SIZE.min(len - i * page::PAGE_SIZE);
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
        if let Some(mapping) = &self.mapping {
            mapping.sync_for_device();
        }
    }
}

/// The mapping of a scatter list.
///
/// # Invariants
///
/// `table` is a list that is mapped for `dev`, which is there, in direction `dir`.
#[derive(Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) dev: *mut bindings::ib_device,
    pub(crate) table: bindings::sg_table,
    pub(crate) dir: bindings::dma_data_direction,
}

// SAFETY: DMA may be synchronised and unmapped from any thread.
unsafe impl Send for Mapping {}
// SAFETY: A shared reference gives access to functions only that may be called at the same time.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn table(&self) -> *mut bindings::sg_table {
        ptr::from_ref(&self.table).cast_mut()
    }

    fn sync_for_cpu(&self) {
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe { bindings::rdma_helper_dma_sync_sgtable_for_cpu(self.dev, self.table(), self.dir) };
    }

    fn sync_for_device(&self) {
        let (dev, table, dir) = (self.dev, self.table(), self.dir);
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe { bindings::rdma_helper_dma_sync_sgtable_for_device(dev, table, dir) };
    }

    /// Makes an MR map a range of the list (`ib_map_mr_sg`).
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the device, and is not registered. Neither it nor the list is used by
    /// anything else. The range is not empty, and inside of the list.
    pub(crate) unsafe fn map_mr(&self, mr: *mut bindings::ib_mr, range: Range<usize>) -> Result {
        let (start, len) = (range.start, range.len());
        // SAFETY: `mr` is an MR of the device, is not registered and not used by anything else, and
        // the range is one of the list, as the caller promises. By the type invariant the list is
        // mapped; nothing else uses it, as its ends are changed meanwhile. The table is only read.
        to_result(unsafe { bindings::rdma_helper_map_mr_sg(mr, self.table(), start, len) })
    }

    /// Unmaps the list (`ib_dma_unmap_sg`).
    ///
    /// # Safety
    ///
    /// No device uses it, and this is not used again.
    pub(crate) unsafe fn unmap(&mut self) {
        // SAFETY: By the type invariant the table is mapped for the device in this direction. It is
        // not used any more, as the caller promises.
        unsafe { bindings::rdma_helper_dma_unmap_sgtable(self.dev, &raw mut self.table, self.dir) };
    }
}

/// Pages that are mapped.
///
/// # Invariants
///
/// `mapping` is of the table of `pages`, for the device of `pd`.
pub(crate) struct RawSg {
    pub(crate) mapping: Mapping,
    pub(crate) pages: Pages,
    pub(crate) pd: Pd,
}

impl RawSg {
    fn alloc(
        pd: &Pd,
        len: usize,
        dir: bindings::dma_data_direction,
        cx: &Sleepable,
    ) -> Result<Self> {
        let (mut pages, dev) = (Pages::alloc(len, cx)?, pd.device().as_raw());
        // SAFETY: The table is valid and not mapped; the device is registered while `pd` lives.
        to_result(unsafe { bindings::rdma_helper_dma_map_sgtable(dev, pages.table(), dir) })?;
        // INVARIANT: The table was just mapped. The device is there while `pd` is.
        Ok(Self {
            mapping: Mapping {
                dev,
                table: pages.0.table,
                dir,
            },
            pages,
            pd: pd.clone(),
        })
    }

    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.mapping.sync_for_cpu();
        self.pages.copy_out(offset, to)
    }

    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.pages.copy_in(offset, from)?;
        self.mapping.sync_for_device();
        Ok(())
    }
}

impl Drop for RawSg {
    fn drop(&mut self) {
        // SAFETY: A request borrows the memory from its owner, so none uses it, and the region that
        // it may have been of has ended. The pages are freed after this.
        unsafe { self.mapping.unmap() };
    }
}
