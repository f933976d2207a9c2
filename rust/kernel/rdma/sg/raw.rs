// SPDX-License-Identifier: GPL-2.0

//! Pages that are mapped for a device.

use super::Pages;
use crate::{
    bindings,
    pd::Pd,
    wr::Sge, //
};
use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::Range, //
};
use kernel::{
    error::to_result,
    page::PAGE_SIZE,
    prelude::*, //
};

/// Pages that are mapped.
///
/// # Invariants
///
/// The table of `pages` is mapped in direction `dir` for the device of `pd`.
pub(crate) struct RawSg {
    pub(super) pages: ManuallyDrop<Pages>,
    pub(super) dir: bindings::dma_data_direction,
    lkey: u32,
    pd: Pd,
}

// SAFETY: It is plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for RawSg {}
// SAFETY: A shared reference gives raw copies only.
unsafe impl Sync for RawSg {}

impl RawSg {
    pub(super) fn map_pages(
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
            // INVARIANT: Just mapped.
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

    pub(super) fn dev(&self) -> *mut bindings::ib_device {
        self.pd.device().as_raw()
    }

    pub(super) fn table(&self) -> *mut bindings::sg_table {
        core::ptr::from_ref(&*self.pages.table).cast_mut()
    }

    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        // SAFETY: By the type invariant the table is mapped for the device in this direction; it is
        // only read.
        unsafe {
            bindings::rdma_helper_dma_sync_sgtable_for_cpu(self.dev(), self.table(), self.dir)
        };
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

    /// Makes an MR map the pages (`ib_map_mr_sg`). Returns how many entries it mapped, or an error,
    /// and how many there are.
    ///
    /// # Safety
    ///
    /// `mr` is an MR of the device, is not registered, and is not used meanwhile.
    pub(crate) unsafe fn map_mr(&self, mr: *mut bindings::ib_mr) -> (c_int, u32) {
        let table = &self.pages.table;
        // SAFETY: `mr` is an MR of the device, is not registered and not used meanwhile, as the
        // caller promises. By the type invariant the table is mapped.
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

    /// Calls a function with address and length of each mapped piece of `range`.
    pub(super) fn each(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(u64, u32) -> Result,
    ) -> Result {
        if range.start >= range.end || range.end > self.pages.len() {
            return Err(EINVAL);
        }
        let (mut sg, mut at) = (self.pages.table.sgl, 0);
        while at < range.end {
            // SAFETY: The entries are as long as `pages`, so they do not end before the range does,
            // and this is one.
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
            // SAFETY: `sg` is an entry of the table. After the last one there is none, and then
            // this is not used, as the range has ended.
            sg = unsafe { bindings::sg_next(sg) };
        }
        Ok(())
    }

    pub(super) fn sges<const N: usize>(&self, range: Range<usize>) -> Result<[Sge<'_>; N]> {
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
            // INVARIANT: A part of the mapped memory, which lives as long as the borrow.
            let sge = left.next().ok_or(EINVAL)?;
            (sge.addr, sge.length) = (addr, length);
            Ok(())
        })?;
        // An entry that is left over would be memory of no length, of which some devices make two
        // gigabytes.
        match left.next() {
            None => Ok(sges),
            Some(_) => Err(EINVAL),
        }
    }

    pub(super) fn unmap(self) -> Pages {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant the table is mapped; whoever has the value owns it, so no
        // request uses the memory. `this` is not dropped, so neither field is used again.
        unsafe {
            bindings::rdma_helper_dma_unmap_sgtable(this.dev(), this.table(), this.dir);
            core::ptr::drop_in_place(&raw mut this.pd);
            ManuallyDrop::take(&mut this.pages)
        }
    }
}

impl Drop for RawSg {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the table is mapped; whoever drops this owns it, so no
        // request uses the memory. The pages are not used again.
        unsafe {
            bindings::rdma_helper_dma_unmap_sgtable(self.dev(), self.table(), self.dir);
            ManuallyDrop::drop(&mut self.pages);
        }
    }
}
