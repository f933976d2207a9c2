// SPDX-License-Identifier: GPL-2.0

//! Leases of CQ entries, which make overrun impossible.

use super::Inner;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Entries of a CQ that a QP has reserved; given back when dropped.
///
/// # Invariants
///
/// `entries` were taken from the room of `cq`.
pub(crate) struct Lease {
    cq: Arc<Inner>,
    entries: i32,
}

impl Lease {
    pub(crate) fn cq(&self) -> &Arc<Inner> {
        &self.cq
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.cq.room.give(self.entries);
    }
}

/// Takes `entries` entries, all or nothing.
pub(crate) fn lease(cq: &Arc<Inner>, entries: u32) -> Result<Lease> {
    let entries: i32 = entries.try_into()?;
    cq.room.take(entries).map_err(|free| {
        pr_err!(
            "{}: a QP needs {entries} CQ entries, {free} of {} are free\n",
            cq.dev,
            cq.entries
        );
        ENOSPC
    })?;
    // INVARIANT: Just taken.
    Ok(Lease {
        cq: cq.clone(),
        entries,
    })
}
