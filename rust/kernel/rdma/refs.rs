// SPDX-License-Identifier: GPL-2.0

//! Reference counts of devices and clients, as `struct percpu_ref`.
//!
//! Each handle has a reference to a [`Refs`], which the removal of its device, or the unload of its
//! module, kills and waits for. A leaked handle stalls that, with a message that names it.

use crate::{
    completion::Completion,
    deferred,
    prelude::internal::*,
    sync::RefCount, //
};
use kernel::{
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
    workqueue, //
};

/// The time between two messages about what is still referenced, in milliseconds.
pub(crate) const REPORT_MS: u32 = 10_000;

/// The kind of object that has a reference, for messages.
#[derive(Clone, Copy)]
pub(crate) enum ObjectKind {
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
    Requests,
}

/// The names of the kinds.
pub(crate) const NAMES: [&str; 11] = [
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
    "array of requests",
];

/// A count of references that can be killed: no reference is taken after that.
///
/// # Invariants
///
/// - `count` counts the live [`Ref`]s.
/// - `empty` is completed when the last reference to killed refs is dropped, as the last access.
#[pin_data]
pub(crate) struct Refs {
    pub(crate) count: RefCount,
    kinds: [Atomic<i32>; NAMES.len()],
    #[pin]
    pub(crate) empty: Completion,
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

    // Not inlined, as handles are cloned and dropped in each ULP.
    #[inline(never)]
    fn get(&self, kind: ObjectKind) {
        self.count.get();
        self.kinds[kind as usize].add(1, Relaxed);
    }

    #[inline(never)]
    fn put(&self, kind: ObjectKind) {
        self.kinds[kind as usize].add(-1, Relaxed);
        if self.count.put() {
            // The refs exist until `kill_and_wait`, which waits for this, returns.
            self.empty.complete();
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

/// An object that references keep: a device, a client or a MAD agent, as messages name it.
pub(crate) trait Owner: fmt::Display + Sync {
    fn refs(&self) -> &Refs;

    /// Returns the workqueue that tears down the objects that keep this.
    fn queue(&self) -> &workqueue::Queue {
        deferred::CoreWorkqueue::get()
    }
}

/// A counted reference to a device, a client or a MAD agent, which stays while this lives.
///
/// # Invariants
///
/// `owner` is valid, and its refs count this reference, under `kind`.
pub(crate) struct Ref<O: Owner + ?Sized> {
    owner: NonNull<O>,
    pub(crate) kind: ObjectKind,
}

// SAFETY: The owner is `Sync`, so a reference to it may be used and dropped in any thread.
unsafe impl<O: Owner + ?Sized> Send for Ref<O> {}
// SAFETY: A shared reference gives access to an owner, which is `Sync`.
unsafe impl<O: Owner + ?Sized> Sync for Ref<O> {}

impl<O: Owner> Ref<O> {
    /// Takes a reference (`percpu_ref_tryget_live`). Fails with `ENODEV` once the refs are killed.
    ///
    /// # Safety
    ///
    /// `owner` is valid until [`kill_and_wait`](crate::objects::kill_and_wait) has returned for it.
    pub(crate) unsafe fn try_get(owner: NonNull<O>, kind: ObjectKind) -> Result<Self> {
        // SAFETY: `owner` is valid, as the caller promises.
        let refs = unsafe { owner.as_ref() }.refs();
        if !refs.count.try_get() {
            return Err(ENODEV);
        }
        refs.kinds[kind as usize].add(1, Relaxed);
        // INVARIANT: The reference was just counted, and the caller promises that the owner stays.
        Ok(Self { owner, kind })
    }

    /// Takes another reference (`percpu_ref_get`), whether the refs are killed or not.
    pub(crate) fn get(&self, kind: ObjectKind) -> Self {
        self.refs().get(kind);
        // INVARIANT: The reference was just counted, and `self` kept the owner until then.
        Self {
            owner: self.owner,
            kind,
        }
    }
}

impl<O: Owner + 'static> From<Ref<O>> for Ref<dyn Owner> {
    fn from(reference: Ref<O>) -> Self {
        let Ref { owner, kind } = *ManuallyDrop::new(reference);
        // INVARIANT: This is the reference that was given, and which is not dropped.
        Self { owner, kind }
    }
}

impl<O: Owner + ?Sized> core::ops::Deref for Ref<O> {
    type Target = O;

    fn deref(&self) -> &O {
        // SAFETY: The owner is valid by the type invariant.
        unsafe { self.owner.as_ref() }
    }
}

impl<O: Owner + ?Sized> Drop for Ref<O> {
    fn drop(&mut self) {
        self.refs().put(self.kind);
    }
}
