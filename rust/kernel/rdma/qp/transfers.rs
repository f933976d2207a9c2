// SPDX-License-Identifier: GPL-2.0

//! Transfers that use their QP when they end.
//!
//! `rdma_rw_ctx_destroy` needs the QP, and it is called in the handler of the transfer. A drain
//! proves that all requests have completed, not that all handlers have begun: those of a direct CQ,
//! or of one that the drain of an SRQ polls, may still be waiting with another thread. So transfers
//! are counted, and their QP is destroyed when none is left.
//!
//! On iWARP they may leave pages behind, which peers can write to until the QP, and its MRs with
//! it, is destroyed.

use super::parked::Parked;
use crate::{
    context::Sleepable,
    drain::PATIENCE_MS, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::{
            Acquire,
            Relaxed,
            Release, //
        },
        Atomic, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

/// The transfers of a QP.
pub(crate) struct Transfers {
    /// How many will use the QP.
    count: Atomic<u32>,
    /// What they leave behind.
    kept: Parked,
    /// Whether the device is one of iWARP.
    pub(crate) iwarp: bool,
}

impl Transfers {
    pub(super) const fn new(iwarp: bool) -> Self {
        Self {
            count: Atomic::new(0),
            kept: Parked::new(),
            iwarp,
        }
    }

    /// A transfer has begun.
    pub(crate) fn begin(&self) {
        self.count.add(1, Relaxed);
    }

    /// A transfer has ended and does not use the QP, or this, any more.
    pub(crate) fn end(&self) {
        self.count.fetch_sub(1, Release);
    }

    /// Keeps what a transfer leaves behind until the QP is destroyed. Any context.
    ///
    /// The transfer has not ended.
    pub(crate) fn keep<T: Send + 'static>(&self, left: T) {
        self.kept.park(left);
    }

    /// Waits until no transfer is left.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` after a minute.
    pub(super) fn wait(&self, _cx: &Sleepable) -> Result {
        for _ in 0..PATIENCE_MS {
            if self.count.load(Acquire) == 0 {
                return Ok(());
            }
            fsleep(Delta::from_millis(1));
        }
        Err(ETIMEDOUT)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // SAFETY: The context of a QP, which this is a part of, is dropped once the QP was
        // destroyed, or when it could not be created, and is leaked with it otherwise. So no
        // request is outstanding, and the MRs of the QP are gone; the PD is dropped after this.
        unsafe { self.kept.take().release() };
    }
}
