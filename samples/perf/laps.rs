// SPDX-License-Identifier: GPL-2.0

//! Laps: what is noted of each message that is back.

use crate::args::Args;
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// The number of latencies that are kept.
const SAMPLES: usize = 1 << 16;

/// Returns the time from one instant to a later one, in nanoseconds.
#[inline]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "both are from 0 to `KTIME_MAX`"
)]
pub(crate) fn nanos(from: Instant<Monotonic>, to: Instant<Monotonic>) -> i64 {
    (to - from).as_nanos()
}

/// When the first laps that are measured were over, in nanoseconds from the epoch.
pub(crate) struct Times {
    epoch: Instant<Monotonic>,
    /// Handlers of several slots write to it.
    ends: KVVec<Atomic<i64>>,
}

impl Times {
    pub(crate) fn new(count: u32) -> Result<Arc<Self>> {
        let count = SAMPLES.min(count as usize);
        let mut ends = KVVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            ends.push_within_capacity(Atomic::new(0))?;
        }
        let epoch = Instant::now();
        Ok(Arc::new(Self { epoch, ends }, GFP_KERNEL)?)
    }

    /// Yields how long each lap took, in nanoseconds, the first of which has begun then.
    pub(crate) fn laps(&self, began: Instant<Monotonic>) -> impl Iterator<Item = i64> + '_ {
        let mut last = nanos(self.epoch, began);
        self.ends.iter().map(move |end| {
            let end = end.load(Relaxed);
            end.saturating_sub(core::mem::replace(&mut last, end))
        })
    }
}

/// The laps that end in a slot. Receives are used in the order in which they were posted, so slots
/// take turns.
pub(crate) struct Laps {
    /// The number of the next one. The first that is measured is zero, those before are negative.
    next: usize,
    /// The distance to the one after that.
    step: usize,
    /// The number of laps that are measured.
    count: usize,
    times: Arc<Times>,
}

impl Laps {
    /// The laps of a slot, in which the first of a run ends as number `first`, and then every
    /// `step`th.
    pub(crate) fn new(times: &Arc<Times>, args: &Args<'_>, first: usize, step: usize) -> Self {
        Self {
            next: first.wrapping_sub(args.warmup as usize),
            step,
            count: args.count as usize,
            times: times.clone(),
        }
    }

    /// A lap is over: returns how many are, of those that are measured.
    #[inline]
    pub(crate) fn lap(&mut self) -> usize {
        let now = Instant::<Monotonic>::now();
        let n = self.next;
        self.next = n.wrapping_add(self.step);
        if let Some(end) = self.times.ends.get(n) {
            end.store(nanos(self.times.epoch, now), Relaxed);
        }
        n.wrapping_add(1)
    }

    /// Returns whether there is more to do after this number of laps than to begin the next one.
    #[inline]
    pub(crate) fn is_milestone(&self, n: usize) -> bool {
        n % 64 == 0 || n == self.count
    }

    /// Returns whether a phase is over after this number of laps.
    pub(crate) fn is_end(&self, n: usize) -> bool {
        n == 0 || n == self.count
    }
}
