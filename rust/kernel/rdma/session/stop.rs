// SPDX-License-Identifier: GPL-2.0

//! The end of a work item that sleeps.

use crate::prelude::*;
use kernel::{
    new_condvar,
    new_spinlock_irq,
    sync::{
        CondVar,
        CondVarTimeoutResult,
        SpinLockIrq, //
    },
    task::Task,
    time::msecs_to_jiffies, //
};

struct State {
    stopped: bool,
    /// The address of the task while it runs the work item, or zero.
    task: usize,
    ended: bool,
}

/// A work item of a client that sleeps and is told to stop.
#[pin_data]
pub(super) struct Stop {
    #[pin]
    state: SpinLockIrq<State>,
    #[pin]
    changed: CondVar,
}

impl Stop {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    fn new(flags: kernel::alloc::Flags) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            state <- new_spinlock_irq!(State {
                stopped: false,
                task: 0,
                ended: false,
            }),
            changed <- new_condvar!(),
        });
        Arc::pin_init(init, flags)
    }

    /// Calls `f` from a work item of the client, which ends it soon after [`Stop::stop`]. Fails
    /// with `ENOMEM`.
    pub(super) fn spawn(
        client: &ClientRef,
        flags: kernel::alloc::Flags,
        f: impl FnOnce(&Self, &Sleepable) + Send + 'static,
    ) -> Result<Arc<Self>> {
        let this = Self::new(flags)?;
        let stop = this.clone();
        client.spawn(flags, move |cx| {
            stop.state.lock().task = Task::current_raw().addr();
            f(&stop, cx);
            let mut state = stop.state.lock();
            state.task = 0;
            state.ended = true;
            drop(state);
            stop.changed.notify_all();
        })?;
        Ok(this)
    }

    /// Has the work item end. Any context.
    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Sleeps for so many milliseconds. Returns `false` at once when the work item is to end.
    pub(super) fn sleep(&self, ms: u32, _cx: &Sleepable) -> bool {
        let mut left = msecs_to_jiffies(ms);
        let mut state = self.state.lock();
        while !state.stopped && left > 0 {
            left = match self.changed.wait_interruptible_timeout(&mut state, left) {
                CondVarTimeoutResult::Woken { jiffies } => jiffies,
                CondVarTimeoutResult::Signal { jiffies } => jiffies,
                CondVarTimeoutResult::Timeout => 0,
            };
        }
        !state.stopped
    }

    /// Has the work item end, and waits for that. Fails with `EDEADLK` in the work item.
    pub(super) fn stop_sync(&self, _cx: &Sleepable) -> Result {
        self.stop();
        let mut state = self.state.lock();
        if state.task == Task::current_raw().addr() {
            return Err(EDEADLK);
        }
        while !state.ended {
            self.changed.wait(&mut state);
        }
        Ok(())
    }
}
