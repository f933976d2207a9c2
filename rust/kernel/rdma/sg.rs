// SPDX-License-Identifier: GPL-2.0

//! Scatter lists.
//!
//! [`Pages`] is memory in pages, of any length, that is not mapped. An [`SgBuf`] is such memory
//! mapped for a device, in a direction that is part of its type: requests can have entries of it,
//! one a page at most, and a [`Region`](crate::mr::Region) can be made of it. The CPU accesses
//! either through [`CpuPages`], which borrows it exclusively.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h) (`struct
//! sg_table`)

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
    mem::ManuallyDrop,
    ops::Range, //
};
use kernel::{
    alloc::flags::__GFP_ZERO,
    error::to_result,
    page::{
        Page,
        PAGE_SIZE, //
    },
    prelude::*, //
};

/// DMA-mapped memory in pages.
pub struct SgBuf<D: Direction> {
    raw: RawSg,
    _direction: PhantomData<D>,
}

impl<D: Direction> SgBuf<D> {
    /// Allocates `len` zeroed bytes and maps them, see [`Pages::alloc`] and [`SgBuf::map`].
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

    /// Returns the bytes, for the CPU (`dma_sync_sgtable_for_cpu`, and `..._for_device` when the view
    /// is dropped).
    pub fn cpu(&mut self) -> CpuPages<'_> {
        let raw = &mut self.raw;
        raw.sync_for_cpu();
        let mapped = (raw.dev(), raw.dir);
        // INVARIANT: By the invariant of `RawSg`, whose PD keeps the device.
        CpuPages {
            pages: Some(&mut raw.pages),
            mapped: Some(mapped),
        }
    }

    /// Returns the number of entries of a request for the bytes in `range`.
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

/// Memory in pages, with the table that lists them.
///
/// # Invariants
///
/// `table` lists `pages`, one entry each, and the entries are `len` bytes in all. The pages are
/// initialised, and not in high memory.
pub struct Pages {
    pub(crate) table: KBox<bindings::sg_table>,
    pages: KVec<Page>,
    len: usize,
}

// SAFETY: It owns plain memory.
unsafe impl Send for Pages {}
// SAFETY: A shared reference gives access to the bytes only by copies that may race.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates `len` zeroed bytes, in as many pages as that takes (`alloc_page`,
    /// `sg_alloc_table_from_pages`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` for a length of zero or of 4 GiB and more.
    pub fn alloc(len: usize, _cx: &Sleepable) -> Result<Self> {
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
        // INVARIANT: The table was just made of the pages, which are zeroed. GFP_KERNEL allocates no
        // high memory.
        Ok(Self { table, pages, len })
    }

    /// Returns the length, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes, for the CPU.
    pub fn cpu(&mut self) -> CpuPages<'_> {
        CpuPages::of(Some(self))
    }

    fn check(&self, offset: usize, len: usize) -> Result {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(EINVAL),
        }
    }

    /// Copies bytes out while a device may be writing them.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.check(offset, to.len())?;
        // SAFETY: The range is inside of the table's entries. The copy is C's, so bytes that a
        // device changes meanwhile are torn at worst.
        unsafe {
            bindings::sg_pcopy_to_buffer(
                self.table.sgl,
                self.table.orig_nents,
                to.as_mut_ptr().cast(),
                to.len(),
                offset as bindings::off_t,
            )
        };
        Ok(())
    }

    /// Copies bytes in while a device may be reading them.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.check(offset, from.len())?;
        // SAFETY: The range is inside of the table's entries. The copy is C's, so what a device
        // reads meanwhile is torn at worst.
        unsafe {
            bindings::sg_pcopy_from_buffer(
                self.table.sgl,
                self.table.orig_nents,
                from.as_ptr().cast(),
                from.len(),
                offset as bindings::off_t,
            )
        };
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
/// If there is a device in `mapped`, it is registered for `'a`, and the pages are mapped for it in
/// that direction.
pub struct CpuPages<'a> {
    /// `None` of a [`Ctx`](crate::rw::Ctx) that has lost them.
    pages: Option<&'a mut Pages>,
    mapped: Option<(*mut bindings::ib_device, bindings::dma_data_direction)>,
}

impl<'a> CpuPages<'a> {
    /// Makes the view of pages that are not mapped.
    pub(crate) fn of(pages: Option<&'a mut Pages>) -> Self {
        // INVARIANT: There is no device.
        Self {
            pages,
            mapped: None,
        }
    }

    /// Copies bytes from `offset` on out.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the memory.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.pages.as_ref().ok_or(EINVAL)?.copy_out(offset, to)
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the memory.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result {
        self.pages.as_ref().ok_or(EINVAL)?.copy_in(offset, from)
    }

    /// Returns the pages one after the other, the last one up to the end of the memory.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, len) = match &self.pages {
            Some(pages) => (&pages.pages[..], pages.len),
            None => (&[][..], 0),
        };
        pages.iter().enumerate().map(move |(i, page)| {
            let len = PAGE_SIZE.min(len - i * PAGE_SIZE);
            // SAFETY: By the invariant of `Pages` the page is initialised and, not being in high
            // memory, has an address. The borrow is exclusive, and each page is returned once.
            unsafe {
                let start = bindings::rdma_helper_page_address(page.as_ptr());
                core::slice::from_raw_parts_mut(start.cast(), len)
            }
        })
    }
}

impl Drop for CpuPages<'_> {
    fn drop(&mut self) {
        if let (Some(pages), Some((dev, dir))) = (&mut self.pages, self.mapped) {
            // SAFETY: By the type invariant the pages are mapped for the device in this direction.
            unsafe {
                bindings::rdma_helper_dma_sync_sgtable_for_device(dev, &raw mut *pages.table, dir)
            };
        }
    }
}

/// Pages that are mapped.
///
/// # Invariants
///
/// The table of `pages` is mapped in direction `dir` for the device of `pd`.
pub(crate) struct RawSg {
    pages: ManuallyDrop<Pages>,
    dir: bindings::dma_data_direction,
    lkey: u32,
    pd: Pd,
}

// SAFETY: It owns plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for RawSg {}
// SAFETY: A shared reference gives access to the bytes only by copies that may race.
unsafe impl Sync for RawSg {}

impl RawSg {
    fn map_pages(
        mut pages: Pages,
        pd: &Pd,
        dir: bindings::dma_data_direction,
    ) -> Result<Self, (Pages, Error)> {
        let dev = pd.device().as_raw();
        // SAFETY: The table is valid and not mapped; the device is registered while `pd` lives.
        let mapped = to_result(unsafe {
            bindings::rdma_helper_dma_map_sgtable(dev, &raw mut *pages.table, dir)
        });
        match mapped {
            // INVARIANT: The table was just mapped.
            Ok(()) => Ok(Self {
                pages: ManuallyDrop::new(pages),
                dir,
                lkey: pd.local_dma_lkey(),
                pd: pd.clone(),
            }),
            Err(e) => Err((pages, e)),
        }
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.pd
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

    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.sync_for_cpu();
        self.pages.copy_out(offset, to)
    }

    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.pages.copy_in(offset, from)?;
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe {
            bindings::rdma_helper_dma_sync_sgtable_for_device(self.dev(), self.table(), self.dir)
        };
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

    /// Calls `f` with the DMA address and the length of each part of `range`.
    fn each(&self, range: Range<usize>, mut f: impl FnMut(u64, u32) -> Result) -> Result {
        if range.start >= range.end || range.end > self.pages.len() {
            return Err(EINVAL);
        }
        let (mut sg, mut at) = (self.pages.table.sgl, 0);
        while at < range.end {
            // SAFETY: The mapped entries are as long as `pages` in all, so the range, which was
            // checked, ends in one, and `sg` is not beyond that.
            let (addr, len) = unsafe {
                (
                    bindings::sg_dma_address(sg),
                    bindings::sg_dma_len(sg) as usize,
                )
            };
            let end = at + len;
            let (first, last) = (range.start.max(at), range.end.min(end));
            if first < last {
                f(addr + (first - at) as u64, (last - first) as u32)?;
            }
            at = end;
            // SAFETY: `sg` is an entry of the table. If it is the last, the range has ended, and the
            // result is not used.
            sg = unsafe { bindings::sg_next(sg) };
        }
        Ok(())
    }

    fn sges<const N: usize>(&self, range: Range<usize>) -> Result<[Sge<'_>; N]> {
        let none = Sge {
            addr: 0,
            length: 0,
            lkey: self.lkey,
            pd: self.pd.id(),
            _memory: PhantomData,
        };
        let mut sges = [none; N];
        let mut left = sges.iter_mut();
        self.each(range, |addr, length| {
            // INVARIANT: This is a part of the mapped memory, which lives as long as the borrow.
            let sge = left.next().ok_or(EINVAL)?;
            (sge.addr, sge.length) = (addr, length);
            Ok(())
        })?;
        // An entry that is left has length zero, which to some devices means two gigabytes.
        match left.next() {
            None => Ok(sges),
            Some(_) => Err(EINVAL),
        }
    }

    fn unmap(self) -> Pages {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant the table is mapped. A request borrows the memory from its
        // owner, so none uses it. `this` is not dropped, so neither field is used again.
        unsafe {
            bindings::rdma_helper_dma_unmap_sgtable(this.dev(), this.table(), this.dir);
            core::ptr::drop_in_place(&raw mut this.pd);
            ManuallyDrop::take(&mut this.pages)
        }
    }
}

impl Drop for RawSg {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the table is mapped. A request borrows the memory from its
        // owner, so none uses it. The pages are not used again.
        unsafe {
            bindings::rdma_helper_dma_unmap_sgtable(self.dev(), self.table(), self.dir);
            ManuallyDrop::drop(&mut self.pages);
        }
    }
}
