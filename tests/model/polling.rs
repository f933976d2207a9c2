// SPDX-License-Identifier: GPL-2.0

//! The poll lock of a CQ: one thread at a time holds it, and sees what was done under it before.

use crate::counters::{Empties, Ends, PollLock};
use loom::{
    cell::UnsafeCell,
    sync::{atomic::AtomicUsize, Arc, Mutex},
    thread,
};

struct Cq {
    poll_lock: PollLock,
    /// The array that is polled into.
    wc: UnsafeCell<u32>,
}

impl Cq {
    /// As `Cq::process`; returns whether it got the lock.
    fn process(&self, at: usize) -> bool {
        let taken = self.poll_lock.try_lock(at);
        if taken {
            // SAFETY: This is what is checked.
            self.wc.with_mut(|wc| unsafe { *wc += 1 });
            self.poll_lock.unlock();
        }
        taken
    }
}

#[test]
fn one_at_a_time_polls() {
    loom::model(|| {
        let cq = Arc::new(Cq {
            poll_lock: PollLock::new(),
            wc: UnsafeCell::new(0),
        });
        let other = {
            let cq = cq.clone();
            thread::spawn(move || u32::from(cq.process(1)))
        };
        let mut polled = u32::from(cq.process(2));
        polled += other.join().unwrap();
        // The lock is released in the end.
        polled += u32::from(cq.process(2));
        // SAFETY: There is no other thread.
        assert_eq!(polled, cq.wc.with(|wc| unsafe { *wc }));
        assert!(polled >= 2);
    });
}

#[test]
fn holder_knows_itself() {
    loom::model(|| {
        let poll_lock = Arc::new(PollLock::new());
        let other = {
            let poll_lock = poll_lock.clone();
            thread::spawn(move || {
                if poll_lock.try_lock(1) {
                    assert_eq!(poll_lock.holder(), 1);
                    poll_lock.unlock();
                }
                assert_ne!(poll_lock.holder(), 1);
            })
        };
        if poll_lock.try_lock(2) {
            assert_eq!(poll_lock.holder(), 2);
            poll_lock.unlock();
        }
        assert_ne!(poll_lock.holder(), 2);
        other.join().unwrap();
    });
}

/// A completion that came before the mark is never taken for one that came after it.
#[test]
fn old_completion_does_not_come_after_the_mark() {
    loom::model(|| {
        let cq = Arc::new((PollLock::new(), Empties::new(true), Mutex::new(0u32)));
        let mark = Arc::new(Mutex::new(None));
        let other = {
            let (cq, mark) = (cq.clone(), mark.clone());
            thread::spawn(move || {
                *cq.2.lock().unwrap() += 1;
                *mark.lock().unwrap() = Some(cq.1.mark());
            })
        };
        let (lock, empties, queue) = &*cq;
        for _ in 0..3 {
            assert!(lock.try_lock(1));
            let polled = std::mem::take(&mut *queue.lock().unwrap());
            if polled == 0 {
                empties.found();
            } else {
                let mark = *mark.lock().unwrap();
                assert!(!mark.is_some_and(|mark| empties.since(mark)));
            }
            lock.unlock();
        }
        other.join().unwrap();
    });
}

#[test]
fn empty_cq_has_nothing_old() {
    loom::model(|| {
        let empties = Empties::new(true);
        let mark = empties.mark();
        empties.found();
        assert!(!empties.since(mark));
        empties.found();
        assert!(empties.since(mark));
        let none = Empties::new(false);
        assert!(none.since(none.mark()));
        assert!(!none.since(Empties::NEVER) && !empties.since(Empties::NEVER));
    });
}

/// Whoever gets the number of an MR that is gone knows that its end has begun. Whoever finds all
/// gone finds its number free.
#[test]
fn number_that_comes_again_is_known() {
    loom::model(|| {
        let last = [0, 0].map(AtomicUsize::new).into_iter().collect::<Vec<_>>();
        let shared = Arc::new((Ends::new(last), Mutex::new([true; 2])));
        let end = |number: u32| {
            let shared = shared.clone();
            move || {
                let free = || shared.1.lock().unwrap()[number as usize] = false;
                shared.0.during(number, free);
            }
        };
        let other = thread::spawn(end(1));
        let another = thread::spawn(end(0));
        let (ends, in_use) = &*shared;
        let gone = ends.all_gone();
        let in_use = *in_use.lock().unwrap();
        for (number, in_use) in (0..).zip(in_use) {
            let before = ends.before(number);
            assert!(in_use || before > 0);
            assert!(!in_use || before == 0 || gone < before);
        }
        other.join().unwrap();
        another.join().unwrap();
        assert_eq!(ends.all_gone(), 2);
    });
}
