// SPDX-License-Identifier: GPL-2.0

//! The word that says what state an MR is in.
//!
//! Nothing but an atomic, so that `tests/model` can run this very file in every order of its steps.

use core::sync::atomic::{
    compiler_fence,
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

/// No key gives access to the memory.
const IDLE: u64 = 0;
/// Somebody has the MR for himself, for a moment.
const BUSY: u64 = 1;
/// The MR has a new key, and the request to register it will be posted.
const PREPARED: u64 = 2;
/// A local invalidation was posted, or is about to be.
const INVALIDATING: u64 = 3;
/// A registration was posted, or is being posted, and has perhaps not ended. A bit that no other
/// state has, so that the compiler looks at that one only.
const REGISTERED: u64 = 4;

const STATE: u64 = 7;

/// One registration: what is above the state counts them.
pub(crate) const GENERATION: u64 = STATE + 1;

/// Has the compiler test a word in memory, and then change it there, where it would load it into a
/// register for both.
#[inline]
fn look_again() {
    compiler_fence(Ordering::SeqCst);
}

/// The state of an MR, and the number of its registrations: its generation, which functions here
/// give and take with a state of zero.
///
/// # Invariants
///
/// - While the state is `IDLE` no key gives access to the memory, nor is any request posted that
///   would change that.
/// - Who has changed the state from `IDLE` or `REGISTERED` is the only one to change it again; a
///   request that was posted has that from its poster.
/// - Who marks it `REGISTERED` has the MR for himself, or has the turn of the QP, until the request
///   is in the queue. So who finds that mark, and has the one or the other, comes after it there.
pub(crate) struct Word(Atomic<u64>);

impl Word {
    pub(crate) fn new() -> Self {
        // INVARIANT: A new MR is not registered.
        Self(Atomic::new(IDLE))
    }

    /// Says whether the MR is idle. If it is, what peers and others did with it has happened.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Acquire) & STATE == IDLE
    }

    /// Says whether there is a key that is valid or will be.
    pub(crate) fn has_key(&self) -> bool {
        matches!(self.0.load(Acquire) & STATE, PREPARED | REGISTERED)
    }

    /// Returns the generation, to who has changed the state last.
    fn generation(&self) -> u64 {
        self.0.load(Relaxed) & !STATE
    }

    /// Changes the state from `from` to `to` and returns the generation.
    #[inline]
    fn claim(&self, from: u64, to: u64) -> Option<u64> {
        let word = self.0.load(Relaxed);
        let generation = word & !STATE;
        (word & STATE == from
            && self
                .0
                .cmpxchg(generation | from, generation | to, Full)
                .is_ok())
        .then_some(generation)
    }

    /// Claims an idle MR for another registration and returns its generation.
    /// [`Word::prepared`] or [`Word::registered`] follows.
    #[inline]
    pub(crate) fn begin(&self) -> Option<u64> {
        Some(self.claim(IDLE, BUSY)?.wrapping_add(GENERATION))
    }

    /// Marks the MR as having a key, for a request that will be posted, after [`Word::begin`].
    /// [`Word::registered`] or [`Word::not_posted`] follows.
    #[inline]
    pub(crate) fn prepared(&self, generation: u64) {
        self.0.store(generation | PREPARED, Release);
    }

    /// Marks the MR registered, before the request is posted: after that a peer may answer, and the
    /// MR be gone.
    ///
    /// The caller has the MR for himself, or the turn of the QP, until the post has returned.
    #[inline]
    pub(crate) fn registered(&self, generation: u64) {
        // INVARIANT: As required.
        self.0.store(generation | REGISTERED, Release);
    }

    /// Nothing will be posted, after [`Word::begin`].
    pub(crate) fn not_begun(&self, generation: u64) {
        // INVARIANT: Nothing has changed.
        self.0
            .store(generation.wrapping_sub(GENERATION) | IDLE, Release);
    }

    /// The request of a generation was not posted.
    pub(crate) fn not_posted(&self, generation: u64) {
        // INVARIANT: Nothing was posted under this generation. If it is in neither state, somebody
        // is looking at it or invalidates it: so be it.
        for state in [PREPARED, REGISTERED] {
            let _ = self.0.cmpxchg(generation | state, generation | IDLE, Full);
        }
    }

    /// Claims a registered MR for a local invalidation. [`Word::still_registered`] or, when the
    /// request has completed, [`Word::invalidated`] follows.
    ///
    /// The caller has the MR for himself, or the turn of the QP that the invalidation will be
    /// posted to.
    #[inline]
    pub(crate) fn invalidating(&self) -> bool {
        self.claim(REGISTERED, INVALIDATING).is_some()
    }

    /// As [`Word::is_idle`], where nobody else can reach the MR.
    #[inline]
    pub(crate) fn is_idle_alone(&mut self) -> bool {
        *self.0.get_mut() & STATE == IDLE
    }

    /// Marks an idle MR registered, as [`Word::begin`] and [`Word::registered`] do, where nobody
    /// else can reach it.
    #[inline]
    pub(crate) fn register_alone(&mut self) {
        look_again();
        let word = &mut *self.0.get_mut();
        // INVARIANT: As required.
        *word = word.wrapping_add(const { GENERATION + REGISTERED - IDLE });
    }

    /// Says whether the MR is registered, where nobody else can reach it.
    #[inline]
    pub(crate) fn is_registered_alone(&mut self) -> bool {
        *self.0.get_mut() & REGISTERED != 0
    }

    /// As [`Word::invalidating`], of an MR that is registered, where nobody else can reach it.
    #[inline]
    pub(crate) fn invalidate_alone(&mut self) {
        look_again();
        let word = &mut *self.0.get_mut();
        *word = word.wrapping_sub(const { REGISTERED - INVALIDATING });
    }

    /// As [`Word::not_posted`] and [`Word::invalidated`], where nobody else can reach the MR.
    #[inline]
    pub(crate) fn end_alone(&mut self) {
        let word = &mut *self.0.get_mut();
        // INVARIANT: As there.
        *word = *word & !STATE | IDLE;
    }

    /// Claims a registered MR to look at it, and returns the generation. [`Word::looked`] follows.
    pub(crate) fn look(&self) -> Option<u64> {
        self.claim(REGISTERED, BUSY)
    }

    /// What was seen is, or is not, proof that the registration has ended.
    pub(crate) fn looked(&self, generation: u64, proof: bool) {
        // INVARIANT: The caller has proof, if he says so.
        let state = if proof { IDLE } else { REGISTERED };
        self.0.store(generation | state, Release);
    }

    /// The invalidation was not posted, or has failed.
    pub(crate) fn still_registered(&self) {
        self.0.store(self.generation() | REGISTERED, Release);
    }

    /// The invalidation has completed.
    pub(crate) fn invalidated(&self) {
        // INVARIANT: It followed the registration in one queue, as `invalidating` has found that
        // registered, and has been done.
        self.0.store(self.generation() | IDLE, Release);
    }
}
