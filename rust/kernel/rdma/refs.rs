// SPDX-License-Identifier: GPL-2.0

//! Reference counts of devices and clients, as `struct percpu_ref`.
//!
//! A device cannot be removed and a module cannot be unloaded while a handle of theirs lives: each
//! handle has a reference to a [`Refs`], which the removal kills and waits for. A leaked handle
//! stalls the removal, with a message that names it.

use crate::{
    completion::Completion,
    prelude::*,
    sync::RefCount, //
};
use core::mem::ManuallyDrop;
use kernel::{
    fmt,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

/// The time between two messages about what is still referenced, in milliseconds.
pub(crate) const REPORT_MS: u32 = 10_000;

/// The kind of object that has a reference, for messages.
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

/// A count of references that can be killed: no reference is taken after that.
///
/// # Invariants
///
/// - `count` counts the live references: [`Ref`]s, and those of
///   [`Object`](crate::objects::Object)s.
/// - `empty` is completed when the last reference to killed refs is dropped, as the last access.
#[pin_data]
pub(crate) struct Refs {
    count: RefCount,
    kinds: [Atomic<i32>; NAMES.len()],
    #[pin]
    empty: Completion,
}

impl Refs {
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no reference.
        pin_init!(Self {
            count: RefCount::new(),
            kinds: [const { Atomic::new(0) }; NAMES.len()],
            empty <- Completion::new(),
        })
    }

    /// Takes a reference (`percpu_ref_tryget_live`). Fails with `ENODEV` once the refs are killed.
    ///
    /// # Safety
    ///
    /// The refs stay where they are until [`Refs::kill_and_wait`] has returned.
    pub(crate) unsafe fn try_get(&self, kind: Kind) -> Result<Ref> {
        if !self.count.try_get() {
            return Err(ENODEV);
        }
        // SAFETY: The reference was just counted, and the refs stay, as the caller promises.
        Ok(unsafe { self.counted(kind) })
    }

    /// Makes the reference that `count` was just incremented for.
    ///
    /// # Safety
    ///
    /// It was, and the refs stay where they are until [`Refs::kill_and_wait`] has returned.
    unsafe fn counted(&self, kind: Kind) -> Ref {
        self.kinds[kind as usize].add(1, Relaxed);
        // INVARIANT: The caller has counted the reference, and says that the refs stay.
        Ref {
            refs: NonNull::from(self),
            kind,
        }
    }

    /// Gives a reference of this kind back (`percpu_ref_put`).
    ///
    /// # Safety
    ///
    /// The caller has the reference, and does not use it again.
    pub(crate) unsafe fn put(&self, kind: Kind) {
        self.kinds[kind as usize].add(-1, Relaxed);
        if self.count.put() {
            // The refs are there until `kill_and_wait`, which waits for this, returns.
            self.empty.complete();
        }
    }

    /// Kills the refs and waits until the last reference is dropped (`percpu_ref_kill`). Every ten
    /// seconds a message of `who` counts the references that are left, and `report` is called. A
    /// signal does not end the wait; a message says so when the task is killed.
    pub(crate) fn kill_and_wait(&self, who: &dyn fmt::Display, report: &dyn Fn(), cx: &Sleepable) {
        if !self.count.kill() {
            return;
        }
        let warn = || {
            pr_warn!("{who}: waits for {self}\n");
            report();
        };
        loop {
            match self.empty.wait_killable_timeout(REPORT_MS, cx) {
                Ok(true) => return,
                Ok(false) => warn(),
                Err(_) => break,
            }
        }
        warn();
        pr_warn!("{who}: no signal ends this wait: what is held would be used when it is gone\n");
        while !self.empty.wait_timeout(REPORT_MS, cx) {
            warn();
        }
    }
}

impl fmt::Display for Refs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (name, count) in NAMES.iter().zip(&self.kinds) {
            let count = count.load(Relaxed);
            if count != 0 {
                write!(f, "{separator}{count} {name}(s)")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// A reference to a [`Refs`]: while it lives, the device or client of the refs stays.
///
/// # Invariants
///
/// `refs` is valid, and its count includes this reference under `kind`.
pub(crate) struct Ref {
    refs: NonNull<Refs>,
    kind: Kind,
}

// SAFETY: `Refs` is `Sync`, so a reference may be dropped in any thread.
unsafe impl Send for Ref {}
// SAFETY: A shared reference gives access to a `Refs`, which is `Sync`.
unsafe impl Sync for Ref {}

impl Ref {
    fn refs(&self) -> &Refs {
        // SAFETY: `refs` is valid by the type invariant.
        unsafe { self.refs.as_ref() }
    }

    /// Leaves the reference to the caller, who gives it back by [`Refs::put`].
    pub(crate) fn into_kind(self) -> Kind {
        ManuallyDrop::new(self).kind
    }

    /// Takes another reference to the same refs (`percpu_ref_get`), killed or not.
    pub(crate) fn get(&self, kind: Kind) -> Self {
        self.refs().count.get();
        // SAFETY: Just counted. The refs stay while there is this reference, by its invariant.
        unsafe { self.refs().counted(kind) }
    }
}

impl Drop for Ref {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this is a reference of this kind, and it is not used again.
        unsafe { self.refs().put(self.kind) };
    }
}
