// SPDX-License-Identifier: GPL-2.0

//! Which QP it is, or was.

use crate::{
    bindings,
    pd::{
        self,
        Pd, //
    }, //
};
use core::ptr::NonNull;
use kernel::sync::atomic::{
    ordering::Relaxed,
    Atomic, //
};

/// The number of QPs that there have been.
static LAST: Atomic<u64> = Atomic::new(0);

/// Tells a QP from all that there have been and will be, where its address may be another one's
/// when it is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Serial(u64);

impl Serial {
    /// That of no QP.
    pub(crate) const NONE: Self = Self(0);

    #[inline(never)]
    fn next() -> Self {
        // In 64 bits it does not come to its beginning again.
        Self(LAST.fetch_add(1, Relaxed).wrapping_add(1))
    }
}

/// Where requests are posted to, and what a region notes of the QP that it is registered through.
///
/// # Invariants
///
/// `raw` is valid, of the PD `pd`, and no other QP has or had this number. `iwarp` says whether its
/// device is one of iWARP.
pub(crate) struct Place {
    pub(crate) raw: NonNull<bindings::ib_qp>,
    pub(crate) pd: pd::Id,
    pub(crate) serial: Serial,
    pub(crate) iwarp: bool,
}

impl Place {
    /// # Safety
    ///
    /// `raw` is a new QP of this PD, and is there until what is returned is gone.
    pub(super) unsafe fn new(raw: NonNull<bindings::ib_qp>, pd: &Pd) -> Self {
        // INVARIANT: By the caller's promise, and a new number.
        Self {
            raw,
            pd: pd.id(),
            serial: Serial::next(),
            iwarp: pd.device().is_iwarp(),
        }
    }
}
