// SPDX-License-Identifier: GPL-2.0

//! Owners that no completion gives back.
//!
//! An owner of requests that are not signaled, behind which no signaled one was posted, is out of
//! use only when the QP was drained. Until then the QP keeps it, in a list that is filled without a
//! lock: in the context of a post.

use core::ptr;
use kernel::{
    alloc::flags::__GFP_NOWARN,
    prelude::*,
    sync::atomic::{
        ordering::{
            Full,
            Relaxed, //
        },
        Atomic, //
    }, //
};

/// # Invariants
///
/// The first field of an [`Entry<P>`] in a box of its own, and `drop` is [`drop_entry::<P>`].
struct Node {
    next: *mut Node,
    drop: unsafe fn(*mut Node),
}

#[repr(C)]
struct Entry<P> {
    node: Node,
    owner: P,
}

/// # Safety
///
/// `node` is that of an `Entry<P>`, and is not used any more.
unsafe fn drop_entry<P>(node: *mut Node) {
    // SAFETY: `node` is that of an `Entry<P>` and is not used any more, as the caller promises; by
    // the invariant of `Node` that is in a box of its own.
    drop(unsafe { KBox::from_raw(node.cast::<Entry<P>>()) });
}

/// The owners that a QP keeps.
///
/// # Invariants
///
/// The head of a list of nodes that this owns.
pub(super) struct DrainList(Atomic<*mut Node>);

// SAFETY: Owners can be sent, and the list is changed by atomics only.
unsafe impl Send for DrainList {}
// SAFETY: The list is changed by atomics only, and who takes owners out of it has them for himself.
unsafe impl Sync for DrainList {}

impl DrainList {
    pub(super) const fn new() -> Self {
        // INVARIANT: The empty list.
        Self(Atomic::new(ptr::null_mut()))
    }

    /// Keeps an owner. Any context.
    #[inline]
    pub(super) fn add<P: Send + 'static>(&self, owner: P) {
        // What is reported here needs no other report.
        let Ok(target) = KBox::<Entry<P>>::new_uninit(GFP_ATOMIC | __GFP_NOWARN) else {
            pr_err!("no memory to keep the owner of posted requests: it is leaked\n");
            core::mem::forget(owner);
            return;
        };
        let entry = target.write(Entry {
            node: Node {
                next: ptr::null_mut(),
                drop: drop_entry::<P>,
            },
            owner,
        });
        // SAFETY: The node begins an entry in a box of its own.
        unsafe { self.push(KBox::into_raw(entry).cast()) };
    }

    /// # Safety
    ///
    /// `node` holds the invariant of [`Node`], and the caller owns it.
    unsafe fn push(&self, node: *mut Node) {
        let mut head = self.0.load(Relaxed);
        loop {
            // SAFETY: Nobody else has the node yet.
            unsafe { (*node).next = head };
            match self.0.cmpxchg(head, node, Full) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all owners out, to be dropped once the requests that were posted before this are
    /// proved to be complete.
    pub(super) fn take(&self) -> Taken<'_> {
        // INVARIANT: The list is empty now, and its nodes are in what is returned.
        Taken {
            head: self.0.xchg(ptr::null_mut(), Full),
            drain_list: self,
        }
    }
}

/// Owners that were taken out of a [`DrainList`]; they go back unless they are dropped explicitly.
///
/// # Invariants
///
/// The head of a list of nodes that this owns.
pub(super) struct Taken<'a> {
    head: *mut Node,
    drain_list: &'a DrainList,
}

impl Taken<'_> {
    fn pop(&mut self) -> Option<*mut Node> {
        let node = self.head;
        if node.is_null() {
            return None;
        }
        // SAFETY: By the type invariant the node is valid and owned by this.
        // INVARIANT: It is the caller's now.
        self.head = unsafe { (*node).next };
        Some(node)
    }

    /// Drops the owners.
    ///
    /// # Safety
    ///
    /// All requests that were posted before they were taken out are complete.
    pub(super) unsafe fn release(mut self) {
        while let Some(node) = self.pop() {
            // SAFETY: The node was just taken out of the list, and what it keeps is not in use.
            unsafe { ((*node).drop)(node) };
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        while let Some(node) = self.pop() {
            // SAFETY: The node was just taken out of the list.
            unsafe { self.drain_list.push(node) };
        }
    }
}
