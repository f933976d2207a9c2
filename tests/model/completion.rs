// SPDX-License-Identifier: GPL-2.0

//! As `struct completion`, completed once.

use loom::sync::{Condvar, Mutex};

pub struct Completion(Mutex<bool>, Condvar);

impl Completion {
    pub fn new() -> Self {
        Self(Mutex::new(false), Condvar::new())
    }

    pub fn complete(&self) {
        let mut done = self.0.lock().unwrap();
        assert!(!*done, "told twice");
        *done = true;
        self.1.notify_one();
    }

    pub fn wait(&self) {
        let mut done = self.0.lock().unwrap();
        while !*done {
            done = self.1.wait(done).unwrap();
        }
    }
}
