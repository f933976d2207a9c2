// SPDX-License-Identifier: GPL-2.0

//! An object that `Refs` guard is used under references only, and freed after the last of them.

use crate::{completion::Completion, counters::RefCount};
use loom::{cell::UnsafeCell, sync::Arc, thread};

/// A gate as `gate.rs` makes it, with the thing that it guards.
struct Guarded {
    count: RefCount,
    empty: Completion,
    thing: UnsafeCell<u32>,
}

impl Guarded {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            count: RefCount::new(),
            empty: Completion::new(),
            thing: UnsafeCell::new(1),
        })
    }

    /// As `Refs::hold`.
    fn hold(this: &Arc<Self>) -> Option<Ref> {
        this.count.try_get().then(|| Ref(this.clone()))
    }

    /// As `Refs::close`; then the thing goes.
    fn close_and_free(&self) {
        if self.count.kill() {
            self.empty.wait();
        }
        // SAFETY: This is what is checked.
        self.thing.with_mut(|thing| unsafe { *thing = 0 });
    }
}

/// As `refs::Ref`.
struct Ref(Arc<Guarded>);

impl Ref {
    fn another(&self) -> Self {
        self.0.count.get();
        Self(self.0.clone())
    }

    fn use_it(&self) {
        // SAFETY: This is what is checked.
        assert_eq!(self.0.thing.with(|thing| unsafe { *thing }), 1);
    }
}

impl Drop for Ref {
    fn drop(&mut self) {
        if self.0.count.put() {
            self.0.empty.complete();
        }
    }
}

#[test]
fn holds_race_with_close() {
    loom::model(|| {
        let gate = Guarded::new();
        let users = [0, 1].map(|_| {
            let gate = gate.clone();
            thread::spawn(move || {
                if let Some(hold) = Guarded::hold(&gate) {
                    hold.use_it();
                }
            })
        });
        gate.close_and_free();
        assert!(Guarded::hold(&gate).is_none());
        for user in users {
            user.join().unwrap();
        }
    });
}

#[test]
fn another_hold_goes_to_a_thread() {
    loom::model(|| {
        let gate = Guarded::new();
        let hold = Guarded::hold(&gate).unwrap();
        let user = thread::spawn(move || {
            let another = hold.another();
            let second = thread::spawn(move || another.use_it());
            hold.use_it();
            drop(hold);
            second.join().unwrap();
        });
        gate.close_and_free();
        user.join().unwrap();
    });
}

#[test]
fn closed_gate_takes_another_hold_beside_one() {
    loom::model(|| {
        let gate = Guarded::new();
        let hold = Guarded::hold(&gate).unwrap();
        let closer = {
            let gate = gate.clone();
            thread::spawn(move || gate.close_and_free())
        };
        let another = hold.another();
        drop(hold);
        another.use_it();
        drop(another);
        closer.join().unwrap();
    });
}
