// SPDX-License-Identifier: GPL-2.0

//! Receive queues: those of QPs, and SRQs.

use crate::{
    memory::Sge,
    ring::Ring, //
};
use core::ptr::NonNull;
use kernel::prelude::*;
use rdma_bindings as bindings;

#[derive(Clone, Copy, Default)]
struct Wr {
    wr_id: u64,
    entries: usize,
}

/// A receive that was taken from its queue. Its entries stay until the next one is posted.
pub(crate) struct Recv {
    pub(crate) wr_id: u64,
    at: usize,
    entries: usize,
}

/// A queue of receives.
pub(crate) struct RecvQueue {
    wrs: Ring<Wr>,
    sges: KVVec<Sge>,
    /// Number of entries that a receive can have.
    max_sge: usize,
    /// Number of receives whose completions have not been polled.
    used: usize,
}

impl RecvQueue {
    pub(crate) fn new(max_wr: usize, max_sge: usize) -> Result<Self> {
        let sges = max_wr.checked_mul(max_sge).ok_or(EINVAL)?;
        Ok(Self {
            wrs: Ring::new(max_wr)?,
            sges: KVVec::from_elem(Sge::default(), sges, GFP_KERNEL)?,
            max_sge,
            used: 0,
        })
    }

    /// Adds a receive. Fails with `ENOMEM` if the queue is full.
    #[inline]
    pub(crate) fn post(&mut self, wr_id: u64, sges: &[Sge]) -> Result {
        let entries = sges.len();
        if entries > self.max_sge {
            return Err(EINVAL);
        }
        if self.used >= self.wrs.capacity() {
            return Err(ENOMEM);
        }
        let at = self.wrs.push(Wr { wr_id, entries }).map_err(|_| ENOMEM)?;
        let begin = at * self.max_sge;
        if let Some(to) = self.sges.get_mut(begin..begin + entries) {
            to.copy_from_slice(sges);
        }
        self.used += 1;
        Ok(())
    }

    pub(crate) fn take(&mut self) -> Option<Recv> {
        let (at, wr) = self.wrs.pop()?;
        Some(Recv {
            wr_id: wr.wr_id,
            at,
            entries: wr.entries,
        })
    }

    /// Returns the entries of a receive that was just taken.
    pub(crate) fn entries(&self, recv: &Recv) -> &[Sge] {
        let begin = recv.at * self.max_sge;
        self.sges.get(begin..begin + recv.entries).unwrap_or(&[])
    }

    /// Frees the entry of a receive.
    pub(crate) fn retire(&mut self) {
        self.used = self.used.saturating_sub(1);
    }

    /// Drops all receives.
    pub(crate) fn clear(&mut self) {
        self.wrs.retain(|_| false);
        self.used = 0;
    }

    pub(crate) fn capacity(&self) -> usize {
        self.wrs.capacity()
    }

    pub(crate) fn max_sge(&self) -> usize {
        self.max_sge
    }

    pub(crate) fn used(&self) -> usize {
        self.used
    }
}

/// The address of an SRQ, for events.
#[derive(Clone, Copy)]
pub(crate) struct SrqPtr(pub(crate) NonNull<bindings::ib_srq>);

// SAFETY: The pointer is only compared and passed to C; to dereference it is unsafe.
unsafe impl Send for SrqPtr {}

/// A shared receive queue.
pub(crate) struct Srq {
    pub(crate) raw: SrqPtr,
    pub(crate) queue: RecvQueue,
}
