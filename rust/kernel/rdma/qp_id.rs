// SPDX-License-Identifier: GPL-2.0

//! QPs by numbers that are not used again, and their queues.

use crate::{
    bindings,
    code, //
};
use kernel::sync::atomic;

/// A queue of a QP.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    Send = 0,
    Recv = 1,
}

/// What the private data of a QP begin with, to which its `qp_context` points.
#[repr(C)]
pub(crate) struct QpHead {
    /// That of the client of the QP's device. The first field: see [`code::Module::of`].
    pub(crate) module: code::Module,
    pub(crate) id: QpId,
}

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

    pub(crate) fn next() -> Self {
        static LAST: atomic::Atomic<u64> = atomic::Atomic::new(0);
        let step = 1 << Self::FREE_BITS;
        // INVARIANT: A multiple of the step. A QP each microsecond would take nine years to come to
        // the beginning again.
        Self(LAST.fetch_add(step, atomic::Relaxed).wrapping_add(step))
    }

    /// Returns the number of a QP.
    ///
    /// # Safety
    ///
    /// `qp` is a QP of this crate, and is not destroyed meanwhile.
    pub(crate) unsafe fn of(qp: *const bindings::ib_qp) -> Self {
        // SAFETY: The QP is valid, as the caller promises, and its context points to this.
        unsafe { (*(*qp).qp_context.cast::<QpHead>()).id }
    }

    #[inline]
    pub(crate) fn get(self) -> u64 {
        self.0
    }
}
