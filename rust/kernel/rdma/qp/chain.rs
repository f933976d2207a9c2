// SPDX-License-Identifier: GPL-2.0

//! Requests that are posted in one call.

pub(super) use private::Write;

use crate::{
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    debug,
    mr::{
        RegWr,
        Registration,
        State, //
    },
    qp::{
        post::{
            come_after_reads,
            no_signal,
            post_list,
            signal, //
        },
        BatchError,
        PostTarget,
        Qp, //
    },
    wr::{
        AtomicWr,
        Remote,
        SendWr, //
    }, //
};
use core::{
    marker::PhantomData,
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::{
        SpinLockIrq,
        SpinLockIrqGuard, //
    }, //
};

/// The C requests of a chain.
///
/// # Invariants
///
/// `slots` is valid, and its first `len` requests, of `LINKS`, are written and linked, but for the
/// end of the last.
pub(super) struct Links<const LINKS: usize, const SGES: usize> {
    slots: *mut Slot<SGES>,
    len: usize,
    /// Whether there is an RDMA READ among them, or was one among those that were posted before.
    pub(super) reads: bool,
}

/// A chain that the driver has refused, and what it says.
pub(super) struct Refused<'t, const LINKS: usize, const SGES: usize> {
    links: Links<LINKS, SGES>,
    /// Held until the registrations that were not posted have ended.
    _lock: Option<SpinLockIrqGuard<'t, ()>>,
    bad: *const bindings::ib_send_wr,
    ret: c_int,
}

impl<const LINKS: usize, const SGES: usize> Links<LINKS, SGES> {
    /// Has `make` add links, which are made of memory of `owner`. Returns them, and whether one
    /// registers a region that is shared, so that they have to be posted under the QP's lock.
    ///
    /// # Safety
    ///
    /// `slots` and `place` outlive what is returned.
    #[inline]
    pub(super) unsafe fn make<'a, T>(
        slots: *mut [Slot<SGES>; LINKS],
        target: &PostTarget,
        owner: &'a T,
        make: impl FnOnce(&'a T, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(Self, bool)> {
        let mut chain = Chain {
            // INVARIANT: There is no request yet. The place is there by the caller's promise.
            links: Self {
                slots: slots.cast(),
                len: 0,
                reads: false,
            },
            posting: Posting {
                target: NonNull::from(target),
                shared: false,
                reads: false,
            },
            _owner: PhantomData,
        };
        let made = make(owner, &mut chain);
        let Chain {
            mut links, posting, ..
        } = chain;
        links.reads = posting.reads;
        match made {
            Ok(()) if links.len > 0 => Ok((links, posting.shared)),
            made => {
                // SAFETY: Nothing is posted, and the owner is borrowed.
                unsafe { links.undo(0) };
                Err(made.err().unwrap_or(EINVAL))
            }
        }
    }

    /// Returns the number of links.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns request number `n`.
    ///
    /// # Safety
    ///
    /// `n` is less than `LINKS`.
    #[inline]
    unsafe fn wr(&self, n: usize) -> *mut bindings::ib_send_wr {
        // SAFETY: The slots are valid by the type invariant, and `n` is in bounds.
        unsafe { (*self.slots.add(n)).wr() }
    }

    /// Ends the registrations among the links from number `from` on.
    ///
    /// # Safety
    ///
    /// These links are not posted, and what they are made of is alive.
    #[cold]
    unsafe fn undo(self, from: usize) {
        for n in from..self.len {
            // SAFETY: By the type invariant the slot is valid and its request is written. That is
            // not posted and what it is made of is alive, as the caller promises; `self` goes, so
            // this is done once.
            unsafe { (*self.slots.add(n)).undo() };
        }
    }

    /// Marks the regions registered that the chain registers.
    ///
    /// # Safety
    ///
    /// The regions are alive. The chain is posted next, and the caller holds the lock of its QP
    /// until that has returned.
    unsafe fn commit(&self) {
        for n in 0..self.len {
            // SAFETY: By the type invariant the slot is valid and its request is written. A region
            // is alive, and the caller holds the lock of the QP, as promised.
            unsafe { (*self.slots.add(n)).commit() };
        }
    }

    /// Posts the chain, signaled at its end if there is a `tail` callback for that.
    ///
    /// # Safety
    ///
    /// `target` is valid. `reg_lock` is that of its QP if a region is shared. What the links are
    /// made of lives until the tail completes or, without one, until a signaled request that is
    /// posted later completes or the QP was drained.
    #[inline]
    pub(super) unsafe fn post<'t>(
        self,
        target: &PostTarget,
        reg_lock: Option<&'t SpinLockIrq<()>>,
        tail: Option<*mut bindings::ib_cqe>,
    ) -> Result<(), Refused<'t, LINKS, SGES>> {
        // SAFETY: There is a first and a last one: an empty chain is not made.
        let (first, last) = unsafe { (self.wr(0), self.wr(self.len - 1)) };
        // SAFETY: By the type invariant the last request is written.
        unsafe {
            (*last).next = core::ptr::null_mut();
            if let Some(tail) = tail {
                signal(last, tail);
                if self.reads && target.iwarp {
                    come_after_reads(last);
                }
                debug::set_qp_of(target.raw.as_ptr(), tail);
            }
        }
        let lock = reg_lock.map(|reg_lock| {
            let lock = reg_lock.lock();
            // SAFETY: Nothing is posted yet, so the regions are alive. The lock is held to the end.
            unsafe { self.commit() };
            lock
        });
        let (qp, mut bad) = (target.raw.as_ptr(), core::ptr::null());
        // SAFETY: The QP of `place` is valid and what the links are made of is kept, as the caller
        // promises. By the type invariant they are written and linked.
        let ret = unsafe { post_list(qp, first, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        Err(Refused {
            links: self,
            _lock: lock,
            bad,
            ret,
        })
    }
}

impl<const LINKS: usize, const SGES: usize> Refused<'_, LINKS, SGES> {
    /// Returns why the driver has refused a link, and how many were posted before it, if that is
    /// known. What the others have marked is taken back.
    ///
    /// # Safety
    ///
    /// What the links are made of is alive.
    #[cold]
    pub(super) unsafe fn take_back(self) -> (Error, Option<usize>) {
        let Self {
            links,
            _lock,
            bad,
            ret,
        } = self;
        // SAFETY: `n` is less than the number of links, which is at most `LINKS`.
        let posted = (0..links.len).find(|n| core::ptr::eq(unsafe { links.wr(*n) }, bad));
        if let Some(n) = posted {
            // SAFETY: The driver says that it has posted none from this one on, and what the links
            // are made of is alive, as the caller promises.
            unsafe { links.undo(n) };
        }
        (Error::from_errno(ret), posted)
    }
}

/// A chain of up to `LINKS` requests of up to `SGES` entries each, which is being made.
///
/// See [`Qp::post_chain`].
///
/// # Invariants
///
/// The place in `posting` is there.
pub struct Chain<'a, const LINKS: usize, const SGES: usize = 1> {
    links: Links<LINKS, SGES>,
    posting: Posting,
    // Invariant, so that what is added is memory of the owner.
    _owner: PhantomData<fn(&'a ()) -> &'a ()>,
}

impl<'a, const LINKS: usize, const SGES: usize> Chain<'a, LINKS, SGES> {
    /// Adds a request at the end. Adding a registration returns where a peer will find the region.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the chain is full; `EINVAL` if the request is of another PD; or what else its
    /// own post would say.
    #[inline]
    pub fn push<L: Link<'a, SGES>>(&mut self, link: L) -> Result<L::Output> {
        let links = &mut self.links;
        let n = links.len;
        if n >= LINKS {
            return Err(ENOSPC);
        }
        // SAFETY: By the invariant of `Links` the slots are valid, and `n` is less than `LINKS`, as
        // just checked.
        let slot = unsafe { &mut *links.slots.add(n) };
        // SAFETY: By the type invariant the place is there. `Links::post` commits registrations,
        // and what is not posted is undone.
        let output = unsafe { link.write(slot, &mut self.posting) }?;
        let wr = slot.wr();
        // SAFETY: The request was just written, and so was the one before, by the type invariant.
        unsafe {
            no_signal(wr);
            if n > 0 {
                (*links.wr(n - 1)).next = wr;
            }
        }
        // INVARIANT: Written and linked.
        links.len = n + 1;
        Ok(output)
    }
}

/// Requests of one owner that were not posted, or not all of them.
pub struct ChainError<P> {
    /// The owner, if nothing was posted.
    ///
    /// Otherwise the QP keeps it and drops it once a drain has proved that it is out of use.
    pub owner: Option<P>,
    /// The number of requests, from the first, that were posted.
    pub posted: usize,
    /// Why the next one was not.
    pub error: Error,
}

impl<P> From<ChainError<P>> for Error {
    fn from(e: ChainError<P>) -> Self {
        e.error
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts several requests in one call (`ib_post_send` of a linked list), moving their owner in.
    ///
    /// `make` adds the requests, made from what the owner has, to the chain, whose room its type
    /// says. Only the last one is signaled: its completion says that those before it have completed
    /// too, and gives the owner to its handler.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`]. The driver may have posted some requests when it refuses one: see
    /// [`ChainError`].
    ///
    /// # Examples
    ///
    /// A registration and the message that tells the peer of it:
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, mr::*, qp::*, wc::Wc, wr::SendWr};
    /// # #[derive(HasCqe)]
    /// # struct Io { cqe: Cqe<Self>, message: Buf<ToDevice>, region: Region<FromDevice> }
    /// # impl CqeHandler for Io {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn submit(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    ///     Ok(qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
    ///         chain.push(RegWr::remote_write(&io.region))?;
    ///         chain.push(SendWr::send([io.message.whole()]))
    ///     })?)
    /// }
    /// ```
    #[inline]
    pub fn post_chain<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        owner: P,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), ChainError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        self.batch(owner)
            .finish(make)
            .map_err(BatchError::into_chain)
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

/// The place of a C request with up to `SGES` entries.
///
/// # Invariants
///
/// When the request is written and registers a region, `registration` is written.
#[doc(hidden)]
#[repr(C)]
pub struct Slot<const SGES: usize> {
    registration: MaybeUninit<Registration>,
    wr: MaybeUninit<AnyWr>,
    sges: [MaybeUninit<bindings::ib_sge>; SGES],
}

impl<const SGES: usize> Slot<SGES> {
    pub(super) const fn new() -> Self {
        // INVARIANT: No request is written.
        Self {
            registration: MaybeUninit::uninit(),
            wr: MaybeUninit::uninit(),
            sges: [const { MaybeUninit::uninit() }; SGES],
        }
    }

    #[inline]
    pub(super) fn wr(&mut self) -> *mut bindings::ib_send_wr {
        self.wr.as_mut_ptr().cast()
    }

    /// Marks the region registered, if the link registers one.
    ///
    /// # Safety
    ///
    /// The request is written. Its region is alive; the request is posted next, and the caller
    /// holds the lock of its QP until that has returned.
    unsafe fn commit(&mut self) {
        // SAFETY: The request is written, as the caller promises, so by the type invariant the
        // registration is. Its region is alive, and the caller holds the lock.
        unsafe {
            if (*self.wr()).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                self.registration.assume_init_ref().commit();
            }
        }
    }

    /// Ends the registration, if the link registers a region.
    ///
    /// # Safety
    ///
    /// The request is written and was not posted, what it is made of is alive, and this was not
    /// called for it before.
    unsafe fn undo(&mut self) {
        // SAFETY: The request is written, as the caller promises, so by the type invariant the
        // registration is. It was not posted, its region is alive, and it is read once.
        unsafe {
            if (*self.wr()).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                self.registration.assume_init_read().abort();
            }
        }
    }
}

/// How links are posted.
#[doc(hidden)]
pub struct Posting {
    pub(super) target: NonNull<PostTarget>,
    /// A link registers a region that is shared.
    pub(super) shared: bool,
    /// Whether a link is an RDMA READ.
    pub(super) reads: bool,
}

mod private {
    use super::*;

    /// What a [`Link`](super::Link) has to do.
    pub trait Write<const SGES: usize>: Sized {
        type Output;

        /// Writes the C request, without callback and successor.
        ///
        /// # Safety
        ///
        /// The target in `posting` is valid. [`Slot::commit`] is called under the lock of the QP if
        /// `posting` is `shared` then. If the request is not posted, [`Slot::undo`] is called.
        unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting)
            -> Result<Self::Output>;
    }
}

/// A request of up to `SGES` entries that can be a link of a [`Chain`](super::Chain): a
/// [`SendWr`], an [`AtomicWr`] or a [`RegWr`].
pub trait Link<'a, const SGES: usize>: Write<SGES> {}

impl<'a, const N: usize, const SGES: usize> Link<'a, SGES> for SendWr<'a, N> {}
impl<const N: usize, const SGES: usize> Write<SGES> for SendWr<'_, N> {
    type Output = ();

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result {
        const { assert!(N <= SGES, "the chain has no room for so many entries") };
        posting.reads |= self.is_read();
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entries, and for a request of every kind; the place is
        // there.
        unsafe { self.write(slot.wr().cast(), sges, posting.target.as_ref()) }
    }
}

impl<'a, const SGES: usize> Link<'a, SGES> for AtomicWr<'a> {}
impl<const SGES: usize> Write<SGES> for AtomicWr<'_> {
    type Output = ();

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result {
        const { assert!(1 <= SGES, "the chain has no room for an entry") };
        let sge = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entry, and for a request of every kind; the place is there.
        unsafe { self.write(slot.wr().cast(), sge, posting.target.as_ref()) }
    }
}

impl<'a, S: State, const SGES: usize> Link<'a, SGES> for RegWr<'a, S> {}
impl<S: State, const SGES: usize> Write<SGES> for RegWr<'_, S> {
    type Output = Remote;

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result<Remote> {
        // SAFETY: There is room for a request of every kind, and the target is valid. The caller
        // commits the registration and ends it if it is not posted. An exclusive one is committed
        // when it is prepared.
        let prepared = unsafe { self.prepare(slot.wr().cast(), posting.target.as_ref()) };
        let (_, remote, registration) = prepared?;
        // INVARIANT: The request was just written.
        slot.registration.write(registration);
        posting.shared |= S::SHARED;
        Ok(remote)
    }
}
