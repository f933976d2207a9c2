// SPDX-License-Identifier: GPL-2.0

//! Scatter lists.
//!
//! [`SgBuf`] is memory in pages of the ULP's own. [`SgMap`] is memory of another subsystem, such as
//! a bio's, whose [owner](SgOwner) comes back when the list is no longer mapped.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h) (`struct
//! sg_table`)

use crate::{
    dma::{
        AnyDirection,
        DeviceReads,
        Direction,
        FromDevice,
        OneWay,
        ToDevice, //
    },
    lost,
    mr,
    pd::Pd,
    prelude::internal::*,
    wr::{
        Sge,
        SgeList, //
    }, //
};
use core::ops::{
    Deref,
    Range, //
};
use kernel::{
    alloc::flags::__GFP_ZERO,
    page::{
        Page,
        PAGE_SIZE, //
    }, //
};

/// DMA-mapped memory in pages, for a [`Region`]. The CPU accesses its bytes through
/// [`SgBuf::cpu`], which borrows it exclusively.
///
/// [`Region`]: crate::mr::Region
pub type SgBuf<D> = SgMap<Pages, D>;

impl<D: Direction> SgBuf<D> {
    /// Allocates `len` zeroed bytes, in as many pages as that takes, and maps them (`alloc_page`,
    /// `sg_alloc_table_from_pages`, `ib_dma_map_sg`). Fails with `ENOMEM`, as for more than 2 GiB
    /// on most kernels; `EINVAL` for a length of zero or of 4 GiB and more; `EIO` if the memory
    /// could not be mapped.
    pub fn alloc(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Self> {
        Ok(Self::new(pd, Pages::alloc(len, cx)?)?)
    }

    /// Returns the bytes, for the CPU (`dma_sync_sgtable_for_cpu`, and `..._for_device` when the
    /// view is dropped).
    pub fn cpu(&mut self) -> CpuPages<'_> {
        // SAFETY: This is borrowed exclusively, and the pages and the mapping with it.
        unsafe { CpuPages::new(Some(&self.owner), Some(self.list.mapping.0), None) }
    }
}

/// A table of its own, all of whose entries are used, and which is freed when this is dropped.
struct OwnTable(bindings::sg_table);

impl OwnTable {
    fn sgl<D: Direction>(&self) -> Sgl<D> {
        Sgl::new(self.0.sgl, self.0.orig_nents)
    }
}

// SAFETY: The entries are memory that may be freed from any thread, and nothing else has their
// address.
unsafe impl Send for OwnTable {}
// SAFETY: A shared reference gives no access to the table.
unsafe impl Sync for OwnTable {}

impl Drop for OwnTable {
    fn drop(&mut self) {
        // SAFETY: The table is empty or was allocated by C, and is not used again.
        unsafe { bindings::sg_free_table(&raw mut self.0) };
    }
}

/// Memory in pages, with the table that lists them: the owner of what [`Ctx::alloc`] allocates.
///
/// [`Ctx::alloc`]: crate::rw::Ctx::alloc
pub struct Pages(KBox<PagesInner>);

/// # Invariants
///
/// `table` lists `pages`, one entry each, `len` bytes in all: initialised, not in high memory.
struct PagesInner {
    table: OwnTable,
    pages: KVec<Page>,
    len: usize,
}

impl Pages {
    /// Allocates `len` zeroed bytes.
    pub(crate) fn alloc(len: usize, _cx: &Sleepable) -> Result<Self> {
        if len == 0 || u32::try_from(len).is_err() {
            return Err(EINVAL);
        }
        let count = len.div_ceil(PAGE_SIZE);
        let flags = GFP_KERNEL | __GFP_NOWARN;
        let mut pages = KVec::with_capacity(count, flags)?;
        let mut raw = KVec::with_capacity(count, flags)?;
        for _ in 0..count {
            let page = Page::alloc_page(GFP_KERNEL | __GFP_ZERO)?;
            raw.push_within_capacity(page.as_ptr())?;
            pages.push_within_capacity(page)?;
        }
        let table = OwnTable(bindings::sg_table::default());
        let mut this = Self(KBox::new(PagesInner { table, pages, len }, GFP_KERNEL)?);
        // Every device can use entries of one page; an IOMMU may merge them.
        //
        // SAFETY: There are `count` pages, at least one, and the table is valid for writes.
        to_result(unsafe {
            bindings::sg_alloc_table_from_pages_segment(
                &raw mut this.0.table.0,
                raw.as_mut_ptr(),
                count.try_into()?,
                0,
                len,
                PAGE_SIZE as u32,
                bindings::GFP_KERNEL,
            )
        })?;
        // INVARIANT: The table lists the pages, zeroed and, by GFP_KERNEL, not in high memory.
        Ok(this)
    }

    /// Copies bytes out while a device may be writing them.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result {
        // SAFETY: `to` is valid for writes of its length.
        unsafe { self.copy(offset, to.as_mut_ptr(), to.len(), true) }
    }

    /// Copies bytes in while a device may be reading them.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result {
        // SAFETY: `from` is valid for reads of its length.
        unsafe { self.copy(offset, from.as_ptr().cast_mut(), from.len(), false) }
    }

    /// Copies page by page, as the entries of the table may be cut meanwhile.
    ///
    /// # Safety
    ///
    /// `bytes` is valid for reads of `len` bytes; for writes, if the copy is `out` of the pages.
    unsafe fn copy(&self, offset: usize, bytes: *mut u8, len: usize, out: bool) -> Result {
        if offset.checked_add(len).is_none_or(|end| end > self.0.len) {
            return Err(EINVAL);
        }
        let mut done = 0;
        let mut skip = offset % PAGE_SIZE;
        for page in self.0.pages.iter().skip(offset / PAGE_SIZE) {
            let part = (PAGE_SIZE - skip).min(len - done);
            // SAFETY: By the invariant of `PagesInner` the page is not in high memory, so it has an
            // address. The part is in it, and one of `bytes`, which is valid, as the caller
            // promises. The copy is C's, so bytes that a device changes meanwhile are torn at
            // worst.
            unsafe {
                let page = bindings::rdma_helper_page_address(page.as_ptr()).byte_add(skip);
                let bytes = bytes.add(done).cast();
                let (to, from) = if out { (bytes, page) } else { (page, bytes) };
                bindings::rdma_helper_memcpy(to, from, part);
            }
            done += part;
            skip = 0;
            if done == len {
                break;
            }
        }
        Ok(())
    }
}

// SAFETY: The list is an allocation of its own, of pages that nothing else has, and all of its
// entries are filled, as `sg_alloc_table_from_pages_segment()` does. Their bytes are accessed by
// `CpuPages` only, and by copies that may race.
unsafe impl<D: Direction> SgOwner<D> for Pages {
    fn sgl(&mut self) -> Sgl<D> {
        self.0.table.sgl()
    }
}

/// The bytes of pages, for the CPU, while no device accesses them.
///
/// # Invariants
///
/// The pages, and `mapping`, if some are mapped, are borrowed exclusively for `'a`.
pub struct CpuPages<'a> {
    /// `None` of a [`Ctx`](crate::rw::Ctx) that has lost them.
    pages: Option<&'a Pages>,
    mapping: Option<Mapping>,
    /// Keeps the mapping of a [`Ctx`](crate::rw::Ctx) that is prepared.
    _held: Option<lost::Held<'a>>,
}

impl<'a> CpuPages<'a> {
    /// Makes the view of pages, and of the mapping of some of them, if there is one, which `held`
    /// keeps if it is that of a transfer.
    ///
    /// # Safety
    ///
    /// The pages, and what unmaps them, are borrowed exclusively for `'a`.
    pub(crate) unsafe fn new(
        pages: Option<&'a Pages>,
        mapping: Option<Mapping>,
        held: Option<lost::Held<'a>>,
    ) -> Self {
        if let Some(mapping) = &mapping {
            mapping.sync_for_cpu();
        }
        // INVARIANT: The pages are borrowed exclusively, from what unmaps them.
        Self {
            pages,
            mapping,
            _held: held,
        }
    }

    /// Copies bytes out, from `offset` on. Fails with `EINVAL` if there are not so many.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_out(offset, to)
    }

    /// Copies bytes in, from `offset` on. Fails with `EINVAL` if there is no room for them.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result {
        self.pages.ok_or(EINVAL)?.copy_in(offset, from)
    }

    /// Returns the pages one after the other, the last one up to the end of the memory.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, len) = match self.pages {
            Some(pages) => (&pages.0.pages[..], pages.0.len),
            None => (&[][..], 0),
        };
        pages.iter().enumerate().map(move |(i, page)| {
            let len = PAGE_SIZE.min(len - i * PAGE_SIZE);
            // SAFETY: By the invariant of `PagesInner` the page is initialised and, not being in
            // high memory, has an address. By the type invariant the pages are borrowed
            // exclusively, and so is this view; each page is returned once.
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
/// `table` is a list that is mapped for `dev`, which is valid, in direction `dir`.
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
    /// Returns the table, which C only reads, or changes back.
    pub(crate) fn table(&self) -> *mut bindings::sg_table {
        ptr::from_ref(&self.table).cast_mut()
    }

    pub(crate) fn sync_for_cpu(&self) {
        // SAFETY: By the type invariant the table is mapped for the device in this direction.
        unsafe { bindings::rdma_helper_dma_sync_sgtable_for_cpu(self.dev, self.table(), self.dir) };
    }

    pub(crate) fn sync_for_device(&self) {
        let dev = self.dev;
        let table = self.table();
        let dir = self.dir;
        // SAFETY: By the type invariant the table is mapped for the device in this direction.
        unsafe { bindings::rdma_helper_dma_sync_sgtable_for_device(dev, table, dir) };
    }
}

/// A [`Mapping`] that is unmapped when this is dropped.
///
/// # Invariants
///
/// The list and the device exist until this is dropped, and nothing uses the mapping then.
pub(crate) struct OwnMapping(pub(crate) Mapping);

impl Drop for OwnMapping {
    #[inline]
    fn drop(&mut self) {
        let Mapping { dev, table, dir } = &self.0;
        // SAFETY: By the invariant of `Mapping` the table is mapped for the device in this
        // direction, and by that of this type it is no longer used.
        unsafe {
            bindings::rdma_helper_dma_unmap_sg(*dev, table.sgl, table.orig_nents as c_int, *dir)
        };
    }
}

/// A scatter list, by value: the address of its first entry, and the number of those that are
/// filled.
///
/// C keeps both in a `struct sg_table`, which also has the number of entries that were allocated:
/// `blk_rq_map_sg()` fills as many of them as the request has segments.
///
/// For memory that goes [`OneWay`] it also has the direction.
pub struct Sgl<D: AnyDirection> {
    first: *mut bindings::scatterlist,
    entries: u32,
    dir: bindings::dma_data_direction,
    _direction: PhantomData<D>,
}

impl<D: Direction> Sgl<D> {
    /// Names the first `entries` entries of a list, which `sg_next` finds.
    pub fn new(first: *mut bindings::scatterlist, entries: u32) -> Self {
        Self::from_raw(first, entries, D::RAW)
    }
}

impl Sgl<OneWay> {
    /// Names the first `entries` entries of a list, which `sg_next` finds, of memory that the
    /// device reads.
    pub fn to_device(first: *mut bindings::scatterlist, entries: u32) -> Self {
        Self::from_raw(first, entries, ToDevice::RAW)
    }

    /// Names the first `entries` entries of a list, which `sg_next` finds, of memory that the
    /// device writes.
    pub fn from_device(first: *mut bindings::scatterlist, entries: u32) -> Self {
        Self::from_raw(first, entries, FromDevice::RAW)
    }
}

impl<D: AnyDirection> Sgl<D> {
    fn from_raw(
        first: *mut bindings::scatterlist,
        entries: u32,
        dir: bindings::dma_data_direction,
    ) -> Self {
        Self {
            first,
            entries,
            dir,
            _direction: PhantomData,
        }
    }

    /// Returns a table of the entries, none of which is mapped yet.
    pub(crate) fn into_table(self) -> bindings::sg_table {
        bindings::sg_table {
            sgl: self.first,
            nents: self.entries,
            orig_nents: self.entries,
        }
    }
}

/// An owner of memory that a scatter list describes, which a device may access in direction `D`, as
/// a request of the block layer or pinned pages behind a ULP's own type.
///
/// The list is the owner's, which has allocated it and frees it: mostly it is a part of the request
/// whose memory it describes. Documentation/mr.rst has an example.
///
/// [`Qp::post_rw`]: crate::qp::Qp::post_rw
///
/// # Examples
///
/// ```
/// use kernel::bindings;
/// use rdma::{prelude::*, sg::{SgOwner, Sgl}};
///
/// struct Block {
///     list: KBox<bindings::scatterlist>,
///     _bytes: KBox<[u8; 512]>,
/// }
///
/// impl Block {
///     fn new(bytes: KBox<[u8; 512]>) -> Result<Self> {
///         let mut list = KBox::new(bindings::scatterlist::default(), GFP_KERNEL)?;
///         // SAFETY: The list is valid for writes, and the bytes are from kmalloc.
///         unsafe { bindings::sg_init_one(&raw mut *list, bytes.as_ptr().cast(), 512) };
///         Ok(Self { list, _bytes: bytes })
///     }
/// }
///
/// // SAFETY: The list is in a box and has one entry, of bytes that only this has.
/// unsafe impl SgOwner<Bidirectional> for Block {
///     fn sgl(&mut self) -> Sgl<Bidirectional> {
///         Sgl::new(&raw mut *self.list, 1)
///     }
/// }
/// ```
///
/// # Safety
///
/// From the call of [`SgOwner::sgl`] on until the owner is dropped or given back:
///
/// - the entries that it has returned stay where they are, also if the owner is moved, and nothing
///   else uses them: the first and the last entry of a range are cut meanwhile;
/// - there is at least one, `sg_next` leads from each to the next one and may be called for the
///   last one, too, and none is empty;
/// - they are pages that exist, and neither freed nor used for anything else;
/// - nothing reads these by reference if the device writes (all directions but [`ToDevice`], and
///   [`Sgl::to_device`]), and nothing writes them by reference.
///
/// The owner may be dropped in any context that a region or a [`Ctx`](crate::rw::Ctx) of it is
/// dropped in, in the handler of a transfer, and in a work item. That must not wait for the device
/// or for a client to go. An owner that keeps the QP is not for transfers by that on iWARP: see
/// [`Qp::post_rw`].
pub unsafe trait SgOwner<D: AnyDirection>: Send + Unpin + 'static {
    /// Returns the list. Called when it is not mapped.
    fn sgl(&mut self) -> Sgl<D>;
}

/// DMA-mapped memory of another owner, which comes back when no device or peer can reach it.
///
/// An owner that must not be dropped goes into a region by [`Region::map`], which gives it back if
/// it fails, as [`Region::new`] does not.
///
/// [`Region::map`]: crate::mr::Region::map
/// [`Region::new`]: crate::mr::Region::new
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, sg::{SgList, SgMap}};
///
/// /// Lets peers read a table that the ULP goes on using.
/// fn publish(pd: &Pd, table: Arc<KVec<u8>>, cx: &Sleepable) -> Result {
///     let memory = SgMap::<_, ToDevice>::new(pd, SgList::new(table, cx)?)?;
///     let region = Region::new(memory, cx)?;
///     // When it is idle again:
///     let (_mr, memory) = region.into_parts().map_err(|_| EBUSY)?;
///     let _table: Arc<KVec<u8>> = memory.into_owner().into_inner();
///     Ok(())
/// }
/// ```
///
/// # Invariants
///
/// This is covariant in `O`, as it is the only handle of the owner, and gives it back by value.
pub struct SgMap<O: SgOwner<D>, D: AnyDirection> {
    // The list is unmapped before its owner is dropped.
    pub(crate) list: MappedList,
    pub(crate) owner: O,
    _direction: PhantomData<D>,
}

// SAFETY: A shared reference gives access to the owner only if that is `Pages`, which is `Sync`,
// and to the list, which is only read then.
unsafe impl<O: SgOwner<D>, D: AnyDirection> Sync for SgMap<O, D> {}

/// Memory that could not be mapped, or not be put into a [`Ctx`](crate::rw::Ctx).
pub struct SgMapError<O> {
    /// Its owner.
    pub owner: O,
    /// The cause.
    pub error: Error,
}

impl<O> From<SgMapError<O>> for Error {
    fn from(e: SgMapError<O>) -> Self {
        e.error
    }
}

impl<O: SgOwner<D>, D: AnyDirection> SgMap<O, D> {
    /// Maps the memory of an owner (`ib_dma_map_sg`). Any context. Gives the owner back with
    /// `EINVAL` for no bytes, or 4 GiB and more; `EIO` if mapping fails.
    #[inline]
    pub fn new(pd: &Pd, owner: O) -> Result<Self, SgMapError<O>> {
        Self::with_pd(pd.clone(), owner)
    }

    /// As [`SgMap::new`], with a handle of the PD that [`SgMap::into_parts`] gives back. A ULP that
    /// maps one list after the other has the handle counted once.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, sg::{SgMap, SgOwner}};
    /// /// Maps the memory of two owners for a moment each.
    /// fn two<O: SgOwner<ToDevice>>(pd: Pd, [a, b]: [O; 2]) -> Result<[O; 2]> {
    ///     let (a, pd) = SgMap::with_pd(pd, a)?.into_parts();
    ///     let (b, _) = SgMap::with_pd(pd, b)?.into_parts();
    ///     Ok([a, b])
    /// }
    /// ```
    pub fn with_pd(pd: Pd, mut owner: O) -> Result<Self, SgMapError<O>> {
        let sgl = owner.sgl();
        let dir = sgl.dir;
        // SAFETY: The owner keeps the memory until the list was unmapped.
        match unsafe { MappedList::new(pd, sgl.into_table(), dir) } {
            Ok(list) => Ok(Self {
                list,
                owner,
                _direction: PhantomData,
            }),
            Err(error) => Err(SgMapError { owner, error }),
        }
    }

    /// Unmaps the memory (`ib_dma_unmap_sg`) and gives its owner back. Any context.
    pub fn into_owner(self) -> O {
        self.into_parts().0
    }

    /// Unmaps the memory (`ib_dma_unmap_sg`) and gives its owner and the PD back. Any context.
    pub fn into_parts(self) -> (O, Pd) {
        let MappedList { mapping, pd, .. } = self.list;
        drop(mapping);
        (self.owner, pd)
    }
}

impl<O: SgOwner<D>, D: DeviceReads> SgMap<O, D> {
    /// Adds entries for all of the memory, for the device to read, to a list, behind those of a
    /// header: data that go with a message instead of a key to them. Fails with `ENOSPC` if there
    /// is no room, and with `EINVAL` for more bytes than a message has, which is 2 GiB; the list is
    /// as it was then.
    ///
    /// Their number is that of the list after mapping, by which an IOMMU may have merged some
    /// (`ib_dma_map_sg`).
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, sg::{SgMap, SgOwner}, wr::SgeList};
    /// /// Sends a command, and the data of a write that has up to four segments with it.
    /// fn write<'a, O: SgOwner<ToDevice>>(
    ///     command: &'a Buf<ToDevice>,
    ///     data: &'a SgMap<O, ToDevice>,
    /// ) -> Result<SendWr<'a, 5>> {
    ///     let mut sges = SgeList::new(command.whole());
    ///     data.append_to(&mut sges)?;
    ///     Ok(SendWr::send(sges))
    /// }
    /// ```
    #[inline]
    pub fn append_to<'a, const N: usize>(&'a self, list: &mut SgeList<Sge<'a>, N>) -> Result {
        self.list.append_to(&mut list.sges, &mut list.len)
    }
}

impl<O: SgOwner<OneWay>> SgMap<O, OneWay> {
    /// As [`SgMap::append_to`] of memory whose direction is known when code is compiled. Fails with
    /// `EACCES` if the device writes the memory.
    #[inline]
    pub fn append_to<'a, const N: usize>(&'a self, list: &mut SgeList<Sge<'a>, N>) -> Result {
        if !self.is_to_device() {
            return Err(EACCES);
        }
        self.list.append_to(&mut list.sges, &mut list.len)
    }

    /// Returns whether the device reads the memory, so that it does not write it.
    pub(crate) fn is_to_device(&self) -> bool {
        self.list.mapping.0.dir == ToDevice::RAW
    }
}

/// Returns the number of bytes of a list, and of the pages of an MR that they touch, at the most.
///
/// # Safety
///
/// The table is of a list that [`SgOwner::sgl`] has returned, and its owner is valid.
pub(crate) unsafe fn extent(table: &bindings::sg_table) -> Result<(u32, u32)> {
    let mut len = 0_u32;
    let mut pages = 0_u32;
    // SAFETY: The list has so many entries, which `sg_next` finds, by the contract of `SgOwner`.
    unsafe {
        let mut sg = table.sgl;
        for left in (0..table.orig_nents).rev() {
            let offset = (*sg).offset as usize;
            let length = (*sg).length;
            len = len.checked_add(length).ok_or(EINVAL)?;
            let touched = (offset % mr::PAGE_SIZE + length as usize).div_ceil(mr::PAGE_SIZE);
            pages = pages.saturating_add(touched as u32);
            if left != 0 {
                sg = bindings::sg_next(sg);
            }
        }
    }
    if len == 0 {
        return Err(EINVAL);
    }
    Ok((len, pages))
}

/// The extent of an entry of a scatterlist, to be restored.
///
/// # Invariants
///
/// The entry is valid, and nothing else uses its list while this exists.
pub(crate) struct Extent {
    sg: *mut bindings::scatterlist,
    offset: u32,
    length: u32,
}

impl Extent {
    pub(crate) fn restore(&self) {
        // SAFETY: By the type invariant the entry is valid, and nothing else uses it.
        unsafe {
            (*self.sg).offset = self.offset;
            (*self.sg).length = self.length;
        }
    }
}

/// Cuts the ends of a list to a range, as C transfers all of an entry. (It takes an offset into the
/// first one, but siw ignores that.) Returns the first entry of the range, the number of its
/// entries, and what the ends were before, if they were cut.
///
/// # Safety
///
/// The list that begins with `first` is valid, and nothing else uses it while there is what is
/// returned. The range is not empty, and inside of the memory that the list describes.
pub(crate) unsafe fn cut(
    mut first: *mut bindings::scatterlist,
    range: &Range<usize>,
) -> (*mut bindings::scatterlist, u32, Option<[Extent; 2]>) {
    // SAFETY: The list is valid, and has both ends of the range, as the caller promises.
    unsafe {
        let mut skip = range.start;
        while skip >= (*first).length as usize {
            skip -= (*first).length as usize;
            first = bindings::sg_next(first);
        }
        let mut left = skip + range.len();
        let mut last = first;
        let mut count = 1;
        while left > (*last).length as usize {
            left -= (*last).length as usize;
            last = bindings::sg_next(last);
            count += 1;
        }
        let is_cut = skip != 0 || left != (*last).length as usize;
        let ends = is_cut.then(|| {
            // INVARIANT: The caller promises that nothing else uses the list.
            let ends = [first, last].map(|sg| Extent {
                sg,
                offset: (*sg).offset,
                length: (*sg).length,
            });
            (*last).length = left as u32;
            (*first).offset += skip as u32;
            (*first).length -= skip as u32;
            ends
        });
        (first, count, ends)
    }
}

/// Maps a list; returns its number of bytes, and of pages at the most. The caller makes the
/// [`MappedList`], which is not moved then.
///
/// # Safety
///
/// The table is of a list that [`SgOwner::sgl`] has returned, which is not mapped, and its owner is
/// valid. The device is registered.
unsafe fn map_table(
    dev: *mut bindings::ib_device,
    table: &mut bindings::sg_table,
    dir: bindings::dma_data_direction,
) -> Result<(u32, u32)> {
    // SAFETY: The list is valid and not mapped, and the device is registered, as the caller
    // promises.
    unsafe {
        let extent = extent(table)?;
        match bindings::rdma_helper_dma_map_sgtable(dev, table, dir) {
            0 => Ok(extent),
            _ => Err(EIO),
        }
    }
}

/// Returns the length of an entry for the device (`sg_dma_len`, a macro).
///
/// # Safety
///
/// The entry is valid, and mapped.
#[inline]
unsafe fn dma_len(sg: *const bindings::scatterlist) -> u32 {
    // SAFETY: The entry is valid, as the caller promises.
    unsafe {
        #[cfg(CONFIG_NEED_SG_DMA_LENGTH)]
        return (*sg).dma_length;
        #[cfg(not(CONFIG_NEED_SG_DMA_LENGTH))]
        return (*sg).length;
    }
}

/// A list that is mapped.
///
/// # Invariants
///
/// `mapping` is of a list of `len` bytes in at most `pages` pages, for the device of `pd`.
#[doc(hidden)]
pub struct MappedList {
    pub(crate) mapping: OwnMapping,
    pub(crate) pd: Pd,
    pub(crate) len: u32,
    pub(crate) pages: u32,
}

impl MappedList {
    /// Maps a list.
    ///
    /// # Safety
    ///
    /// The table is of a list that [`SgOwner::sgl`] has returned. Its owner exists until the list
    /// is dropped.
    #[inline]
    unsafe fn new(
        pd: Pd,
        mut table: bindings::sg_table,
        dir: bindings::dma_data_direction,
    ) -> Result<Self> {
        let dev = pd.device().as_raw();
        // SAFETY: `SgOwner::sgl` has returned the list, so it is valid and not mapped. The device
        // is registered while `pd` lives.
        let (len, pages) = unsafe { map_table(dev, &mut table, dir) }?;
        // INVARIANT: The list was just mapped for the PD's device, which is valid while `pd` is.
        // The memory is valid, as the caller promises. A request borrows it from its owner, and the
        // region that it may have been of ends before this is dropped, so nothing uses it then.
        Ok(Self {
            mapping: OwnMapping(Mapping { dev, table, dir }),
            pd,
            len,
            pages,
        })
    }

    /// Adds entries for all of the memory to the first `len`. Not inlined, so that it is not in
    /// each ULP.
    #[inline(never)]
    fn append_to<'a>(&'a self, sges: &mut [Sge<'a>], len: &mut usize) -> Result {
        let room = sges.get_mut(*len..).ok_or(ENOSPC)?;
        *len += self.write_to(room, |sge| sge)? as usize;
        Ok(())
    }

    /// Writes C's entries for all of the memory, and returns their number. Fails as
    /// [`SgMap::append_to`]. Not inlined, so that it is not in each ULP.
    #[inline(never)]
    pub(crate) fn write_sges(&self, to: &mut [MaybeUninit<bindings::ib_sge>]) -> Result<u32> {
        self.write_to(to, |sge| MaybeUninit::new(sge.to_raw()))
    }

    /// Writes an entry for each of the list, and returns their number.
    #[inline]
    fn write_to<'a, T>(&'a self, to: &mut [T], entry: impl Fn(Sge<'a>) -> T) -> Result<u32> {
        // To some devices the highest bit of a length has another meaning.
        if self.len > i32::MAX as u32 {
            return Err(EINVAL);
        }
        let table = &self.mapping.0.table;
        let mut sg = table.sgl;
        let room = to
            .get_mut(..table.nents as usize)
            .and_then(|room| room.split_first_mut());
        let (to, rest) = room.ok_or(ENOSPC)?;
        *to = entry(self.sge(sg));
        for to in rest {
            // SAFETY: By the invariant of `Mapping` the list has so many entries that are mapped.
            sg = unsafe { bindings::sg_next(sg) };
            *to = entry(self.sge(sg));
        }
        Ok(table.nents)
    }

    /// Returns an entry for one of the list, which is mapped.
    fn sge(&self, sg: *mut bindings::scatterlist) -> Sge<'_> {
        // SAFETY: The entry is valid, as the owner of the memory keeps the list.
        let (addr, length) = unsafe { ((*sg).dma_address, dma_len(sg)) };
        // INVARIANT: The memory is mapped for the device of the PD while this is borrowed.
        Sge {
            addr,
            length,
            lkey: self.pd.local_dma_lkey(),
            pd: self.pd.id(),
            _memory: PhantomData,
        }
    }
}

/// An owner of any type, which is only dropped.
///
/// # Invariants
///
/// `bytes` is a value that `drop` drops, and which may be in any thread.
#[doc(hidden)]
pub struct AnyOwner {
    bytes: MaybeUninit<[usize; 4]>,
    drop: unsafe fn(*mut ()),
}

// SAFETY: By the type invariant the value may be in any thread.
unsafe impl Send for AnyOwner {}

impl AnyOwner {
    pub(crate) fn new<O: Send + 'static>(owner: O) -> Self {
        const {
            assert!(
                size_of::<O>() <= size_of::<[usize; 4]>() && align_of::<O>() <= align_of::<usize>(),
                "an owner of memory is at most four words: put it into a box"
            )
        };
        let mut bytes = MaybeUninit::<[usize; 4]>::uninit();
        // SAFETY: There is room for it, which is aligned, as was just checked.
        unsafe { bytes.as_mut_ptr().cast::<O>().write(owner) };
        // SAFETY: It is called for a valid `O`, which is not used again.
        let drop = |owner: *mut ()| unsafe { ptr::drop_in_place(owner.cast::<O>()) };
        // INVARIANT: The value was just written, and is `Send`.
        Self { bytes, drop }
    }

    /// # Safety
    ///
    /// The owner is an `O`.
    pub(crate) unsafe fn get<O>(&self) -> &O {
        // SAFETY: By the type invariant it is a valid value, and an `O`, as the caller promises.
        unsafe { &*self.bytes.as_ptr().cast() }
    }

    /// # Safety
    ///
    /// The owner is an `O`.
    pub(crate) unsafe fn into_inner<O>(self) -> O {
        let this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant it is a valid value, and an `O`, as the caller promises.
        // `this` is neither used again nor dropped.
        unsafe { this.bytes.as_ptr().cast::<O>().read() }
    }
}

impl Drop for AnyOwner {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the function drops this value, which is not used again.
        unsafe { (self.drop)(self.bytes.as_mut_ptr().cast()) }
    }
}

mod private {
    use super::*;

    /// # Safety
    ///
    /// The bytes are valid, and stay where they are, until the value is dropped, also if it is
    /// moved. Nobody writes them, unless a device does to which the value was given for that.
    pub unsafe trait Bytes: Send + Unpin + 'static {
        fn bytes(&self) -> &[u8];

        /// Drops the value. Any context.
        fn free(self);
    }

    macro_rules! vector {
        ($($vector:ty),*) => {$(
            // SAFETY: The bytes are an allocation of the vector's own.
            unsafe impl Bytes for $vector {
                fn bytes(&self) -> &[u8] {
                    self
                }

                fn free(self) {
                    if self.capacity() == 0 {
                        return;
                    }
                    let (memory, _, _) = self.into_raw_parts();
                    // SAFETY: The vector has owned the memory, which `kmalloc()` or `vmalloc()`
                    // has allocated. `vfree()` would sleep.
                    unsafe { bindings::kvfree_atomic(memory.cast()) };
                }
            }

            // SAFETY: The list is an allocation of its own, and describes one of the vector's own,
            // to which there is no reference while this has it.
            unsafe impl<D: Direction> SgOwner<D> for SgList<$vector> {
                fn sgl(&mut self) -> Sgl<D> {
                    self.table.sgl()
                }
            }
        )*};
    }

    vector!(KVec<u8>, VVec<u8>, KVVec<u8>);

    // SAFETY: The bytes could be borrowed for as long as there is a reference to the value, which
    // this has.
    unsafe impl<T: Deref<Target = [u8]> + Send + Sync + 'static> Bytes for Arc<T> {
        fn bytes(&self) -> &[u8] {
            self
        }

        fn free(self) {}
    }
}

/// Bytes and a scatter list of them: a vector, or what many share and a device only reads.
///
/// A vector may be freed in any context, whichever its allocator is (`vfree_atomic()`). The last
/// reference to shared bytes is dropped where this is dropped: for an `Arc` of a [`VVec`] or a
/// [`KVVec`] that must be where one may sleep, or in an interrupt or softirq.
///
/// # Invariants
///
/// `table` describes the bytes of `owner`, which exists until this is dropped.
pub struct SgList<T: private::Bytes> {
    table: KBox<OwnTable>,
    owner: ManuallyDrop<T>,
}

impl<T: private::Bytes> SgList<T> {
    /// Describes the bytes of an owner (`sg_alloc_table_from_pages`). Fails with `ENOMEM`; `EINVAL`
    /// if there are no bytes, or no pages of them, as of the kernel's image on some architectures.
    pub fn new(owner: T, _cx: &Sleepable) -> Result<Self> {
        let mut table = KBox::new(OwnTable(bindings::sg_table::default()), GFP_KERNEL)?;
        let bytes = owner.bytes();
        if bytes.is_empty() {
            return Err(EINVAL);
        }
        // SAFETY: The bytes are valid, and the table is valid for writes.
        to_result(unsafe {
            bindings::rdma_helper_sg_of_bytes(&raw mut table.0, bytes.as_ptr().cast(), bytes.len())
        })?;
        // INVARIANT: The table was just made of them.
        Ok(Self {
            table,
            owner: ManuallyDrop::new(owner),
        })
    }

    /// Gives the owner back.
    pub fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used again nor dropped.
        unsafe {
            ptr::drop_in_place(&raw mut this.table);
            ManuallyDrop::take(&mut this.owner)
        }
    }
}

impl<T: private::Bytes> Drop for SgList<T> {
    fn drop(&mut self) {
        // SAFETY: The owner exists by the type invariant, and is not used again.
        unsafe { ManuallyDrop::take(&mut self.owner) }.free();
    }
}

// SAFETY: The list is an allocation of its own, and describes bytes that exist while this has a
// reference to what has them. Nobody writes them: they are shared, and the device only reads.
unsafe impl<T> SgOwner<ToDevice> for SgList<Arc<T>>
where
    T: Deref<Target = [u8]> + Send + Sync + 'static,
{
    fn sgl(&mut self) -> Sgl<ToDevice> {
        self.table.sgl()
    }
}
