// SPDX-License-Identifier: GPL-2.0

//! A request that is in flight has one user at a time, and is freed once, after the last one.

use crate::counters::Users;
use loom::{cell::UnsafeCell, sync::Arc, thread};

const FREE: u32 = u32::MAX;

/// The memory of a request.
struct Entry {
    handles: Users,
    value: UnsafeCell<u32>,
}

impl Entry {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            handles: Users::new(),
            value: UnsafeCell::new(0),
        })
    }

    /// As code with `&mut` of the request.
    fn touch(&self) {
        // SAFETY: This is what is checked.
        self.value.with_mut(|value| unsafe {
            assert_ne!(*value, FREE, "used after it was freed");
            *value += 1;
        });
    }

    /// As `Handle::drop`.
    fn leave(&self) {
        if self.handles.put() {
            self.touch();
            // SAFETY: This is what is checked.
            self.value.with_mut(|value| unsafe { *value = FREE });
        }
    }

    fn is_free(&self) -> bool {
        // SAFETY: There is no other thread.
        self.value.with(|value| unsafe { *value == FREE })
    }
}

/// As `Reusable::start`, and the handler runs in another thread.
fn start(entry: &Arc<Entry>) -> thread::JoinHandle<()> {
    entry.handles.get_second();
    let entry = entry.clone();
    thread::spawn(move || {
        entry.touch();
        entry.leave();
    })
}

#[test]
fn keeper_uses_what_is_home_again() {
    loom::model(|| {
        let entry = Entry::new();
        assert!(entry.handles.is_one());
        let mut handlers = vec![start(&entry)];
        // As `Reusable::get`, and `Reusable::start` again.
        if entry.handles.is_one() {
            entry.touch();
            handlers.push(start(&entry));
        }
        for handler in handlers {
            handler.join().unwrap();
        }
        assert!(entry.handles.is_one());
        entry.leave();
        assert!(entry.is_free());
    });
}

#[test]
fn last_one_frees_it() {
    loom::model(|| {
        let entry = Entry::new();
        let handler = start(&entry);
        entry.leave();
        handler.join().unwrap();
        assert!(entry.is_free());
    });
}
