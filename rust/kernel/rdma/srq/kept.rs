// SPDX-License-Identifier: GPL-2.0

//! The counting of slots that are kept when their SRQ ends.
//!
//! Nothing but atomics, so that `tests/model` can run this very file in every order of its steps.

use kernel::sync::atomic::{
    ordering::{
        Full,
        Relaxed, //
    },
    Atomic, //
};

/// More than there can be slots.
const UNKNOWN: i32 = 1 << 30;

/// How many slots have not come back.
///
/// # Invariants
///
/// [`UNKNOWN`] less those that came back, until [`Kept::wait_for`] has said how many were kept;
/// from then on those that are still kept.
pub(crate) struct Kept(Atomic<i32>);

impl Kept {
    pub(crate) fn new() -> Self {
        // INVARIANT: None has come back.
        Self(Atomic::new(UNKNOWN))
    }

    /// A slot has come back. Says whether it was the last one that is waited for: the waiter is
    /// then to be told, and nothing else may be touched.
    ///
    /// Full ordering: all use of any slot happens before the waiter is told.
    #[must_use]
    pub(crate) fn came_back(&self) -> bool {
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
