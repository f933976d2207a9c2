// SPDX-License-Identifier: GPL-2.0

//! `struct completion`, with the waits that the kernel crate's lacks, and waits for events.
//!
//! C header: [`include/linux/completion.h`](srctree/include/linux/completion.h)

use crate::prelude::internal::*;
use kernel::{
    sync,
    task::MAX_SCHEDULE_TIMEOUT,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    },
    types::Opaque, //
};

/// A completion. A wait takes its lock, so it returns only after [`Completion::complete`] has done
/// its last access: the waiter may free the completion.
#[pin_data]
pub(crate) struct Completion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: A `struct completion` may be used from any thread.
unsafe impl Send for Completion {}
// SAFETY: A `struct completion` has its own lock.
unsafe impl Sync for Completion {}

impl Completion {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot| {
                // SAFETY: `slot` is valid for writes, and the completion stays pinned there.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Wakes one waiter (`complete`). Any context.
    pub(crate) fn complete(&self) {
        // SAFETY: The completion is initialised and pinned.
        unsafe { bindings::complete(self.inner.get()) };
    }

    /// Returns `true` if the completion has completed (`try_wait_for_completion`). A wait of no
    /// time would sleep until the next tick.
    pub(crate) fn try_wait(&self) -> bool {
        // SAFETY: The completion is initialised and pinned.
        unsafe { bindings::try_wait_for_completion(self.inner.get()) }
    }

    /// Waits for at most `ms` milliseconds (`wait_for_completion_timeout`). Returns `true` if the
    /// completion has completed.
    pub(crate) fn wait_timeout(&self, ms: u32, _cx: &Sleepable) -> bool {
        // SAFETY: The completion is initialised and pinned; the token proves that this may sleep.
        unsafe {
            bindings::wait_for_completion_timeout(self.inner.get(), msecs_to_jiffies(ms)) != 0
        }
    }

    /// Waits for at most so many jiffies (`wait_for_completion_killable_timeout`). Returns how many
    /// are left, which is none only if the completion has not completed. Fails with `ERESTARTSYS`
    /// when the task is killed.
    pub(crate) fn wait_killable(&self, jiffies: Jiffies, _cx: &Sleepable) -> Result<Jiffies> {
        // SAFETY: The completion is initialised and pinned; the token proves that this may sleep.
        let left =
            unsafe { bindings::wait_for_completion_killable_timeout(self.inner.get(), jiffies) };
        Jiffies::try_from(left).map_err(|_| ERESTARTSYS)
    }

    /// As [`Completion::wait_killable`], but fails when a signal is pending
    /// (`wait_for_completion_interruptible_timeout`).
    pub(crate) fn wait_interruptible(&self, jiffies: Jiffies, _cx: &Sleepable) -> Result<Jiffies> {
        // SAFETY: The completion is initialised and pinned; the token proves that this may sleep.
        let left = unsafe {
            bindings::wait_for_completion_interruptible_timeout(self.inner.get(), jiffies)
        };
        Jiffies::try_from(left).map_err(|_| ERESTARTSYS)
    }
}

/// Waits until `ready` returns a value, and returns that
/// (`wait_event_interruptible_lock_irq_timeout`); without a limit if `timeout_ms` is `None`. Fails
/// with `ETIMEDOUT`, and with `ERESTARTSYS` if a signal is pending.
pub(crate) fn wait_event<T: Unpin, B: sync::lock::Backend, R>(
    condvar: &sync::CondVar,
    guard: &mut sync::lock::Guard<'_, T, B>,
    timeout_ms: Option<u32>,
    ready: impl FnMut(&mut T) -> Option<R>,
    cx: &Sleepable,
) -> Result<R> {
    let jiffies = timeout_ms.map_or(MAX_SCHEDULE_TIMEOUT as Jiffies, msecs_to_jiffies);
    wait_event_jiffies(condvar, guard, jiffies, ready, cx)
}

/// As [`wait_event`], for at most so many jiffies.
pub(crate) fn wait_event_jiffies<T: Unpin, B: sync::lock::Backend, R>(
    condvar: &sync::CondVar,
    guard: &mut sync::lock::Guard<'_, T, B>,
    jiffies: Jiffies,
    mut ready: impl FnMut(&mut T) -> Option<R>,
    _cx: &Sleepable,
) -> Result<R> {
    use sync::CondVarTimeoutResult as Wake;

    let mut wake = Wake::Woken { jiffies };
    loop {
        if let Some(value) = ready(&mut **guard) {
            return Ok(value);
        }
        wake = match wake {
            Wake::Signal { .. } => return Err(ERESTARTSYS),
            Wake::Timeout | Wake::Woken { jiffies: 0 } => return Err(ETIMEDOUT),
            Wake::Woken { jiffies } => condvar.wait_interruptible_timeout(guard, jiffies),
        };
    }
}
