// SPDX-License-Identifier: GPL-2.0

//! The tasks that are in a callback of a connection manager.
//!
//! Callbacks share a few work queues, some of them ordered, so a task that waits in a callback for
//! another event may wait for ever: functions that would wait return `EDEADLK`.

use crate::{
    links::{
        Linked,
        Links,
        List, //
    },
    prelude::internal::*, //
};
use core::marker::PhantomPinned;

kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any callback.
    unsafe(uninit) static MARKS: SpinLock<List<InCallback>> = List::new();
}

/// Initialises the lock of the marks.
///
/// # Safety
///
/// Called once, when the module is loaded.
pub(crate) unsafe fn init() {
    // SAFETY: The caller calls this once, when the module is loaded.
    unsafe { MARKS.init() };
}

/// Returns the address of the current task, to be compared.
fn current_task() -> usize {
    // SAFETY: `current` may be read in any context, and its address is only compared.
    unsafe { bindings::get_current() as usize }
}

/// A mark that the current task is in a callback, or in a handler that callbacks may wait for. It
/// is on the task's stack, and in the list of `MARKS`.
#[pin_data(PinnedDrop)]
pub(crate) struct InCallback {
    task: usize,
    /// The address of the id whose handler lock the task has, or zero.
    locked_id: usize,
    links: Links<Self>,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: The links are one field.
unsafe impl Linked for InCallback {
    fn links(&self) -> &Links<Self> {
        &self.links
    }
}

impl InCallback {
    pub(crate) fn enter() -> impl PinInit<Self> {
        Self::new(0)
    }

    /// As [`Self::enter`], in a callback of this id, which has the handler lock of the id.
    pub(super) fn enter_locked(id: *const bindings::rdma_cm_id) -> impl PinInit<Self> {
        Self::new(id.addr())
    }

    fn new(locked_id: usize) -> impl PinInit<Self> {
        pin_init!(&this in Self {
            task: current_task(),
            locked_id,
            links: Links::new(),
            _pin: PhantomPinned,
            _: {
                // SAFETY: All fields are initialised, and the mark is pinned.
                unsafe { this.as_ref().list() };
            },
        })
    }

    /// Adds a mark to the list. Not inlined, nor is [`Self::unlist`], as each callback has one.
    ///
    /// # Safety
    ///
    /// The mark is pinned.
    #[inline(never)]
    unsafe fn list(&self) {
        // SAFETY: The mark is pinned, as the caller promises, and leaves the list, the only one of
        // marks, when it is dropped.
        unsafe { MARKS.lock().push(self) };
    }

    #[inline(never)]
    fn unlist(&self) {
        // SAFETY: There is no other list of marks.
        unsafe { MARKS.lock().remove(self) };
    }

    /// Returns whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        let task = current_task();
        MARKS.lock().iter().any(|mark| mark.task == task)
    }

    /// Returns whether the current task is in a callback of this id, and has its handler lock.
    pub(super) fn has_locked(id: *const bindings::rdma_cm_id) -> bool {
        let task = current_task();
        let is_own = |mark: &Self| mark.task == task && mark.locked_id == id.addr();
        MARKS.lock().iter().any(is_own)
    }

    /// Fails with `EDEADLK` if the current task is in a callback.
    pub(crate) fn refuse() -> Result {
        (!Self::is_current()).then_some(()).ok_or(EDEADLK)
    }
}

#[pinned_drop]
impl PinnedDrop for InCallback {
    fn drop(self: Pin<&mut Self>) {
        self.unlist();
    }
}
