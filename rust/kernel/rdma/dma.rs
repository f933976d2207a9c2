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

mod private {
    pub trait Sealed {}
}
use private::Sealed;

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

/// A buffer without its direction's type.
///
/// # Invariants
///
/// `memory` is `len` bytes of zeroed-at-first kmalloc memory, owned by this, and mapped at `addr`
/// in direction `dir` for the device of `pd`, which is `raw_pd` to C.
pub(crate) struct RawBuf {
    addr: u64,
    len: u32,
    lkey: u32,
    memory: NonNull<u8>,
    dir: bindings::dma_data_direction,
    raw_pd: *const bindings::ib_pd,
    pd: Pd,
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
            dir,
            raw_pd: pd.as_raw(),
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
    fn sync_for_cpu(&self) {
        if !self.is_virt_dma() {
            // SAFETY: By the type invariant.
            unsafe {
                bindings::rdma_helper_dma_sync_for_cpu(
                    self.pd.device().as_raw(),
                    self.addr,
                    self.len(),
                    self.dir,
                )
            };
        }
    }

    #[inline]
    fn sync_for_device(&self) {
        if !self.is_virt_dma() {
            // SAFETY: By the type invariant.
            unsafe {
                bindings::rdma_helper_dma_sync_for_device(
                    self.pd.device().as_raw(),
                    self.addr,
                    self.len(),
                    self.dir,
                )
            };
        }
    }

    fn check(&self, offset: usize, len: usize) -> Result {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(EINVAL),
        }
    }

    /// Copies bytes out while the device may be writing them.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        self.check(offset, to.len())?;
        self.sync_for_cpu();
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

    /// Copies bytes in while the device may be reading them.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        self.check(offset, from.len())?;
        // SAFETY: The range is inside of the buffer; see `copy_out`.
        unsafe {
            bindings::rdma_helper_memcpy(
                self.memory.as_ptr().add(offset).cast(),
                from.as_ptr().cast(),
                from.len(),
            )
        };
        self.sync_for_device();
        Ok(())
    }

    #[inline]
    fn whole(&self) -> Sge<'_> {
        // INVARIANT: The mapped memory, which lives as long as the borrow.
        Sge {
            addr: self.addr,
            length: self.len,
            lkey: self.lkey,
            pd: self.raw_pd,
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

impl Drop for RawBuf {
    fn drop(&mut self) {
        let len = self.len();
        // SAFETY: By the type invariant; whoever drops a buffer owns it, so no request uses it.
        unsafe {
            bindings::rdma_helper_dma_unmap_single(
                self.pd.device().as_raw(),
                self.addr,
                len,
                self.dir,
            )
        };
        // SAFETY: By the type invariant.
        drop(unsafe { KVec::from_raw_parts(self.memory.as_ptr(), len, len) });
    }
}

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
