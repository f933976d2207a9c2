// SPDX-License-Identifier: GPL-2.0

//! One at a time has the seat of a CQ's poller, and sees what the one before has done.

use crate::counters::Seat;
use loom::{cell::UnsafeCell, sync::Arc, thread};

struct Cq {
    seat: Seat,
    /// What is polled into.
    row: UnsafeCell<u32>,
}

impl Cq {
    /// As `Cq::process`; says whether it had the seat.
    fn process(&self, at: usize) -> bool {
        let taken = self.seat.take(at);
        if taken {
            // SAFETY: This is what is checked.
            self.row.with_mut(|row| unsafe { *row += 1 });
            self.seat.leave();
        }
        taken
    }
}

#[test]
fn one_at_a_time_polls() {
    loom::model(|| {
        let cq = Arc::new(Cq {
            seat: Seat::new(),
            row: UnsafeCell::new(0),
        });
        let other = {
            let cq = cq.clone();
            thread::spawn(move || u32::from(cq.process(1)))
        };
        let mut polled = u32::from(cq.process(2));
        polled += other.join().unwrap();
        // Nobody is in the way of the other for good.
        polled += u32::from(cq.process(2));
        // SAFETY: There is no other thread.
        assert_eq!(polled, cq.row.with(|row| unsafe { *row }));
        assert!(polled >= 2);
    });
}

#[test]
fn holder_knows_itself() {
    loom::model(|| {
        let seat = Arc::new(Seat::new());
        let other = {
            let seat = seat.clone();
            thread::spawn(move || {
                if seat.take(1) {
                    assert_eq!(seat.holder(), 1);
                    seat.leave();
                }
                assert_ne!(seat.holder(), 1);
            })
        };
        if seat.take(2) {
            assert_eq!(seat.holder(), 2);
            seat.leave();
        }
        assert_ne!(seat.holder(), 2);
        other.join().unwrap();
    });
}
