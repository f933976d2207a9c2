// SPDX-License-Identifier: GPL-2.0

//! Owners of sends of which few are signaled: each comes back once, not before its request has
//! completed, and the ring is freed once, after its last reference.

use crate::counters::{Spsc, KEEPER, REQUEST};
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicU32, Ordering},
        Arc, Mutex,
    },
    thread,
};

const PLACES: u32 = 2;

/// A ring of owners, which are numbers, and the device's queue.
struct Ring {
    places: Spsc,
    entries: [UnsafeCell<(u32, bool)>; PLACES as usize],
    back: AtomicU32,
    /// The number of requests that were posted and have completed.
    completed: AtomicU32,
    /// The posted requests: `true` for one that is signaled.
    queue: Mutex<Vec<bool>>,
    freed: UnsafeCell<bool>,
}

impl Ring {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            places: Spsc::new(2),
            entries: [UnsafeCell::new((0, false)), UnsafeCell::new((0, false))],
            back: AtomicU32::new(0),
            completed: AtomicU32::new(0),
            queue: Mutex::new(Vec::new()),
            freed: UnsafeCell::new(false),
        })
    }

    /// As `SendRing::refused` of a chain that was posted in part.
    fn keep_in_part(&self, owner: u32) {
        let place = self.places.next(PLACES).unwrap();
        // SAFETY: This is what is checked.
        self.entries[(place % PLACES) as usize].with_mut(|e| unsafe { *e = (owner, true) });
        self.places.publish(true);
        let place = self.places.unpublish(true);
        // SAFETY: This is what is checked.
        self.entries[(place % PLACES) as usize].with_mut(|e| unsafe { (*e).1 = false });
        self.places.publish(false);
        self.queue.lock().unwrap().push(false);
    }

    /// As `SendRing::post`.
    fn post(&self, owner: u32, signaled: bool, refused: bool) -> bool {
        let Some(place) = self.places.next(PLACES) else {
            return false;
        };
        // SAFETY: This is what is checked.
        self.entries[(place % PLACES) as usize].with_mut(|e| unsafe { *e = (owner, signaled) });
        self.places.publish(signaled);
        if refused {
            let place = self.places.unpublish(signaled);
            // SAFETY: This is what is checked.
            let entry = self.entries[(place % PLACES) as usize].with(|e| unsafe { *e });
            assert_eq!(entry, (owner, signaled));
            return false;
        }
        self.queue.lock().unwrap().push(signaled);
        true
    }

    fn pop(&self) -> Option<(u32, bool)> {
        let place = self.places.first()?;
        // SAFETY: This is what is checked.
        let entry = self.entries[(place % PLACES) as usize].with_mut(|e| unsafe { *e });
        self.places.release();
        Some(entry)
    }

    /// Drops a reference, of a request or of another.
    fn put(&self, reference: u32) {
        if self.places.put(reference) {
            while self.pop().is_some() {}
            // SAFETY: This is what is checked.
            self.freed.with_mut(|freed| unsafe {
                assert!(!*freed);
                *freed = true;
            });
        }
    }

    /// As the device: completes what is in the queue. Returns the number of completions.
    fn complete(&self) -> u32 {
        let mut queue = self.queue.lock().unwrap();
        let done: Vec<bool> = queue.drain(..).collect();
        self.completed
            .fetch_add(done.len() as u32, Ordering::Relaxed);
        done.into_iter().map(u32::from).sum()
    }

    /// As `done`, at the poller or not.
    fn done(&self, at_poller: bool) {
        if !at_poller {
            self.places.miss();
            return self.put(REQUEST);
        }
        let mut completed = 1 + self.places.take_missed();
        while let Some((owner, signaled)) = self.pop() {
            // Owners come back in order, and not before their request has completed.
            assert_eq!(owner, self.back.fetch_add(1, Ordering::Relaxed));
            assert!(owner < self.completed.load(Ordering::Relaxed));
            completed -= u32::from(signaled);
            if completed == 0 {
                break;
            }
        }
        self.put(REQUEST);
    }
}

#[test]
fn owners_come_back_in_order() {
    loom::model(|| {
        let ring = Ring::new();
        let handler = {
            let ring = ring.clone();
            thread::spawn(move || {
                for _ in 0..ring.complete() {
                    ring.done(true);
                }
            })
        };
        assert!(ring.post(0, false, false));
        assert!(ring.post(1, true, false));
        let third = ring.post(2, false, false);
        handler.join().unwrap();
        for _ in 0..ring.complete() {
            ring.done(true);
        }
        assert_eq!(ring.back.load(Ordering::Relaxed), 2);
        assert!(third || ring.post(2, false, false));
        ring.put(KEEPER);
        ring.put(KEEPER);
    });
}

#[test]
fn missed_completion_is_made_up_for() {
    loom::model(|| {
        let ring = Ring::new();
        assert!(ring.post(0, true, false));
        assert_eq!(ring.complete(), 1);
        let stray = {
            let ring = ring.clone();
            thread::spawn(move || ring.done(false))
        };
        assert!(ring.post(1, true, false));
        assert_eq!(ring.complete(), 1);
        ring.done(true);
        stray.join().unwrap();
        assert!(ring.back.load(Ordering::Relaxed) >= 1);
        ring.put(KEEPER);
        ring.put(KEEPER);
        // SAFETY: There is no other thread.
        assert!(ring.freed.with(|freed| unsafe { *freed }));
    });
}

#[test]
fn refused_owner_is_not_in_the_ring() {
    loom::model(|| {
        let ring = Ring::new();
        assert!(ring.post(0, true, false));
        assert_eq!(ring.complete(), 1);
        let handler = {
            let ring = ring.clone();
            thread::spawn(move || ring.done(true))
        };
        assert!(!ring.post(1, true, true));
        assert!(ring.post(1, true, false));
        handler.join().unwrap();
        assert_eq!(ring.complete(), 1);
        ring.done(true);
        assert_eq!(ring.back.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn owner_of_a_part_comes_back_with_the_next() {
    loom::model(|| {
        let ring = Ring::new();
        assert!(ring.post(0, true, false));
        assert_eq!(ring.complete(), 1);
        let handler = {
            let ring = ring.clone();
            thread::spawn(move || ring.done(true))
        };
        ring.keep_in_part(1);
        handler.join().unwrap();
        assert_eq!(ring.back.load(Ordering::Relaxed), 1);
        assert!(ring.post(2, true, false));
        assert_eq!(ring.complete(), 1);
        ring.done(true);
        assert_eq!(ring.back.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn last_reference_frees_the_ring() {
    loom::model(|| {
        let ring = Ring::new();
        assert!(ring.post(0, true, false));
        assert_eq!(ring.complete(), 1);
        let threads = [
            thread::spawn({
                let ring = ring.clone();
                move || ring.done(false)
            }),
            thread::spawn({
                let ring = ring.clone();
                move || ring.put(KEEPER)
            }),
        ];
        ring.put(KEEPER);
        for thread in threads {
            thread.join().unwrap();
        }
        // SAFETY: There is no other thread.
        assert!(ring.freed.with(|freed| unsafe { *freed }));
    });
}

#[test]
fn lost_requests_do_not_keep_the_ring() {
    loom::model(|| {
        let ring = Ring::new();
        assert!(ring.post(0, true, false));
        assert_eq!(ring.complete(), 1);
        // One that misses the ring, in a thread that has returned when the QP ends.
        let stray = {
            let ring = ring.clone();
            thread::spawn(move || ring.done(false))
        };
        assert!(ring.post(1, true, false));
        stray.join().unwrap();
        let handle = {
            let ring = ring.clone();
            thread::spawn(move || ring.put(KEEPER))
        };
        assert_eq!(ring.places.end_requests(), 1);
        ring.put(KEEPER);
        handle.join().unwrap();
        // SAFETY: There is no other thread.
        assert!(ring.freed.with(|freed| unsafe { *freed }));
    });
}
