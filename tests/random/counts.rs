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
    }, //
};

/// More than there are steps.
const KINDS: usize = 40;

/// The counts of the threads of a run.
pub(crate) struct Counts {
    /// Of each kind of step: how often it was taken, and how often it could be done.
    taken: [Atomic<u64>; KINDS],
    done: [Atomic<u64>; KINDS],
}

impl Counts {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let this = Self {
            taken: [const { Atomic::new(0) }; KINDS],
            done: [const { Atomic::new(0) }; KINDS],
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    pub(crate) fn count(&self, (kind, done): (usize, bool)) {
        for (sums, add) in [(&self.taken, true), (&self.done, done)] {
            if let Some(sum) = sums.get(kind) {
                sum.fetch_add(add.into(), Relaxed);
            }
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        self.taken.iter().map(|sum| sum.load(Relaxed)).sum()
    }

    /// Prints the sums of the steps with these names.
    pub(crate) fn print(&self, of: &dyn fmt::Display, names: impl Iterator<Item = &'static str>) {
        for (name, (taken, done)) in names.zip(self.taken.iter().zip(&self.done)) {
            let (taken, done) = (taken.load(Relaxed), done.load(Relaxed));
            pr_info!("{of} {name}: {done} of {taken}\n");
        }
    }
}
