// SPDX-License-Identifier: GPL-2.0

//! Items that one work item ends (`struct llist_head`). Nothing else is here, so that loom can run
//! this file in every order of its steps.

use crate::atomic::{
    AtomicPtr,
    Ordering, //
};
use core::{
    iter,
    ptr, //
};

/// The place of an item in a batch.
pub(crate) struct Next<T>(AtomicPtr<T>);

impl<T> Next<T> {
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }
}

/// An item that can be in a batch.
pub(crate) trait Batched: Sized {
    fn next(&self) -> &Next<Self>;
}

/// A list of items, the last one that was added first.
///
/// # Invariants
///
/// From the first item on each has the address of the next one. All are valid until they are taken
/// out, and in no other list.
pub(crate) struct Batch<T>(AtomicPtr<T>);

impl<T: Batched> Batch<T> {
    pub(crate) fn new() -> Self {
        // INVARIANT: There is none.
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Adds an item. Returns whether it is the first: the caller has it take the batch. Any other,
    /// and the batch, may be gone when this returns. Any context.
    ///
    /// # Safety
    ///
    /// The item is in no batch, nothing else uses it, and it is valid until it is taken out. If it
    /// is not the first it is not used after this.
    pub(crate) unsafe fn add(&self, item: *mut T) -> bool {
        let mut first = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: The item is valid, as the caller promises, while it is not in the list.
            unsafe { &*item }.next().0.store(first, Ordering::Relaxed);
            // Release: it pairs with `take`, so that the caller's accesses to the item come first.
            // INVARIANT: As the caller promises.
            match (self.0).compare_exchange(first, item, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return first.is_null(),
                Err(now) => first = now,
            }
        }
    }

    /// Takes all items out, the last one first. The next one that is added is the first again.
    pub(crate) fn take(&self) -> impl Iterator<Item = *mut T> {
        // Acquire: see `add`.
        let mut next = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        iter::from_fn(move || {
            let item = next;
            // SAFETY: By the type invariant the item is valid, or null, as it is the caller's only
            // when this has returned.
            next = unsafe { item.as_ref() }?.next().0.load(Ordering::Relaxed);
            Some(item)
        })
    }
}
