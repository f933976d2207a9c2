// SPDX-License-Identifier: GPL-2.0

//! DMA-mapped buffers.
//!
//! Not by [`kernel::dma`], but `ib_dma_map_single`, as software devices have no DMA device.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_dma_map_single`)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    context::private::Sealed,
    message::RecvBytes,
    pd::Pd,
    prelude::internal::*,
    wc::Success,
    wr, //
};
use core::ops::{
    Deref,
    DerefMut,
    Range, //
};
use kernel::page::PAGE_SIZE;

/// A DMA-mapped buffer. The CPU accesses its bytes through [`Buf::cpu`], which borrows it
/// exclusively. [`Buf::write`] is for bytes that are known late, as a key.
///
/// A buffer that is used again still has what was in it: behind a message that is shorter than the
/// last one, [`Buf::whole`] would send the rest of that, perhaps to another peer. [`Buf::fill`]
/// writes a message, and [`Buf::filled`] is that and no more.
///
/// # Invariants
///
/// `mapped` is mapped in direction `D`.
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// fn message(text: &[u8; 16], pd: &Pd, cx: &Sleepable) -> Result<Buf<ToDevice>> {
///     let mut buf = Buf::alloc(pd, 20, cx)?;
///     let mut bytes = buf.cpu();
///     bytes[4..].copy_from_slice(text);
///     drop(bytes); // The device's again.
///     Ok(buf)
/// }
///
/// /// A message of any length, in a buffer that had another one.
/// fn again<'a>(buf: &'a mut Buf<ToDevice>, text: &[u8]) -> Result<SendWr<'a>> {
///     let len = u16::try_from(text.len())?;
///     buf.fill(&[&len.to_le_bytes(), text])?;
///     Ok(SendWr::send([buf.filled()?]))
/// }
/// ```
pub struct Buf<D: Direction> {
    pub(crate) mapped: Mapped,
    _direction: PhantomData<D>,
}

impl<D: Direction> Buf<D> {
    /// Allocates and maps `len` zeroed bytes (`kzalloc`, or `alloc_pages_exact` where that takes
    /// fewer pages; `ib_dma_map_single`). Fails with `ENOMEM`, as for more than `KMALLOC_MAX_SIZE`
    /// (4 MiB), which takes a [`SgBuf`]; `EINVAL` for a length of zero; `EIO` if the memory could
    /// not be mapped.
    ///
    /// [`SgBuf`]: crate::sg::SgBuf
    pub fn alloc(pd: &Pd, len: usize, _cx: &Sleepable) -> Result<Self> {
        // INVARIANT: The memory is mapped in this direction.
        Ok(Self {
            mapped: Mapped::alloc(pd, len, D::RAW)?,
            _direction: PhantomData,
        })
    }

    /// Returns the bytes, for the CPU (`ib_dma_sync_single_for_cpu`, and `..._for_device` when the
    /// view is dropped).
    #[inline]
    pub fn cpu(&mut self) -> CpuView<'_> {
        self.mapped.sync_for_cpu();
        CpuView(&mut self.mapped)
    }
}

/// Buffers of one length, of which many are in one piece of mapped memory, as a ULP has those of a
/// queue. A piece is unmapped and freed with its last buffer.
///
/// They are side by side, each in cache lines of its own. As memory of `kmalloc`, they begin at
/// multiples of the largest power of two that divides their length, up to a page. For data of other
/// subsystems, which may want more, there is [`Bufs::aligned`].
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// #[derive(HasCqe)]
/// struct Response {
///     cqe: Cqe<Self>,
///     buf: Buf<FromDevice>,
/// }
/// # impl CqeHandler for Response {
/// #     type Pointer = Taken<Self>;
/// #     type Needs = context::Atomic;
/// #     fn done(_: Taken<Self>, _: &Wc, _: &context::Atomic) {}
/// # }
///
/// fn alloc(qp: &Qp<Softirq>, pd: &Pd, cx: &Sleepable) -> Result<Requests<Response>> {
///     let mut bufs = Bufs::new(pd, 128, 16, cx)?;
///     let make = |_| {
///         Ok(Response {
///             cqe: Cqe::new(),
///             buf: bufs.take(cx)?,
///         })
///     };
///     Requests::new(qp, 128, make, cx)
/// }
/// ```
///
/// # Invariants
///
/// The pieces are mapped in direction `D`.
pub struct Bufs<D: Direction> {
    pieces: Pieces,
    _direction: PhantomData<D>,
}

impl<D: Direction> Bufs<D> {
    /// Prepares `count` buffers of `len` bytes, to be taken. Fails as [`Buf::alloc`].
    pub fn new(pd: &Pd, count: usize, len: usize, cx: &Sleepable) -> Result<Self> {
        Self::aligned(pd, count, len, 1, cx)
    }

    /// Prepares buffers that begin at multiples of `align`, a power of two that is at most a page:
    /// as the blocks of a disk may have to. Fails as [`Buf::alloc`], and with `EINVAL` for any
    /// other alignment.
    pub fn aligned(
        pd: &Pd,
        count: usize,
        len: usize,
        align: usize,
        _cx: &Sleepable,
    ) -> Result<Self> {
        // INVARIANT: They are mapped in this direction.
        Ok(Self {
            pieces: Pieces::new(pd, count, len, align, D::RAW)?,
            _direction: PhantomData,
        })
    }

    /// Takes the next buffer, which may allocate a piece: in process context. Fails with `ENOSPC`
    /// if all were taken; otherwise as [`Buf::alloc`].
    pub fn take(&mut self, _cx: &Sleepable) -> Result<Buf<D>> {
        // INVARIANT: It is mapped as the piece is.
        Ok(Buf {
            mapped: self.pieces.take()?,
            _direction: PhantomData,
        })
    }
}

/// The pieces of [`Bufs`]. Not generic, so that it is not in each ULP.
///
/// # Invariants
///
/// `piece` is mapped in direction `dir`. Of its bytes those from `used` on are not part of a
/// buffer.
struct Pieces {
    piece: Arc<Mapped>,
    dir: bindings::dma_data_direction,
    len: usize,
    /// The distance of two buffers.
    stride: usize,
    left: usize,
    used: usize,
}

impl Pieces {
    /// The longest piece of several buffers. The page allocator has as much also when memory is
    /// fragmented (`PAGE_ALLOC_COSTLY_ORDER`).
    const LEN: usize = PAGE_SIZE << 3;

    fn new(
        pd: &Pd,
        count: usize,
        len: usize,
        align: usize,
        dir: bindings::dma_data_direction,
    ) -> Result<Self> {
        let stride = Self::stride(len, align)?;
        // INVARIANT: No byte of the piece is part of a buffer.
        Ok(Self {
            piece: Self::alloc(pd, count, stride, dir)?,
            dir,
            len,
            stride,
            left: count,
            used: 0,
        })
    }

    /// Returns the distance of two buffers of `len` bytes.
    fn stride(len: usize, align: usize) -> Result<usize> {
        if !align.is_power_of_two() || align > PAGE_SIZE {
            return Err(EINVAL);
        }
        // SAFETY: It may be called in any context, and returns a constant of the machine.
        let line = unsafe { bindings::rdma_helper_dma_alignment() };
        let stride = len.checked_next_multiple_of(align.max(line));
        stride.filter(|stride| *stride > 0).ok_or(EINVAL)
    }

    /// Allocates a piece for `count` buffers, or the first of them. It is aligned as they are:
    /// the power of two that divides their distance divides its length.
    fn alloc(
        pd: &Pd,
        count: usize,
        stride: usize,
        dir: bindings::dma_data_direction,
    ) -> Result<Arc<Mapped>> {
        // A piece is longer only if a buffer is.
        let most = Self::LEN.checked_div(stride).ok_or(EINVAL)?.max(1);
        let len = stride.checked_mul(count.clamp(1, most)).ok_or(EINVAL)?;
        Ok(Arc::new(Mapped::alloc(pd, len, dir)?, GFP_KERNEL)?)
    }

    fn take(&mut self) -> Result<Mapped> {
        let left = self.left.checked_sub(1).ok_or(ENOSPC)?;
        if self.piece.len().saturating_sub(self.used) < self.len {
            // INVARIANT: No byte of the new piece is part of a buffer.
            self.piece = Self::alloc(&self.piece.pd, self.left, self.stride, self.dir)?;
            self.used = 0;
        }
        let mapped = Mapped::part(&self.piece, self.used, self.len)?;
        // INVARIANT: These bytes are part of the buffer.
        self.used = self.used.saturating_add(self.stride);
        self.left = left;
        Ok(mapped)
    }
}

/// Writes bytes to where no word may be written.
///
/// # Safety
///
/// `to` is valid for writes of as many bytes.
#[inline(never)]
unsafe fn write_bytes(to: *mut c_void, bytes: &[u8]) {
    for (n, byte) in bytes.iter().enumerate() {
        // SAFETY: `n` is less than the number of bytes that `to` is valid for.
        unsafe { to.cast::<u8>().add(n).write_volatile(*byte) };
    }
}

impl<D: DeviceReads> Buf<D> {
    /// Writes a message to the beginning of the buffer, one part behind the other, for
    /// [`Buf::filled`]. Fails with `EMSGSIZE` if there is no room for it: the buffer is as it was.
    ///
    /// One that is written through [`Buf::cpu`] is [`Buf::sge`] of its length.
    pub fn fill(&mut self, parts: &[&[u8]]) -> Result {
        let len = parts
            .iter()
            .try_fold(0_usize, |len, part| len.checked_add(part.len()));
        let len = len
            .filter(|len| *len <= self.mapped.len())
            .ok_or(EMSGSIZE)?;
        let mut bytes = self.cpu();
        let mut to = bytes.as_mut_ptr();
        for part in parts {
            // SAFETY: All parts together are not longer than the buffer, which is borrowed.
            unsafe {
                ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
                to = to.add(part.len());
            }
        }
        drop(bytes);
        // This is at most the length of the buffer.
        self.mapped.filled = len as u32;
        Ok(())
    }

    /// Returns an entry for what [`Buf::fill`] has written last, for the device to read. Fails with
    /// `EINVAL` if that is nothing.
    #[inline]
    pub fn filled(&self) -> Result<wr::Sge<'_>> {
        self.mapped.sge(0..self.mapped.filled as usize)
    }

    /// Writes bytes, 64 at most, at `offset` (`ib_dma_sync_single_for_device`), in the call that
    /// posts the buffer, as in the example of [`Qp::post_chain`]. A device that reads them
    /// meanwhile may get old or new ones, and so it is where two threads write the same ones. Any
    /// context. Fails with `EINVAL` if they are not inside of the buffer.
    ///
    /// [`Qp::post_chain`]: crate::qp::Qp::post_chain
    #[inline]
    pub fn write<const N: usize>(&self, offset: usize, bytes: &[u8; N]) -> Result {
        const {
            assert!(
                N <= 64,
                "write more by `cpu()`, before the buffer is posted"
            )
        };
        let to = self.mapped.bytes(offset, N)?;
        // SAFETY: Both ranges are `N` bytes, of the memory and of `bytes`. A shared reference gives
        // no other access to the former but this one and copies by C, and this is volatile, as
        // WRITE_ONCE(): what is read or written meanwhile is torn at worst.
        unsafe {
            if const { N % 8 == 0 } && to.cast::<u64>().is_aligned() {
                // Of an array the compiler would store each word twice.
                for n in 0..N / 8 {
                    let word = bytes.as_ptr().cast::<u64>().add(n).read_unaligned();
                    to.cast::<u64>().add(n).write_volatile(word);
                }
            } else if const { N % 8 == 0 } {
                write_bytes(to, bytes);
            } else {
                to.cast::<[u8; N]>().write_volatile(*bytes);
            }
        }
        self.mapped.sync_for_device(offset, N);
        Ok(())
    }

    /// Returns an entry for the whole buffer, for the device to read: also for what is left in it
    /// of what it was used for before.
    #[inline]
    pub fn whole(&self) -> wr::Sge<'_> {
        self.mapped.whole()
    }

    /// Returns an entry for the bytes in `range`, for the device to read. Fails with `EINVAL` if
    /// the range is empty or not inside of the buffer. A request without memory has no entries.
    #[inline]
    pub fn sge(&self, range: Range<usize>) -> Result<wr::Sge<'_>> {
        self.mapped.sge(range)
    }
}

impl<D: DeviceWrites> Buf<D> {
    /// Returns the bytes of a message that was received into the whole buffer, whose completion is
    /// `wc`; none if the peer has written elsewhere, with immediate data.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, wc::Success};
    /// use zerocopy::byteorder::little_endian::U32;
    ///
    /// #[derive(FromBytes)]
    /// #[repr(C)]
    /// struct Header {
    ///     id: U32,
    ///     len: U32,
    /// }
    ///
    /// /// Returns whether a message is whole.
    /// fn is_whole(buf: &mut Buf<FromDevice>, wc: &Success<'_>) -> Result<bool> {
    ///     let message = buf.received(wc);
    ///     let (header, payload) = message.header::<Header>()?;
    ///     Ok(payload.len() == header.len.get() as usize)
    /// }
    /// ```
    #[inline]
    pub fn received(&mut self, wc: &Success<'_>) -> RecvBytes<'_> {
        RecvBytes::new(self.cpu(), wc.recv_len())
    }

    /// Returns an entry for the whole buffer, for the device to write.
    #[inline]
    pub fn whole_mut(&self) -> wr::SgeMut<'_> {
        wr::SgeMut(self.mapped.whole())
    }

    /// Returns an entry for the bytes in `range`, for the device to write. Fails as [`Buf::sge`].
    #[inline]
    pub fn sge_mut(&self, range: Range<usize>) -> Result<wr::SgeMut<'_>> {
        self.mapped.sge(range).map(wr::SgeMut)
    }
}

/// The bytes of a buffer, for the CPU, while the device does not access them.
pub struct CpuView<'a>(&'a mut Mapped);

impl Deref for CpuView<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: By the invariant of `Mapped` the memory is initialised and `len` bytes long. The
        // borrow of the buffer is exclusive, so neither a request nor another thread uses it.
        unsafe { core::slice::from_raw_parts(self.0.memory.as_ptr(), self.0.len()) }
    }
}

impl DerefMut for CpuView<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: By the invariant of `Mapped` the memory is initialised and `len` bytes long. The
        // borrows of the buffer and of this view are exclusive, so nothing else uses it.
        unsafe { core::slice::from_raw_parts_mut(self.0.memory.as_ptr(), self.0.len()) }
    }
}

impl Drop for CpuView<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.sync_for_device(0, self.0.len());
    }
}

/// A direction of DMA, known when code is compiled ([`Direction`]) or when it runs ([`OneWay`]).
pub trait AnyDirection: Sealed + Send + Sync + Unpin + 'static {}

/// The direction of DMA, as `enum dma_data_direction`.
pub trait Direction: AnyDirection {
    /// The C value.
    #[doc(hidden)]
    const RAW: bindings::dma_data_direction;
}

/// A [`Direction`] in which the device reads memory: for SEND, RDMA WRITE and peers that read.
#[diagnostic::on_unimplemented(
    message = "the device does not read `{Self}` memory",
    note = "map it `ToDevice` or `Bidirectional`"
)]
pub trait DeviceReads: Direction {}

/// A [`Direction`] in which the device writes: for receives, RDMA READ and peers that write.
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
        impl AnyDirection for $name {}
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

/// The device reads the memory or writes it: which of the two, its owner chooses when it is mapped,
/// as that of a block request, which is a write or a read.
///
/// Memory of this direction is an [`SgMap`](crate::sg::SgMap), and peers get the access that goes
/// with its direction, by [`RegWr::remote_one_way`](crate::wr::SendWr::remote_one_way).
pub enum OneWay {}
impl Sealed for OneWay {}
impl AnyDirection for OneWay {}

/// Memory that is physically contiguous, and freed when it is dropped.
///
/// # Invariants
///
/// `start` is `len` initialised bytes that this owns: pages of `alloc_pages_exact` if
/// [`Contiguous::is_exact`], of kmalloc otherwise.
struct Contiguous {
    start: NonNull<u8>,
    len: usize,
}

impl Contiguous {
    /// Returns whether `kmalloc`, which gives a power of two of pages, would give more than needed.
    fn is_exact(len: usize) -> bool {
        !len.div_ceil(PAGE_SIZE).is_power_of_two()
    }

    fn zeroed(len: usize) -> Result<Self> {
        let start = if Self::is_exact(len) {
            // SAFETY: Any length may be asked for, in process context.
            unsafe { bindings::rdma_helper_alloc_pages_exact(len) }.cast()
        } else {
            let bytes = KVec::<u8>::zeroed(len, GFP_KERNEL | __GFP_NOWARN)?;
            bytes.into_raw_parts().0
        };
        // INVARIANT: These bytes were just allocated in this way, and are zero.
        Ok(Self {
            start: NonNull::new(start).ok_or(ENOMEM)?,
            len,
        })
    }
}

impl Drop for Contiguous {
    fn drop(&mut self) {
        let start = self.start.as_ptr();
        let len = self.len;
        // SAFETY: By the type invariant these are pages of `alloc_pages_exact` or the parts of a
        // vector, by their length, and nothing else owns them.
        unsafe {
            if Self::is_exact(len) {
                bindings::free_pages_exact(start.cast(), len);
            } else {
                drop(KVec::from_raw_parts(start, len, len));
            }
        }
    }
}

/// Mapped memory, which is unmapped and freed when it is dropped.
///
/// One function drops all of it, which is not generic: a ULP's code that drops a buffer is a call.
///
/// # Invariants
///
/// - `memory` is `len` initialised bytes: a [`Contiguous`] that this owns, or a part of `piece`
///   that nothing else uses. They are mapped at `addr` for the device of `pd`, in direction `dir`,
///   or that is [`VIRT`]: the CPU and the device always see the same memory.
/// - `pd` and `piece` are dropped with this alone.
// The fields that a post uses are first, to share a cache line with the request's own.
#[doc(hidden)]
#[repr(C)]
pub struct Mapped {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    lkey: u32,
    pub(crate) pd: ManuallyDrop<Pd>,
    memory: NonNull<u8>,
    dir: bindings::dma_data_direction,
    /// The length of what was filled last.
    filled: u32,
    piece: ManuallyDrop<Option<Arc<Mapped>>>,
}

/// That of the memory of software devices, which is not synchronised (`ib_uses_virt_dma`).
const VIRT: bindings::dma_data_direction = bindings::dma_data_direction::DMA_NONE;

// SAFETY: It owns plain memory, and DMA may be unmapped from any thread.
unsafe impl Send for Mapped {}
// SAFETY: A shared reference gives access to the bytes only by copies that may race.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn alloc(pd: &Pd, len: usize, dir: bindings::dma_data_direction) -> Result<Self> {
        let len32 = u32::try_from(len)?;
        if len == 0 {
            return Err(EINVAL);
        }
        let memory = Contiguous::zeroed(len)?;
        let dev = pd.device().as_raw();
        let mut addr = 0;
        // SAFETY: The memory is valid for `len` bytes, which are physically contiguous, and the
        // device is registered while `pd` lives.
        to_result(unsafe {
            let memory = memory.start.as_ptr().cast();
            bindings::rdma_helper_dma_map_single(dev, memory, len, dir, &mut addr)
        })?;
        // SAFETY: The device is registered while `pd` lives.
        let is_virt = unsafe { bindings::rdma_helper_uses_virt_dma(dev) };
        // INVARIANT: The memory was just allocated, initialised and mapped.
        Ok(Self {
            addr,
            len: len32,
            lkey: pd.local_dma_lkey(),
            pd: ManuallyDrop::new(pd.clone()),
            memory: ManuallyDrop::new(memory).start,
            dir: if is_virt { VIRT } else { dir },
            filled: 0,
            piece: ManuallyDrop::new(None),
        })
    }

    /// Returns `len` bytes of a piece, which are part of no other buffer.
    fn part(piece: &Arc<Self>, offset: usize, len: usize) -> Result<Self> {
        let memory = piece.bytes(offset, len)?.cast();
        // INVARIANT: The bytes are in the piece, which is mapped by its invariant, and nothing else
        // uses them.
        Ok(Self {
            addr: piece.addr.wrapping_add(offset as u64),
            len: u32::try_from(len)?,
            lkey: piece.lkey,
            pd: piece.pd.clone(),
            memory: NonNull::new(memory).ok_or(EINVAL)?,
            dir: piece.dir,
            filled: 0,
            piece: ManuallyDrop::new(Some(piece.clone())),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    fn sync_for_cpu(&self) {
        if self.dir != VIRT {
            let dev = self.pd.device().as_raw();
            let len = self.len();
            // SAFETY: By the type invariant the memory is mapped for the device in this direction.
            unsafe { bindings::rdma_helper_dma_sync_for_cpu(dev, self.addr, len, self.dir) };
        }
    }

    /// Synchronises `len` bytes at `offset`, which are inside of the memory: where memory is
    /// bounced, the device may have written beside them.
    #[inline]
    fn sync_for_device(&self, offset: usize, len: usize) {
        if self.dir != VIRT {
            let dev = self.pd.device().as_raw();
            let addr = self.addr.wrapping_add(offset as u64);
            // SAFETY: By the type invariant the memory is mapped for the device in this direction.
            unsafe { bindings::rdma_helper_dma_sync_for_device(dev, addr, len, self.dir) };
        }
    }

    /// Returns the address of `len` bytes at `offset`.
    #[inline]
    fn bytes(&self, offset: usize, len: usize) -> Result<*mut c_void> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(self.memory.as_ptr().wrapping_add(offset).cast()),
            _ => Err(EINVAL),
        }
    }

    /// Copies bytes out while the device may be writing them.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        let from = self.bytes(offset, to.len())?;
        let len = to.len();
        self.sync_for_cpu();
        // SAFETY: The range is inside of the memory. The copy is C's, so bytes that the device
        // changes meanwhile are torn at worst.
        unsafe { bindings::rdma_helper_memcpy(to.as_mut_ptr().cast(), from, len) };
        Ok(())
    }

    /// Copies bytes in while the device may be reading them.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        let to = self.bytes(offset, from.len())?;
        let len = from.len();
        // SAFETY: The range is inside of the memory. The copy is C's, so bytes that the device
        // reads meanwhile are torn at worst.
        unsafe { bindings::rdma_helper_memcpy(to, from.as_ptr().cast(), len) };
        self.sync_for_device(offset, len);
        Ok(())
    }

    #[inline]
    fn whole(&self) -> wr::Sge<'_> {
        // INVARIANT: By the type invariant this is mapped. It lives as long as the borrow.
        wr::Sge {
            addr: self.addr,
            length: self.len,
            lkey: self.lkey,
            pd: self.pd.id(),
            _memory: PhantomData,
        }
    }

    #[inline]
    fn sge(&self, range: Range<usize>) -> Result<wr::Sge<'_>> {
        // To some devices an entry of length zero means two gigabytes.
        if range.start >= range.end || range.end > self.len() {
            return Err(EINVAL);
        }
        // INVARIANT: This is a part of the mapped memory, which lives as long as the borrow.
        Ok(wr::Sge {
            addr: self.addr.wrapping_add(range.start as u64),
            length: range.end.wrapping_sub(range.start) as u32,
            ..self.whole()
        })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.piece.is_none() {
            let dev = self.pd.device().as_raw();
            let len = self.len();
            // SAFETY: By the type invariant the memory is mapped at `addr` for this device in this
            // direction, which a software device does not look at. A request borrows the memory
            // from its owner, so none uses it.
            unsafe { bindings::rdma_helper_dma_unmap_single(dev, self.addr, len, self.dir) };
            // INVARIANT: This was one, and is used no more.
            drop(Contiguous {
                start: self.memory,
                len,
            });
        }
        // SAFETY: By the type invariant neither was dropped, and neither is used after this.
        unsafe {
            ManuallyDrop::drop(&mut self.piece);
            ManuallyDrop::drop(&mut self.pd);
        }
    }
}
