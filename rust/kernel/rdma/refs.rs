// SPDX-License-Identifier: GPL-2.0

//! Counts of what still uses something that is about to go away.
//!
//! A device cannot be removed and a module cannot be unloaded while a handle of theirs lives: each
//! handle is a [`Ref`] on a [`Refs`], and the removal closes the gate and waits. A handle that is
//! leaked stalls the removal, with a message that names it, instead of being used after it is gone.
//! Posting and completing never touch a refs.

use crate::{
    bindings,
    context::Sleepable,
    objects,
    sync::RefCount, //
};
use core::ptr::NonNull;
use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    time::msecs_to_jiffies,
    types::Opaque, //
};

/// How long to wait between two messages about what is still held, in milliseconds.
pub(crate) const REPORT_MS: u32 = 10_000;

/// What a hold is for, to name it in messages.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Device,
    Pd,
    Cq,
    Qp,
    Mr,
    Srq,
    Id,
    Client,
    Ah,
    Mad,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

const NAMES: [&str; 10] = [
    "device handle",
    "PD",
    "CQ",
    "QP",
    "MR",
    "SRQ",
    "CM id",
    "client handle",
    "address handle",
    "MAD agent",
];

/// A gate that stays open while holds on it may be taken.
///
/// # Invariants
///
/// - `count` counts the live [`Ref`]s.
/// - `empty` is completed when the last hold of a closed gate goes, and is not touched after that.
#[pin_data]
pub(crate) struct Refs {
    count: RefCount,
    kinds: [Atomic<i32>; NAMES.len()],
    #[pin]
    empty: Opaque<bindings::completion>,
}

// SAFETY: A gate is made of atomics and a completion, which may be used from any thread.
unsafe impl Send for Refs {}
// SAFETY: Several threads may use an atomic at once, and a completion has its own lock.
unsafe impl Sync for Refs {}

impl Refs {
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: Nothing is held, the gate is open.
        pin_init!(Self {
            count: RefCount::new(),
            kinds: [const { Atomic::new(0) }; NAMES.len()],
            empty <- Opaque::ffi_init(|slot| {
                // SAFETY: `slot` is valid for writes; a completion is initialised in place and
                // stays pinned.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Takes a hold, unless the gate is closed.
    ///
    /// # Safety
    ///
    /// The gate must stay where it is until it has been closed and [`Refs::kill_and_wait`] has returned.
    pub(crate) unsafe fn try_get(&self, kind: Kind) -> Result<Ref> {
        if !self.count.try_get() {
            return Err(ENODEV);
        }
        self.kinds[kind as usize].add(1, Relaxed);
        // INVARIANT: Just counted.
        Ok(Ref {
            refs: NonNull::from(self),
            kind,
        })
    }

    /// Closes the gate and waits until nothing holds it, telling `who` is still waiting for what.
    ///
    /// No signal ends that: the caller is about to free what is held. It says so when it is killed.
    pub(crate) fn kill_and_wait(&self, who: &dyn fmt::Display, _cx: &Sleepable) {
        if !self.count.kill() {
            return;
        }
        let (empty, timeout) = (self.empty.get(), msecs_to_jiffies(REPORT_MS));
        let mut killed = false;
        loop {
            // SAFETY: `empty` is initialised and pinned; the token says that this task may sleep.
            let left = unsafe {
                if killed {
                    bindings::wait_for_completion_timeout(empty, timeout) as c_long
                } else {
                    bindings::wait_for_completion_killable_timeout(empty, timeout)
                }
            };
            if left > 0 {
                return;
            }
            pr_warn!("{who}: waits for {}\n", Report(self));
            objects::report(self, who);
            if left < 0 {
                killed = true;
                pr_warn!(
                    "{who}: no signal ends this wait: what is held would be used when it is gone\n"
                );
            }
        }
    }
}

/// What is held, for messages.
struct Report<'a>(&'a Refs);

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (name, count) in NAMES.iter().zip(&self.0.kinds) {
            let count = count.load(Relaxed);
            if count != 0 {
                write!(f, "{separator}{count} {name}(s)")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// A hold on a [`Refs`]: while it lives, what the gate guards stays.
///
/// # Invariants
///
/// `gate` is valid, and its count includes this hold under `kind`.
pub(crate) struct Ref {
    refs: NonNull<Refs>,
    kind: Kind,
}

// SAFETY: A gate is `Sync`, and counts in whichever thread a hold is given back.
unsafe impl Send for Ref {}
// SAFETY: What a reference gives access to is a refs, which is `Sync`.
unsafe impl Sync for Ref {}

impl Ref {
    fn refs(&self) -> &Refs {
        // SAFETY: `gate` is valid by the type invariant.
        unsafe { self.refs.as_ref() }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Takes another hold on the same refs, also when it is closed: the first one keeps it from
    /// opening.
    pub(crate) fn another(&self, kind: Kind) -> Self {
        let refs = self.refs();
        refs.count.get();
        refs.kinds[kind as usize].add(1, Relaxed);
        // INVARIANT: Just counted, and `self` keeps the gate in place.
        Self {
            refs: self.refs,
            kind,
        }
    }
}

impl Drop for Ref {
    fn drop(&mut self) {
        let refs = self.refs();
        refs.kinds[self.kind as usize].add(-1, Relaxed);
        if refs.count.put() {
            // SAFETY: `close` cannot have returned: it waits for this completion. Waiting for a
            // completion takes its lock, so `close` returns only after `complete` has done its last
            // access.
            unsafe { bindings::complete(refs.empty.get()) };
        }
    }
}
