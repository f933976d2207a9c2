// SPDX-License-Identifier: GPL-2.0

//! A request of an array has one user at a time, and the array is freed when none is in use.

use crate::{cqe::Queue, requests_state::State};
use loom::{cell::UnsafeCell, sync::Arc, thread};

const FREE: u32 = u32::MAX;
const CALLBACK: usize = 8;

/// A request.
struct Entry {
    state: State,
    value: UnsafeCell<u32>,
}

impl Entry {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: State::new(),
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

    /// As `Inner::quiesce`, and the drop of the array after it.
    fn free_if_idle(&self) -> bool {
        let idle = self.state.is_idle();
        if idle {
            // SAFETY: This is what is checked.
            self.value.with_mut(|value| unsafe { *value = FREE });
        }
        idle
    }
}

/// Posts the request, which the caller holds; its handler runs in another thread.
fn post(entry: &Arc<Entry>) -> thread::JoinHandle<()> {
    entry.touch();
    entry.state.post(CALLBACK, Queue::Send);
    let entry = entry.clone();
    thread::spawn(move || {
        entry.state.hold();
        entry.touch();
        entry.state.put();
    })
}

#[test]
fn idle_request_is_taken_again() {
    loom::model(|| {
        let entry = Entry::new();
        assert!(entry.state.take());
        assert!(!entry.state.take());
        let mut handlers = vec![post(&entry)];
        if entry.state.take() {
            handlers.push(post(&entry));
        }
        for handler in handlers {
            handler.join().unwrap();
        }
        assert!(entry.free_if_idle());
    });
}

#[test]
fn array_is_freed_when_all_are_idle() {
    loom::model(|| {
        let entry = Entry::new();
        assert!(entry.state.take());
        let handler = post(&entry);
        let freed = entry.free_if_idle();
        handler.join().unwrap();
        assert!(freed || entry.free_if_idle());
    });
}

#[test]
fn lost_request_is_taken_once() {
    loom::model(|| {
        let entry = Entry::new();
        assert!(entry.state.take_lost(|_| true).is_none());
        assert!(entry.state.take());
        // What is held is not lost.
        assert!(entry.state.take_lost(|_| true).is_none());
        entry.touch();
        entry.state.post(CALLBACK, Queue::Recv);
        assert!(entry.state.is_posted(|queue| queue == Queue::Recv));
        assert!(entry
            .state
            .take_lost(|queue| queue == Queue::Send)
            .is_none());
        let lost = entry.state.take_lost(|queue| queue == Queue::Recv);
        assert!(matches!(lost, Some((CALLBACK, Queue::Recv))));
        assert!(!entry.state.is_posted(|_| true));
        entry.state.put();
        assert!(entry.free_if_idle());
    });
}
