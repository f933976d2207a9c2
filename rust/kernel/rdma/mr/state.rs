// SPDX-License-Identifier: GPL-2.0

//! The state of an MR.
//!
//! Of the kernel crate this has the atomics only, so that loom can run the file as it is.

use core::{
    cell::Cell,
    sync::atomic, //
};
use kernel::sync::atomic::{
    Acquire,
    Atomic,
    Full,
    Relaxed,
    Release, //
};

/// No key gives access to the memory.
pub(super) const IDLE: u64 = 0;
/// The MR is claimed.
const BUSY: u64 = 1;
/// The MR has a new key, and the request to register it will be posted.
const PREPARED: u64 = 2;
/// A local invalidation was posted, or is about to be.
const INVALIDATING: u64 = 3;
/// A registration was posted, or is being posted, and may not have ended. The bit is in no other
/// state, so that the compiler tests that one only.
const REGISTERED: u64 = 4;

pub(super) const STATE: u64 = 7;

/// One registration: the bits above the state count them.
pub(crate) const GENERATION: u64 = STATE + 1;

mod private {
    pub trait Sealed {}
    impl<const LENT: bool> Sealed for super::Exclusive<LENT> {}
    impl Sealed for super::Shared {}
}

/// The state of a region: [`Exclusive`] or [`Shared`].
///
/// A claim is exclusive access to what belongs to the MR, until the next change of the state.
///
/// The methods are safe, although calls of them in a wrong order would give memory back that peers
/// can reach: ULPs cannot call them. They can name the types, but get no value of one, as there is
/// no constructor besides that of the tests, and a [`Region`](super::Region) does not show its own.
///
/// # Safety
///
/// The type is transparent over a `u64`. An MR that is claimed is not claimed again before that has
/// ended. While it is idle no key gives access to the memory, nor is a request posted that would.
pub unsafe trait State: private::Sealed + Sized + Send + 'static {
    /// `true` if threads may share the state.
    const SHARED: bool;

    /// Returns `true` if the memory was taken out.
    #[inline]
    fn is_taken(&self) -> bool {
        false
    }

    /// Returns `true` if the MR is idle. What others did with it has happened then.
    fn is_idle(&self) -> bool;

    /// Claims an idle MR for a registration. [`State::prepare`] or [`State::set_idle`] follows.
    fn claim_idle(&self) -> bool;

    /// Claims a registered MR. [`State::set_invalidating`], [`State::set_idle`] or
    /// [`State::set_registered`] follows.
    ///
    /// To invalidate it, the caller holds the lock of the QP if the state is shared.
    fn claim_registered(&self) -> bool;

    /// Returns the generation, the number of the last registration, of an MR that is claimed.
    fn generation(&self) -> u64;

    /// Counts the registration of an MR that was claimed idle and has its new key. Returns the
    /// generation, for `Shared::commit()`, or zero if that is exclusive: it is registered now.
    fn prepare(&self) -> u64;

    /// Sets the state of an MR that is claimed.
    fn set(&self, state: u64);

    /// The invalidation of an MR that was claimed is posted next. Its completion has the claim.
    #[inline]
    fn set_invalidating(&self) {
        self.set(INVALIDATING);
    }

    /// Ends the claim of an MR whose invalidation was not posted or has failed.
    #[inline]
    fn set_registered(&self) {
        self.set(REGISTERED);
    }

    /// Ends the claim of an MR whose registration was not posted or is proved to have ended.
    #[inline]
    fn set_idle(&self) {
        self.set(IDLE);
    }
}

/// The state of a region that is used by one thread at a time: each step is a plain load and store,
/// and a claim is none, as this is not `Sync`. Only the completion of an invalidation, which has
/// the owner of the region, uses it in another thread.
///
/// With `LENT` the memory can be taken out by a reference while the MR is idle, which is claimed
/// then until it has another region.
#[repr(transparent)]
pub struct Exclusive<const LENT: bool = false>(Cell<u64>);

/// The state of a region whose memory can be taken out.
pub(super) type Lent = Exclusive<true>;

impl Exclusive {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self(Cell::new(IDLE))
    }
}

impl Lent {
    /// Claims an idle MR whose memory is taken out.
    #[inline]
    pub(super) fn take(&self) -> bool {
        let is_idle = self.is_idle();
        if is_idle {
            self.set(BUSY);
        }
        is_idle
    }

    /// Makes the MR idle whose memory was taken out: it has none.
    #[inline]
    pub(super) fn end(&self) {
        self.set(IDLE);
    }
}

impl<const LENT: bool> Exclusive<LENT> {
    /// Adds to the state in memory. The fence keeps the compiler from loading it into a register
    /// for this and the test before.
    #[inline]
    fn add(&self, n: u64) {
        atomic::compiler_fence(atomic::Ordering::SeqCst);
        self.0.set(self.0.get().wrapping_add(n));
    }
}

// SAFETY: `Cell` is transparent. A claim is exclusive, as the state is not `Sync`; while the memory
// is taken out, only `Lent::end` ends it. The state is set idle only as the trait allows.
unsafe impl<const LENT: bool> State for Exclusive<LENT> {
    const SHARED: bool = false;

    #[inline]
    fn is_taken(&self) -> bool {
        LENT && self.0.get() & STATE == BUSY
    }

    #[inline]
    fn is_idle(&self) -> bool {
        self.0.get() & STATE == IDLE
    }

    #[inline]
    fn claim_idle(&self) -> bool {
        self.is_idle()
    }

    #[inline]
    fn claim_registered(&self) -> bool {
        self.0.get() & REGISTERED != 0
    }

    fn generation(&self) -> u64 {
        self.0.get() & !STATE
    }

    #[inline]
    fn prepare(&self) -> u64 {
        self.add(const { GENERATION + REGISTERED - IDLE });
        0
    }

    #[inline]
    fn set(&self, state: u64) {
        self.0.set(self.0.get() & !STATE | state);
    }

    #[inline]
    fn set_invalidating(&self) {
        self.add(const { INVALIDATING.wrapping_sub(REGISTERED) });
    }
}

/// The state of a region that threads share.
///
/// # Invariants
///
/// - A state other than `IDLE` and `REGISTERED` is changed only by the thread that has set it, and
///   `INVALIDATING` by the completion of the request.
/// - It becomes `REGISTERED` under a claim or under the lock of the QP, which is held until the
///   request is in the queue. So a thread that finds it registered and holds the lock posts behind
///   that request.
#[repr(transparent)]
pub struct Shared(Atomic<u64>);

impl Shared {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        // INVARIANT: A new MR is idle.
        Self(Atomic::new(IDLE))
    }

    fn claim(&self, from: u64) -> bool {
        let old = self.0.load(Relaxed);
        // INVARIANT: `from` is `IDLE` or `REGISTERED`.
        old & STATE == from && self.0.cmpxchg(old, old & !STATE | BUSY, Full).is_ok()
    }

    /// Marks an MR registered that was prepared. The request is posted next: the peer may then
    /// answer, and the MR be gone, before the post returns.
    ///
    /// The caller holds the lock of the QP until the post has returned.
    pub(crate) fn commit(&self, generation: u64) {
        // INVARIANT: The caller has prepared the MR, and holds the lock.
        self.0.store(generation | REGISTERED, Release);
    }

    /// Ends a registration that was prepared and not posted.
    pub(crate) fn abort(&self, generation: u64) {
        // INVARIANT: Nothing was posted under this generation. In any other state the MR is claimed
        // or was, and the next step of that thread counts.
        for state in [PREPARED, REGISTERED] {
            let _ = self.0.cmpxchg(generation | state, generation | IDLE, Full);
        }
    }
}

// SAFETY: `Atomic` is transparent. A claim makes the state `BUSY` or leaves it `PREPARED` or
// `INVALIDATING`, and none of these is claimed. It is set idle only as the trait allows.
unsafe impl State for Shared {
    const SHARED: bool = true;

    fn is_idle(&self) -> bool {
        self.0.load(Acquire) & STATE == IDLE
    }

    fn claim_idle(&self) -> bool {
        self.claim(IDLE)
    }

    fn claim_registered(&self) -> bool {
        self.claim(REGISTERED)
    }

    fn generation(&self) -> u64 {
        self.0.load(Relaxed) & !STATE
    }

    fn prepare(&self) -> u64 {
        let generation = self.generation().wrapping_add(GENERATION);
        // INVARIANT: The caller has claimed the MR.
        self.0.store(generation | PREPARED, Release);
        generation
    }

    fn set(&self, state: u64) {
        // INVARIANT: The caller has claimed the MR.
        self.0.store(self.generation() | state, Release);
    }
}
