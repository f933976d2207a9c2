// SPDX-License-Identifier: GPL-2.0

//! The number of times that each kind of step was taken.

use kernel::{
    fmt,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// More than there are steps.
const KINDS: usize = 64;

/// The counts of the threads of a run.
pub(crate) struct Counts {
    /// Of each kind of step: how often it was taken, and how often it could be done.
    taken: [Atomic<u64>; KINDS],
    done: [Atomic<u64>; KINDS],
    /// And for how many nanoseconds, in all threads.
    took: [Atomic<u64>; KINDS],
}

impl Counts {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let this = Self {
            taken: [const { Atomic::new(0) }; KINDS],
            done: [const { Atomic::new(0) }; KINDS],
            took: [const { Atomic::new(0) }; KINDS],
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// Counts a step of a kind that has begun at `begin`.
    pub(crate) fn count(&self, (kind, done): (usize, bool), begin: Instant<Monotonic>) {
        let took = begin.elapsed().as_nanos().try_into().unwrap_or(0);
        for (sums, add) in [
            (&self.taken, 1),
            (&self.done, done.into()),
            (&self.took, took),
        ] {
            if let Some(sum) = sums.get(kind) {
                sum.fetch_add(add, Relaxed);
            }
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        self.taken.iter().map(|sum| sum.load(Relaxed)).sum()
    }

    /// Prints the sums of the steps with these names.
    pub(crate) fn print(&self, of: &dyn fmt::Display, names: impl Iterator<Item = &'static str>) {
        let sums = self.taken.iter().zip(&self.done).zip(&self.took);
        for (name, ((taken, done), took)) in names.zip(sums) {
            let [taken, done, took] = [taken, done, took].map(|sum| sum.load(Relaxed));
            let ms = took / 1_000_000;
            pr_info!("{of} {name}: {done} of {taken}, {ms} ms\n");
        }
    }
}
