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
    },
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};
use private::Sealed;

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

mod private {
    pub trait Sealed {}
}

/// Which way data go, as `enum dma_data_direction`.
pub trait Direction: Sealed + Send + Sync + Unpin + 'static {
    /// The C value.
    #[doc(hidden)]
    const RAW: bindings::dma_data_direction;
}

/// A [`Direction`] in which the device reads memory: for SEND and RDMA WRITE, and for peers to
/// read.
#[diagnostic::on_unimplemented(
    message = "the device does not read `{Self}` memory",
    note = "map it `ToDevice` or `Bidirectional`"
)]
pub trait DeviceReads: Direction {}

/// A [`Direction`] in which the device writes memory: for receives and RDMA READ, and for peers to
/// write.
#[diagnostic::on_unimplemented(
    message = "the device does not write `{Self}` memory",
    note = "map it `FromDevice` or `Bidirectional`"
)]
pub trait DeviceWrites: Direction {}

macro_rules! direction {
    ($(#[$doc:meta])* $name:ident, $raw:ident, [$($can:ident),*]) => {
        $(#[$doc])*
        pub enum $name {}
        impl Sealed for $name {}
        impl Direction for $name {
            const RAW: bindings::dma_data_direction = bindings::dma_data_direction::$raw;
        }
        $(impl $can for $name {})*
    };
}

direction!(
    /// Memory that the device only reads.
    ToDevice, DMA_TO_DEVICE, [DeviceReads]
);
direction!(
    /// Memory that the device only writes.
    FromDevice, DMA_FROM_DEVICE, [DeviceWrites]
);
direction!(
    /// Memory that the device reads and writes.
    Bidirectional, DMA_BIDIRECTIONAL, [DeviceReads, DeviceWrites]
);

/// Mapped memory, without the direction that it is mapped in.
///
/// # Invariants
///
/// `memory` is `len` bytes of zeroed-at-first kmalloc memory, owned by this, and mapped at `addr`
/// for the device of `pd`.
///
/// What a post needs comes first, to be in one cache line with what is before it in a request.
#[repr(C)]
struct RawBuf {
    addr: u64,
    len: u32,
    lkey: u32,
    pd: Pd,
    memory: NonNull<u8>,
}

// SAFETY: A buffer is plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for RawBuf {}
// SAFETY: A shared reference gives no access to the memory's content but by raw copies.
unsafe impl Sync for RawBuf {}

impl RawBuf {
    fn alloc(pd: &Pd, len: usize, dir: bindings::dma_data_direction) -> Result<Self> {
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
    fn sync_for_cpu(&self, dir: bindings::dma_data_direction) {
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
    fn sync_for_device(&self, dir: bindings::dma_data_direction) {
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
    unsafe fn free(&mut self, dir: bindings::dma_data_direction) {
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
    fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
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
    fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
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
    fn whole(&self) -> Sge<'_> {
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
    fn sge(&self, range: Range<usize>) -> Result<Sge<'_>> {
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
    unsafe fn new(raw: RawBuf, dir: bindings::dma_data_direction) -> Self {
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
