// SPDX-License-Identifier: GPL-2.0

//! The counting of who has a request: its keeper, whom it is lent to, or both.
//!
//! Nothing but an atomic, so that `tests/model` can run this very file in every order of its steps.

use super::atomic::{
    AtomicU32,
    Ordering, //
};

/// How many handles there are to a request.
///
/// The atomics are those of the language. Nothing in C looks at this, and those of the kernel crate
/// are calls of functions unless the kernel has `CONFIG_RUST_INLINE_HELPERS`, two for each request:
/// more than the rest of what a handler does.
///
/// # Invariants
///
/// The number of handles, 1 or 2; or 0 when the last one is being dropped.
pub(crate) struct Holders(AtomicU32);

impl Holders {
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
    pub(crate) fn lend(&self) {
        // INVARIANT: By the caller's promise.
        self.0.store(2, Ordering::Relaxed);
    }

    /// The caller's handle is gone. Says whether it was the last one: then what the other was used
    /// for has happened.
    #[inline]
    #[must_use]
    pub(crate) fn leave(&self) -> bool {
        // INVARIANT: By the caller's promise.
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
