// SPDX-License-Identifier: GPL-2.0

//! Memory that is mapped for a device.

use crate::{
    bindings,
    pd::Pd,
    wr::Sge, //
};
use core::{
    marker::PhantomData,
    ops::Range,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// Mapped memory, without the direction that it is mapped in.
///
/// # Invariants
///
/// `memory` is `len` bytes of zeroed-at-first kmalloc memory, owned by this, and mapped at `addr`
/// for the device of `pd`.
///
/// What a post needs comes first, to be in one cache line with what is before it in a request.
#[repr(C)]
pub(super) struct RawBuf {
    addr: u64,
    len: u32,
    lkey: u32,
    pd: Pd,
    pub(super) memory: NonNull<u8>,
}

// SAFETY: A buffer is plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for RawBuf {}
// SAFETY: A shared reference gives no access to the memory's content but by raw copies.
unsafe impl Sync for RawBuf {}

impl RawBuf {
    pub(super) fn alloc(pd: &Pd, len: usize, dir: bindings::dma_data_direction) -> Result<Self> {
        let len32 = u32::try_from(len)?;
        if len == 0 {
            return Err(EINVAL);
        }
        let mut bytes = KVec::<u8>::with_capacity(len, GFP_KERNEL)?;
        bytes.extend_with(len, 0, GFP_KERNEL)?;
        let (memory, _, _) = bytes.into_raw_parts();
        let (dev, mut addr) = (pd.device().as_raw(), 0);
        // SAFETY: The memory is valid for `len` bytes and from kmalloc, and the device is
        // registered while `pd` lives.
        let mapped = to_result(unsafe {
            bindings::rdma_helper_dma_map_single(dev, memory.cast(), len, dir, &mut addr)
        });
        if let Err(e) = mapped {
            // SAFETY: These are the parts of the vector above.
            drop(unsafe { KVec::from_raw_parts(memory, len, len) });
            return Err(e);
        }
        // INVARIANT: Just allocated and mapped.
        Ok(Self {
            addr,
            len: len32,
            lkey: pd.local_dma_lkey(),
            // SAFETY: A vector that has allocated is not null.
            memory: unsafe { NonNull::new_unchecked(memory) },
            pd: pd.clone(),
        })
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Whether the CPU and the device see the same memory without help: software devices always.
    #[inline]
    fn is_virt_dma(&self) -> bool {
        if !cfg!(CONFIG_INFINIBAND_VIRT_DMA) {
            return false;
        }
        // SAFETY: The device is registered while `pd` lives, and the field does not change.
        unsafe { (*self.pd.device().as_raw()).dma_device.is_null() }
    }

    #[inline]
    pub(super) fn sync_for_cpu(&self, dir: bindings::dma_data_direction) {
        if !self.is_virt_dma() {
            // SAFETY: By the type invariant the memory is mapped for the device.
            unsafe {
                bindings::rdma_helper_dma_sync_for_cpu(
                    self.pd.device().as_raw(),
                    self.addr,
                    self.len(),
                    dir,
                )
            };
        }
    }

    #[inline]
    pub(super) fn sync_for_device(&self, dir: bindings::dma_data_direction) {
        if !self.is_virt_dma() {
            // SAFETY: By the type invariant the memory is mapped for the device.
            unsafe {
                bindings::rdma_helper_dma_sync_for_device(
                    self.pd.device().as_raw(),
                    self.addr,
                    self.len(),
                    dir,
                )
            };
        }
    }

    /// Unmaps and frees the memory.
    ///
    /// # Safety
    ///
    /// It is mapped in this direction, and is not used again.
    pub(super) unsafe fn free(&mut self, dir: bindings::dma_data_direction) {
        let (dev, len) = (self.pd.device().as_raw(), self.len());
        // SAFETY: By the type invariant the memory is mapped at `addr` for this device; in this
        // direction, and not to be used again, as the caller promises.
        unsafe { bindings::rdma_helper_dma_unmap_single(dev, self.addr, len, dir) };
        // SAFETY: By the type invariant these are the parts of a vector, which is not used again.
        drop(unsafe { KVec::from_raw_parts(self.memory.as_ptr(), len, len) });
    }

    fn check(&self, offset: usize, len: usize) -> Result {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(EINVAL),
        }
    }

    /// Copies bytes out.
    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.check(offset, to.len())?;
        // SAFETY: The range is inside of the buffer. The copy is C's, so bytes that the device
        // changes meanwhile are torn at worst.
        unsafe {
            bindings::rdma_helper_memcpy(
                to.as_mut_ptr().cast(),
                self.memory.as_ptr().add(offset).cast(),
                to.len(),
            )
        };
        Ok(())
    }

    /// Copies bytes in.
    pub(super) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.check(offset, from.len())?;
        // SAFETY: The range is inside of the buffer. The copy is C's, so what the device reads
        // meanwhile is torn at worst.
        unsafe {
            bindings::rdma_helper_memcpy(
                self.memory.as_ptr().add(offset).cast(),
                from.as_ptr().cast(),
                from.len(),
            )
        };
        Ok(())
    }

    #[inline]
    pub(super) fn whole(&self) -> Sge<'_> {
        // INVARIANT: The mapped memory, which lives as long as the borrow.
        Sge {
            addr: self.addr,
            length: self.len,
            lkey: self.lkey,
            pd: self.pd.id(),
            _memory: PhantomData,
        }
    }

    #[inline]
    pub(super) fn sge(&self, range: Range<usize>) -> Result<Sge<'_>> {
        // To some devices an empty entry means two gigabytes.
        if range.start >= range.end || range.end > self.len() {
            return Err(EINVAL);
        }
        // INVARIANT: A part of the mapped memory, which lives as long as the borrow.
        Ok(Sge {
            addr: self.addr + range.start as u64,
            length: (range.end - range.start) as u32,
            ..self.whole()
        })
    }
}

/// Mapped memory that is unmapped and freed when it is dropped.
///
/// # Invariants
///
/// The memory is mapped in direction `dir`, and nobody else unmaps or frees it.
pub(crate) struct Mapped {
    raw: RawBuf,
    dir: bindings::dma_data_direction,
}

impl Mapped {
    /// # Safety
    ///
    /// `raw` is mapped in direction `dir`, and nobody else unmaps or frees its memory.
    pub(super) unsafe fn new(raw: RawBuf, dir: bindings::dma_data_direction) -> Self {
        // INVARIANT: By the caller's promise.
        Self { raw, dir }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the memory is mapped in this direction, and nobody else
        // frees it. Who drops this owns it, so no request uses the memory.
        unsafe { self.raw.free(self.dir) };
    }
}
