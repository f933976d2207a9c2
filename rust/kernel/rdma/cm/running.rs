// SPDX-License-Identifier: GPL-2.0

//! Which tasks are in callbacks of the connection manager.

use crate::bindings;
use kernel::prelude::*;

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's init, before anything can use it.
    unsafe(uninit) static RUNNING: Mutex<Tasks> = Tasks {
        listed: KVec::new(),
        unlisted: 0,
    };
}

/// The tasks that are in callbacks.
struct Tasks {
    listed: KVec<usize>,
    /// How many more there are, for which there was no memory.
    unlisted: usize,
}

/// Owns what this file keeps for all ids; part of the core module. No callback runs any more when
/// it is dropped.
pub(crate) struct Table(());

impl Table {
    /// # Safety
    ///
    /// To be called once, when the module is loaded.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: The caller calls this once, when the module is loaded.
        unsafe { RUNNING.init() };
        Self(())
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // Nothing drops a static when the module is unloaded.
        RUNNING.lock().listed = KVec::new();
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
///
/// While there is no memory to list a task, every task is taken to be in a callback: what would
/// wait returns `EDEADLK` then.
pub(crate) struct Running {
    task: usize,
    listed: bool,
}

impl Running {
    pub(crate) fn enter() -> Self {
        let task = current_task();
        let mut tasks = RUNNING.lock();
        let listed = tasks.listed.push(task, GFP_KERNEL).is_ok();
        if !listed {
            tasks.unlisted += 1;
        }
        Self { task, listed }
    }

    /// Says whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        let tasks = RUNNING.lock();
        tasks.unlisted != 0 || tasks.listed.contains(&current_task())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut tasks = RUNNING.lock();
        if !self.listed {
            tasks.unlisted -= 1;
            return;
        }
        let last = tasks.listed.iter().rposition(|task| *task == self.task);
        if let Some(index) = last {
            let _ = tasks.listed.remove(index);
        }
    }
}
