// SPDX-License-Identifier: GPL-2.0

//! Counters and locks that are one atomic each.
//!
//! Nothing but atomics, so that `tests/model` can run this very file in every order of its steps.
//!
//! Those that are used for each request are atomics of the language. The kernel crate's are calls
//! of functions unless the kernel has `CONFIG_RUST_INLINE_HELPERS`, two for each request: more than
//! the rest of what a handler does. C does not look at any of them, and none is used with data that
//! C protects. All others are the kernel crate's.

use crate::atomic::{
    AtomicU32,
    AtomicUsize,
    Ordering, //
};
use kernel::sync::atomic::{
    ordering::{
        Acquire,
        Full,
        Relaxed,
        Release, //
    },
    Atomic, //
};

/// Set once the gate is closed.
const CLOSED: i64 = 1 << 62;

/// A count of holds that can be closed.
///
/// # Invariants
///
/// The low bits are the number of holds; the bit [`CLOSED`] is set once and stays.
pub(crate) struct RefCount(Atomic<i64>);

impl RefCount {
    pub(crate) fn new() -> Self {
        // INVARIANT: Nothing is held, the gate is open.
        Self(Atomic::new(0))
    }

    /// Adds a hold, unless the gate is closed.
    ///
    /// Whatever is guarded was found by other means, and stays until [`RefCount::kill`] has seen this
    /// hold go: no ordering is needed, as in `refcount_inc_not_zero()`.
    pub(crate) fn try_get(&self) -> bool {
        let mut old = self.0.load(Relaxed);
        loop {
            if old & CLOSED != 0 {
                return false;
            }
            match self.0.cmpxchg(old, old + 1, Relaxed) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
    }

    /// Adds a hold beside one that is there, which keeps a closed gate from being empty.
    pub(crate) fn get(&self) {
        self.0.add(1, Relaxed);
    }

    /// Removes a hold, and says whether it was the last one of a closed refs: whoever closed it is
    /// then to be told, and nothing else may be touched.
    ///
    /// Full ordering: everything that was done under any hold happens before the closer is told.
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        self.0.fetch_sub(1, Full) == CLOSED + 1
    }

    /// Closes the refs, and says whether something is held: then the last hold will tell.
    ///
    /// Full ordering: everything that was done under holds that are gone has happened.
    #[must_use]
    pub(crate) fn kill(&self) -> bool {
        // INVARIANT: From here a hold is added only beside another: the count falls to zero once.
        self.0.fetch_add(CLOSED, Full) != 0
    }
}

/// Nobody has the seat.
const EMPTY: usize = 0;

/// The place of a CQ's poller, which one at a time has. Nobody waits for it here: to who finds it
/// taken, the CQ looks empty.
///
/// # Invariants
///
/// `EMPTY`, or an address on the stack of who has the seat.
pub(crate) struct PollLock(AtomicUsize);

impl PollLock {
    pub(crate) fn new() -> Self {
        // INVARIANT: As required.
        Self(AtomicUsize::new(EMPTY))
    }

    /// Takes the seat, if nobody has it, for who has `at` on his stack. What was done by those who
    /// had it before has happened.
    #[inline]
    #[must_use]
    pub(crate) fn try_lock(&self, at: usize) -> bool {
        // INVARIANT: By the caller's promise.
        self.0
            .compare_exchange(EMPTY, at, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Leaves the seat, which the caller has.
    #[inline]
    pub(crate) fn unlock(&self) {
        // INVARIANT: As required.
        self.0.store(EMPTY, Ordering::Release);
    }

    /// Returns an address on the stack of who has the seat; of anybody else it may be an old one.
    pub(crate) fn holder(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many entries of a CQ are not leased.
///
/// # Invariants
///
/// With the entries that are taken and not yet given back it is the number of entries.
pub(crate) struct FreeCqes(Atomic<i32>);

impl FreeCqes {
    pub(crate) fn new(entries: i32) -> Self {
        // INVARIANT: Nothing is taken.
        Self(Atomic::new(entries))
    }

    pub(crate) fn free(&self) -> i32 {
        self.0.load(Relaxed)
    }

    /// Takes entries, all or nothing; returns how many are free if there are not enough.
    ///
    /// Acquire: what used the entries before is done with them.
    pub(crate) fn reserve(&self, entries: i32) -> core::result::Result<(), i32> {
        let mut free = self.free();
        loop {
            if free < entries {
                return Err(free);
            }
            // INVARIANT: What leaves `free` is taken.
            match self.0.cmpxchg(free, free - entries, Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => free = now,
            }
        }
    }

    /// Gives back entries that were taken.
    ///
    /// Release: see [`FreeCqes::reserve`].
    pub(crate) fn release(&self, entries: i32) {
        // INVARIANT: By the caller's promise.
        self.0.fetch_add(entries, Release);
    }
}

/// How many handles there are to a request.
///
/// # Invariants
///
/// The number of handles, 1 or 2; or 0 when the last one is being dropped.
pub(crate) struct Handles(AtomicU32);

impl Handles {
    /// There is a keeper.
    pub(crate) fn new() -> Self {
        // INVARIANT: As required.
        Self(AtomicU32::new(1))
    }

    /// Says whether the caller's handle is the only one. If it is, what the other one was used for
    /// has happened.
    #[inline]
    pub(crate) fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }

    /// There will be another handle; the caller's is the only one. So this is no race, and needs no
    /// locked instruction.
    #[inline]
    pub(crate) fn add(&self) {
        // INVARIANT: By the caller's promise.
        self.0.store(2, Ordering::Relaxed);
    }

    /// The caller's handle is gone. Says whether it was the last one: then what the other was used
    /// for has happened.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        // INVARIANT: By the caller's promise.
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// More than there can be slots.
const UNKNOWN: i32 = 1 << 30;

/// How many slots have not come back.
///
/// # Invariants
///
/// [`UNKNOWN`] less those that came back, until [`SlotsOut::wait_for`] has said how many were kept;
/// from then on those that are still kept.
pub(crate) struct SlotsOut(Atomic<i32>);

impl SlotsOut {
    pub(crate) fn new() -> Self {
        // INVARIANT: None has come back.
        Self(Atomic::new(UNKNOWN))
    }

    /// A slot has come back. Says whether it was the last one that is waited for: the waiter is
    /// then to be told, and nothing else may be touched.
    ///
    /// Full ordering: all use of any slot happens before the waiter is told.
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        self.0.fetch_sub(1, Full) == 1
    }

    /// Says how many slots were kept when they began to be counted, and whether some still are:
    /// then the last one will tell.
    ///
    /// Full ordering: all use of slots that came back has happened.
    #[must_use]
    pub(crate) fn wait_for(&self, kept: i32) -> bool {
        let rest = UNKNOWN - kept;
        // INVARIANT: What is left is what was kept less those that came back.
        self.0.fetch_sub(rest, Full) != rest
    }

    /// Returns how many are still kept, once that is known.
    pub(crate) fn now(&self) -> i32 {
        self.0.load(Relaxed)
    }
}
