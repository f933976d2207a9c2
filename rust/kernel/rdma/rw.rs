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

mod post;

use crate::{
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
    sync::RwState,
    wr, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::{
        Bound,
        Range,
        RangeBounds, //
    },
    ptr, //
};
use kernel::{
    alloc::Flags,
    types::Opaque, //
};

const READ: bindings::dma_data_direction = bindings::dma_data_direction::DMA_FROM_DEVICE;
const WRITE: bindings::dma_data_direction = bindings::dma_data_direction::DMA_TO_DEVICE;

/// The memory of a transfer, on both sides.
struct Extents {
    /// `None` for all of the memory.
    range: Option<Range<usize>>,
    remote: Remote,
    dir: bindings::dma_data_direction,
}

/// An [`Rw`] without its lifetime.
struct Plan {
    ctx: NonNull<RawCtx>,
    /// `None` if the context was prepared.
    extents: Option<Extents>,
}

/// A transfer between the memory of a [`Ctx`] and a peer's; with a request of up to `N` entries
/// behind it, if `THEN`.
///
/// # Invariants
///
/// The context of the plan lives for `'a`. There is a request if `THEN`, and only then.
pub struct Rw<'a, const N: usize = 0, const THEN: bool = false> {
    plan: Plan,
    then: Option<wr::SendWr<'a, N>>,
    _ctx: PhantomData<&'a RawCtx>,
}

impl<'a> Rw<'a> {
    #[inline]
    fn new(ctx: &'a RawCtx, extents: Option<Extents>) -> Self {
        let ctx = NonNull::from(ctx);
        // INVARIANT: The context is borrowed for `'a`, and there is no request.
        Self {
            plan: Plan { ctx, extents },
            then: None,
            _ctx: PhantomData,
        }
    }

    #[inline]
    fn of(
        ctx: &'a RawCtx,
        range: impl RangeBounds<usize>,
        remote: Remote,
        dir: bindings::dma_data_direction,
    ) -> Self {
        let range = match (range.start_bound(), range.end_bound()) {
            (Bound::Unbounded, Bound::Unbounded) => None,
            (start, end) => {
                let start = match start {
                    Bound::Included(start) => *start,
                    Bound::Excluded(before) => before.saturating_add(1),
                    Bound::Unbounded => 0,
                };
                let end = match end {
                    Bound::Included(last) => last.saturating_add(1),
                    Bound::Excluded(end) => *end,
                    Bound::Unbounded => ctx.len,
                };
                Some(start..end)
            }
        };
        Self::new(ctx, Some(Extents { range, remote, dir }))
    }

    /// Reads the peer's bytes from `remote` on into the bytes in `range` of the memory (RDMA READ),
    /// which is `..` for all of them. Posting or preparing it may sleep.
    #[inline]
    pub fn read<D: DeviceWrites, O: SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: impl RangeBounds<usize>,
        remote: Remote,
        _cx: &Sleepable,
    ) -> Self {
        Self::of(&ctx.raw, range, remote, READ)
    }

    /// Writes the bytes in `range` of the memory, which is `..` for all of them, to the peer, from
    /// `remote` on (RDMA WRITE). Posting or preparing it may sleep.
    #[inline]
    pub fn write<D: DeviceReads, O: SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: impl RangeBounds<usize>,
        remote: Remote,
        _cx: &Sleepable,
    ) -> Self {
        Self::of(&ctx.raw, range, remote, WRITE)
    }

    /// Adds a request behind the transfer, which completes instead, as a response that follows its
    /// data (`chain_wr` of `rdma_rw_ctx_post`). Any context. [`Qp::post_rw`] says how it fails.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, rw::{Ctx, Rw}};
    /// # #[derive(HasCqe)]
    /// # struct Answer { cqe: Cqe<Self>, data: Ctx<ToDevice>, message: Buf<ToDevice> }
    /// # impl CqeHandler for Answer {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn answer(qp: &Qp<Workqueue>, to: Remote, a: Pin<KBox<Answer>>, cx: &Sleepable) -> Result {
    ///     Ok(qp.post_rw(a, |a| {
    ///         Ok(Rw::write(&a.data, .., to, cx).then(SendWr::send([a.message.whole()])))
    ///     })?)
    /// }
    /// ```
    #[inline]
    pub fn then<const N: usize>(self, wr: wr::SendWr<'a, N>) -> Rw<'a, N, true> {
        // INVARIANT: The context lives for `'a`, and there is a request.
        Rw {
            plan: self.plan,
            then: Some(wr),
            _ctx: PhantomData,
        }
    }

    /// The transfer that the context was prepared for by [`Qp::prepare_rw`]. Posting it does not
    /// sleep.
    #[inline]
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
pub struct Ctx<D: Direction = Bidirectional, O: SgOwner<D> = Pages> {
    raw: KBox<RawCtx>,
    _owner: PhantomData<(D, O)>,
}

/// A [`Ctx`] of memory of any owner, which stays in its box.
///
/// # Invariants
///
/// While `state` has the address of a QP, and is not that of a context that is prepared, `cqe` and
/// `inner` are accessed only by the call that has claimed this and, if that posts, by the
/// completion then. From a successful [`RawCtx::map`] to the end of the
/// transfer its QP, whose address `state` has, counts it, and `inner.raw` is initialised for it.
#[repr(C)]
struct RawCtx {
    inner: UnsafeCell<Inner>,
    /// The callback of the last request.
    cqe: UnsafeCell<bindings::ib_cqe>,
    state: RwState,
    /// The length of the memory.
    len: usize,
}

/// # Invariants
///
/// `table` is what [`SgOwner::table`] has returned, and is there while `owner` is. From `first` on
/// there are `count` entries of it: all, unless a part of the memory is transferred.
#[repr(C)]
struct Inner {
    /// C keeps addresses of parts of it in others. The first field: C is told its address most.
    raw: Opaque<bindings::rdma_rw_ctx>,
    /// The callback of the owner of the transfer that is posted.
    user: *mut bindings::ib_cqe,
    first: *mut bindings::scatterlist,
    count: u32,
    /// That of the transfer.
    dir: bindings::dma_data_direction,
    /// Set if peers can write to the memory, by the key of an MR, until a READ has succeeded.
    exposed: bool,
    /// The first and the last entry, before they were cut to begin and to end with the range, if
    /// they were.
    ends: Option<[sg::Extent; 2]>,
    table: *mut bindings::sg_table,
    /// `None` if a peer may still write to its memory.
    owner: Option<sg::AnyOwner>,
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
        let mapping = self.raw.mapping();
        let owner = self.raw.inner.get_mut().owner.as_mut();
        // SAFETY: By the type invariant the owner is of this type.
        let pages = owner.map(|owner| unsafe { owner.get::<Pages>() });
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
        match self.raw.state.is_lost() {
            true => 0,
            false => self.raw.len,
        }
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
    ///
    /// # Safety
    ///
    /// The mapping is of the memory, for the device of `qp`. That is a QP of this crate, which is
    /// not destroyed meanwhile.
    #[cold]
    #[inline(never)]
    unsafe fn lose(&mut self, mapping: sg::Mapping, qp: NonNull<bindings::ib_qp>) {
        if let Some(owner) = self.owner.take() {
            // INVARIANT: The mapping is of the owner's memory, and for the QP's device. The QP
            // drops it, and then the owner, when it was destroyed with its MRs, and before its PD.
            let left = (sg::OwnMapping(mapping), owner);
            // SAFETY: The QP is as the caller promises.
            unsafe { qp::keep_until_destroyed(qp.as_ptr(), left) };
        }
    }

    /// Returns the mapping of the transfer.
    ///
    /// # Safety
    ///
    /// The list is mapped for the device of `qp`, which is valid.
    unsafe fn mapping(&self, qp: NonNull<bindings::ib_qp>) -> sg::Mapping {
        // INVARIANT: The list is mapped in this direction, as the caller promises.
        sg::Mapping {
            // SAFETY: The QP is valid, as the caller promises.
            dev: unsafe { qp.as_ref() }.device,
            table: bindings::sg_table {
                sgl: self.first,
                nents: self.count,
                orig_nents: self.count,
            },
            dir: self.dir,
        }
    }

    /// Makes the list what it was before it was cut.
    fn uncut(&mut self) {
        if let Some(ends) = self.ends.take() {
            ends.iter().for_each(sg::Extent::restore);
        }
        // SAFETY: By the type invariant the table is there, as the memory is.
        let table = unsafe { &*self.table };
        // INVARIANT: All entries of the table.
        (self.first, self.count) = (table.sgl, table.orig_nents);
    }
}

impl RawCtx {
    /// Makes a context without its owner. `table` is what that has returned.
    fn new(table: *mut bindings::sg_table, flags: Flags) -> Result<KBox<Self>> {
        // SAFETY: The owner, which the caller has, has just returned the table: it is valid.
        let ((len, _), all) = unsafe { (sg::extent(table)?, &*table) };
        // INVARIANT: No transfer is posted. The list is all of the table.
        let this = Self {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            state: RwState::new(),
            inner: UnsafeCell::new(Inner {
                user: ptr::null_mut(),
                raw: Opaque::uninit(),
                first: all.sgl,
                count: all.orig_nents,
                dir: READ,
                exposed: false,
                ends: None,
                table,
                owner: None,
            }),
            len: len as usize,
        };
        Ok(KBox::new(this, flags)?)
    }

    /// Returns the QP of the transfer that there is, for one who has this.
    fn qp(&self) -> Option<NonNull<bindings::ib_qp>> {
        NonNull::new(self.state.any_qp() as *mut bindings::ib_qp)
    }

    /// Maps the list and makes the requests (`rdma_rw_ctx_init`), which may sleep, and ends the
    /// claim if that fails.
    ///
    /// # Safety
    ///
    /// The caller has claimed this for `qp`, which is valid. The port is one of its device, and
    /// what C divides by is not zero.
    #[inline]
    unsafe fn map(
        &self,
        qp: NonNull<bindings::ib_qp>,
        port: u32,
        remote: Remote,
        dir: bindings::dma_data_direction,
    ) -> Result {
        // SAFETY: The caller has claimed this, which keeps all others from `inner`.
        let inner = unsafe { &mut *self.inner.get() };
        inner.dir = dir;
        // SAFETY: The QP is valid, as the caller promises, and the port is one of its device. By
        // the type invariant the list has so many entries, which are not mapped.
        let ret = unsafe {
            bindings::rdma_rw_ctx_init(
                inner.raw.get(),
                qp.as_ptr(),
                port,
                inner.first,
                inner.count,
                0,
                remote.addr,
                remote.rkey,
                dir,
            )
        };
        if ret < 0 {
            return Err(self.not_mapped(ret));
        }
        // SAFETY: The QP is valid, as the caller promises.
        unsafe { qp::transfers(qp.as_ptr()) }.begin();
        Ok(())
    }

    /// Ends the claim of the caller.
    #[cold]
    #[inline(never)]
    fn not_mapped(&self, ret: c_int) -> Error {
        // SAFETY: The caller has claimed this, which keeps all others from `inner`.
        unsafe { (*self.inner.get()).uncut() };
        self.state.set_idle();
        Error::from_errno(ret)
    }

    /// Claims this for a transfer that was not prepared, and maps what of the memory is to be
    /// transferred, with all checks.
    ///
    /// # Safety
    ///
    /// `qp` is valid.
    unsafe fn map_part(&self, qp: NonNull<bindings::ib_qp>, extents: Extents) -> Result {
        let Extents { range, remote, dir } = extents;
        // INVARIANT: If it is idle, the caller has this for itself from here on.
        match self.state.claim(qp.as_ptr() as usize) {
            Ok(()) => {}
            Err(RwState::LOST) => return Err(EINVAL),
            Err(_) => return Err(EBUSY),
        }
        // SAFETY: The caller promises that the QP is valid.
        let (sges, pages, port) = unsafe {
            let qp = qp.as_ref();
            let pages = (*qp.device).attrs.max_fast_reg_page_list_len;
            (qp.max_write_sge.min(qp.max_read_sge), pages, qp.port)
        };
        let range = range.unwrap_or(0..self.len);
        // C divides by the number of entries that a request can have, and by that of the pages of
        // an MR, and looks the port up.
        if range.is_empty() || range.end > self.len || sges == 0 || pages == 0 || port == 0 {
            self.state.set_idle();
            return Err(EINVAL);
        }
        if range.len() != self.len {
            // SAFETY: This was claimed above, which keeps all others from `inner` and the list.
            let inner = unsafe { &mut *self.inner.get() };
            // SAFETY: By the type invariant the table is there, as the memory is. The range is not
            // empty and inside of that, as just checked, and nothing else uses the list.
            let cut = unsafe { sg::cut(inner.table, &range) };
            // INVARIANT: The entries are some of the table.
            (inner.first, inner.count, inner.ends) = cut;
        }
        // SAFETY: This was claimed above. The QP is valid, as the caller promises, and it and its
        // device have the limits that were just checked.
        unsafe { self.map(qp, port, remote, dir) }
    }

    /// Returns the mapping of a transfer that was prepared.
    fn mapping(&mut self) -> Option<sg::Mapping> {
        let qp = self.qp()?;
        // SAFETY: This is borrowed exclusively, so it is prepared, if there is a QP, and by the
        // type invariant that is there.
        Some(unsafe { self.inner.get_mut().mapping(qp) })
    }

    /// Returns the callback of the owner of the transfer that is posted.
    ///
    /// # Safety
    ///
    /// The caller has the completion of the transfer.
    #[inline]
    unsafe fn user(&self) -> *mut bindings::ib_cqe {
        // SAFETY: The completion has this.
        unsafe { (*self.inner.get()).user }
    }

    /// Ends a transfer of all of the memory that was posted and has completed, and the claim
    /// (`rdma_rw_ctx_destroy`), and returns the callback of the owner. Any context.
    ///
    /// The values that are needed after a call are read again after it, the address of the context
    /// from its completion, so that fewer registers are saved. With a reference to that the
    /// compiler would know that it has not changed.
    ///
    /// # Safety
    ///
    /// The context is that of `wc`, a completion that is valid during this call, and its owner was
    /// not taken back. The transfer was begun by [`transfer_all`], none of its requests is
    /// outstanding, and nothing else uses the context.
    #[inline]
    unsafe fn end(wc: *const Wc) -> *mut bindings::ib_cqe {
        // SAFETY: The context is that of this completion, and its owner, which keeps it, was not
        // taken back, as the caller promises.
        let ctx = || unsafe { of(wc) };
        let qp = |ctx: &Self| ctx.state.qp() as *mut bindings::ib_qp;
        // SAFETY: The context was initialised for this QP, which is not destroyed while it counts
        // the transfer, and with these entries, as they were not cut. Nothing else uses `inner`,
        // as the caller promises.
        unsafe {
            let (ctx, at) = (ctx(), qp(ctx()));
            let inner = &*ctx.inner.get();
            let (raw, first, count) = (inner.raw.get(), inner.first, inner.count);
            bindings::rdma_rw_ctx_destroy(raw, at, (*at).port, first, count, inner.dir);
        }
        let ctx = ctx();
        // SAFETY: The QP counts the transfer. The context has not left the claim yet, so it is used
        // by nothing else.
        let (transfers, user) = unsafe { (qp::transfers(qp(ctx)), ctx.user()) };
        ctx.state.set_idle();
        // The QP may be gone after this.
        transfers.end(user)
    }

    /// Ends the transfer that there is, and the claim (`rdma_rw_ctx_destroy`). `succeeded` is
    /// `true` if all of it was done. Any context.
    ///
    /// `rdma_rw` keeps an MR that only a READ that succeeds invalidates
    /// (`IB_WR_RDMA_READ_WITH_INV`, on iWARP) until the QP is destroyed. So the QP keeps the memory
    /// as long.
    ///
    /// # Safety
    ///
    /// No request of a transfer is outstanding, and nothing else uses this.
    unsafe fn finish(&self, succeeded: bool) {
        let Some(qp) = self.qp() else {
            return;
        };
        // SAFETY: The caller promises that nothing else uses this.
        let inner = unsafe { &mut *self.inner.get() };
        let ended = !inner.exposed || succeeded;
        // SAFETY: The context was initialised for this QP, which is not destroyed while it counts
        // the transfer, and with these entries. With a count of zero no page is unmapped.
        let (mapping, transfers) = unsafe {
            let count = if ended { inner.count } else { 0 };
            let (raw, port) = (inner.raw.get(), qp.as_ref().port);
            bindings::rdma_rw_ctx_destroy(raw, qp.as_ptr(), port, inner.first, count, inner.dir);
            (inner.mapping(qp), qp::transfers(qp.as_ptr()))
        };
        inner.uncut();
        inner.exposed = false;
        if ended {
            self.state.set_idle();
        } else {
            // SAFETY: The mapping is that of the memory. The QP counts the transfer until `end`.
            unsafe { inner.lose(mapping, qp) };
            self.state.set_lost();
        }
        transfers.end(ptr::null_mut());
    }

    /// Ends a transfer of which nothing was posted, and the claim.
    ///
    /// # Safety
    ///
    /// The caller has claimed this, and no request was posted since [`RawCtx::map`] has succeeded.
    #[cold]
    unsafe fn undo(&self) {
        // SAFETY: The claim keeps all others from `inner`. No request was posted, as the caller
        // promises, so none is outstanding, and no peer has a key.
        unsafe {
            (*self.inner.get()).exposed = false;
            self.finish(false);
        }
    }

    /// Notes whether peers will have a key to the memory, on iWARP. Fails if they could write what
    /// they are sent.
    ///
    /// # Safety
    ///
    /// The caller has claimed this. `first` is the first request of the transfer, and `then` is
    /// null or what follows it.
    #[cold]
    unsafe fn expose(
        &self,
        first: *const bindings::ib_send_wr,
        then: *mut bindings::ib_send_wr,
    ) -> Result {
        // SAFETY: The claim keeps all others from `inner`. The requests are valid, as the caller
        // promises.
        unsafe {
            let inner = &mut *self.inner.get();
            if inner.dir == READ && !then.is_null() {
                qp::post::come_after_reads(then);
            }
            // If there is an MR, the first request registers it, or invalidates it before that.
            inner.exposed = matches!(
                (*first).opcode,
                bindings::ib_wr_opcode_IB_WR_REG_MR | bindings::ib_wr_opcode_IB_WR_LOCAL_INV
            );
            match inner.exposed && inner.dir == WRITE {
                // The key is there if a parameter of ib_core asks for it.
                true => Err(EOPNOTSUPP),
                false => Ok(()),
            }
        }
    }

    /// Returns the first of the requests (`rdma_rw_ctx_wrs`). The last one, or `then`, which
    /// follows, completes to this context.
    ///
    /// # Safety
    ///
    /// The caller has claimed this for `qp`, and the transfer is mapped and [noted](Self::note).
    /// `then` is null or an initialised request.
    #[inline]
    unsafe fn requests(
        &self,
        qp: NonNull<bindings::ib_qp>,
        then: *mut bindings::ib_send_wr,
    ) -> *mut bindings::ib_send_wr {
        // SAFETY: The transfer is mapped, so `inner.raw` is initialised for this QP, and the claim
        // keeps all others from this. `then` is initialised unless it is null.
        unsafe {
            let (raw, cqe) = ((*self.inner.get()).raw.get(), self.cqe.get());
            if !then.is_null() {
                wr::end(then, cqe);
            }
            bindings::rdma_rw_ctx_wrs(raw, qp.as_ptr(), qp.as_ref().port, cqe, then)
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

/// Returns the context of a completion.
///
/// # Safety
///
/// The completion is valid, and its request was posted with the callback of a context, which is
/// there for `'a`.
#[inline]
unsafe fn of<'a>(wc: *const Wc) -> &'a RawCtx {
    // SAFETY: The completion is valid. By the caller's promise it has the address of that field of
    // a context that is there for `'a`.
    unsafe {
        let cqe = (*wc).cqe().cast::<UnsafeCell<bindings::ib_cqe>>();
        &*kernel::container_of!(cqe, RawCtx, cqe)
    }
}
