// SPDX-License-Identifier: GPL-2.0

//! Lists of objects that have the links in themselves (`struct list_head`).
//!
//! [`kernel::list`] is for objects in an `Arc` of their own. These are parts of others or on a
//! stack, and leave their list before they go.

use crate::prelude::internal::*;
use core::{
    cell::UnsafeCell,
    iter,
    marker::PhantomPinned, //
};

/// The neighbours of an object in its list.
struct Neighbours<T: ?Sized> {
    prev: Option<NonNull<T>>,
    next: Option<NonNull<T>>,
}

/// The part of an object by which it is in a list. It is not `Unpin`, and neither is an object that
/// has it, so an exclusive reference to that does not claim that no list refers to it.
///
/// # Invariants
///
/// There are no neighbours while the object is in no list. The links are used by [`List`] only: by
/// the one that the object is in or is being put into, which is borrowed, exclusively where they
/// are written.
pub(crate) struct Links<T: ?Sized>(UnsafeCell<Neighbours<T>>, PhantomPinned);

// SAFETY: By the type invariant the borrow of a list is access to the links.
unsafe impl<T: ?Sized> Send for Links<T> {}
// SAFETY: By the type invariant the borrow of a list is access to the links.
unsafe impl<T: ?Sized> Sync for Links<T> {}

impl<T: ?Sized> Links<T> {
    pub(crate) const fn new() -> Self {
        let none = Neighbours {
            prev: None,
            next: None,
        };
        // INVARIANT: The object is in no list.
        Self(UnsafeCell::new(none), PhantomPinned)
    }
}

/// An object that can be in a list.
///
/// # Safety
///
/// `links` returns the same part of the object each time.
pub(crate) unsafe trait Linked {
    /// Returns the part by which the object is in its list.
    fn links(&self) -> &Links<Self>;
}

/// A list of objects.
///
/// # Invariants
///
/// From `first` on each object has the address of the next one, and from `last` on that of the one
/// before; the first has none before it, and the last no next one. All are valid, and in no other
/// list.
pub(crate) struct List<T: Linked + ?Sized> {
    first: Option<NonNull<T>>,
    last: Option<NonNull<T>>,
}

// SAFETY: A list gives shared references to its objects, which are `Sync`.
unsafe impl<T: Linked + Sync + ?Sized> Send for List<T> {}

impl<T: Linked + ?Sized> List<T> {
    pub(crate) const fn new() -> Self {
        // INVARIANT: There is no object.
        Self {
            first: None,
            last: None,
        }
    }

    /// Returns the objects, in the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        // SAFETY: By the type invariant the object is valid: it is removed before it goes, for
        // which the list is borrowed exclusively.
        let at = |at: NonNull<T>| unsafe { at.as_ref() };
        iter::successors(self.first.map(at), move |object| {
            // SAFETY: The object is in this list, which is borrowed, so its links do not change.
            unsafe { (*object.links().0.get()).next }.map(at)
        })
    }

    /// Returns whether an object is in this list.
    ///
    /// # Safety
    ///
    /// The object is in no other list, and is put into none.
    unsafe fn has(&self, object: &T) -> bool {
        // SAFETY: As the caller promises, this list alone uses the links, and it is borrowed.
        let has_prev = unsafe { (*object.links().0.get()).prev.is_some() };
        has_prev || (self.first).is_some_and(|first| ptr::addr_eq(first.as_ptr(), object))
    }

    /// Adds an object at the end, unless it is listed.
    ///
    /// # Safety
    ///
    /// The object is in no other list, and is put into none. Until it is removed it stays where it
    /// is.
    pub(crate) unsafe fn push(&mut self, object: &T) {
        // SAFETY: As the caller promises.
        if unsafe { self.has(object) } {
            return;
        }
        let at = NonNull::from(object);
        let prev = self.last.replace(at);
        // INVARIANT: The object is valid until it is removed, as the caller promises, and the last:
        // it had no neighbours, as it was in no list.
        //
        // SAFETY: By the type invariant `prev` is valid. The links of both are used by this list
        // only, which is borrowed exclusively.
        unsafe {
            (*object.links().0.get()).prev = prev;
            match prev {
                Some(prev) => (*prev.as_ref().links().0.get()).next = Some(at),
                None => self.first = Some(at),
            }
        }
    }

    /// Removes an object, if it is listed.
    ///
    /// # Safety
    ///
    /// The object is in no other list, and is put into none.
    pub(crate) unsafe fn remove(&mut self, object: &T) {
        // SAFETY: As the caller promises.
        if unsafe { !self.has(object) } {
            return;
        }
        // INVARIANT: The neighbours have the addresses of each other.
        //
        // SAFETY: By the type invariant the neighbours are valid. The links of all are used by this
        // list only, which is borrowed exclusively.
        unsafe {
            let links = &mut *object.links().0.get();
            let prev = links.prev.take();
            let next = links.next.take();
            match prev {
                Some(prev) => (*prev.as_ref().links().0.get()).next = next,
                None => self.first = next,
            }
            match next {
                Some(next) => (*next.as_ref().links().0.get()).prev = prev,
                None => self.last = prev,
            }
        }
    }
}
