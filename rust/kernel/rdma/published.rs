// SPDX-License-Identifier: GPL-2.0

//! Parts of the core module, which all of the crate finds by a static.

use crate::{
    atomic::{
        AtomicPtr,
        Ordering, //
    },
    prelude::internal::*, //
};

/// The address of a part of the core module.
///
/// # Invariants
///
/// Null, or the address of a value that lives as long as the core module has users.
pub(crate) struct Published<T>(AtomicPtr<T>);

impl<T: Sync + 'static> Published<T> {
    pub(crate) const fn new() -> Self {
        // INVARIANT: There is no value.
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Publishes a value, when the core module is loaded.
    ///
    /// # Safety
    ///
    /// The value lives as long as the core module has users.
    pub(crate) unsafe fn set(&self, value: &T) {
        // INVARIANT: As the caller promises.
        let addr = ptr::from_ref(value).cast_mut();
        self.0.store(addr, Ordering::Release);
    }

    /// Returns the value. `None` before there is one.
    #[inline]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: By the type invariant the value lives as long as the core module has users, and
        // the caller is, or works for, one.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }
}
