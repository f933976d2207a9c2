// SPDX-License-Identifier: GPL-2.0

//! Objects that any thread may take.

use crate::rng::Rng;
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};

/// Things of one kind, until it is closed.
#[pin_data]
pub(crate) struct Pool<T> {
    #[pin]
    things: Mutex<Option<KVec<T>>>,
}

impl<T> Pool<T> {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            things <- new_mutex!(Some(KVec::new())),
        })
    }

    /// Puts a thing in, or gives it back if the pool is closed.
    pub(crate) fn put(&self, thing: T) -> Result<(), T> {
        if let Some(things) = &mut *self.things.lock() {
            if things.reserve(1, GFP_KERNEL).is_ok() {
                return things.push_within_capacity(thing).map_err(|e| e.0);
            }
        }
        Err(thing)
    }

    /// Takes one of them.
    pub(crate) fn take(&self, rng: &mut Rng) -> Option<T> {
        match &mut *self.things.lock() {
            Some(things) => things.remove(rng.below(things.len() as u32) as usize).ok(),
            None => None,
        }
    }

    /// Takes one of them if there are more than `enough`, or once in `times`.
    pub(crate) fn thin(&self, enough: usize, times: u32, rng: &mut Rng) -> Option<T> {
        let len = self.things.lock().as_ref().map_or(0, KVec::len);
        match len > enough || rng.once_in(times) {
            true => self.take(rng),
            false => None,
        }
    }

    /// Returns all of them. The pool takes no more.
    pub(crate) fn close(&self) -> KVec<T> {
        self.things.lock().take().unwrap_or_else(KVec::new)
    }
}

impl<T: Clone> Pool<T> {
    /// Returns one of them, which stays.
    pub(crate) fn any(&self, rng: &mut Rng) -> Option<T> {
        let things = self.things.lock();
        let things = things.as_ref()?;
        things.get(rng.below(things.len() as u32) as usize).cloned()
    }
}
