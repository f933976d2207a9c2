// SPDX-License-Identifier: GPL-2.0

//! The objects of a device that its removal ends.

use crate::{
    bindings,
    cm::connection::Shared,
    context::Sleepable, //
};
use core::ptr::NonNull;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc,
        Mutex, //
    }, //
};

/// Something made from a device that threads may wait for.
pub(crate) trait OnRemoval: Send + Sync {
    /// The device is about to go: every thread that waits for this gets `ENODEV`, and no other one
    /// waits from here on. Called before [`OnRemoval::removed`] of any object, with the list
    /// locked: takes locks for a moment only, and waits for nothing.
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

// The connection manager tells ids of a device's removal only after the clients that were
// registered later, which are all ULPs, have let go of the device. So the crate tells them itself.

struct BoundId {
    /// `None` once it was destroyed, while its handler is still to be told that the device goes.
    id: Option<NonNull<bindings::rdma_cm_id>>,
    shared: Arc<Shared>,
    told: bool,
}

// SAFETY: An id may be used from any thread.
unsafe impl Send for BoundId {}

struct IdList {
    ids: KVec<BoundId>,
    closed: bool,
}

/// The bound ids of one device of one client, until the device goes.
///
/// # Invariants
///
/// An id that is listed is not destroyed while the list is locked. Its `place` is its index then.
#[pin_data]
pub(crate) struct BoundIds {
    #[pin]
    list: Mutex<IdList>,
}

impl BoundIds {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(IdList {
                ids: KVec::new(),
                closed: false,
            }),
        })
    }

    /// Lists an id.
    ///
    /// # Safety
    ///
    /// The id is removed from the list before it is destroyed.
    pub(crate) unsafe fn add(
        &self,
        id: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
    ) -> Result {
        let mut list = self.list.lock();
        if list.closed {
            return Err(ENODEV);
        }
        list.ids.reserve(1, GFP_KERNEL)?;
        // INVARIANT: The caller removes the id before it is destroyed, and its index is the length.
        shared.place.store(list.ids.len().try_into()?, Relaxed);
        let entry = BoundId {
            id: Some(id),
            shared,
            told: false,
        };
        Ok(list.ids.push(entry, GFP_KERNEL)?)
    }

    /// Removes an id that is about to be destroyed: the last one takes its place, so that this
    /// costs the same whatever their number is.
    pub(crate) fn remove(&self, id: NonNull<bindings::rdma_cm_id>, shared: &Shared) {
        let mut list = self.list.lock();
        let (place, closed) = (shared.place.load(Relaxed), list.closed);
        match list.ids.get_mut(place as usize) {
            Some(entry) if entry.id == Some(id) && closed && !entry.told => {
                // Who waited for the connection got `ENODEV` and has let go of the id.
                entry.id = None;
                return;
            }
            Some(entry) if entry.id == Some(id) => {}
            _ => return,
        }
        let last = list.ids.pop();
        let entry = match (list.ids.get_mut(place as usize), last) {
            (Some(entry), Some(last)) => {
                // INVARIANT: It is there now.
                last.shared.place.store(place, Relaxed);
                Some(core::mem::replace(entry, last))
            }
            (_, last) => last,
        };
        drop(list);
        drop(entry);
    }

    /// Closes the list, and has everybody who waits for an id know that the device goes. Waits for
    /// nothing.
    pub(crate) fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        for entry in &list.ids {
            entry.shared.gone();
        }
    }

    /// Returns an id whose handler does not know yet that the device goes.
    fn next_untold(&self) -> Option<Arc<Shared>> {
        let mut list = self.list.lock();
        let entry = list.ids.iter_mut().find(|entry| !entry.told)?;
        entry.told = true;
        Some(entry.shared.clone())
    }

    /// Gives the handler of every id that was there the last event and disconnects the id, after
    /// [`BoundIds::close`].
    pub(crate) fn end_all(&self, _cx: &Sleepable) {
        // First the handlers, so that they know why their requests are flushed.
        while let Some(shared) = self.next_untold() {
            shared.tell_removal();
        }
        for entry in &self.list.lock().ids {
            match entry.id {
                Some(id) if entry.shared.is_attached() && entry.shared.end() => {
                    // SAFETY: By the invariant of `BoundIds` the id is alive: the list is locked. Ids
                    // that are not connected any more are left alone.
                    unsafe { bindings::rdma_disconnect(id.as_ptr()) };
                }
                _ => {}
            }
        }
    }
}
