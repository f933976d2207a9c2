// SPDX-License-Identifier: GPL-2.0

//! Transfers that use their QP when they end.
//!
//! `rdma_rw_ctx_destroy` needs the QP, and it is called in the handler of the transfer. A drain
//! proves that all requests have completed, not that all handlers have begun: those of a direct CQ,
//! or of one that the drain of an SRQ polls, may still be waiting with another thread. So transfers
//! are counted, and their QP is destroyed when none is left.

use crate::context::Sleepable;
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

/// How long handlers of a drained QP may take to begin, in milliseconds.
const PATIENCE_MS: u32 = 60_000;

/// The number of transfers that will use the QP.
pub(crate) struct Transfers(Atomic<u32>);

impl Transfers {
    pub(super) const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// A transfer has begun.
    pub(crate) fn begin(&self) {
        self.0.add(1, Relaxed);
    }

    /// A transfer has ended and does not use the QP, or this, any more.
    pub(crate) fn end(&self) {
        self.0.fetch_sub(1, Release);
    }

    /// Waits until no transfer is left.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` after a minute.
    pub(super) fn wait(&self, _cx: &Sleepable) -> Result {
        for _ in 0..PATIENCE_MS {
            if self.0.load(Acquire) == 0 {
                return Ok(());
            }
            fsleep(Delta::from_millis(1));
        }
        Err(ETIMEDOUT)
    }
}
