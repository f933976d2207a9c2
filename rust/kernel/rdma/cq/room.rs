// SPDX-License-Identifier: GPL-2.0

//! The counting of leases.
//!
//! Nothing but atomics, so that `tests/model` can run this very file in every order of its steps.

use kernel::sync::atomic::{
    ordering::{
        Acquire,
        Relaxed,
        Release, //
    },
    Atomic, //
};

/// How many entries of a CQ are not leased.
///
/// # Invariants
///
/// With the entries that are taken and not yet given back it is the number of entries.
pub(crate) struct Room(Atomic<i32>);

impl Room {
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
    pub(crate) fn take(&self, entries: i32) -> core::result::Result<(), i32> {
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
    /// Release: see [`Room::take`].
    pub(crate) fn give(&self, entries: i32) {
        // INVARIANT: By the caller's promise.
        self.0.fetch_add(entries, Release);
    }
}
