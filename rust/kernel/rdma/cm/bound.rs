// SPDX-License-Identifier: GPL-2.0

//! The ids that are bound to a device, so that its removal can end them.
//!
//! The connection manager tells ids of a device's removal only after the clients that were
//! registered later, which are all ULPs, have let go of the device. So the crate tells them itself.

use super::callback::Shared;
use crate::{
    bindings,
    context::Sleepable, //
};
use core::ptr::NonNull;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

struct Entry {
    id: NonNull<bindings::rdma_cm_id>,
    shared: Arc<Shared>,
}

// SAFETY: An id may be used from any thread.
unsafe impl Send for Entry {}

/// The bound ids of one device of one client, until the device goes.
///
/// # Invariants
///
/// An id that is listed is not destroyed while the list is locked.
#[pin_data]
pub(crate) struct Bound {
    #[pin]
    ids: Mutex<Option<KVec<Entry>>>,
}

impl Bound {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            ids <- new_mutex!(Some(KVec::new())),
        })
    }

    /// Lists an id.
    ///
    /// # Safety
    ///
    /// The id is removed from the list before it is destroyed.
    pub(super) unsafe fn add(
        &self,
        id: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
    ) -> Result {
        // INVARIANT: By the caller's promise.
        let entry = Entry { id, shared };
        let mut ids = self.ids.lock();
        Ok(Option::as_mut(&mut ids)
            .ok_or(ENODEV)?
            .push(entry, GFP_KERNEL)?)
    }

    /// Removes an id that is about to be destroyed.
    pub(super) fn remove(&self, id: NonNull<bindings::rdma_cm_id>) {
        if let Some(ids) = Option::as_mut(&mut self.ids.lock()) {
            ids.retain(|entry| entry.id != id);
        }
    }

    /// Disconnects every id that is still there and gives its handler the last event. No id can be
    /// bound from here on.
    pub(crate) fn end_all(&self, _cx: &Sleepable) {
        let mut ids = self.ids.lock();
        let Some(entries) = ids.take() else { return };
        for entry in &entries {
            if entry.shared.is_attached() {
                // SAFETY: By the type invariant the id is alive. Ids that are not connected any
                // more are left alone.
                unsafe { bindings::rdma_disconnect(entry.id.as_ptr()) };
            }
        }
        drop(ids);
        for entry in entries {
            entry.shared.tell_removal();
        }
    }
}
