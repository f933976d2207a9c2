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
//!     type Needs = context::Atomic;
//!
//!     fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
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
        self,
        Bidirectional, //
    },
    links::Links,
    lost,
    prelude::internal::*,
    qp,
    sg,
    sync::RwState,
    wc::Wc,
    wr::{
        self,
        Remote, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ops::{
        Bound,
        Range,
        RangeBounds, //
    }, //
};
use kernel::{
    alloc::Flags,
    page::PAGE_SIZE,
    types::{
        NotThreadSafe,
        Opaque, //
    }, //
};

const READ: bindings::dma_data_direction = bindings::dma_data_direction::DMA_FROM_DEVICE;
const WRITE: bindings::dma_data_direction = bindings::dma_data_direction::DMA_TO_DEVICE;

/// Returns how many values of a type one allocation has at most.
const fn most<T>() -> usize {
    bindings::KMALLOC_MAX_SIZE as usize / size_of::<T>()
}

type RegCtx = bindings::rdma_rw_ctx__bindgen_ty_1_rdma_rw_reg_ctx;

/// The number of entries of a scatter list at most: C has an array of as many `struct ib_sge`.
const MAX_ENTRIES: usize = most::<bindings::ib_sge>();

/// The number of entries of which C can make requests whatever one request or MR can have: one of
/// its arrays has a `struct ib_rdma_wr` for each request, another one more for each MR.
const FEW_ENTRIES: usize = most::<RegCtx>();

/// The memory of a transfer, on both sides.
struct Extents {
    /// `None` for all of the memory.
    range: Option<Range<usize>>,
    remote: Remote,
    dir: bindings::dma_data_direction,
}

/// A transfer between a [`Ctx`] and a peer, with or without a request of up to `N` entries behind
/// it. It completes to the handler `ID` of its owner.
///
/// As the token that [`Rw::read`] and [`Rw::write`] are called with, it stays in its thread.
///
/// # Invariants
///
/// If there are `extents`, the current task may sleep.
pub struct Rw<'a, const N: usize = 0, const ID: u64 = 0> {
    ctx: &'a RawCtx,
    /// `None` if the context was prepared.
    extents: Option<Extents>,
    /// What follows, if anything.
    then: Option<wr::SendWr<'a, N>>,
    _thread: NotThreadSafe,
}

impl<'a> Rw<'a> {
    #[inline]
    fn new(
        ctx: &'a RawCtx,
        range: impl RangeBounds<usize>,
        remote: Remote,
        dir: bindings::dma_data_direction,
        _cx: &Sleepable,
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
                    Bound::Unbounded => ctx.len(),
                };
                Some(start..end)
            }
        };
        // INVARIANT: The caller has passed the token.
        Self {
            ctx,
            extents: Some(Extents { range, remote, dir }),
            then: None,
            _thread: NotThreadSafe,
        }
    }

    /// Reads the peer's bytes from `remote` on into those in `range` of the memory (RDMA READ).
    #[inline]
    pub fn read<D: dma::DeviceWrites, O: sg::SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: impl RangeBounds<usize>,
        remote: Remote,
        cx: &Sleepable,
    ) -> Self {
        Self::new(&ctx.raw, range, remote, READ, cx)
    }

    /// Writes the bytes in `range` of the memory to the peer, from `remote` on (RDMA WRITE).
    #[inline]
    pub fn write<D: dma::DeviceReads, O: sg::SgOwner<D>>(
        ctx: &'a Ctx<D, O>,
        range: impl RangeBounds<usize>,
        remote: Remote,
        cx: &Sleepable,
    ) -> Self {
        Self::new(&ctx.raw, range, remote, WRITE, cx)
    }

    /// Adds a request behind the transfer, which completes instead, as a response that follows its
    /// data (`chain_wr` of `rdma_rw_ctx_post`).
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, rw::{Ctx, Rw}};
    /// type Answer = (Ctx<ToDevice>, Buf<ToDevice>);
    ///
    /// fn answer<'a>((data, msg): &'a Answer, to: Remote, cx: &Sleepable) -> Rw<'a, 1> {
    ///     Rw::write(data, .., to, cx).then(SendWr::send([msg.whole()]))
    /// }
    /// ```
    #[inline]
    pub fn then<const N: usize>(self, wr: wr::SendWr<'a, N>) -> Rw<'a, N> {
        // INVARIANT: `self` has not left the thread that it was made in.
        Rw {
            ctx: self.ctx,
            extents: self.extents,
            then: Some(wr),
            _thread: NotThreadSafe,
        }
    }

    /// The transfer that [`Qp::prepare_rw`](qp::Qp::prepare_rw) has prepared. Posting it does not
    /// sleep.
    #[inline]
    pub fn prepared<D: dma::Direction, O: sg::SgOwner<D>>(ctx: &'a Ctx<D, O>) -> Self {
        // INVARIANT: There are no extents.
        Self {
            ctx: &ctx.raw,
            extents: None,
            then: None,
            _thread: NotThreadSafe,
        }
    }
}

impl<'a, const N: usize> Rw<'a, N> {
    /// Names the handler of the owner that the transfer completes to: see
    /// [`SendWr::done_by`](wr::SendWr::done_by).
    #[inline]
    pub fn done_by<const ID: u64>(self) -> Rw<'a, N, ID> {
        // INVARIANT: `self` has not left the thread that it was made in.
        Rw {
            ctx: self.ctx,
            extents: self.extents,
            then: self.then,
            _thread: NotThreadSafe,
        }
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
        // C divides by one of them.
        let mr = dev.attrs().max_fast_reg_page_list_len;
        let read = dev.attrs().max_sge_rd;
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
/// the memory of another owner ([`Ctx::new`], [`Ctx::fill`]).
///
/// # Examples
///
/// ```
/// # use rdma::{prelude::*, rw::{Ctx, Rw}, sg::SgList};
/// #[derive(HasCqe)]
/// struct Answer {
///     cqe: Cqe<Self>,
///     data: Ctx<ToDevice, SgList<KVec<u8>>>,
/// }
///
/// impl CqeHandler for Answer {
///     type Pointer = Pin<KBox<Self>>;
///     type Needs = Sleepable;
///
///     fn done(mut this: Self::Pointer, _wc: &Wc, _cx: &Sleepable) {
///         // The context is kept for the next answer, without its memory.
///         let _data: Option<KVec<u8>> = this.data.take().map(SgList::into_inner);
///     }
/// }
///
/// /// Allocates an answer, when the connection is made.
/// fn allocate() -> Result<Pin<KBox<Answer>>> {
///     Ok(KBox::pin(Answer { cqe: Cqe::new(), data: Ctx::empty(GFP_KERNEL)? }, GFP_KERNEL)?)
/// }
///
/// fn answer(
///     qp: &Qp<Workqueue>,
///     mut answer: Pin<KBox<Answer>>,
///     data: SgList<KVec<u8>>,
///     to: Remote,
///     cx: &Sleepable,
/// ) -> Result {
///     answer.data.fill(data)?;
///     Ok(qp.post_rw(answer, |answer| Ok(Rw::write(&answer.data, .., to, cx)))?)
/// }
/// ```
///
/// # Invariants
///
/// The owner in `raw`, if there is one, is an `O`. This is covariant in `O`, as it is the only
/// handle of the owner, and gives it back by value.
pub struct Ctx<D: dma::Direction = Bidirectional, O: sg::SgOwner<D> = sg::Pages> {
    raw: KBox<RawCtx>,
    _owner: PhantomData<(D, O)>,
}

/// A [`Ctx`] of memory of any owner, which stays in its box.
///
/// # Invariants
///
/// - While `state` has the address of a QP and is not prepared, `cqe` and `inner` are accessed only
///   by the call that has claimed the context and, once that has posted, by the completion.
/// - From a successful [`RawCtx::map`] to the end of the transfer the QP in `state` counts it, and
///   `inner.raw` is initialised for that QP.
/// - The end of a QP takes back a prepared context, with its list in [`lost`] locked, unless it is
///   held. It is held, under that lock, while its borrower ends the transfer or has a view of the
///   memory, or since such a view was forgotten. Of all others the end reads the state only.
/// - While `state` is [`RwState::EMPTY`] there is neither an owner nor a transfer.
// By its links it is not `Unpin`, so an exclusive reference does not claim that nothing else refers
// to it.
#[repr(C)]
struct RawCtx {
    inner: UnsafeCell<CtxInner>,
    /// The callback of the last request.
    cqe: UnsafeCell<bindings::ib_cqe>,
    state: RwState,
    /// The length of the memory. It changes only while the context is borrowed exclusively.
    len: UnsafeCell<usize>,
    links: Links<dyn lost::Transfer>,
}

/// # Invariants
///
/// `all` is of the list that [`sg::SgOwner::sgl`] has returned, and that exists while `owner` is.
/// From `first` on there are `count` entries of it: all, unless a part of the memory is
/// transferred.
#[repr(C)]
struct CtxInner {
    /// C keeps addresses of its parts in it. First, as most C calls take its address.
    raw: Opaque<bindings::rdma_rw_ctx>,
    /// The callback of the owner of the transfer that is posted.
    user: *mut bindings::ib_cqe,
    first: *mut bindings::scatterlist,
    count: u32,
    /// That of the transfer.
    dir: bindings::dma_data_direction,
    /// Set if peers can write to the memory, by the key of an MR, until a READ has succeeded.
    exposed: bool,
    /// The first and the last entry, as they were before they were cut to the range.
    ends: Option<[sg::Extent; 2]>,
    all: bindings::sg_table,
    owner: Option<sg::AnyOwner>,
}

// SAFETY: A transfer may be begun and end on any thread.
unsafe impl Send for RawCtx {}
// SAFETY: What is not atomic has one user at a time by the invariants.
unsafe impl Sync for RawCtx {}

// SAFETY: `SgOwner` has `Send` as a supertrait, and `RawCtx` is.
unsafe impl<D: dma::Direction, O: sg::SgOwner<D>> Send for Ctx<D, O> {}
// SAFETY: A shared reference gives no access to the owner.
unsafe impl<D: dma::Direction, O: sg::SgOwner<D>> Sync for Ctx<D, O> {}

impl Ctx {
    /// Allocates `len` zeroed bytes, in as many pages as that takes. Fails with `ENOMEM`; `EINVAL`
    /// for a length of zero, or of more pages than [`Ctx::new`] takes entries.
    pub fn alloc(len: usize, cx: &Sleepable) -> Result<Self> {
        if len.div_ceil(PAGE_SIZE) > MAX_ENTRIES {
            return Err(EINVAL);
        }
        Ok(Self::new(sg::Pages::alloc(len, cx)?, GFP_KERNEL)?)
    }

    /// Returns the bytes, for the CPU.
    pub fn cpu(&mut self) -> sg::CpuPages<'_> {
        // SAFETY: The context is borrowed exclusively for as long as what is returned.
        let held = (self.raw.state.is_prepared()).then(|| unsafe { lost::Held::new(&*self.raw) });
        let qp = self.raw.qp();
        // SAFETY: This is borrowed exclusively, and a transfer that is prepared is held.
        let inner = unsafe { &*self.raw.inner.get() };
        // SAFETY: If there is a QP, a transfer is prepared for it, and held: it is mapped, and the
        // QP, which counts it, valid, until what is returned is dropped.
        let mapping = qp.map(|qp| unsafe { inner.mapping(qp) });
        // SAFETY: By the type invariant the owner is of this type.
        let pages = (inner.owner.as_ref()).map(|owner| unsafe { owner.get::<sg::Pages>() });
        // SAFETY: This is borrowed exclusively, and the pages and the mapping with it.
        unsafe { sg::CpuPages::new(pages, mapping, held) }
    }
}

impl<D: dma::Direction, O: sg::SgOwner<D>> Ctx<D, O> {
    /// Allocates a context without memory, whose transfers fail with `EINVAL`. Fails with `ENOMEM`.
    pub fn empty(flags: Flags) -> Result<Self> {
        // INVARIANT: There is no owner.
        Ok(Self {
            raw: RawCtx::new(flags)?,
            _owner: PhantomData,
        })
    }

    /// Makes the context of an owner's memory. Gives the owner back with `ENOMEM`, or as
    /// [`Ctx::fill`].
    pub fn new(owner: O, flags: Flags) -> Result<Self, sg::SgMapError<O>> {
        match Self::empty(flags) {
            Ok(mut this) => this.fill(owner).map(|()| this),
            Err(error) => Err(sg::SgMapError { owner, error }),
        }
    }

    /// Gives an owner's memory to a context that has none: a new one, or one whose memory was
    /// [taken](Ctx::take) or lost (see [`Qp::post_rw`](qp::Qp::post_rw)). Allocates nothing. Any
    /// context.
    ///
    /// Gives the owner back with `EBUSY` if the context has memory; with `EINVAL` if the owner's
    /// has no bytes, 4 GiB and more, or more entries than C can make requests of:
    /// `KMALLOC_MAX_SIZE` by 16, which is 1 GiB in pages of 4 KiB.
    pub fn fill(&mut self, mut owner: O) -> Result<(), sg::SgMapError<O>> {
        if !self.raw.state.is_empty() {
            return Err(sg::SgMapError {
                owner,
                error: EBUSY,
            });
        }
        // SAFETY: This is borrowed exclusively and has no memory, so nothing else uses it. The
        // owner has just returned the list, and is put into the context below.
        match unsafe { self.raw.fill(owner.sgl().into_table()) } {
            Ok(()) => {
                // INVARIANT: The owner is an `O`.
                self.raw.inner.get_mut().owner = Some(sg::AnyOwner::new(owner));
                Ok(())
            }
            Err(error) => Err(sg::SgMapError { owner, error }),
        }
    }

    /// Gives the owner back, after which the context can be [filled](Ctx::fill) again. A transfer
    /// that was prepared is [cancelled](Ctx::cancel). Returns `None` if there is no memory, as that
    /// is lost, for example. Any context.
    pub fn take(&mut self) -> Option<O> {
        self.cancel();
        let owner = self.raw.inner.get_mut().owner.take()?;
        // INVARIANT: There is no owner, and no transfer: this is borrowed exclusively, so it is not
        // posted, and what was prepared has just ended.
        self.raw.state.set(RwState::EMPTY);
        // SAFETY: By the type invariant the owner is an `O`.
        Some(unsafe { owner.into_inner() })
    }

    /// Returns the length of the memory, in bytes: zero if there is none.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        if self.raw.state.is_empty() {
            return 0;
        }
        self.raw.len()
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
        unsafe { self.raw.cancel() };
    }
}

impl CtxInner {
    /// Returns the mapping of the transfer.
    ///
    /// # Safety
    ///
    /// The list is mapped for the device of `qp`, which is valid.
    unsafe fn mapping(&self, qp: NonNull<bindings::ib_qp>) -> sg::Mapping {
        // INVARIANT: The list is mapped in this direction, as the caller promises.
        sg::Mapping {
            // SAFETY: The QP is valid, as the caller promises.
            dev: unsafe { (*qp.as_ptr()).device },
            table: bindings::sg_table {
                sgl: self.first,
                nents: self.count,
                orig_nents: self.count,
            },
            dir: self.dir,
        }
    }

    /// Returns the state in which no transfer has this. The list is not cut.
    fn idle(&self) -> usize {
        if self.count as usize <= FEW_ENTRIES {
            RwState::IDLE
        } else {
            RwState::LARGE
        }
    }

    /// Restores the list as it was before it was cut.
    fn uncut(&mut self) {
        if self.ends.is_some() {
            self.restore();
        }
        // INVARIANT: All entries of the list.
        self.first = self.all.sgl;
        self.count = self.all.orig_nents;
    }

    fn restore(&mut self) {
        for end in self.ends.take().iter().flatten() {
            end.restore();
        }
    }
}

impl RawCtx {
    /// Makes a context without memory.
    fn new(flags: Flags) -> Result<KBox<Self>> {
        // There is no context before there is memory for it: its drop takes it out of the table.
        let memory = KBox::<Self>::new_uninit(flags)?;
        // INVARIANT: There is neither an owner nor a transfer. The list has no entries.
        let this = memory.write(Self {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            state: RwState::new(),
            inner: UnsafeCell::new(CtxInner {
                user: ptr::null_mut(),
                raw: Opaque::uninit(),
                first: ptr::null_mut(),
                count: 0,
                dir: READ,
                exposed: false,
                ends: None,
                all: bindings::sg_table::default(),
                owner: None,
            }),
            len: UnsafeCell::new(0),
            links: Links::new(),
        });
        // SAFETY: The context is new, stays in its box, and removes itself when it is dropped.
        unsafe { lost::add(&*this) };
        Ok(this)
    }

    /// Makes all of a list that of the context.
    ///
    /// # Safety
    ///
    /// The context has no memory, and nothing else uses it. The list is one that an owner has
    /// returned, which the caller puts into the context next if this succeeds.
    unsafe fn fill(&mut self, all: bindings::sg_table) -> Result {
        // SAFETY: The owner has returned the list, as the caller promises.
        let (len, _) = unsafe { sg::extent(&all)? };
        if all.orig_nents as usize > MAX_ENTRIES {
            return Err(EINVAL);
        }
        let inner = self.inner.get_mut();
        inner.all = all;
        inner.uncut();
        let idle = inner.idle();
        *self.len.get_mut() = len as usize;
        // INVARIANT: No transfer has this.
        self.state.set(idle);
        Ok(())
    }

    /// Returns the length of the memory, of the last one if there is none.
    #[inline]
    fn len(&self) -> usize {
        // SAFETY: Nobody borrows the context exclusively while there is a reference to it.
        unsafe { *self.len.get() }
    }

    /// Returns the QP of the transfer. The caller has the context.
    fn qp(&self) -> Option<NonNull<bindings::ib_qp>> {
        NonNull::new(self.state.any_qp() as *mut bindings::ib_qp)
    }

    /// Maps the list and makes the requests (`rdma_rw_ctx_init`), or ends the claim. May sleep.
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
            // SAFETY: The caller has claimed this.
            return Err(unsafe { self.not_mapped(Error::from_errno(ret)) });
        }
        // SAFETY: The QP is valid, as the caller promises.
        unsafe { qp::transfers(qp.as_ptr()) }.begin();
        Ok(())
    }

    /// Ends the claim of the caller.
    ///
    /// # Safety
    ///
    /// The caller has claimed this.
    unsafe fn not_mapped(&self, error: Error) -> Error {
        // SAFETY: The caller has claimed this, which keeps all others from `inner`.
        let inner = unsafe { &mut *self.inner.get() };
        inner.uncut();
        self.state.set(inner.idle());
        error
    }

    /// Claims this for a transfer that was not prepared, checks that, and maps its memory.
    ///
    /// # Safety
    ///
    /// `qp` is valid.
    unsafe fn map_part(&self, qp: NonNull<bindings::ib_qp>, extents: Extents) -> Result {
        let Extents { range, remote, dir } = extents;
        // INVARIANT: If it is idle, the caller has this for itself from here on.
        let claim = |idle| self.state.claim(idle, qp.as_ptr() as usize);
        let claimed = claim(RwState::IDLE).or_else(|state| match state {
            RwState::LARGE => claim(RwState::LARGE),
            state => Err(state),
        });
        match claimed {
            Ok(_) => {}
            Err(RwState::EMPTY) => return Err(EINVAL),
            Err(_) => return Err(EBUSY),
        }
        // SAFETY: The caller promises that the QP is valid.
        let (sges, pages, port) = unsafe {
            let qp = qp.as_ptr();
            let sges = (*qp).max_write_sge.min((*qp).max_read_sge);
            let pages = (*(*qp).device).attrs.max_fast_reg_page_list_len;
            (sges, pages, (*qp).port)
        };
        let len = self.len();
        let range = range.unwrap_or(0..len);
        // C divides by the first two, and looks the port up.
        if range.is_empty() || range.end > len || sges == 0 || pages == 0 || port == 0 {
            // SAFETY: This was claimed above.
            return Err(unsafe { self.not_mapped(EINVAL) });
        }
        if range.len() != len {
            // INVARIANT: The entries are some of the list.
            // SAFETY: This was claimed above, which keeps all others from `inner` and the list. By
            // the invariant of `CtxInner` it is valid, as the memory is. The range is not empty and
            // inside of the memory, as just checked.
            unsafe {
                let inner = &mut *self.inner.get();
                (inner.first, inner.count, inner.ends) = sg::cut(inner.all.sgl, &range);
            }
        }
        // SAFETY: This was claimed above, which keeps all others from `inner`.
        let entries = unsafe { (*self.inner.get()).count };
        let requests = entries.div_ceil(sges);
        let mrs = entries.div_ceil(pages.min(256));
        if requests as usize > most::<bindings::ib_rdma_wr>() || mrs as usize > FEW_ENTRIES {
            // SAFETY: This was claimed above.
            return Err(unsafe { self.not_mapped(EINVAL) });
        }
        // SAFETY: This was claimed above. The QP is valid, as the caller promises, and it and its
        // device have the limits that were just checked.
        unsafe { self.map(qp, port, remote, dir) }
    }

    /// Claims a prepared transfer of this state, if it is one for the QP whose memory the device
    /// may not see as it is now: it may have been filled since. Fails with the error of a post if
    /// it is not.
    ///
    /// # Safety
    ///
    /// `qp` is valid.
    unsafe fn claim_stale(&self, qp: NonNull<bindings::ib_qp>, state: usize) -> Result {
        let at = qp.as_ptr() as usize;
        let stale = at | RwState::PREPARED | RwState::STALE;
        // INVARIANT: If it is prepared, the caller has this for itself from here on.
        let claimed = if state == stale {
            self.state.claim(stale, at)
        } else {
            Err(state)
        };
        match claimed {
            Ok(_) => {
                // SAFETY: This was just claimed, so nothing else uses `inner`. The transfer was
                // mapped for the device of this QP, which is valid, as the caller promises.
                unsafe { (*self.inner.get()).mapping(qp) }.sync_for_device();
                Ok(())
            }
            Err(state) if RwState::is_claimed(state) => Err(EBUSY),
            Err(_) => Err(EINVAL),
        }
    }

    /// Notes the owner before the transfer is mapped, so that it is not kept in registers.
    ///
    /// # Safety
    ///
    /// The caller has claimed this.
    #[inline]
    unsafe fn note(&self, posted: &post::PostArgs) {
        // SAFETY: The caller has claimed this, which keeps all others from its fields.
        unsafe {
            (*self.inner.get()).user = posted.user;
            (*self.cqe.get()).done = Some(posted.done);
        }
    }

    /// Ends a transfer of all of the memory that was posted and has completed, and the claim
    /// (`rdma_rw_ctx_destroy`), and returns the callback of the owner. Any context.
    ///
    /// What is needed after a call is read again from the completion, so that fewer registers are
    /// saved. With a reference to that the compiler would know that it has not changed.
    ///
    /// # Safety
    ///
    /// The context is that of `wc`, a completion that is valid during this call, and its owner was
    /// not taken back. The transfer is of all of the memory and not on iWARP, none of its requests
    /// is outstanding, and nothing else uses the context.
    #[inline]
    unsafe fn end(wc: *const Wc) -> *mut bindings::ib_cqe {
        // SAFETY: The completion is of this context, whose owner was not taken back and keeps it,
        // as the caller promises.
        let ctx = || unsafe { ctx_of(wc) };
        let qp = |ctx: &Self| ctx.state.qp() as *mut bindings::ib_qp;
        // SAFETY: The context was initialised for this QP, which is not destroyed while it counts
        // the transfer, and with these entries, as they were not cut. Nothing else uses `inner`,
        // as the caller promises.
        unsafe {
            let at = qp(ctx());
            let ctx = ctx();
            let inner = &*ctx.inner.get();
            let raw = inner.raw.get();
            let first = inner.first;
            let count = inner.count;
            bindings::rdma_rw_ctx_destroy(raw, at, (*at).port, first, count, inner.dir);
        }
        let ctx = ctx();
        // SAFETY: The QP counts the transfer, and nothing else uses the context, which is claimed.
        let (transfers, user) = unsafe { (qp::transfers(qp(ctx)), (*ctx.inner.get()).user) };
        ctx.state.set(RwState::IDLE);
        // The QP may be gone after this.
        transfers.end(user)
    }

    /// Ends the current transfer, if there is one, and the claim (`rdma_rw_ctx_destroy`). `safe` is
    /// `true` if no peer has a key to the memory, as all of the transfer was done, or nothing was
    /// posted. Otherwise the QP keeps memory that is exposed. Any context.
    ///
    /// # Safety
    ///
    /// No request of a transfer is outstanding, and nothing else uses this.
    unsafe fn finish(&self, safe: bool) {
        let Some(qp) = self.qp() else {
            return;
        };
        // SAFETY: The caller promises that nothing else uses this.
        let inner = unsafe { &mut *self.inner.get() };
        if inner.exposed && !safe {
            // SAFETY: None of the requests is outstanding and nothing else uses this, as the caller
            // promises. There is a transfer, of the QP that the state has.
            unsafe { self.lose(qp) };
        } else {
            // SAFETY: The context was initialised for this QP, which is not destroyed while it
            // counts the transfer, and with these entries.
            unsafe {
                let raw = inner.raw.get();
                let qp = qp.as_ptr();
                let port = (*qp).port;
                let first = inner.first;
                bindings::rdma_rw_ctx_destroy(raw, qp, port, first, inner.count, inner.dir);
            }
            inner.uncut();
            inner.exposed = false;
            self.state.set(inner.idle());
        }
        // SAFETY: The QP counts the transfer until this.
        unsafe { qp::transfers(qp.as_ptr()) }.end(ptr::null_mut());
    }

    /// Ends a transfer, but its count, whose memory a peer has a key to: the QP keeps that.
    ///
    /// # Safety
    ///
    /// As of [`RawCtx::finish`]. There is a transfer, of `qp`.
    unsafe fn lose(&self, qp: NonNull<bindings::ib_qp>) {
        // SAFETY: The caller promises that nothing else uses this.
        let inner = unsafe { &mut *self.inner.get() };
        // SAFETY: The context was initialised for this QP, which is not destroyed while it counts
        // the transfer. With a count of zero no page is unmapped.
        let mapping = unsafe {
            let raw = inner.raw.get();
            let at = qp.as_ptr();
            bindings::rdma_rw_ctx_destroy(raw, at, (*at).port, inner.first, 0, inner.dir);
            inner.mapping(qp)
        };
        inner.uncut();
        inner.exposed = false;
        if let Some(owner) = inner.owner.take() {
            // INVARIANT: The mapping is of the owner's memory, and for the QP's device. The QP
            // drops both after its MRs and before its PD.
            let left = (sg::OwnMapping(mapping), owner);
            // SAFETY: The QP is this crate's, and counts the transfer until `end`.
            unsafe { qp::keep_until_destroyed(qp.as_ptr(), left) };
        }
        // INVARIANT: There is no owner any longer, and the transfer has ended.
        self.state.set(RwState::EMPTY);
    }

    /// Ends the transfer that is prepared, if there is one. Any context.
    ///
    /// # Safety
    ///
    /// This is not posted, and nothing but the end of its QP uses it.
    #[inline]
    unsafe fn cancel(&self) {
        if self.state.is_prepared() {
            // SAFETY: This is not posted, and nothing but the end of its QP uses it, as the caller
            // promises.
            unsafe { self.end_prepared() };
        }
    }

    /// As [`RawCtx::cancel`] of a transfer that is prepared.
    ///
    /// # Safety
    ///
    /// As of that.
    unsafe fn end_prepared(&self) {
        // SAFETY: Nothing but the end of the QP uses this, as the caller promises. That has ended
        // the transfer before it was held, or does not use it.
        unsafe {
            let _held = lost::Held::new(self);
            self.finish(false);
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
            let raw = (*self.inner.get()).raw.get();
            let qp = qp.as_ptr();
            let cqe = self.cqe.get();
            if !then.is_null() {
                wr::write_tail(then, cqe);
            }
            bindings::rdma_rw_ctx_wrs(raw, qp, (*qp).port, cqe, then)
        }
    }
}

impl Drop for RawCtx {
    fn drop(&mut self) {
        lost::remove(self);
        // SAFETY: This is being dropped, so no request is outstanding: a posted context is owned by
        // the queue, and one that was posted in part by the QP until it is drained. The QP's end
        // does not find what is not listed.
        unsafe { self.finish(false) };
    }
}

// SAFETY: The links are one field.
unsafe impl lost::Transfer for RawCtx {
    fn links(&self) -> &Links<dyn lost::Transfer> {
        &self.links
    }

    fn state(&self) -> &RwState {
        &self.state
    }

    fn cqe(&self) -> *mut bindings::ib_cqe {
        self.cqe.get()
    }

    unsafe fn is_qp_closed(&self) -> bool {
        // SAFETY: The QP of the transfer is valid, as the caller promises.
        (self.qp()).is_some_and(|qp| unsafe { qp::transfers(qp.as_ptr()) }.is_closed())
    }

    unsafe fn take_back(&self) {
        // It stays prepared until it has ended: in the state of one that is posted it would be
        // completed as lost.
        //
        // SAFETY: The transfer is not posted, and nothing else uses it, as the caller promises.
        unsafe { self.finish(false) };
    }
}

/// Returns the context of a completion.
///
/// # Safety
///
/// The completion is valid, and of a request with the callback of a context that exists for `'a`.
#[inline]
unsafe fn ctx_of<'a>(wc: *const Wc) -> &'a RawCtx {
    // SAFETY: The completion is valid. By the caller's promise it has the address of that field of
    // a context that exists for `'a`.
    unsafe {
        let cqe = (*wc).cqe().cast::<UnsafeCell<bindings::ib_cqe>>();
        &*kernel::container_of!(cqe, RawCtx, cqe)
    }
}
