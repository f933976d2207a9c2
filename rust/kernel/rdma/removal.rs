// SPDX-License-Identifier: GPL-2.0

//! The removal of a device, and the objects that end with it. The connection manager's own event
//! comes only after all ULPs have released the device.

use crate::prelude::internal::*;
use core::mem;
use kernel::sync::{
    atomic,
    Mutex, //
};

/// An object made from a device that is to end when the device goes.
pub(crate) trait OnRemoval: Send + Sync {
    fn index(&self) -> &Index;

    /// The device is about to go: all waits for the object end with `ENODEV`, and none begins.
    /// Called, with the list locked, for all objects before [`OnRemoval::removed`]: must not wait.
    fn gone(self: Arc<Self>) {}

    /// The device goes: ends the object, or tells its handler. May wait for the ULP.
    fn removed(&self, _cx: &Sleepable) {}

    /// Disconnects the object. Called after [`OnRemoval::removed`] of all objects, so that their
    /// handlers know why their requests are flushed.
    fn disconnect(&self) {}
}

/// The index of an object in the list of its device. The list's lock protects it.
pub(crate) struct Index(atomic::Atomic<u32>);

impl Index {
    pub(crate) const fn new() -> Self {
        Self(atomic::Atomic::new(u32::MAX))
    }
}

/// # Invariants
///
/// The [`Index`] of `objects[i]` is `i`.
struct List {
    objects: KVVec<Option<Arc<dyn OnRemoval>>>,
    closed: bool,
}

/// The objects of one device of one client that end when the device goes.
#[pin_data]
pub(crate) struct Removal {
    #[pin]
    list: Mutex<List>,
}

impl Removal {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- kernel::new_mutex!(List {
                objects: KVVec::new(),
                closed: false,
            }),
        })
    }

    /// Lists an object, which is not in the list. Fails with `ENODEV` when the device goes.
    pub(crate) fn add(&self, object: Arc<dyn OnRemoval>) -> Result {
        let mut list = self.list.lock();
        if list.closed {
            return Err(ENODEV);
        }
        list.objects.reserve(1, GFP_KERNEL | __GFP_NOWARN)?;
        let index = list.objects.len().try_into()?;
        object.index().0.store(index, atomic::Relaxed);
        list.objects.push_within_capacity(Some(object))?;
        Ok(())
    }

    /// Takes an object out, if it is listed. Costs the same however many there are.
    pub(crate) fn remove(&self, object: &dyn OnRemoval) {
        let mut list = self.list.lock();
        let index = object.index().0.xchg(u32::MAX, atomic::Relaxed) as usize;
        let removed = list.objects.get_mut(index).and_then(Option::take);
        // The last object gets its index, unless `end_all` goes through the list.
        if removed.is_some() && !list.closed {
            let last = list.objects.pop().flatten();
            if let (Some(last), Some(entry)) = (last, list.objects.get_mut(index)) {
                last.index().0.store(index as u32, atomic::Relaxed);
                *entry = Some(last);
            }
        }
        drop(list);
        drop(removed);
    }

    /// Closes the list, and ends all waits for its objects with `ENODEV`: none begins after that.
    pub(crate) fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        for object in list.objects.iter().flatten() {
            object.clone().gone();
        }
    }

    /// Ends all objects, after [`Removal::close`].
    pub(crate) fn end_all(&self, cx: &Sleepable) {
        self.for_each(&|object| object.removed(cx));
        self.for_each(&|object| object.disconnect());
        // Dropped with the list unlocked.
        let _objects = mem::take(&mut self.list.lock().objects);
    }

    /// Calls `f` for each object of the closed list, which is not locked meanwhile.
    fn for_each(&self, f: &dyn Fn(&dyn OnRemoval)) {
        for index in 0.. {
            let object = self.list.lock().objects.get(index).cloned();
            match object {
                Some(Some(object)) => f(&*object),
                Some(None) => {}
                None => break,
            }
        }
    }
}

/// The steps of a removal that may wait.
pub(crate) enum Step {
    Event,
    Remove,
    Objects,
    Data,
}

pub(crate) const STEPS: [&str; 4] = [
    "event()",
    "remove()",
    "MAD agents, listeners and handlers of connections",
    "the drop of the ULP's data",
];
