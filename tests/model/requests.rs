// SPDX-License-Identifier: GPL-2.0

//! A request of an array has one user at a time, and the array is freed when none is in use.

use crate::{
    cqe::Queue,
    requests_state::{Callback, State, FREE_BITS},
};
use loom::{cell::UnsafeCell, sync::Arc, thread};

const FREE: u32 = u32::MAX;
/// Numbers of QPs.
const A: u64 = 1 << FREE_BITS;
const B: u64 = 2 << FREE_BITS;
const CALLBACK: Callback<()> = Callback::At(8);

/// A request.
struct Entry {
    state: State<()>,
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

/// Posts the request to this QP, which the caller holds; its handler runs in another thread.
fn post(entry: &Arc<Entry>, qp: u64) -> thread::JoinHandle<()> {
    entry.touch();
    entry.state.post(qp, Queue::Send, CALLBACK);
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
        let mut handlers = vec![post(&entry, A)];
        if entry.state.take() {
            handlers.push(post(&entry, A));
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
        let handler = post(&entry, A);
        let freed = entry.free_if_idle();
        handler.join().unwrap();
        assert!(freed || entry.free_if_idle());
    });
}

#[test]
fn lost_request_is_taken_once() {
    loom::model(|| {
        let entry = Entry::new();
        let take_lost = |queue| entry.state.take_lost(A, |of| of == queue);
        assert!(take_lost(Queue::Recv).is_none());
        assert!(entry.state.take());
        // What is held is not lost.
        assert!(take_lost(Queue::Recv).is_none());
        entry.touch();
        entry.state.post(A, Queue::Recv, CALLBACK);
        assert!(entry.state.is_posted(A, |queue| queue == Queue::Recv));
        assert!(!entry.state.is_posted(B, |_| true));
        assert!(take_lost(Queue::Send).is_none());
        let lost = take_lost(Queue::Recv);
        assert!(matches!(lost, Some((Callback::At(8), Queue::Recv))));
        assert!(!entry.state.is_posted(A, |_| true));
        entry.state.put();
        assert!(entry.free_if_idle());
    });
}

#[test]
fn request_of_another_qp_is_not_taken() {
    loom::model(|| {
        let entry = Entry::new();
        assert!(entry.state.take());
        post(&entry, A).join().unwrap();
        // QP A has ended. Another thread goes on with B.
        let other = {
            let entry = entry.clone();
            thread::spawn(move || {
                assert!(entry.state.take());
                post(&entry, B).join().unwrap();
            })
        };
        assert!(entry.state.take_lost(A, |_| true).is_none());
        other.join().unwrap();
        assert!(entry.free_if_idle());
    });
}

#[test]
fn callback_elsewhere_is_found() {
    loom::model(|| {
        let entry = Entry::new();
        let mut callback = ();
        let address = core::ptr::from_mut(&mut callback) as usize;
        assert!(entry.state.take());
        let poster = {
            let entry = entry.clone();
            thread::spawn(move || {
                let callback = Callback::Elsewhere(address as *mut ());
                entry.state.post(A, Queue::Send, callback);
            })
        };
        // Whoever finds the request finds its callback.
        if let Some((callback, _)) = entry.state.take_lost(A, |_| true) {
            assert!(matches!(callback, Callback::Elsewhere(at) if at as usize == address));
        }
        poster.join().unwrap();
    });
}
