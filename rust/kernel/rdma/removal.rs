// SPDX-License-Identifier: GPL-2.0

//! What has to know that a device goes, so that threads that wait for it let go.

use crate::context::Sleepable;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// Something made from a device that threads may wait for.
pub(crate) trait OnRemoval: Send + Sync {
    /// The device is about to go: every thread that waits for this gets `ENODEV`, and no other one
    /// waits from here on. Called before [`OnRemoval::removed`] of any object, with the list locked:
    /// takes locks for a moment only, and waits for nothing.
    fn gone(self: Arc<Self>) {}

    /// The device goes: ends this. May wait, for handlers of the ULP too.
    fn removed(&self, _cx: &Sleepable) {}
}

struct Entry {
    object: Arc<dyn OnRemoval>,
    told: bool,
}

struct List {
    entries: KVec<Entry>,
    closed: bool,
}

/// The objects of one device of one client that are to be told of its removal.
#[pin_data]
pub(crate) struct Removal {
    #[pin]
    list: Mutex<List>,
}

impl Removal {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(List {
                entries: KVec::new(),
                closed: false,
            }),
        })
    }

    /// Lists an object.
    ///
    /// # Errors
    ///
    /// `ENODEV` once the device goes, or `ENOMEM`.
    pub(crate) fn add(&self, object: Arc<dyn OnRemoval>) -> Result {
        let mut list = self.list.lock();
        if list.closed {
            return Err(ENODEV);
        }
        let entry = Entry {
            object,
            told: false,
        };
        Ok(list.entries.push(entry, GFP_KERNEL)?)
    }

    /// Takes an object out, if it is listed.
    pub(crate) fn remove<T>(&self, object: &Arc<T>) {
        let object: *const T = Arc::as_ptr(object);
        let mut list = self.list.lock();
        let is_it = |entry: &Entry| core::ptr::addr_eq(Arc::as_ptr(&entry.object), object);
        if let Some(index) = list.entries.iter().position(is_it) {
            let _ = list.entries.remove(index);
        }
    }

    /// Closes the list, and has everybody who waits for an object know that the device goes.
    pub(crate) fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        for entry in &list.entries {
            entry.object.clone().gone();
        }
    }

    /// Returns an object that was not ended yet.
    fn next_untold(&self) -> Option<Arc<dyn OnRemoval>> {
        let mut list = self.list.lock();
        let entry = list.entries.iter_mut().find(|entry| !entry.told)?;
        entry.told = true;
        Some(entry.object.clone())
    }

    /// Ends all objects, after [`Removal::close`].
    pub(crate) fn end_all(&self, cx: &Sleepable) {
        while let Some(object) = self.next_untold() {
            object.removed(cx);
        }
    }
}
