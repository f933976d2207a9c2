// SPDX-License-Identifier: GPL-2.0

//! The tasks that are in a callback of a connection manager.
//!
//! Callbacks share a few work queues, some of them ordered, so a task that waits in a callback for
//! another event may wait for ever: what would wait returns `EDEADLK`.

use crate::prelude::internal::*;
use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

/// The tasks that are in callbacks, and zeroes. A task looks for its own stores only.
static TASKS: [Atomic<usize>; 256] = [const { Atomic::new(0) }; 256];

/// The number of tasks that are in callbacks. A task that is has counted itself.
static ENTERED: Atomic<u32> = Atomic::new(0);

/// The tasks for which there was no room. Until they return, every task is taken for one.
static UNLISTED: Atomic<u32> = Atomic::new(0);

/// Returns the address of the current task, to be compared.
pub(super) fn current_task() -> usize {
    // SAFETY: `current` may be read in any context, and its address is only compared.
    unsafe { bindings::get_current() as usize }
}

/// A mark that the current task is in a callback, or in a handler that callbacks may wait for.
pub(crate) struct InCallback(Option<&'static Atomic<usize>>);

impl InCallback {
    pub(crate) fn enter() -> Self {
        let task = current_task();
        ENTERED.add(1, Relaxed);
        let is_free = |slot: &&Atomic<usize>| slot.cmpxchg(0, task, Relaxed).is_ok();
        let slot = TASKS.iter().find(is_free);
        if slot.is_none() {
            UNLISTED.add(1, Relaxed);
        }
        Self(slot)
    }

    /// Returns whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        if ENTERED.load(Relaxed) == 0 {
            return false;
        }
        let task = current_task();
        UNLISTED.load(Relaxed) != 0 || TASKS.iter().any(|slot| slot.load(Relaxed) == task)
    }

    /// Fails with `EDEADLK` if the current task is in a callback.
    pub(crate) fn refuse() -> Result {
        (!Self::is_current()).then_some(()).ok_or(EDEADLK)
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        match self.0 {
            Some(slot) => slot.store(0, Relaxed),
            None => drop(UNLISTED.fetch_sub(1, Relaxed)),
        }
        ENTERED.fetch_sub(1, Relaxed);
    }
}
