// SPDX-License-Identifier: GPL-2.0

//! Times of operations.

use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// An operation that takes longer is reported at once, in milliseconds.
const LONG: i64 = 10_000;

/// The operations that are measured.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Resolve,
    Connect,
    /// From giving up what a thread waits for until it does not.
    GiveUp,
    IbPath,
    IbConnect,
    /// `Id::destroy()`.
    Destroy,
    /// `Listener::destroy()` of either manager.
    Unlisten,
    /// From letting go of a connection until its handler is dropped.
    Release,
    IbRelease,
    /// From disconnecting it until then.
    Disconnect,
    IbDisconnect,
}

const NAMES: [&str; 11] = [
    "resolve",
    "connect",
    "give up",
    "ibcm path",
    "ibcm connect",
    "destroy",
    "destroy a listener",
    "release",
    "ibcm release",
    "disconnect",
    "ibcm disconnect",
];

/// The longest of each kind, in milliseconds.
pub(crate) struct Times {
    begin: Instant<Monotonic>,
    longest: [Atomic<i64>; NAMES.len()],
}

impl Times {
    pub(crate) fn new() -> Self {
        Self {
            begin: Instant::now(),
            longest: [const { Atomic::new(0) }; NAMES.len()],
        }
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> i64 {
        self.begin.elapsed().as_millis()
    }

    /// Something that began at `since` is over.
    pub(crate) fn took(&self, kind: Kind, since: i64) {
        let took = self.now() - since;
        let (Some(longest), Some(name)) =
            (self.longest.get(kind as usize), NAMES.get(kind as usize))
        else {
            return;
        };
        if took > LONG {
            pr_warn!("LONG: {name}: {took} ms\n");
        }
        let mut before = longest.load(Relaxed);
        while before < took {
            match longest.cmpxchg(before, took, Relaxed) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
    }

    /// Returns what `f` returns, and notes how long it takes.
    pub(crate) fn measure<T>(&self, kind: Kind, f: impl FnOnce() -> T) -> T {
        let since = self.now();
        let done = f();
        self.took(kind, since);
        done
    }

    pub(crate) fn print(&self) {
        for (name, longest) in NAMES.iter().zip(&self.longest) {
            pr_info!("longest {name}: {} ms\n", longest.load(Relaxed));
        }
    }
}
