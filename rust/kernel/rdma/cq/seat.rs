// SPDX-License-Identifier: GPL-2.0

//! Whose turn it is to poll a CQ that the RDMA core does not poll.
//!
//! Nothing but an atomic, so that `tests/model` can run this very file in every order of its steps.

use super::atomic::{
    AtomicUsize,
    Ordering, //
};

/// Nobody has the seat.
const EMPTY: usize = 0;

/// The place of a CQ's poller, which one at a time has. Nobody waits for it here: to who finds it
/// taken, the CQ looks empty.
///
/// The atomics are those of the language, as in `lend`: those of the kernel crate are calls.
///
/// # Invariants
///
/// `EMPTY`, or an address on the stack of who has the seat.
pub(crate) struct Seat(AtomicUsize);

impl Seat {
    pub(crate) fn new() -> Self {
        // INVARIANT: As required.
        Self(AtomicUsize::new(EMPTY))
    }

    /// Takes the seat, if nobody has it, for who has `at` on his stack. What was done by those who
    /// had it before has happened.
    #[inline]
    #[must_use]
    pub(crate) fn take(&self, at: usize) -> bool {
        // INVARIANT: By the caller's promise.
        self.0.compare_exchange(EMPTY, at, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Leaves the seat, which the caller has.
    #[inline]
    pub(crate) fn leave(&self) {
        // INVARIANT: As required.
        self.0.store(EMPTY, Ordering::Release);
    }

    /// Returns an address on the stack of who has the seat; of anybody else it may be an old one.
    pub(crate) fn holder(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
