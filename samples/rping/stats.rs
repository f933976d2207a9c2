// SPDX-License-Identifier: GPL-2.0

//! The counters of an instance.

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
    time::Delta, //
};

/// Counters of all connections of an instance, since it was last started.
pub(crate) struct Stats {
    pings: Atomic<u64>,
    bytes_verified: Atomic<u64>,
    completions: Atomic<u64>,
    errors: Atomic<u64>,
    connections: Atomic<u64>,
    nanos: Atomic<u64>,
}

impl Stats {
    pub(crate) const fn new() -> Self {
        Self {
            pings: Atomic::new(0),
            bytes_verified: Atomic::new(0),
            completions: Atomic::new(0),
            errors: Atomic::new(0),
            connections: Atomic::new(0),
            nanos: Atomic::new(0),
        }
    }

    fn all(&self) -> [&Atomic<u64>; 6] {
        [
            &self.pings,
            &self.bytes_verified,
            &self.completions,
            &self.errors,
            &self.connections,
            &self.nanos,
        ]
    }

    pub(crate) fn reset(&self) {
        for counter in self.all() {
            counter.store(0, Relaxed);
        }
    }

    /// A request has completed, well or not.
    pub(crate) fn completion(&self) {
        self.completions.add(1, Relaxed);
    }

    /// The data of a ping were compared and are right.
    pub(crate) fn verified(&self, len: usize) {
        self.bytes_verified.add(len as u64, Relaxed);
    }

    /// A ping has come to its end.
    pub(crate) fn ping(&self, took: Delta) {
        self.pings.add(1, Relaxed);
        self.nanos.add(took.as_nanos().unsigned_abs(), Relaxed);
    }

    /// A connection is there.
    pub(crate) fn connection(&self) {
        self.connections.add(1, Relaxed);
    }

    /// A connection has ended in an error.
    pub(crate) fn error(&self) {
        self.errors.add(1, Relaxed);
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [pings, bytes, completions, errors, connections, nanos] =
            self.all().map(|counter| counter.load(Relaxed));
        let rtt = nanos.checked_div(pings).unwrap_or(0);
        f.write_fmt(fmt!("pings {pings}\nbytes_verified {bytes}\n"))?;
        f.write_fmt(fmt!("completions {completions}\nerrors {errors}\n"))?;
        f.write_fmt(fmt!("connections {connections}\nrtt_ns {rtt}\n"))
    }
}
