// SPDX-License-Identifier: GPL-2.0

//! Requests of which only the last is signaled, posted in one call or one after the other.

use super::{
    post,
    Inner, //
};
use crate::{
    cqe::{
        self,
        CqePointer,
        Queue,
        Runs, //
    },
    debug,
    dma::OneWay,
    mr,
    prelude::internal::*,
    qp::Qp,
    sg::{
        SgMap,
        SgOwner, //
    },
    trace,
    wc,
    wr::{
        self,
        PostError, //
    }, //
};
use kernel::sync::SpinLockIrqGuard;

/// An operation that can be posted in a [`Chain`]: all but [`InvOp`](mr::InvOp), which completes to
/// a callback of its own.
pub trait ChainOp: wr::WrOp {
    /// Returns the registration of a region.
    #[doc(hidden)]
    #[inline]
    fn registration(_undo: Self::Undo) -> Option<mr::PreparedReg> {
        None
    }
}

impl ChainOp for wr::RdmaOp {}
impl ChainOp for wr::AtomicOp {}

impl<S: mr::State> ChainOp for mr::RegOp<S> {
    #[inline]
    fn registration(undo: mr::PreparedReg) -> Option<mr::PreparedReg> {
        Some(undo)
    }
}

/// A C request of any kind.
///
/// # Invariants
///
/// Every member begins with its `struct ib_send_wr`.
#[repr(C)]
union AnyWr {
    send: ManuallyDrop<bindings::ib_send_wr>,
    rdma: ManuallyDrop<bindings::ib_rdma_wr>,
    atomic: ManuallyDrop<bindings::ib_atomic_wr>,
    reg: ManuallyDrop<bindings::ib_reg_wr>,
}

/// Memory for a C request with up to `SGES` entries.
///
/// # Invariants
///
/// When the request is written and registers a region, so is `registration`.
#[repr(C)]
pub(crate) struct WrSlot<const SGES: usize> {
    registration: MaybeUninit<mr::PreparedReg>,
    wr: MaybeUninit<AnyWr>,
    sges: [MaybeUninit<bindings::ib_sge>; SGES],
}

impl<const SGES: usize> WrSlot<SGES> {
    #[inline]
    fn wr(&mut self) -> *mut bindings::ib_send_wr {
        self.wr.as_mut_ptr().cast()
    }
}

/// The requests of a chain. They are apart from it, as it would be in memory where they are taken
/// back.
///
/// # Invariants
///
/// The slots are valid, and the requests of the first `len` are written and linked, but for the end
/// of the last.
struct LinkedWrs<const SGES: usize> {
    slots: *mut WrSlot<SGES>,
    len: usize,
}

/// A chain of up to `LINKS` requests of up to `SGES` entries each, which is being made. The last
/// request completes to the handler `ID` of their owner. All are on the stack: a chain of more than
/// 4 KiB, as 24 requests of one entry, does not compile.
///
/// See [`Qp::post_chain`].
///
/// # Invariants
///
/// `links` has `LINKS` slots.
pub struct Chain<'a, const LINKS: usize, const SGES: usize = 1, const ID: u64 = 0> {
    links: LinkedWrs<SGES>,
    /// Set if there is an RDMA READ among them, or was one among those that were posted before.
    pub(crate) reads: bool,
    /// Set if one registers a shared region, so that all are posted under the lock of the QP.
    is_locked: bool,
    target: &'a wr::PostTarget,
    // Invariant, so that what is added is memory of the owner.
    _owner: PhantomData<fn(&'a ()) -> &'a ()>,
}

/// A chain that the driver has refused, and its answer.
pub(crate) struct Refused<'a, const SGES: usize> {
    links: LinkedWrs<SGES>,
    /// Held until what was not posted is taken back.
    _guard: Option<SpinLockIrqGuard<'a, ()>>,
    bad: *const bindings::ib_send_wr,
    ret: c_int,
}

impl<const SGES: usize> LinkedWrs<SGES> {
    /// Returns request number `n`.
    ///
    /// # Safety
    ///
    /// There is a slot `n`.
    #[inline]
    unsafe fn wr(&self, n: usize) -> *mut bindings::ib_send_wr {
        // SAFETY: The slots are valid by the type invariant, and `n` is in bounds.
        unsafe { (*self.slots.add(n)).wr() }
    }

    /// Calls `f` for the registrations from request number `from` on.
    fn for_each_registration(&self, from: usize, f: impl Fn(&mr::PreparedReg)) {
        for n in from..self.len {
            // SAFETY: By the type invariant the slot is valid and its request is written. So is the
            // registration, if the request is one.
            unsafe {
                let slot = &mut *self.slots.add(n);
                if (*slot.wr()).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                    f(slot.registration.assume_init_ref());
                }
            }
        }
    }

    /// Ends the registrations from request number `from` on.
    ///
    /// # Safety
    ///
    /// These requests are not posted, and what they are made of is alive.
    #[cold]
    unsafe fn undo(self, from: usize) {
        // SAFETY: The region is alive and its registration is not posted, as the caller promises.
        // `self` goes, so this is done once.
        self.for_each_registration(from, |registration| unsafe { registration.abort() });
    }

    /// Marks the shared regions registered, under the lock, which is held until the chain is
    /// posted.
    ///
    /// # Safety
    ///
    /// The regions are alive. The requests are posted next, to the QP of `target`.
    unsafe fn commit<'t>(&self, target: &'t wr::PostTarget) -> SpinLockIrqGuard<'t, ()> {
        let guard = target.lock_regs();
        // SAFETY: The region is alive, as the caller promises, and the lock is held.
        self.for_each_registration(0, |registration| unsafe { registration.commit() });
        guard
    }
}

impl<'a, const LINKS: usize, const SGES: usize, const ID: u64> Chain<'a, LINKS, SGES, ID> {
    /// Calls `make` to add requests, which are made of memory of `owner`.
    ///
    /// # Safety
    ///
    /// `slots` is memory that outlives what is returned. `owner` is valid, and is neither changed
    /// nor moved before the chain was posted or dropped.
    #[inline]
    pub(crate) unsafe fn make<T: 'a>(
        slots: *mut [WrSlot<SGES>; LINKS],
        target: &'a wr::PostTarget,
        owner: *const T,
        make: impl FnOnce(&'a T, &mut Self) -> Result,
    ) -> Result<Self> {
        const {
            assert!(
                size_of::<[WrSlot<SGES>; LINKS]>() <= 4096,
                "a chain takes at most 4 KiB of the stack: post several (`Qp::batch`)"
            )
        };
        // INVARIANT: There is no request yet.
        let mut chain = Self {
            links: LinkedWrs {
                slots: slots.cast(),
                len: 0,
            },
            reads: false,
            is_locked: false,
            target,
            _owner: PhantomData,
        };
        // SAFETY: The owner is valid and stays as it is, as the caller promises.
        match make(unsafe { &*owner }, &mut chain) {
            Ok(()) if chain.links.len > 0 => Ok(chain),
            made => {
                // SAFETY: Nothing is posted, and the owner is valid, as the caller promises.
                unsafe { chain.links.undo(0) };
                Err(made.err().unwrap_or(EINVAL))
            }
        }
    }

    /// Adds a request at the end, and returns what posting it by itself would. Fails with `ENOSPC`
    /// if the chain is full; or what posting the request by itself would be refused with.
    #[inline]
    pub fn push<O: ChainOp, const N: usize>(
        &mut self,
        wr: wr::SendWr<'a, N, O>,
    ) -> Result<O::Output> {
        const { assert!(N <= SGES, "the chain has no room for so many entries") };
        let n = self.links.len;
        if n >= LINKS {
            return Err(ENOSPC);
        }
        // SAFETY: What the request refers to is the owner's. `post` commits registrations, and
        // `undo` aborts them.
        let (wr, (output, undo)) = unsafe { wr.prepare(self.target) }?;
        // SAFETY: By the type invariant the slots are valid, and `n` is less than `LINKS`, as just
        // checked.
        let slot = unsafe { &mut *self.links.slots.add(n) };
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entries, and for a request of every kind; it is prepared.
        unsafe { wr.write(slot.wr().cast(), sges) };
        if let Some(registration) = O::registration(undo) {
            self.is_locked |= registration.is_shared();
            // INVARIANT: The request was just written.
            slot.registration.write(registration);
        }
        // SAFETY: `write` above has written the request of slot `n`, and there are `n` before it.
        unsafe { self.link(n) };
        Ok(output)
    }

    /// Adds a SEND of a header and, behind it, all of a list's memory. This is [`Chain::push`] of
    /// the entries of [`SgMap::append_to`], and fails as these, but writes them where the driver
    /// reads them.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{dma::*, qp::Chain, sg::{SgMap, SgOwner}};
    /// /// Adds a command, and the data of a write that has up to four segments with it.
    /// fn write<'a, O: SgOwner<OneWay>>(
    ///     chain: &mut Chain<'a, 1, 5>,
    ///     command: &'a Buf<ToDevice>,
    ///     data: &'a SgMap<O, OneWay>,
    /// ) -> Result {
    ///     chain.push_with_data(command.whole(), data)
    /// }
    /// ```
    #[inline]
    pub fn push_with_data<O: SgOwner<OneWay>>(
        &mut self,
        header: wr::Sge<'a>,
        data: &'a SgMap<O, OneWay>,
    ) -> Result {
        let n = self.links.len;
        if n >= LINKS {
            return Err(ENOSPC);
        }
        if header.pd != self.target.pd || data.list.pd.id() != self.target.pd {
            return Err(EINVAL);
        }
        if !data.is_to_device() {
            return Err(EACCES);
        }
        // SAFETY: By the type invariant the slots are valid, and `n` is less than `LINKS`, as just
        // checked.
        let slot = unsafe { &mut *self.links.slots.add(n) };
        let (first, rest) = slot.sges.split_first_mut().ok_or(ENOSPC)?;
        first.write(header.to_raw());
        let count = data.list.write_sges(rest)?.wrapping_add(1);
        let wr = slot.wr();
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for a request of every kind. All that a SEND has is written here.
        unsafe {
            (*wr).sg_list = sges;
            (*wr).num_sge = count as c_int;
            wr::write_header(wr, bindings::ib_wr_opcode_IB_WR_SEND, 0, 0);
            self.link(n);
        }
        Ok(())
    }

    /// Links request number `n` to the one before it.
    ///
    /// # Safety
    ///
    /// There are `n` requests so far, and a slot behind them with a request that was just written.
    #[inline]
    unsafe fn link(&mut self, n: usize) {
        // SAFETY: The request was just written, as the caller promises, and so was the one before,
        // by the type invariant.
        unsafe {
            let wr = self.links.wr(n);
            self.reads |= (*wr).opcode == bindings::ib_wr_opcode_IB_WR_RDMA_READ;
            post::signal(wr, None);
            if n > 0 {
                (*self.links.wr(n - 1)).next = wr;
            }
        }
        // INVARIANT: Written and linked.
        self.links.len = n + 1;
    }

    /// Drops the chain, which is not posted.
    ///
    /// # Safety
    ///
    /// What the requests are made of is alive.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: Nothing is posted, and what they are made of is alive, as the caller promises.
        unsafe { self.links.undo(0) };
    }

    /// Posts the chain, signaled at its end if there is a `tail` callback for that. Where posts are
    /// noted, it is if `noted` is set.
    ///
    /// # Safety
    ///
    /// What the requests are made of lives until the tail completes or, without one, until a
    /// signaled request that is posted later completes or the QP was drained. The callback of what
    /// is noted is that of an owner, as [`noted`](crate::noted) requires.
    #[inline(always)]
    pub(crate) unsafe fn post(
        self,
        tail: Option<*mut bindings::ib_cqe>,
        noted: bool,
    ) -> Result<(), Refused<'a, SGES>> {
        let Self { links, target, .. } = self;
        // SAFETY: There is a first and a last one: `make` returns no empty chain.
        let (first, last) = unsafe { (links.wr(0), links.wr(links.len - 1)) };
        // SAFETY: By the type invariant the last request is written.
        unsafe {
            (*last).next = ptr::null_mut();
            if let Some(tail) = tail {
                post::signal(last, Some(tail));
                if self.reads && target.iwarp {
                    post::come_after_reads(last);
                }
                debug::set_qp_of(target.raw.as_ptr(), tail);
            }
        }
        let guard = if self.is_locked {
            wc::unlikely();
            // SAFETY: Nothing is posted yet, so the regions are alive.
            Some(unsafe { links.commit(target) })
        } else {
            None
        };
        let qp = target.raw.as_ptr();
        let mut bad = ptr::null();
        // SAFETY: The QP of `target` is valid and the operation its driver's by the invariant of
        // that, and what the requests are made of is kept, as the caller promises. By the type
        // invariant they are written and linked; one that is alone has no successor.
        let ret = unsafe {
            if const { LINKS == 1 } {
                trace::PostVerb::post_one(target.post_send, qp, first, noted)
            } else {
                trace::PostVerb::post(target.post_send, qp, first, &mut bad, noted)
            }
        };
        if ret == 0 {
            return Ok(());
        }
        if const { LINKS == 1 } {
            // SAFETY: The request is written. The driver has named it there, if at all.
            bad = unsafe { (*first).next };
        }
        Err(Refused {
            links,
            _guard: guard,
            bad,
            ret,
        })
    }
}

impl<const SGES: usize> Refused<'_, SGES> {
    /// Returns why the driver has refused a request, and how many were posted before it, at the
    /// most, if that is known. The registrations behind them end.
    ///
    /// # Safety
    ///
    /// The owner that the requests are made of is alive.
    #[cold]
    pub(super) unsafe fn take_back(self, names_first: bool) -> (Error, Option<usize>) {
        let (error, posted) = self.why(names_first);
        if let Some(n) = posted {
            // SAFETY: The driver reports that it has posted none from this one on, and what the
            // requests are made of is alive, as the caller promises.
            unsafe { self.links.undo(n) };
        }
        (error, posted)
    }

    /// As [`Refused::take_back`], but leaves the registrations as they are.
    ///
    /// `names_first` is that of the QP: see [`Inner::names_first`]. From such a driver it is not
    /// known which one had no room, so all but the last are taken for posted.
    pub(crate) fn why(&self, names_first: bool) -> (Error, Option<usize>) {
        let error = Error::from_errno(self.ret);
        let links = &self.links;
        // SAFETY: `n` is less than the number of requests, and so of slots.
        let posted = (0..links.len).find(|n| ptr::eq(unsafe { links.wr(*n) }, self.bad));
        match posted {
            Some(0) if names_first && error == ENOMEM => (error, Some(links.len - 1)),
            posted => (error, posted),
        }
    }
}

/// Requests of one owner that are posted one after the other, with a signaled one at the end.
///
/// If it is dropped before [`Batch::finish`] has succeeded, and something was posted, the QP keeps
/// the owner until a drain has proved that it is out of use.
///
/// # Invariants
///
/// The owner exists until it is posted or lost.
pub struct Batch<'q, P: CqePointer<ID>, const ID: u64 = 0> {
    qp: &'q Inner,
    owner: Option<P>,
    /// In so many bits that it cannot wrap.
    posted: u64,
    /// Set if an RDMA READ may be among the requests that were posted.
    reads: bool,
}

/// A chain that was not posted by `Qp::post_shared`.
pub(crate) enum ChainError {
    /// It was not made.
    Unmade(Error),
    /// The driver has refused a request, behind so many others if it has named it.
    Refused(Error, Option<usize>),
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts several requests in one call (`ib_post_send` of a linked list), moving their owner in.
    /// `make` adds the requests, made from what the owner has, to the chain. Only the last one is
    /// signaled, and gives the owner to its handler.
    ///
    /// Any context. Fails as [`Qp::post_send`]. The driver may have posted some requests when it
    /// refuses one: see [`PostError`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, mr::*, qp::*, wc::Wc, wr::{Remote, SendWr}};
    /// # #[derive(HasCqe)]
    /// # struct Io { cqe: Cqe<Self>, message: Buf<ToDevice>, region: Region<FromDevice> }
    /// # impl CqeHandler for Io {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn submit(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    ///     Ok(qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
    ///         let Remote { rkey, .. } = chain.push(RegWr::remote_write(&io.region))?;
    ///         io.message.write(0, &rkey.to_le_bytes())?;
    ///         chain.push(SendWr::send([io.message.whole()]))
    ///     })?)
    /// }
    /// ```
    #[inline]
    pub fn post_chain<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        owner: P,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES, ID>) -> Result,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
    {
        self.inner
            .post_links(owner, false, make)
            .map_err(|e| self.inner.keep_posted(e))
    }

    /// Begins a batch of requests of one owner. Nothing is posted yet. The queue has room again
    /// only when a signaled request completes, so do not fill it with requests that are not.
    /// Documentation/qp.rst has an example.
    #[inline]
    pub fn batch<P, const ID: u64>(&self, owner: P) -> Batch<'_, P, ID>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
    {
        // INVARIANT: The owner is valid.
        Batch {
            qp: &self.inner,
            owner: Some(owner),
            posted: 0,
            reads: false,
        }
    }
}

impl Inner {
    /// Posts a chain whose last request completes to the owner. `reads` is whether there may be
    /// RDMA READs before it. The error has the owner unless the last request may be in the queue.
    #[inline]
    fn post_links<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        owner: P,
        reads: bool,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES, ID>) -> Result,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        if !owner.may_post_to(self.target.qp_id, cqe::Sealed(())) {
            return Err(PostError::new(owner, EINVAL));
        }
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain. The owner is given up before that is posted, and
        // stays where it is.
        let made = unsafe { Chain::make(slots.as_mut_ptr(), &self.target, &*owner, make) };
        let mut chain = match made {
            Ok(chain) => chain,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        chain.reads |= reads;
        let cqe = owner.into_cqe(cqe::Sealed(()));
        // SAFETY: The owner was just given up for this address.
        unsafe { P::note_cqe(cqe, self.target.qp_id, Queue::Send, cqe) };
        // SAFETY: The owner is the queue's until its callback is called, and what the requests are
        // made of is the owner's.
        let posted = unsafe { chain.post(Some(cqe), P::NOTED) };
        // SAFETY: The requests were made of the owner, and the last, signaled one has its callback.
        posted.map_err(|refused| unsafe { self.take_back(refused, cqe) })
    }

    /// Posts a chain that `make` makes of what `owner` has, and whose last request completes to the
    /// callback that `start` returns. Others may use the owner from `start` on, which is called
    /// when the chain is made, so what was prepared is not taken back if the driver refuses it.
    /// `names_first` is [`Inner::names_first`], without the QP, whose address each post would keep.
    ///
    /// # Safety
    ///
    /// The owner stays where it is until that request has completed or, if it was not posted, until
    /// the QP was drained; nobody has more than references to it until then, and the caller nothing
    /// else before `start` is called.
    #[inline]
    pub(crate) unsafe fn post_shared<T, const LINKS: usize, const SGES: usize>(
        &self,
        owner: *const T,
        start: impl FnOnce() -> *mut bindings::ib_cqe,
        names_first: impl FnOnce() -> bool,
        make: impl for<'a> FnOnce(&'a T, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), ChainError> {
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain. The owner stays where it is, as the caller promises,
        // and others use it only when the chain is made.
        let chain = unsafe { Chain::make(slots.as_mut_ptr(), &self.target, owner, make) }
            .map_err(ChainError::Unmade)?;
        // SAFETY: What the chain is made of stays until the QP was drained, as the caller promises.
        unsafe { chain.post(Some(start()), false) }.map_err(|refused| {
            let (error, posted) = refused.why(names_first());
            ChainError::Refused(error, posted)
        })
    }

    /// Finds out what was posted of a chain, and takes the owner back.
    ///
    /// # Safety
    ///
    /// The driver has refused requests that were made of what the owner has; the last of them was
    /// to complete to `cqe`, which is the owner's.
    #[cold]
    unsafe fn take_back<P, const ID: u64, const SGES: usize>(
        &self,
        refused: Refused<'_, SGES>,
        cqe: *mut bindings::ib_cqe,
    ) -> PostError<P>
    where
        P: CqePointer<ID>,
    {
        // SAFETY: The owner that was given up is alive unless all is posted, when nothing is marked
        // that has to be taken back.
        let (error, posted) = unsafe { refused.take_back(self.names_first()) };
        let owner = match posted {
            // SAFETY: The signaled request was not posted, so nothing else will take its owner
            // back.
            Some(_) => Some(unsafe { P::take_back(cqe) }),
            None => {
                post::unnamed();
                None
            }
        };
        PostError::in_part(owner, posted.unwrap_or(0) as u32, error)
    }

    /// Keeps the owner of requests that were posted until the QP was drained.
    #[cold]
    fn keep_posted<P: CqePointer<ID>, const ID: u64>(&self, mut e: PostError<P>) -> PostError<P> {
        if e.posted() > 0 {
            if let Some(owner) = e.owner.take() {
                self.keep_until_drained::<P, P::Target>(owner);
            }
        }
        e
    }
}

impl<P: CqePointer<ID>, const ID: u64> Batch<'_, P, ID> {
    /// Returns the number of requests that were posted.
    #[inline]
    pub fn posted(&self) -> u32 {
        self.posted.try_into().unwrap_or(u32::MAX)
    }

    /// Gives the batch up with this error. The owner is in it if nothing was posted; otherwise the
    /// QP keeps it until it is drained.
    pub fn into_error(mut self, error: Error) -> PostError<P> {
        let error = PostError::in_part(self.owner.take(), self.posted(), error);
        self.qp.keep_posted(error)
    }

    /// Posts requests that are not signaled, in one call. Any context. Fails as [`Qp::post_chain`];
    /// [`Batch::posted`] counts those that were posted all the same.
    #[inline]
    pub fn post<const LINKS: usize, const SGES: usize>(
        &mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES, ID>) -> Result,
    ) -> Result {
        let qp = self.qp;
        let owner = self.owner.as_ref().ok_or(EIO)?;
        if !owner.may_post_to(qp.target.qp_id, cqe::Sealed(())) {
            return Err(EINVAL);
        }
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain, and the owner does not move.
        let chain = unsafe { Chain::make(slots.as_mut_ptr(), &qp.target, &**owner, make) }?;
        let len = chain.links.len;
        self.reads |= chain.reads;
        // SAFETY: The owner is moved into a signaled request that is posted later, or kept until
        // the QP was drained.
        let (posted, result) = match unsafe { chain.post(None, false) } {
            Ok(()) => (len, Ok(())),
            Err(refused) => {
                // SAFETY: The owner, which is borrowed, keeps what the chain is made of.
                let (error, posted) = unsafe { refused.take_back(qp.names_first()) };
                // Without a word from the driver, take all for posted.
                (posted.unwrap_or(len), Err(error))
            }
        };
        self.posted = self.posted.wrapping_add(posted as u64);
        result
    }

    /// Posts the last requests, the very last signaled, and moves the owner in. Any context. Fails
    /// as [`Qp::post_chain`]. The batch can be finished again, or given up ([`Batch::into_error`]).
    #[inline]
    pub fn finish<const LINKS: usize, const SGES: usize>(
        &mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES, ID>) -> Result,
    ) -> Result {
        let owner = self.owner.take().ok_or(EIO)?;
        self.qp.post_links(owner, self.reads, make).map_err(|e| {
            let error = e.error();
            self.posted = self.posted.wrapping_add(e.posted().into());
            // An RDMA READ may be among what was posted now.
            self.reads |= e.posted() > 0;
            self.owner = e.owner;
            error
        })
    }
}

impl<P: CqePointer<ID>, const ID: u64> Drop for Batch<'_, P, ID> {
    #[inline]
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            if self.posted > 0 {
                self.qp.keep_until_drained::<P, P::Target>(owner);
            }
        }
    }
}
