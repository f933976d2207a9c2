// SPDX-License-Identifier: GPL-2.0

//! Numbers of QPs that are not used again.

use kernel::sync::atomic;

/// Tells a QP from all that there have been and will be, where its address may be another one's
/// when it is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct QpId(u64);

impl QpId {
    /// That of no QP.
    pub(crate) const NONE: Self = Self(0);

    #[inline(never)]
    pub(crate) fn next() -> Self {
        static LAST: atomic::Atomic<u64> = atomic::Atomic::new(0);
        // In 64 bits it does not come to its beginning again.
        Self(LAST.fetch_add(1, atomic::Relaxed).wrapping_add(1))
    }
}
