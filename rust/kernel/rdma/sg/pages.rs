// SPDX-License-Identifier: GPL-2.0

//! Memory in pages.

use super::RawSg;
use crate::{
    bindings,
    context::Sleepable, //
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

// SAFETY: It is plain memory.
unsafe impl Send for Pages {}
// SAFETY: A shared reference gives raw copies only.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates `len` zeroed bytes, in as many pages as that takes (`alloc_page`,
    /// `sg_alloc_table_from_pages`).
    ///
    /// Process context.
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
        // Entries of one page are what every device takes; an IOMMU may merge them.
        //
        // SAFETY: There are `count` pages, which is at least one, and the table is ours.
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
        // INVARIANT: As listed and zeroed; GFP_KERNEL takes no high memory.
        Ok(Self { table, pages, len })
    }

    /// Returns the length, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Lets the CPU see the bytes.
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
        // SAFETY: By the type invariant the table lists the pages; whoever drops this owns it, so
        // nothing uses it.
        unsafe { bindings::sg_free_table(&raw mut *self.table) };
    }
}

/// The bytes of pages, for the CPU, while no device has business with them.
///
/// # Invariants
///
/// If there is a device in `mapped`, it is registered for `'a`, and the pages are mapped for it in
/// that direction.
pub struct CpuPages<'a> {
    /// None of a [`Ctx`](crate::rw::Ctx) that has lost them.
    pages: Option<&'a mut Pages>,
    /// Where they are mapped, if they are.
    mapped: Option<(*mut bindings::ib_device, bindings::dma_data_direction)>,
}

impl<'a> CpuPages<'a> {
    /// Shows pages that are not mapped, if there are any.
    pub(crate) fn of(pages: Option<&'a mut Pages>) -> Self {
        // INVARIANT: There is no device.
        Self {
            pages,
            mapped: None,
        }
    }

    /// Shows pages that are mapped and belong to the CPU.
    pub(super) fn of_mapped(raw: &'a mut RawSg) -> Self {
        let mapped = (raw.dev(), raw.dir);
        // INVARIANT: By that of `RawSg`, which keeps the PD and so the device.
        Self {
            pages: Some(&mut raw.pages),
            mapped: Some(mapped),
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

    /// Returns the pages, one after the other, the last as long as it is used.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, len) = match &self.pages {
            Some(pages) => (&pages.pages[..], pages.len),
            None => (&[][..], 0),
        };
        pages.iter().enumerate().map(move |(i, page)| {
            let len = PAGE_SIZE.min(len - i * PAGE_SIZE);
            // SAFETY: By the invariant of `Pages` the page has an address and is initialised. The
            // borrow is exclusive, and each page comes once.
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
