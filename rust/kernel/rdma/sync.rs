// SPDX-License-Identifier: GPL-2.0

//! Counters and locks that are one atomic each. Nothing else is here, so that loom can run this
//! file in every order of its steps.
//!
//! The atomics that each request uses are those of the language, as the kernel crate's are function
//! calls unless the kernel has `CONFIG_RUST_INLINE_HELPERS`. C does not access these, nor do they
//! protect data that C accesses.

use crate::atomic::{
    AtomicU32,
    AtomicUsize,
    Ordering, //
};
use kernel::sync::atomic::{
    Acquire,
    Atomic,
    Full,
    Relaxed,
    Release, //
};

/// Set when the count is killed.
const DEAD: usize = 1 << (usize::BITS - 2);

/// A count of references that can be killed, as `struct percpu_ref`.
///
/// # Invariants
///
/// The low bits are the number of references; the bit [`DEAD`] is set once and stays.
pub(crate) struct RefCount(AtomicUsize);

impl RefCount {
    pub(crate) fn new() -> Self {
        // INVARIANT: There is no reference.
        Self(AtomicUsize::new(0))
    }

    /// Adds a reference, unless the count was killed. Returns whether it did. No ordering is
    /// needed, as in `refcount_inc_not_zero()`.
    pub(crate) fn try_get(&self) -> bool {
        let add = |n| (n & DEAD == 0).then_some(n + 1);
        let relaxed = Ordering::Relaxed;
        self.0.fetch_update(relaxed, relaxed, add).is_ok()
    }

    /// Adds a reference. The caller has one, or knows that the count is not killed meanwhile.
    #[inline]
    pub(crate) fn get(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Drops a reference. Returns `true` if it was the last one of a count that was killed: the
    /// caller then wakes the waiter, and must not touch anything else. Acquire and release: all
    /// that was done with any reference happens before the waiter is woken.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == DEAD + 1
    }

    /// Kills the count. Returns whether there are references: [`RefCount::put`] then finds the last
    /// one. Acquire: all that was done with references that were dropped has happened.
    #[must_use]
    pub(crate) fn kill(&self) -> bool {
        // INVARIANT: From here a reference is only added beside another: it falls to zero once.
        self.0.fetch_add(DEAD, Ordering::AcqRel) != 0
    }
}

/// A count of users, which tells the last one.
///
/// # Invariants
///
/// The number of users.
pub(crate) struct Users(AtomicUsize);

impl Users {
    /// Returns a count of one user.
    pub(crate) fn new() -> Self {
        // INVARIANT: There is one user.
        Self(AtomicUsize::new(1))
    }

    /// Returns the number of users, for a message.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds a user, beside one that stays meanwhile. No ordering is needed, as in `refcount_inc()`.
    #[inline]
    pub(crate) fn get(&self) {
        // INVARIANT: The new user is counted.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller is no longer a user. Returns whether it was the last: all use by others has
    /// happened then. Otherwise it must not touch anything else.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        // INVARIANT: The caller was counted.
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// The claim of a context of transfers ([`rw::Ctx`](crate::rw::Ctx)).
///
/// # Invariants
///
/// [`RwState::IDLE`] if it is not claimed, or [`RwState::LARGE`] if each transfer of its memory has
/// to be looked at; [`RwState::EMPTY`] if it has no memory; the address of the QP while a transfer
/// has it, with [`RwState::PREPARED`] while one is only prepared, and with [`RwState::STALE`] then
/// if the memory is to be synchronised before that is posted, and [`RwState::HELD`] if the end of
/// the QP leaves it alone.
pub(crate) struct RwState(AtomicUsize);

impl RwState {
    pub(crate) const IDLE: usize = 0;
    pub(crate) const PREPARED: usize = 1;
    pub(crate) const EMPTY: usize = 2;
    pub(crate) const LARGE: usize = 4;
    /// Beside [`RwState::PREPARED`] only, as is [`RwState::HELD`], so that the bits of the states
    /// above serve.
    pub(crate) const STALE: usize = 4;
    pub(crate) const HELD: usize = 2;
    /// The state of no context.
    pub(crate) const NEVER: usize = usize::MAX;

    pub(crate) fn new() -> Self {
        // INVARIANT: There is no memory yet.
        Self(AtomicUsize::new(Self::EMPTY))
    }

    /// Claims a context in the state `from`, idle, large or prepared for this QP, for a transfer of
    /// that. Fails with the state. Acquire: see [`RwState::set`].
    #[inline]
    pub(crate) fn claim(&self, from: usize, qp: usize) -> core::result::Result<usize, usize> {
        // INVARIANT: The transfer of the caller has it.
        (self.0).compare_exchange(from, qp, Ordering::Acquire, Ordering::Relaxed)
    }

    /// The transfer of the caller has ended, or is prepared. Release: for the next claim.
    #[inline]
    pub(crate) fn set(&self, state: usize) {
        // INVARIANT: The caller gives up its claim.
        self.0.store(state, Ordering::Release);
    }

    /// Returns whether somebody has a context of this state.
    pub(crate) fn is_claimed(state: usize) -> bool {
        !matches!(state, Self::IDLE | Self::EMPTY | Self::LARGE) && state & Self::PREPARED == 0
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.qp() == Self::EMPTY
    }

    /// Returns whether a transfer is only prepared. The caller excludes that one is posted.
    /// Acquire: if not, the end of the QP no longer uses the context.
    #[inline]
    pub(crate) fn is_prepared(&self) -> bool {
        self.0.load(Ordering::Acquire) & Self::PREPARED != 0
    }

    /// Returns whether a transfer is prepared for this QP and not held. Acquire: see
    /// [`RwState::set`].
    pub(crate) fn is_prepared_for(&self, qp: usize) -> bool {
        self.0.load(Ordering::Acquire) & !Self::STALE == qp | Self::PREPARED
    }

    /// Holds, or no longer holds, a transfer that is prepared. The caller has the context, and
    /// excludes the end of the QP.
    pub(crate) fn hold(&self, is_held: bool) {
        let state = self.qp();
        if state & Self::PREPARED != 0 {
            self.set(if is_held {
                state | Self::HELD
            } else {
                state & !Self::HELD
            });
        }
    }

    /// Returns the state: the address of the QP, for the transfer that has the context.
    #[inline]
    pub(crate) fn qp(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the QP of the transfer, prepared or not; 0 for none. The caller has the context.
    pub(crate) fn any_qp(&self) -> usize {
        match self.qp() {
            Self::EMPTY | Self::LARGE => 0,
            state => state & !(Self::PREPARED | Self::STALE | Self::HELD),
        }
    }
}

/// The lock of a CQ's poller. No thread spins or sleeps for it: the CQ looks empty meanwhile.
///
/// # Invariants
///
/// Zero, or an address on the stack of the thread that holds the lock.
pub(crate) struct PollLock(AtomicUsize);

impl PollLock {
    pub(crate) fn new() -> Self {
        // INVARIANT: The lock is not held.
        Self(AtomicUsize::new(0))
    }

    /// Takes the lock if it is not held, for the thread that has the address `at` on its stack.
    /// Returns whether it did. All that was done under the lock before has happened.
    #[inline]
    #[must_use]
    pub(crate) fn try_lock(&self, at: usize) -> bool {
        // INVARIANT: The caller, which holds the lock now, has `at` on its stack.
        self.0
            .compare_exchange(0, at, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Releases the lock, which the caller holds.
    #[inline]
    pub(crate) fn unlock(&self) {
        // INVARIANT: The lock is no longer held.
        self.0.store(0, Ordering::Release);
    }

    /// Returns an address on the stack of the thread that holds the lock. It is exact if that is
    /// the caller, and may be out of date otherwise.
    pub(crate) fn holder(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reference to a ring that is not that of a request.
pub(crate) const KEEPER: u32 = 1 << 24;

/// A reference of a request to a ring.
pub(crate) const REQUEST: u32 = 1;

/// The places of a ring that one thread at a time fills and one empties, and its references.
///
/// # Invariants
///
/// The places from `first` on that are before `next` are in use, at most as many as there are, so
/// less than [`KEEPER`]. `refs` is the sum of the references: of [`KEEPER`]s, and of [`REQUEST`]s.
pub(crate) struct Spsc {
    first: AtomicU32,
    next: AtomicU32,
    /// Completions that were handled where the ring could not be emptied.
    missed: AtomicU32,
    refs: AtomicU32,
}

impl Spsc {
    /// Returns the places of an empty ring with so many keepers.
    pub(crate) fn new(keepers: u32) -> Self {
        // INVARIANT: No place is in use, and there is no request.
        Self {
            first: AtomicU32::new(0),
            next: AtomicU32::new(0),
            missed: AtomicU32::new(0),
            refs: AtomicU32::new(keepers * KEEPER),
        }
    }

    /// Returns the next of `places` that is not in use, for the producer. Acquire: it is empty.
    #[inline]
    pub(crate) fn next(&self, places: u32) -> Option<u32> {
        let next = self.next.load(Ordering::Relaxed);
        let used = next.wrapping_sub(self.first.load(Ordering::Acquire));
        (used < places).then_some(next)
    }

    /// The producer has filled the next place; if a completion comes for it, that has a reference.
    /// Release: see [`Spsc::first`].
    #[inline]
    pub(crate) fn publish(&self, completes: bool) {
        if completes {
            self.refs.fetch_add(REQUEST, Ordering::Relaxed);
        }
        let next = self.next.load(Ordering::Relaxed).wrapping_add(1);
        // INVARIANT: The place was not in use.
        self.next.store(next, Ordering::Release);
    }

    /// Takes back what was just published, and for which no completion comes. Returns the place.
    pub(crate) fn unpublish(&self, completes: bool) -> u32 {
        if completes {
            // The caller has another.
            self.refs.fetch_sub(REQUEST, Ordering::Relaxed);
        }
        let next = self.next.load(Ordering::Relaxed).wrapping_sub(1);
        // INVARIANT: The consumer takes nothing for which no completion has come.
        self.next.store(next, Ordering::Relaxed);
        next
    }

    /// Returns the first place that is in use, for the consumer. Acquire: it is filled.
    #[inline]
    pub(crate) fn first(&self) -> Option<u32> {
        let first = self.first.load(Ordering::Relaxed);
        (first != self.next.load(Ordering::Acquire)).then_some(first)
    }

    /// The consumer has emptied the first place. Release: see [`Spsc::next`].
    #[inline]
    pub(crate) fn release(&self) {
        let first = self.first.load(Ordering::Relaxed).wrapping_add(1);
        // INVARIANT: The place was in use.
        self.first.store(first, Ordering::Release);
    }

    /// Counts a completion for the consumer.
    pub(crate) fn miss(&self) {
        self.missed.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of completions that the consumer has missed.
    #[inline]
    pub(crate) fn take_missed(&self) -> u32 {
        match self.missed.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.missed.swap(0, Ordering::Acquire),
        }
    }

    /// Drops a reference, a [`KEEPER`] or a [`REQUEST`]. Returns whether it was the last: all use
    /// of the ring has happened then.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self, reference: u32) -> bool {
        self.refs.fetch_sub(reference, Ordering::AcqRel) == reference
    }

    /// Returns the number of requests that have references.
    pub(crate) fn requests(&self) -> u32 {
        self.refs.load(Ordering::Acquire) & (KEEPER - 1)
    }

    /// Drops the references of requests that never complete. Returns their number. The caller is a
    /// keeper, and no other thread puts those of requests.
    pub(crate) fn end_requests(&self) -> u32 {
        let requests = self.requests();
        // INVARIANT: These requests have no references any longer.
        self.refs.fetch_sub(requests, Ordering::AcqRel);
        requests
    }
}

/// The number of times that a CQ that callers poll was found empty.
///
/// # Invariants
///
/// The number, plus one, of polls under the poll lock that have found nothing and whose holder has
/// counted them; or [`usize::MAX`] if callers do not poll the CQ.
pub(crate) struct Empties(AtomicUsize);

impl Empties {
    /// The mark of a time since which the CQ was never found empty.
    pub(crate) const NEVER: usize = usize::MAX;

    pub(crate) fn new(callers_poll: bool) -> Self {
        // INVARIANT: The CQ was not polled, or callers do not poll it.
        Self(AtomicUsize::new(if callers_poll { 1 } else { usize::MAX }))
    }

    /// Counts a poll that has found nothing, for the holder of the poll lock, which polls again
    /// after this for all.
    #[inline]
    pub(crate) fn found(&self) {
        // INVARIANT: Callers poll the CQ, and do not find it empty so often.
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns what [`Empties::since`] is to be told.
    pub(crate) fn mark(&self) -> usize {
        // Adds nothing, to see the last count.
        match self.0.fetch_add(0, Ordering::SeqCst) {
            usize::MAX => 0,
            // The next poll that is counted may have been before this.
            empties => empties + 1,
        }
    }

    /// Returns whether the CQ was found empty since the mark: what its poller handles has come
    /// after that. `true` if callers do not poll it.
    #[inline]
    pub(crate) fn since(&self, mark: usize) -> bool {
        self.0.load(Ordering::Relaxed) > mark
    }
}

/// The MRs of a device whose end has begun, in that order, and those that are gone. C gives the
/// number of one that is gone, and with it the keys, to another.
///
/// # Invariants
///
/// - `gone` is not more than `begun`, and the first `all_gone` are gone.
/// - `last` is not empty. In the place of a number, which others share, is the order of the last
///   one that has begun to end, or zero.
pub(crate) struct Ends<L> {
    begun: AtomicUsize,
    gone: AtomicUsize,
    all_gone: AtomicUsize,
    last: L,
}

impl<L: core::ops::Deref<Target = [AtomicUsize]>> Ends<L> {
    /// Returns the ends of none. `last` are zeros, one at least.
    pub(crate) fn new(last: L) -> Self {
        // INVARIANT: There was none.
        Self {
            begun: AtomicUsize::new(0),
            gone: AtomicUsize::new(0),
            all_gone: AtomicUsize::new(0),
            last,
        }
    }

    /// Returns the place of a number.
    fn last(&self, number: u32) -> Option<&AtomicUsize> {
        let place = (number as usize).checked_rem(self.last.len())?;
        self.last.get(place)
    }

    /// Calls `end`, which ends the one of this number.
    pub(crate) fn during<T>(&self, number: u32, end: impl FnOnce() -> T) -> T {
        let order = self.begun.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if let Some(last) = self.last(number) {
            // INVARIANT: Of two at a time the later one stays.
            last.fetch_max(order, Ordering::SeqCst);
        }
        let ended = end();
        let gone = self.gone.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if gone == self.begun.load(Ordering::SeqCst) {
            // INVARIANT: None has begun that is not gone.
            self.all_gone.fetch_max(gone, Ordering::SeqCst);
        }
        ended
    }

    /// Returns the order of the last one that may have had the number of one that was just made.
    pub(crate) fn before(&self, number: u32) -> usize {
        self.last(number)
            .map_or(usize::MAX, |last| last.load(Ordering::SeqCst))
    }

    /// Returns how many of the first are gone.
    pub(crate) fn all_gone(&self) -> usize {
        self.all_gone.load(Ordering::SeqCst)
    }
}

/// The number of entries of a CQ that are not reserved.
///
/// # Invariants
///
/// The sum of this and of the entries that are reserved is the number of entries.
pub(crate) struct FreeCqes(Atomic<i32>);

impl FreeCqes {
    pub(crate) fn new(entries: i32) -> Self {
        // INVARIANT: No entry is reserved.
        Self(Atomic::new(entries))
    }

    pub(crate) fn free(&self) -> i32 {
        self.0.load(Relaxed)
    }

    /// Reserves entries, all or none; fails with the number of free ones if there are not enough.
    /// Acquire: all that was done with the entries before they were released has happened.
    pub(crate) fn reserve(&self, entries: i32) -> core::result::Result<(), i32> {
        let mut free = self.free();
        loop {
            if free < entries {
                return Err(free);
            }
            // INVARIANT: The entries by which `free` is reduced are reserved.
            match self.0.cmpxchg(free, free - entries, Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => free = now,
            }
        }
    }

    /// Releases entries that were reserved. Release: see [`FreeCqes::reserve`].
    pub(crate) fn release(&self, entries: i32) {
        // INVARIANT: The entries were reserved, as the caller promises.
        self.0.fetch_add(entries, Release);
    }
}

/// More slots than an SRQ can have.
const UNKNOWN: i32 = 1 << 30;

/// The number of slots of an SRQ that are kept.
///
/// # Invariants
///
/// [`UNKNOWN`] less the slots that came back, until [`SlotsOut::wait_for`] is given the number that
/// were kept; from then on the number that still are.
pub(crate) struct SlotsOut(Atomic<i32>);

impl SlotsOut {
    pub(crate) fn new() -> Self {
        // INVARIANT: None has come back.
        Self(Atomic::new(UNKNOWN))
    }

    /// Takes a slot back. Returns `true` if it was the last one that is waited for: the caller then
    /// wakes the waiter, and must not touch anything else. Full ordering: all use of slots is
    /// before.
    #[must_use]
    pub(crate) fn put(&self) -> bool {
        self.0.fetch_sub(1, Full) == 1
    }

    /// Sets the number of slots that were kept when they began to be counted. Returns whether some
    /// still are: then [`SlotsOut::put`] returns `true` for the last one. Full ordering: all use of
    /// slots that came back has happened.
    #[must_use]
    pub(crate) fn wait_for(&self, kept: i32) -> bool {
        let rest = UNKNOWN - kept;
        // INVARIANT: The rest is the number that were kept less those that came back.
        self.0.fetch_sub(rest, Full) != rest
    }

    /// Returns the number of slots that are still kept, after [`SlotsOut::wait_for`].
    pub(crate) fn now(&self) -> i32 {
        self.0.load(Relaxed)
    }
}
