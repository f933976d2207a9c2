// SPDX-License-Identifier: GPL-2.0

//! Which tasks are in callbacks of the connection manager.

use crate::bindings;
use kernel::prelude::*;

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's init, before anything can use it.
    unsafe(uninit) static RUNNING: Mutex<KVec<usize>> = KVec::new();
}

/// Owns what this file keeps for all ids; part of the core module. No callback runs any more when it
/// is dropped.
pub(crate) struct Table(());

impl Table {
    /// # Safety
    ///
    /// To be called once, when the module is loaded.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: By the caller's promise.
        unsafe { RUNNING.init() };
        Self(())
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // Nothing drops a static when the module is unloaded.
        *RUNNING.lock() = KVec::new();
    }
}

/// Returns the address of the current task, to be compared.
pub(super) fn current_task() -> usize {
    // SAFETY: There is a current task.
    unsafe { bindings::get_current() as usize }
}

/// A mark of the current task while it is in a callback of the connection manager.
///
/// Callbacks share a few work queues, one of them ordered: who waits in a callback for another
/// event may wait for ever, and with it everybody else.
pub(crate) struct Running(usize);

impl Running {
    pub(crate) fn enter() -> Self {
        let task = current_task();
        // Without memory a wait in this callback goes unnoticed; nothing else depends on it.
        let _ = RUNNING.lock().push(task, GFP_KERNEL);
        Self(task)
    }

    /// Says whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        RUNNING.lock().contains(&current_task())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.lock().retain(|task| *task != self.0);
    }
}
