// SPDX-License-Identifier: GPL-2.0

//! Transfers of scatter lists by `rdma_rw`.
//!
//! # Examples
//!
//! ```
//! use rdma::{prelude::*, rw::{Ctx, Rw}};
//!
//! #[derive(HasCqe)]
//! struct Fetch {
//!     cqe: Cqe<Self>,
//!     data: Ctx,
//! }
//!
//! impl CqeHandler for Fetch {
//!     type Pointer = Pin<KBox<Self>>;
//!     type Needs = Atomic;
//!
//!     fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
//!         let mut first = [0; 4];
//!         if wc.result().is_ok() && this.data.cpu().read(0, &mut first).is_ok() {
//!             pr_info!("the peer has {first:?}\n");
//!         }
//!     }
//! }
//!
//! fn fetch(qp: &Qp<Workqueue>, remote: Remote, cx: &Sleepable) -> Result {
//!     let fetch = Fetch { cqe: Cqe::new(), data: Ctx::alloc(100_000, cx)? };
//!     let fetch = KBox::pin(fetch, GFP_KERNEL)?;
//!     Ok(qp.post_rw(fetch, |f| Ok(Rw::read(&f.data, 0..100_000, remote, cx)))?)
//! }
//! ```
//!
//! C header: [`include/rdma/rw.h`](srctree/include/rdma/rw.h); C source:
//! `drivers/infiniband/core/rw.c`

use crate::{
    atomic::{
        AtomicBool,
        AtomicUsize,
        Ordering, //
    },
    bindings,
    cqe,
    debug,
    device::Port,
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    prelude::*,
    qp,
    sg::{
        self,
        Pages,
        SgOwner, //
    },
    wr::{
        self,
        Op as _, //
    }, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    mem::MaybeUninit,
    ops::Range,
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    alloc::Flags,
    prelude::*,
    types::Opaque, //
};

const READ: bindings::dma_data_direction = bindings::dma_data_direction::DMA_FROM_DEVICE;
const WRITE: bindings::dma_data_direction = bindings::dma_data_direction::DMA_TO_DEVICE;

/// What is transferred.
#[derive(Clone)]
struct Extents {
    range: Range<usize>,
    remote: Remote,
    dir: bindings::dma_data_direction,
}

/// An [`Rw`] without its lifetime.
struct Plan {
    ctx: NonNull<RawCtx>,
    /// `None` if the context was prepared.
    extents: Option<Extents>,
}

/// A transfer between the memory of a [`Ctx`] and a peer's.
///
/// # Invariants
///
/// The context of the plan lives for `'a`.
pub struct Rw<'a>(Plan, PhantomData<&'a RawCtx>);

impl<'a> Rw<'a> {
    fn new(ctx: &'a RawCtx, extents: Option<Extents>) -> Self {
        let ctx = NonNull::from(ctx);
        // INVARIANT: The context is borrowed for `'a`.
        Self(Plan { ctx, extents }, PhantomData)
    }

    /// Reads the peer's bytes from `remote` on into the bytes in `range` of the memory (RDMA READ).
    /// Posting or preparing it may sleep.
    pub fn read<D: DeviceWrites, O: SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: Range<usize>,
        remote: Remote,
        _cx: &Sleepable,
    ) -> Self {
        let dir = READ;
        Self::new(&ctx.raw, Some(Extents { range, remote, dir }))
    }

    /// Writes the bytes in `range` of the memory to the peer, from `remote` on (RDMA WRITE).
    /// Posting or preparing it may sleep.
    pub fn write<D: DeviceReads, O: SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: Range<usize>,
        remote: Remote,
        _cx: &Sleepable,
    ) -> Self {
        let dir = WRITE;
        Self::new(&ctx.raw, Some(Extents { range, remote, dir }))
    }

    /// The transfer that the context was prepared for by [`Qp::prepare_rw`]. Posting it does not
    /// sleep.
    pub fn prepared<D: Direction, O: SgOwner<D>>(ctx: &'a Ctx<D, O>) -> Self {
        Self::new(&ctx.raw, None)
    }
}

impl Port<'_> {
    /// Returns the number of contexts of a QP that a transfer of up to `pages` pages takes, for
    /// [`InitAttr::rw_contexts`](crate::qp::InitAttr::rw_contexts) (`rdma_rw_mr_factor`). Fails
    /// with `EOPNOTSUPP` if the driver has not set the number of pages that one request can have;
    /// `EINVAL` for too many pages.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{device::Port, prelude::*};
    /// /// The contexts of a QP that answers so many requests at once, with 256 pages each, and the
    /// /// entries of its CQ.
    /// fn sizes(port: &Port<'_>, requests: u32) -> Result<(u32, u32)> {
    ///     let contexts = requests * port.rw_contexts(256)?;
    ///     Ok((contexts, 2 * requests + port.rw_requests(contexts)))
    /// }
    /// ```
    pub fn rw_contexts(&self, pages: u32) -> Result<u32> {
        let dev = self.device();
        // C divides by one of them; a module parameter is among what decides by which.
        let (mr, read) = (
            dev.attrs().max_fast_reg_page_list_len,
            dev.attrs().max_sge_rd,
        );
        if mr == 0 || read == 0 {
            return Err(EOPNOTSUPP);
        }
        // C's sum with either would wrap.
        pages.checked_add(mr.max(read)).ok_or(EINVAL)?;
        // SAFETY: The device is registered while there is a handle of it, and has the port by the
        // invariant of `Port`.
        Ok(unsafe { bindings::rdma_rw_mr_factor(dev.as_raw(), self.num(), pages) })
    }

    /// Returns the maximum number of send requests of `contexts` contexts (`rdma_rw_max_send_wr`).
    pub fn rw_requests(&self, contexts: u32) -> u32 {
        // SAFETY: The device is registered while there is a handle of it, and has the port by the
        // invariant of `Port`.
        unsafe { bindings::rdma_rw_max_send_wr(self.device().as_raw(), self.num(), contexts, 0) }
    }
}

/// Memory that a scatter list describes, and the context of its transfers (`struct rdma_rw_ctx`): a
/// part of the owner that is moved into the send queue. It is pages of its own ([`Ctx::alloc`]), or
/// the memory of another owner ([`Ctx::new`]), which comes back when neither the device nor a peer
/// can reach it.
///
/// # Invariants
///
/// The owner in `raw` is an `O`.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, rw::{Ctx, Rw}, sg::SgList};
///
/// /// A table that many share, sent to whoever asks.
/// #[derive(HasCqe)]
/// struct Answer {
///     cqe: Cqe<Self>,
///     table: Ctx<ToDevice, SgList<Arc<KVec<u8>>>>,
/// }
///
/// impl CqeHandler for Answer {
///     type Pointer = Pin<KBox<Self>>;
///     type Needs = Atomic;
///
///     fn done(this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {
///         let answer = KBox::into_inner(Pin::into_inner(this));
///         let _table: Option<Arc<KVec<u8>>> = answer.table.into_owner().map(SgList::into_inner);
///     }
/// }
///
/// fn answer(qp: &Qp<Workqueue>, table: Arc<KVec<u8>>, to: Remote, cx: &Sleepable) -> Result {
///     let len = table.len();
///     let table = Ctx::new(SgList::new(table, cx)?, GFP_KERNEL)?;
///     let answer = KBox::pin(Answer { cqe: Cqe::new(), table }, GFP_KERNEL)?;
///     Ok(qp.post_rw(answer, |a| Ok(Rw::write(&a.table, 0..len, to, cx)))?)
/// }
/// ```
#[repr(transparent)]
pub struct Ctx<D: Direction = Bidirectional, O: SgOwner<D> = Pages> {
    raw: RawCtx,
    _owner: PhantomData<(D, O)>,
}

/// A [`Ctx`] of memory of any owner.
///
/// # Invariants
///
/// While `claimed` is set, `inner` is accessed only by the call that has set it and, if that posts,
/// by the completion then, and this is not moved. From a successful `RawCtx::start` to
/// `RawCtx::finish`, `inner.job` is the transfer, counted by its QP.
#[repr(C)]
struct RawCtx {
    /// The callback of the last request. The first field, so its address is the context's.
    cqe: bindings::ib_cqe,
    claimed: AtomicBool,
    inner: UnsafeCell<Inner>,
    /// The length of the memory, zero if it is lost.
    len: AtomicUsize,
}

/// # Invariants
///
/// `table` is what [`SgOwner::table`] has returned, and is there while `owner` is.
struct Inner {
    /// `None` if a peer may still write to its memory.
    owner: Option<sg::AnyOwner>,
    table: *mut bindings::sg_table,
    /// C keeps addresses of parts of it in others.
    raw: Pin<KBox<Opaque<bindings::rdma_rw_ctx>>>,
    job: Option<Job>,
}

/// A transfer that has begun.
struct Job {
    user: *mut bindings::ib_cqe,
    transfers: NonNull<qp::Transfers>,
    qp: NonNull<bindings::ib_qp>,
    port: u32,
    /// Of the entries of the range.
    mapping: sg::Mapping,
    /// Set if peers can write to the memory, by the key of an MR, until a READ has succeeded.
    exposed: bool,
    /// The first and the last entry, before they were cut to begin and to end with the range, if
    /// they were.
    ends: Option<[Extent; 2]>,
}

/// The extent of an entry of a scatterlist, to be restored.
struct Extent {
    sg: *mut bindings::scatterlist,
    offset: u32,
    length: u32,
}

/// Memory that peers may write to, still mapped.
///
/// # Invariants
///
/// - `mapping` is of entries of the table of `_owner`.
/// - This is dropped when the MRs that may have the memory are gone, and before the device is.
struct Exposed {
    _owner: sg::AnyOwner,
    mapping: sg::Mapping,
}

impl Drop for Exposed {
    fn drop(&mut self) {
        // SAFETY: By the type invariant no key gives access to the memory any more.
        unsafe { self.mapping.unmap() };
    }
}

// SAFETY: A transfer may be begun and end on any thread.
unsafe impl Send for RawCtx {}
// SAFETY: What is not atomic has one user at a time by the invariants.
unsafe impl Sync for RawCtx {}

// SAFETY: The owner is `Send`, by its trait.
unsafe impl<D: Direction, O: SgOwner<D>> Send for Ctx<D, O> {}
// SAFETY: A shared reference gives no access to the owner.
unsafe impl<D: Direction, O: SgOwner<D>> Sync for Ctx<D, O> {}

impl Ctx {
    /// Allocates `len` zeroed bytes, in as many pages as that takes. Fails with `ENOMEM`; `EINVAL`
    /// for a length of zero or of 4 GiB and more.
    pub fn alloc(len: usize, cx: &Sleepable) -> Result<Self> {
        Ok(Self::new(Pages::alloc(len, cx)?, GFP_KERNEL)?)
    }

    /// Returns the bytes, for the CPU.
    pub fn cpu(&mut self) -> sg::CpuPages<'_> {
        let Inner { owner, job, .. } = self.raw.inner.get_mut();
        // SAFETY: By the type invariant the owner is of this type.
        let pages = owner.as_mut().map(|owner| unsafe { owner.get::<Pages>() });
        let mapping = job.as_mut().map(|job| &mut job.mapping);
        sg::CpuPages::new(pages, mapping)
    }
}

impl<D: Direction, O: SgOwner<D>> Ctx<D, O> {
    /// Makes the context of an owner's memory. Gives the owner back with `EINVAL` if the memory has
    /// no bytes, or 4 GiB and more; with `ENOMEM`.
    pub fn new(mut owner: O, flags: Flags) -> Result<Self, sg::SgMapError<O>> {
        let table = owner.table();
        match RawCtx::new(table, flags) {
            Ok(mut raw) => {
                raw.inner.get_mut().owner = Some(sg::AnyOwner::new(owner));
                // INVARIANT: The owner is an `O`.
                Ok(Self {
                    raw,
                    _owner: PhantomData,
                })
            }
            Err(error) => Err(sg::SgMapError { owner, error }),
        }
    }

    /// Returns the length of the memory, in bytes: zero if it is lost, see
    /// [`Qp::post_rw`](crate::qp::Qp::post_rw).
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.raw.len.load(Ordering::Relaxed)
    }

    /// Gives the owner back, unless its memory is lost. A transfer that was prepared is
    /// [cancelled](Ctx::cancel). Any context.
    pub fn into_owner(mut self) -> Option<O> {
        self.cancel();
        let owner = self.raw.inner.get_mut().owner.take()?;
        // SAFETY: By the type invariant the owner is an `O`.
        Some(unsafe { owner.into_inner() })
    }

    /// Unmaps the memory of a transfer that was prepared and is not to be posted
    /// (`rdma_rw_ctx_destroy`). Any context.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, rw::{Ctx, Rw}};
    /// /// After a reconnect.
    /// fn again(data: &mut Ctx, qp: &Qp<Softirq>, to: Remote, cx: &Sleepable) -> Result {
    ///     data.cancel();
    ///     qp.prepare_rw(Rw::write(data, 0..4096, to, cx))
    /// }
    /// ```
    pub fn cancel(&mut self) {
        // SAFETY: This is borrowed exclusively, so it is not posted.
        unsafe { self.raw.finish(false) };
    }
}

impl Inner {
    /// Leaves the memory of a transfer that has failed, to which peers have a key, to the QP.
    #[cold]
    #[inline(never)]
    fn lose(&mut self, transfers: &qp::Transfers) {
        if let (Some(owner), Some(job)) = (self.owner.take(), self.job.take()) {
            // INVARIANT: The mapping is of its memory. The QP drops it when it was destroyed with
            // its MRs, and before its PD.
            transfers.keep(Exposed {
                _owner: owner,
                mapping: job.mapping,
            });
        }
    }
}

/// Cuts the ends of a list to a range. Returns the first entry of the range, the number of its
/// entries, and what the ends were before, if they were cut.
///
/// C transfers all of an entry, so the last one is cut to end where the range does. It takes an
/// offset into the first one, but siw ignores that (`siw_map_mr_sg()`).
///
/// # Safety
///
/// The table is valid, and nothing else uses it. The range is not empty, and inside of the memory
/// that it describes.
unsafe fn cut(
    table: *mut bindings::sg_table,
    range: &Range<usize>,
) -> (*mut bindings::scatterlist, u32, Option<[Extent; 2]>) {
    // SAFETY: The table is valid and has both ends of the range, as the caller promises, so each
    // entry that is looked at is there.
    unsafe {
        let (mut skip, mut first) = (range.start, (*table).sgl);
        while skip >= (*first).length as usize {
            skip -= (*first).length as usize;
            first = bindings::sg_next(first);
        }
        let (mut left, mut last, mut count) = (skip + range.len(), first, 1);
        while left > (*last).length as usize {
            left -= (*last).length as usize;
            last = bindings::sg_next(last);
            count += 1;
        }
        let is_cut = skip != 0 || left != (*last).length as usize;
        let ends = is_cut.then(|| {
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

impl RawCtx {
    /// Makes a context without its owner. `table` is what that has returned.
    fn new(table: *mut bindings::sg_table, flags: Flags) -> Result<Self> {
        // SAFETY: The owner, which the caller has, has just returned the table.
        let (len, _) = unsafe { sg::extent(table) }?;
        // INVARIANT: No transfer is posted.
        Ok(Self {
            cqe: bindings::ib_cqe {
                done: Some(transferred),
            },
            claimed: AtomicBool::new(false),
            len: AtomicUsize::new(len as usize),
            inner: UnsafeCell::new(Inner {
                owner: None,
                table,
                raw: KBox::pin_init(Opaque::zeroed(), flags)?,
                job: None,
            }),
        })
    }

    /// Begins the access to `inner`, which [`RawCtx::release`] or the completion ends.
    #[inline]
    fn claim(&self) -> Result {
        // INVARIANT: If this sets it, the caller has `inner` for itself.
        match self.claimed.swap(true, Ordering::Acquire) {
            false => Ok(()),
            true => Err(EBUSY),
        }
    }

    /// Maps the memory and makes the requests (`rdma_rw_ctx_init`), which may sleep, if that was
    /// not prepared.
    ///
    /// # Safety
    ///
    /// The caller has claimed this. `qp` is valid and `transfers` counts for it.
    #[inline]
    unsafe fn start(
        &self,
        extents: &Option<Extents>,
        qp: NonNull<bindings::ib_qp>,
        transfers: &qp::Transfers,
    ) -> Result {
        // SAFETY: The caller has claimed this, which keeps all others from `inner`.
        let inner = unsafe { &mut *self.inner.get() };
        let Extents { range, remote, dir } = match (extents, &inner.job) {
            (Some(extents), None) => extents.clone(),
            (None, Some(job)) if job.qp == qp => return Ok(()),
            (None, _) => return Err(EINVAL),
            (Some(_), Some(_)) => return Err(EBUSY),
        };
        let Range { start, end } = range;
        let len = self.len.load(Ordering::Relaxed);
        if inner.owner.is_none() || start >= end || end > len {
            return Err(EINVAL);
        }
        // SAFETY: The caller promises that the QP is valid.
        let (sges, pages, port) = unsafe {
            let qp = qp.as_ref();
            let pages = (*qp.device).attrs.max_fast_reg_page_list_len;
            (qp.max_write_sge.min(qp.max_read_sge), pages, qp.port)
        };
        // C divides by the number of entries that a request can have, and by that of the pages of
        // an MR, and looks the port up.
        if sges == 0 || pages == 0 || port == 0 {
            return Err(EINVAL);
        }
        let (first, count, ends) = if end - start == len {
            // SAFETY: By the type invariant the table is there.
            let table = unsafe { &*inner.table };
            (table.sgl, table.orig_nents, None)
        } else {
            // SAFETY: By the type invariant the table is there. The range was checked to be inside
            // of the memory that it describes, so both entries are found. The caller has claimed
            // this, which keeps all others from the list.
            unsafe { cut(inner.table, &range) }
        };
        // SAFETY: The QP is valid, as the caller promises, and the list has `count` entries from
        // `first` on, which are not mapped.
        let ret = unsafe {
            bindings::rdma_rw_ctx_init(
                inner.raw.get(),
                qp.as_ptr(),
                port,
                first,
                count,
                0,
                remote.addr,
                remote.rkey,
                dir,
            )
        };
        if ret < 0 {
            ends.iter().flatten().for_each(Extent::restore);
            return Err(Error::from_errno(ret));
        }
        transfers.begin();
        let table = bindings::sg_table {
            sgl: first,
            nents: count,
            orig_nents: count,
        };
        inner.job = Some(Job {
            user: ptr::null_mut(),
            transfers: NonNull::from(transfers),
            qp,
            port,
            // INVARIANT: `rdma_rw_ctx_init` has just mapped them. The device is there while the QP
            // is, which is not destroyed before it has ended what it counts.
            mapping: sg::Mapping {
                // SAFETY: The QP is valid, as the caller promises.
                dev: unsafe { qp.as_ref() }.device,
                table,
                dir,
            },
            exposed: false,
            ends,
        });
        Ok(())
    }

    /// Undoes [`RawCtx::start`] (`rdma_rw_ctx_destroy`), and returns the callback of the owner.
    /// `succeeded` is `true` if all of the transfer was done. Any context.
    ///
    /// `rdma_rw` keeps an MR that only a READ that succeeds invalidates
    /// (`IB_WR_RDMA_READ_WITH_INV`, on iWARP) until the QP is destroyed. So the QP keeps the memory
    /// as long.
    ///
    /// # Safety
    ///
    /// No request of a transfer is outstanding, and nothing else uses this.
    unsafe fn finish(&self, succeeded: bool) -> Option<*mut bindings::ib_cqe> {
        // SAFETY: The caller promises that nothing else uses this.
        let inner = unsafe { &mut *self.inner.get() };
        let job = inner.job.as_ref()?;
        let sg::Mapping { table, dir, .. } = &job.mapping;
        let ended = !job.exposed || succeeded;
        // SAFETY: `start` has initialised the context with these. The QP is not destroyed while it
        // counts this transfer. With a count of zero no page is unmapped.
        unsafe {
            let count = if ended { table.orig_nents } else { 0 };
            let (raw, qp) = (inner.raw.get(), job.qp.as_ptr());
            bindings::rdma_rw_ctx_destroy(raw, qp, job.port, table.sgl, count, *dir);
        }
        job.ends.iter().flatten().for_each(Extent::restore);
        let (user, transfers) = (job.user, job.transfers);
        // SAFETY: The QP is not destroyed while it counts this transfer.
        let transfers = unsafe { transfers.as_ref() };
        if !ended {
            self.len.store(0, Ordering::Relaxed);
            inner.lose(transfers);
        }
        inner.job = None;
        transfers.end();
        Some(user)
    }

    /// Ends a transfer of which nothing was posted, and the claim.
    ///
    /// # Safety
    ///
    /// The caller has claimed this, and no request was posted since [`RawCtx::start`] has
    /// succeeded.
    unsafe fn undo(&self) {
        // SAFETY: The claim keeps all others from `inner`. No request was posted, as the caller
        // promises, so none is outstanding, and no peer has a key.
        unsafe {
            if let Some(job) = &mut (*self.inner.get()).job {
                job.exposed = false;
            }
            self.finish(false);
        }
        self.release();
    }

    /// Returns the first of the requests (`rdma_rw_ctx_wrs`). The last one, or `then`, which
    /// follows, completes to this context, and that to `user`.
    ///
    /// # Safety
    ///
    /// `start` has succeeded, and nothing else uses this. `then` is null or an initialised request.
    #[inline]
    unsafe fn requests(
        &self,
        user: *mut bindings::ib_cqe,
        then: *mut bindings::ib_send_wr,
    ) -> *mut bindings::ib_send_wr {
        // SAFETY: `start` has succeeded, so `inner.raw` is initialised for this QP and port, and
        // nothing else uses it, as the caller promises. `then` is initialised unless it is null.
        // The callback is only read.
        unsafe {
            let inner = &mut *self.inner.get();
            let Some(job) = &mut inner.job else {
                return then;
            };
            job.user = user;
            let cqe = (&raw const self.cqe).cast_mut();
            if !then.is_null() {
                wr::end(then, cqe);
                let read = bindings::ib_wr_opcode_IB_WR_RDMA_READ;
                if job.transfers.as_ref().iwarp && job.mapping.dir == READ && (*then).opcode != read
                {
                    // siw completes a request that follows a READ before the READ, unless it is a
                    // READ too.
                    (*then).send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
                }
            }
            let (qp, port) = (job.qp.as_ptr(), job.port);
            let first = bindings::rdma_rw_ctx_wrs(inner.raw.get(), qp, port, cqe, then);
            // If there is an MR, the first request registers it, or invalidates it before that.
            job.exposed = job.transfers.as_ref().iwarp
                && matches!(
                    (*first).opcode,
                    bindings::ib_wr_opcode_IB_WR_REG_MR | bindings::ib_wr_opcode_IB_WR_LOCAL_INV
                );
            first
        }
    }

    /// Returns what [`Qp::names_first`] does for the QP of the transfer.
    ///
    /// # Safety
    ///
    /// `start` has succeeded, and nothing else uses this.
    #[cold]
    #[inline(never)]
    unsafe fn names_first(&self) -> bool {
        // SAFETY: Nothing else uses this, as the caller promises. The QP is valid while it counts
        // the transfer.
        unsafe {
            let job = &(*self.inner.get()).job;
            job.as_ref()
                .is_some_and(|job| qp::post::names_first(job.qp.as_ptr()))
        }
    }

    fn release(&self) {
        self.claimed.store(false, Ordering::Release);
    }
}

impl Extent {
    fn restore(&self) {
        // SAFETY: The entry is one of the list of a context, which nothing else uses while this is
        // there.
        unsafe {
            (*self.sg).offset = self.offset;
            (*self.sg).length = self.length;
        }
    }
}

impl Drop for RawCtx {
    fn drop(&mut self) {
        // SAFETY: This is being dropped, so no request is outstanding: a posted context is owned by
        // the queue, and one that was posted in part by the QP until it is drained.
        unsafe { self.finish(false) };
    }
}

/// The `done` callback of all transfers.
///
/// # Safety
///
/// Called by the RDMA core for the last request of a transfer.
unsafe extern "C" fn transferred(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call. The request was posted with the address of the first
    // field of a context, which the owner keeps until its own callback is called. This is the last
    // request, so none is outstanding.
    unsafe {
        let ctx = &*(*(*wc).__bindgen_anon_1.wr_cqe)
            .cast_const()
            .cast::<RawCtx>();
        if let Some(user) = ctx.finish((*wc).status == bindings::ib_wc_status_IB_WC_SUCCESS) {
            ctx.release();
            cqe::hand_on(user, cq, wc);
        }
    }
}

/// How far a post came that has failed.
enum Failed {
    Nowhere(Error),
    /// After so many requests.
    InPart(u32, Error),
    /// The driver did not say how far: the last request may be in the queue.
    Unnamed(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Nowhere(e) | Failed::InPart(_, e) | Failed::Unnamed(e) => e,
        }
    }
}

/// A transfer that was posted in part, and its owner. The transfer ends when this is dropped.
///
/// # Invariants
///
/// `ctx` is a context whose `start` has succeeded, and is kept by the owner. This is dropped when
/// none of its requests is outstanding.
struct InPart<P> {
    ctx: NonNull<RawCtx>,
    _owner: P,
}

// SAFETY: A transfer may end on any thread.
unsafe impl<P: Send> Send for InPart<P> {}

impl<P> Drop for InPart<P> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the owner keeps the context; it is dropped after this.
        let ctx = unsafe { self.ctx.as_ref() };
        // SAFETY: By the type invariant no request is outstanding. `claimed` is still set, which
        // keeps all others from the rest.
        unsafe { ctx.finish(false) };
        ctx.release();
    }
}

/// Begins a transfer and posts its requests, and `then` behind them. If `user`, which they complete
/// to, is null, they are not posted.
///
/// # Safety
///
/// `qp` is valid and counts its transfers in `transfers`. `then` is null or an initialised request.
/// The context of `plan` stays where it is during this call. With a `user`, that and the memory of
/// `then` do until `user` has completed or, if the post fails in part, until the QP is drained.
#[inline(never)]
unsafe fn begin(
    plan: &Plan,
    qp: NonNull<bindings::ib_qp>,
    transfers: &qp::Transfers,
    user: *mut bindings::ib_cqe,
    then: *mut bindings::ib_send_wr,
) -> Result<(), Failed> {
    // SAFETY: The context stays where it is at least until a request is posted, as the caller
    // promises.
    let ctx = unsafe { plan.ctx.as_ref() };
    ctx.claim().map_err(Failed::Nowhere)?;
    // SAFETY: The context was just claimed, so nothing else uses it. `qp` is valid and counts in
    // `transfers`, as the caller promises.
    let started = unsafe { ctx.start(&plan.extents, qp, transfers) };
    if started.is_err() || user.is_null() {
        ctx.release();
        return started.map_err(Failed::Nowhere);
    }
    // SAFETY: The transfer was just begun, and nothing else uses the context, which was claimed
    // above. `then` is null or initialised, as the caller promises.
    let first = unsafe { ctx.requests(user, then) };
    // SAFETY: The context was claimed above, so nothing else uses it.
    let job = unsafe { &(*ctx.inner.get()).job };
    if job
        .as_ref()
        .is_some_and(|job| job.exposed && job.mapping.dir == WRITE)
    {
        // By the key that a parameter of ib_core asks for, peers could write what they are sent.
        //
        // SAFETY: Nothing was posted. The context was claimed above.
        unsafe { ctx.undo() };
        return Err(Failed::Nowhere(EOPNOTSUPP));
    }
    debug::set_qp_of(qp.as_ptr(), user);
    let mut bad = ptr::null();
    // SAFETY: `qp` is valid, and the memory of the requests stays where it is, as the caller
    // promises. They were just made and, with `then`, linked.
    let ret = unsafe { qp::post::post_list(qp.as_ptr(), first, &mut bad) };
    if ret == 0 {
        // The context may be gone by now.
        return Ok(());
    }
    let error = Error::from_errno(ret);
    if bad.is_null() {
        // The context may be gone by now.
        return Err(Failed::Unnamed(error));
    }
    // SAFETY: The requests are linked, and the owner, which no completion gives back, as the driver
    // has refused one, keeps them.
    let mut posted = unsafe { distance(first, bad) };
    // Some driver does not name the one that had no room: all but the last are taken for posted.
    //
    // SAFETY: The context was claimed above, and its transfer has begun.
    if posted == 0 && error == ENOMEM && unsafe { ctx.names_first() } {
        // SAFETY: The requests are linked up to their end, and the owner keeps them.
        posted = unsafe { distance(first, ptr::null()) } - 1;
    }
    if posted > 0 {
        return Err(Failed::InPart(posted, error));
    }
    // SAFETY: The driver has refused the first request, so it has posted none. The context was
    // claimed above.
    unsafe { ctx.undo() };
    Err(Failed::Nowhere(error))
}

/// Returns the number of requests between two of a list.
///
/// # Safety
///
/// `first` is a list of valid requests.
#[cold]
unsafe fn distance(
    mut first: *const bindings::ib_send_wr,
    last: *const bindings::ib_send_wr,
) -> u32 {
    let mut n = 0u32;
    while !ptr::eq(first, last) && !first.is_null() {
        // SAFETY: The request is one of the list, as it is not behind its end, and valid, as the
        // caller promises.
        first = unsafe { (*first).next };
        n = n.saturating_add(1);
    }
    n
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Maps the memory of a [`Ctx`] for a transfer and makes its requests (`rdma_rw_ctx_init`), so
    /// that it can be posted where one cannot sleep.
    ///
    /// The QP is not destroyed before the transfer has completed, or was cancelled
    /// ([`Ctx::cancel`]), as dropping the context does, too: if that takes more than a minute after
    /// the last reference to the QP is gone, the QP is leaked and holds its device. Fails with
    /// `EBUSY` if the context is posted or was prepared; `EINVAL` if the range is empty or not
    /// inside of the memory, if that is lost, or the QP is not initialised or has no entries, or
    /// MRs are needed and cannot map the entries of the list; `EAGAIN` if MRs are needed and all of
    /// the QP's are in use; `ENOMEM`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, rw::{Ctx, Rw}};
    /// # #[derive(HasCqe)]
    /// # struct Answer { cqe: Cqe<Self>, data: Ctx }
    /// # impl CqeHandler for Answer {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// /// When the request came.
    /// fn prepare(qp: &Qp<Softirq>, answer: &Answer, to: Remote, cx: &Sleepable) -> Result {
    ///     qp.prepare_rw(Rw::write(&answer.data, 0..4096, to, cx))
    /// }
    ///
    /// /// When the data is there.
    /// fn respond(qp: &Qp<Softirq>, answer: Pin<KBox<Answer>>, _cx: &Atomic) -> Result {
    ///     Ok(qp.post_rw(answer, |a| Ok(Rw::prepared(&a.data)))?)
    /// }
    /// ```
    pub fn prepare_rw(&self, rw: Rw<'_>) -> Result {
        let (qp, user, then) = (self.any.target.raw, ptr::null_mut(), ptr::null_mut());
        // SAFETY: By the invariant of `Rw` the context is borrowed. The QP is valid and counts in
        // `transfers()`. Nothing is posted.
        Ok(unsafe { begin(&rw.0, qp, self.transfers(), user, then) }?)
    }

    /// Transfers memory of a [`Ctx`] to or from the peer (`rdma_rw_ctx_init`, `rdma_rw_ctx_post`),
    /// moving in their owner. Any context, if the transfer was prepared.
    ///
    /// The QP must be created with contexts for it: see
    /// [`InitAttr::rw_contexts`](crate::qp::InitAttr::rw_contexts). In the owner's handler the
    /// memory is not mapped any more (`rdma_rw_ctx_destroy`).
    ///
    /// If a READ fails on iWARP, where the peer has a key, the memory is lost to the [`Ctx`], whose
    /// length is zero then; its owner is dropped after the QP is destroyed, so that must not keep
    /// the QP.
    ///
    /// Fails with what `rw` says, or as [`Qp::prepare_rw`]; with `EINVAL` also if the context is to
    /// be prepared for this QP and is not; `ENOMEM` also when the queue is full; `EOPNOTSUPP` for a
    /// WRITE on iWARP if ib_core was loaded with `force_mr`, by which peers could write the memory.
    /// See [`PostError`] for what becomes of the owner. A transfer that was prepared and that was
    /// refused is to be prepared again.
    pub fn post_rw<P, const ID: u64>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<Rw<'a>>,
    ) -> Result<(), PostError<P>>
    where
        P: cqe::CqePointer<ID>,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let plan = match rw(&owner) {
            Ok(rw) => rw.0,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        // SAFETY: The owner keeps the context, which `rw` has borrowed from it; no request follows.
        unsafe { self.post_plan(owner, &plan, ptr::null_mut()) }
    }

    /// As [`Qp::post_rw`], followed by a request that completes instead, as a response that follows
    /// its data. Fails as [`Qp::post_rw`], and `EINVAL` if an entry of the request is of another
    /// PD.
    pub fn post_rw_then<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<(Rw<'a>, wr::SendWr<'a, N>)>,
    ) -> Result<(), PostError<P>>
    where
        P: cqe::CqePointer<ID>,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let mut sges = MaybeUninit::uninit();
        let (raw, sges) = (raw.as_mut_ptr(), sges.as_mut_ptr());
        let made = rw(&owner).and_then(|(rw, then)| {
            // SAFETY: There is room for the request and its entries; the owner keeps its memory.
            unsafe {
                let mut then = then.erase();
                then.op
                    .prepare(&then.sges.sges, &self.any.target, self.reg_lock())?;
                then.write(raw, sges);
            }
            Ok(rw.0)
        });
        match made {
            // SAFETY: The owner keeps the context and the memory of the request, which `rw` has
            // borrowed from it. The request was just written.
            Ok(plan) => unsafe { self.post_plan(owner, &plan, raw.cast()) },
            Err(error) => Err(PostError::new(owner, error)),
        }
    }

    /// # Safety
    ///
    /// The owner keeps the context and the memory of `then`, which is null or an initialised
    /// request.
    unsafe fn post_plan<P, const ID: u64>(
        &self,
        owner: P,
        plan: &Plan,
        then: *mut bindings::ib_send_wr,
    ) -> Result<(), PostError<P>>
    where
        P: cqe::CqePointer<ID>,
    {
        let cqe = owner.into_cqe(cqe::Sealed::new());
        // SAFETY: The QP is valid and counts in `transfers()`. The owner keeps the context and the
        // memory of `then`, as the caller promises. It is the queue's until it completes, or is
        // kept until the QP is drained below.
        let begun = unsafe { begin(plan, self.any.target.raw, self.transfers(), cqe, then) };
        let Err(failed) = begun else {
            return Ok(());
        };
        match failed {
            // SAFETY: Nothing was posted, so nothing else will take the owner back.
            Failed::Nowhere(error) => Err(PostError::new(unsafe { P::take_back(cqe) }, error)),
            Failed::InPart(posted, error) => {
                // SAFETY: The last request, which completes to the owner, was not posted.
                let owner = unsafe { P::take_back(cqe) };
                // INVARIANT: The owner keeps the context, by the caller's promise. What is parked
                // is dropped when the QP was drained, or never.
                let kept = InPart {
                    ctx: plan.ctx,
                    _owner: owner,
                };
                self.keep_until_drained::<_, P::Target>(kept);
                Err(PostError::in_part(None, posted, error))
            }
            Failed::Unnamed(error) => {
                qp::post::unnamed();
                Err(PostError::in_part(None, 0, error))
            }
        }
    }
}
