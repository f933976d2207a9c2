// SPDX-License-Identifier: GPL-2.0

//! An object that `Refs` guard is used under references only, and freed after the last of them.

use crate::{completion::Completion, counters::RefCount};
use loom::{cell::UnsafeCell, sync::Arc, thread};

/// A count of references as that of `refs.rs`, with the thing that it keeps.
struct Counted {
    count: RefCount,
    empty: Completion,
    thing: UnsafeCell<u32>,
}

impl Counted {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            count: RefCount::new(),
            empty: Completion::new(),
            thing: UnsafeCell::new(1),
        })
    }

    /// As `Refs::try_get`.
    fn try_get(this: &Arc<Self>) -> Option<Ref> {
        this.count.try_get().then(|| Ref(this.clone()))
    }

    /// As `objects::kill_and_wait`; then the thing goes.
    fn kill_and_free(&self) {
        if self.count.kill() {
            self.empty.wait();
        }
        // SAFETY: This is what is checked.
        self.thing.with_mut(|thing| unsafe { *thing = 0 });
    }
}

/// As `refs::Ref`.
struct Ref(Arc<Counted>);

impl Ref {
    fn get(&self) -> Self {
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
fn references_race_with_the_end() {
    loom::model(|| {
        let counted = Counted::new();
        let users = [0, 1].map(|_| {
            let counted = counted.clone();
            thread::spawn(move || {
                if let Some(reference) = Counted::try_get(&counted) {
                    reference.use_it();
                }
            })
        });
        counted.kill_and_free();
        assert!(Counted::try_get(&counted).is_none());
        for user in users {
            user.join().unwrap();
        }
    });
}

#[test]
fn another_reference_goes_to_a_thread() {
    loom::model(|| {
        let counted = Counted::new();
        let reference = Counted::try_get(&counted).unwrap();
        let user = thread::spawn(move || {
            let another = reference.get();
            let second = thread::spawn(move || another.use_it());
            reference.use_it();
            drop(reference);
            second.join().unwrap();
        });
        counted.kill_and_free();
        user.join().unwrap();
    });
}

#[test]
fn killed_count_takes_another_reference_beside_one() {
    loom::model(|| {
        let counted = Counted::new();
        let reference = Counted::try_get(&counted).unwrap();
        let killer = {
            let counted = counted.clone();
            thread::spawn(move || counted.kill_and_free())
        };
        let another = reference.get();
        drop(reference);
        another.use_it();
        drop(another);
        killer.join().unwrap();
    });
}
