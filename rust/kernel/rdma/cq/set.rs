// SPDX-License-Identifier: GPL-2.0

//! One CQ for each completion vector.

use super::Cq;
use crate::{
    context::{
        PollContext,
        Sleepable, //
    },
    device::Device, //
};
use kernel::{
    cpu::{
        nr_cpu_ids,
        CpuId, //
    },
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};

/// CQs on different completion vectors, so on different CPUs, for a ULP with many QPs.
///
/// C ULPs spell this out: nvme and srp give queue `i` the vector `i` modulo the number of vectors,
/// isert the one that the fewest connections use, others that of the current CPU.
pub struct CqSet<C: PollContext> {
    first: Cq<C>,
    others: KVec<Cq<C>>,
    turn: Atomic<u32>,
}

impl<C: PollContext> CqSet<C> {
    /// Allocates a CQ with at least `entries` entries for each completion vector of the device, but
    /// not more than there are CPUs, nor more than `max`.
    ///
    /// # Errors
    ///
    /// As [`Cq::alloc`]; `EINVAL` if `max` is zero.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Softirq}, cq::{Cq, CqSet}, device::Device};
    /// fn make(dev: &Device, cx: &Sleepable) -> Result<Cq<Softirq>> {
    ///     let cqs = CqSet::<Softirq>::alloc(dev, 128, u32::MAX, cx)?;
    ///     Ok(cqs.next().clone())
    /// }
    /// ```
    pub fn alloc(dev: &Device, entries: u32, max: u32, cx: &Sleepable) -> Result<Self> {
        let vectors = dev.num_comp_vectors().min(nr_cpu_ids()).min(max);
        if vectors == 0 {
            return Err(EINVAL);
        }
        let mut others = KVec::new();
        for vector in 1..vectors {
            others.push(Cq::alloc(dev, entries, vector, cx)?, GFP_KERNEL)?;
        }
        Ok(Self {
            first: Cq::alloc(dev, entries, 0, cx)?,
            others,
            turn: Atomic::new(0),
        })
    }

    /// Returns the number of CQs, at least 1.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        1 + self.others.len()
    }

    /// Returns the CQ of a queue, by the queue's number.
    pub fn of(&self, queue: usize) -> &Cq<C> {
        match queue % self.len() {
            0 => &self.first,
            n => self.others.get(n - 1).unwrap_or(&self.first),
        }
    }

    /// Returns one CQ after the other.
    pub fn next(&self) -> &Cq<C> {
        self.of(self.turn.fetch_add(1, Relaxed) as usize)
    }

    /// Returns the CQ of the current CPU, where drivers spread vectors over CPUs in order.
    pub fn local(&self) -> &Cq<C> {
        self.of(CpuId::current().as_u32() as usize)
    }

    /// Returns the CQ with the most entries that no QP has leased.
    pub fn roomiest(&self) -> &Cq<C> {
        self.iter()
            .max_by_key(|cq| cq.free_entries())
            .unwrap_or(&self.first)
    }

    /// Returns all CQs, in the order of their vectors.
    pub fn iter(&self) -> impl Iterator<Item = &Cq<C>> {
        Iterator::chain(core::iter::once(&self.first), &self.others)
    }
}
