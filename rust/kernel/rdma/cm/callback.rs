// SPDX-License-Identifier: GPL-2.0

//! The tasks that are in a callback of a connection manager.
//!
//! Callbacks share a few work queues, some of them ordered, so a task that waits in a callback for
//! another event may wait for ever: what would wait returns `EDEADLK`.

use crate::prelude::internal::*;
use core::{
    cell::UnsafeCell,
    marker::PhantomPinned, //
};

/// The newest mark, or null.
struct Marks(*const InCallback);

// SAFETY: The marks are used under the lock of the list only.
unsafe impl Send for Marks {}

kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any callback.
    unsafe(uninit) static MARKS: SpinLock<Marks> = Marks(ptr::null());
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
pub(super) fn current_task() -> usize {
    // SAFETY: `current` may be read in any context, and its address is only compared.
    unsafe { bindings::get_current() as usize }
}

/// A mark that the current task is in a callback, or in a handler that callbacks may wait for. It
/// is on the task's stack.
///
/// # Invariants
///
/// This is in the list of `MARKS` once it is initialised, until it is dropped. `next` is the mark
/// before it, or null, and is used under the lock of the list only.
#[pin_data(PinnedDrop)]
pub(crate) struct InCallback {
    task: usize,
    next: UnsafeCell<*const Self>,
    #[pin]
    _pin: PhantomPinned,
}

impl InCallback {
    pub(crate) fn enter() -> impl PinInit<Self> {
        pin_init!(&this in Self {
            task: current_task(),
            next: UnsafeCell::new(ptr::null()),
            _pin: PhantomPinned,
            _: {
                let mut marks = MARKS.lock();
                // INVARIANT: The list begins with this.
                // SAFETY: All fields are initialised, and the list is locked.
                unsafe { *(*this.as_ptr()).next.get() = marks.0 };
                marks.0 = this.as_ptr();
            },
        })
    }

    /// Returns whether the current task is in a callback.
    pub(crate) fn is_current() -> bool {
        let (task, marks) = (current_task(), MARKS.lock());
        let mut at = marks.0;
        // SAFETY: By the type invariant the marks in the list are initialised and not yet dropped,
        // which they are not while it is locked.
        while let Some(mark) = unsafe { at.as_ref() } {
            if mark.task == task {
                return true;
            }
            // SAFETY: The list is locked.
            at = unsafe { *mark.next.get() };
        }
        false
    }

    /// Fails with `EDEADLK` if the current task is in a callback.
    pub(crate) fn refuse() -> Result {
        (!Self::is_current()).then_some(()).ok_or(EDEADLK)
    }
}

#[pinned_drop]
impl PinnedDrop for InCallback {
    fn drop(self: Pin<&mut Self>) {
        let this: *const Self = &*self;
        let mut marks = MARKS.lock();
        let mut at: *mut *const Self = &mut marks.0;
        // SAFETY: By the type invariant this is in the list, which is locked: each link up to that
        // of this is valid, and so is the mark that it leads to.
        unsafe {
            while *at != this {
                at = (**at).next.get();
            }
            *at = *self.next.get();
        }
    }
}
