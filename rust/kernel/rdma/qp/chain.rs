// SPDX-License-Identifier: GPL-2.0

//! Requests that are posted in one call.

use crate::{
    debug,
    mr,
    prelude::*,
    qp::post,
    trace,
    wr, //
};
use kernel::sync::SpinLockIrqGuard;

/// An operation that can be posted in a [`Chain`]: all but [`InvOp`](mr::InvOp), which completes to
/// a callback of its own.
pub trait ChainOp: wr::SendOp {
    /// Returns the registration of a region.
    #[doc(hidden)]
    #[inline]
    fn registration(_undo: Self::Undo) -> Option<mr::Registration> {
        None
    }
}

impl ChainOp for wr::RdmaOp {}
impl ChainOp for wr::AtomicOp {}

impl<S: mr::State> ChainOp for mr::RegOp<S> {
    #[inline]
    fn registration(undo: mr::Registration) -> Option<mr::Registration> {
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
pub(super) struct Slot<const SGES: usize> {
    registration: MaybeUninit<mr::Registration>,
    wr: MaybeUninit<AnyWr>,
    sges: [MaybeUninit<bindings::ib_sge>; SGES],
}

impl<const SGES: usize> Slot<SGES> {
    #[inline]
    fn wr(&mut self) -> *mut bindings::ib_send_wr {
        self.wr.as_mut_ptr().cast()
    }
}

/// A chain of up to `LINKS` requests of up to `SGES` entries each, which is being made.
///
/// See [`Qp::post_chain`].
///
/// # Invariants
///
/// `slots` is valid, and its first `len` requests, of `LINKS`, are written and linked, but for the
/// end of the last.
pub struct Chain<'a, const LINKS: usize, const SGES: usize = 1> {
    slots: *mut Slot<SGES>,
    pub(super) len: usize,
    /// Set if there is an RDMA READ among them, or was one among those that were posted before.
    pub(super) reads: bool,
    /// Set if one registers a shared region, so that all are posted under the lock of the QP.
    is_locked: bool,
    target: &'a wr::PostTarget,
    // Invariant, so that what is added is memory of the owner.
    _owner: PhantomData<fn(&'a ()) -> &'a ()>,
}

/// A chain that the driver has refused, and its answer.
pub(super) struct Refused<'a, const LINKS: usize, const SGES: usize> {
    chain: Chain<'a, LINKS, SGES>,
    /// Held until what was not posted is taken back.
    _guard: Option<SpinLockIrqGuard<'a, ()>>,
    bad: *const bindings::ib_send_wr,
    ret: c_int,
}

impl<'a, const LINKS: usize, const SGES: usize> Chain<'a, LINKS, SGES> {
    /// Calls `make` to add requests, which are made of memory of `owner`.
    ///
    /// # Safety
    ///
    /// `slots` is memory that outlives what is returned. `owner` is valid, and is neither changed
    /// nor moved before the chain was posted or dropped.
    #[inline]
    pub(super) unsafe fn make<T: 'a>(
        slots: *mut [Slot<SGES>; LINKS],
        target: &'a wr::PostTarget,
        owner: *const T,
        make: impl FnOnce(&'a T, &mut Self) -> Result,
    ) -> Result<Self> {
        // INVARIANT: There is no request yet.
        let mut chain = Self {
            slots: slots.cast(),
            len: 0,
            reads: false,
            is_locked: false,
            target,
            _owner: PhantomData,
        };
        // SAFETY: The owner is valid and stays as it is, as the caller promises.
        match make(unsafe { &*owner }, &mut chain) {
            Ok(()) if chain.len > 0 => Ok(chain),
            made => {
                // SAFETY: Nothing is posted, and the owner is valid, as the caller promises.
                unsafe { chain.undo(0) };
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
        let n = self.len;
        if n >= LINKS {
            return Err(ENOSPC);
        }
        // SAFETY: What the request refers to is the owner's. `post` commits registrations, and
        // `undo` aborts them.
        let (wr, (output, undo)) = unsafe { wr.prepare(self.target) }?;
        // SAFETY: By the type invariant the slots are valid, and `n` is less than `LINKS`, as just
        // checked.
        let slot = unsafe { &mut *self.slots.add(n) };
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entries, and for a request of every kind; it is prepared.
        unsafe { wr.write(slot.wr().cast(), sges) };
        if let Some(registration) = O::registration(undo) {
            self.is_locked |= registration.is_shared();
            // INVARIANT: The request was just written.
            slot.registration.write(registration);
        }
        let wr = slot.wr();
        // SAFETY: The request was just written, and so was the one before, by the type invariant.
        unsafe {
            self.reads |= (*wr).opcode == bindings::ib_wr_opcode_IB_WR_RDMA_READ;
            post::signal(wr, None);
            if n > 0 {
                (*self.wr(n - 1)).next = wr;
            }
        }
        // INVARIANT: Written and linked.
        self.len = n + 1;
        Ok(output)
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

    /// Calls `f` for the registrations from request number `from` on.
    fn for_each_registration(&self, from: usize, f: impl Fn(&mr::Registration)) {
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
    /// The regions are alive. The chain is posted next.
    #[cold]
    unsafe fn commit(&self) -> SpinLockIrqGuard<'a, ()> {
        let guard = self.target.lock_regs();
        // SAFETY: The region is alive, as the caller promises, and the lock is held.
        self.for_each_registration(0, |registration| unsafe { registration.commit() });
        guard
    }

    /// Posts the chain, signaled at its end if there is a `tail` callback for that.
    ///
    /// # Safety
    ///
    /// What the requests are made of lives until the tail completes or, without one, until a
    /// signaled request that is posted later completes or the QP was drained.
    #[inline(always)]
    pub(super) unsafe fn post(
        self,
        tail: Option<*mut bindings::ib_cqe>,
    ) -> Result<(), Refused<'a, LINKS, SGES>> {
        let target = self.target;
        let (qp, mut bad) = (target.raw.as_ptr(), core::ptr::null());
        // SAFETY: There is a first and a last one: `make` returns no empty chain.
        let (first, last) = unsafe { (self.wr(0), self.wr(self.len - 1)) };
        // SAFETY: By the type invariant the last request is written.
        unsafe {
            (*last).next = core::ptr::null_mut();
            if let Some(tail) = tail {
                post::signal(last, Some(tail));
                if self.reads && target.iwarp {
                    post::come_after_reads(last);
                }
                debug::set_qp_of(qp, tail);
            }
        }
        // SAFETY: Nothing is posted yet, so the regions are alive.
        let guard = self.is_locked.then(|| unsafe { self.commit() });
        // SAFETY: The QP of `target` is valid and the operation its driver's by the invariant of
        // that, and what the requests are made of is kept, as the caller promises. By the type
        // invariant they are written and linked; one that is alone has no successor.
        let ret = unsafe {
            match const { LINKS == 1 } {
                true => post::send_raw(target.post_send, qp, first),
                false => trace::post_send(target.post_send, qp, first, &mut bad),
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
            chain: self,
            _guard: guard,
            bad,
            ret,
        })
    }
}

impl<const LINKS: usize, const SGES: usize> Refused<'_, LINKS, SGES> {
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
            // SAFETY: The driver says that it has posted none from this one on, and what the
            // requests are made of is alive, as the caller promises.
            unsafe { self.chain.undo(n) };
        }
        (error, posted)
    }

    /// As [`Refused::take_back`], but leaves the registrations as they are.
    ///
    /// `names_first` is that of the [`AnyQp`](crate::qp::AnyQp). From such a driver it is not known
    /// which one had no room, so all but the last are taken for posted.
    #[cold]
    pub(super) fn why(&self, names_first: bool) -> (Error, Option<usize>) {
        let (chain, error) = (&self.chain, Error::from_errno(self.ret));
        // SAFETY: `n` is less than the number of requests, which is at most `LINKS`.
        let posted = (0..chain.len).find(|n| core::ptr::eq(unsafe { chain.wr(*n) }, self.bad));
        match posted {
            Some(0) if names_first && error == ENOMEM => (error, Some(chain.len - 1)),
            posted => (error, posted),
        }
    }
}
