// SPDX-License-Identifier: GPL-2.0

//! The counting of a [`Gate`](super::Gate).
//!
//! Nothing but atomics, so that `tests/model` can run this very file in every order of its steps.

use kernel::sync::atomic::{
    ordering::{
        Full,
        Relaxed, //
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
pub(crate) struct Count(Atomic<i64>);

impl Count {
    pub(crate) fn new() -> Self {
        // INVARIANT: Nothing is held, the gate is open.
        Self(Atomic::new(0))
    }

    /// Adds a hold, unless the gate is closed.
    ///
    /// Whatever is guarded was found by other means, and stays until [`Count::close`] has seen this
    /// hold go: no ordering is needed, as in `refcount_inc_not_zero()`.
    pub(crate) fn enter(&self) -> bool {
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
    pub(crate) fn enter_again(&self) {
        self.0.add(1, Relaxed);
    }

    /// Removes a hold, and says whether it was the last one of a closed gate: whoever closed it is
    /// then to be told, and nothing else may be touched.
    ///
    /// Full ordering: everything that was done under any hold happens before the closer is told.
    #[must_use]
    pub(crate) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Full) == CLOSED + 1
    }

    /// Closes the gate, and says whether something is held: then the last hold will tell.
    ///
    /// Full ordering: everything that was done under holds that are gone has happened.
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        // INVARIANT: From here a hold is added only beside another: the count falls to zero once.
        self.0.fetch_add(CLOSED, Full) != 0
    }
}
