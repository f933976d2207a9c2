// SPDX-License-Identifier: GPL-2.0

//! A count of users whose end can be waited for.

use kernel::{
    new_condvar,
    new_mutex,
    prelude::*,
    sync::{
        CondVar,
        Mutex, //
    }, //
};

/// The users of an object.
///
/// # Invariants
///
/// `state` is the number of users, and whether the object was closed: none is added after that.
#[pin_data]
pub(crate) struct Users {
    #[pin]
    state: Mutex<(usize, bool)>,
    #[pin]
    unused: CondVar,
}

impl Users {
    /// Returns a count of no users.
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: There are none, and the object was not closed.
        pin_init!(Self {
            state <- new_mutex!((0, false), "nvmet::Users::state"),
            unused <- new_condvar!("nvmet::Users::unused"),
        })
    }

    /// Adds a user. Fails with `ENODEV` if the object was closed.
    pub(crate) fn get(&self) -> Result {
        let mut state = self.state.lock();
        if state.1 {
            return Err(ENODEV);
        }
        state.0 = state.0.saturating_add(1);
        Ok(())
    }

    /// Removes a user that was added.
    pub(crate) fn put(&self) {
        let mut state = self.state.lock();
        state.0 = state.0.saturating_sub(1);
        self.unused.notify_all();
    }

    /// Closes the object.
    pub(crate) fn close(&self) {
        self.state.lock().1 = true;
    }

    /// Waits until there are no users. May sleep.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while state.0 != 0 {
            self.unused.wait(&mut state);
        }
    }
}
