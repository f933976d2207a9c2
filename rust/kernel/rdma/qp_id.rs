// SPDX-License-Identifier: GPL-2.0

//! Numbers of QPs that are not used again.

use kernel::sync::atomic;

/// Tells a QP from all that there have been and will be, where its address may be another one's
/// when it is gone.
///
/// # Invariants
///
/// The lowest [`QpId::FREE_BITS`] are 0, so that more can be said in the word that names a QP. 0 is
/// that of no QP.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct QpId(u64);

impl QpId {
    pub(crate) const FREE_BITS: u32 = 16;

    /// That of no QP.
    pub(crate) const NONE: Self = Self(0);

    #[inline(never)]
    pub(crate) fn next() -> Self {
        static LAST: atomic::Atomic<u64> = atomic::Atomic::new(0);
        let step = 1 << Self::FREE_BITS;
        // INVARIANT: A multiple of the step. A QP each microsecond would take nine years to come to
        // the beginning again.
        Self(LAST.fetch_add(step, atomic::Relaxed).wrapping_add(step))
    }

    #[inline]
    pub(crate) fn get(self) -> u64 {
        self.0
    }
}
