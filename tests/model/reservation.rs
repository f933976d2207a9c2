// SPDX-License-Identifier: GPL-2.0

//! An entry of a CQ is never reserved twice, and is reserved again only after it was given back.

use crate::counters::FreeCqes;
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicI32, Ordering::Relaxed},
        Arc,
    },
    thread,
};

struct Cq {
    free: FreeCqes,
    /// The only entry.
    entry: UnsafeCell<u32>,
}

#[test]
fn entry_has_one_user() {
    loom::model(|| {
        let cq = Arc::new(Cq {
            free: FreeCqes::new(1),
            entry: UnsafeCell::new(0),
        });
        let qps = [0, 1].map(|_| {
            let cq = cq.clone();
            thread::spawn(move || {
                if cq.free.reserve(1).is_ok() {
                    // SAFETY: This is what is checked.
                    cq.entry.with_mut(|entry| unsafe { *entry += 1 });
                    cq.free.release(1);
                }
            })
        });
        for qp in qps {
            qp.join().unwrap();
        }
        assert_eq!(cq.free.free(), 1);
    });
}

#[test]
fn leases_are_all_or_nothing() {
    loom::model(|| {
        let room = Arc::new(FreeCqes::new(3));
        let reserved = Arc::new(AtomicI32::new(0));
        let qps = [2, 2].map(|entries| {
            let (room, reserved) = (room.clone(), reserved.clone());
            thread::spawn(move || match room.reserve(entries) {
                Ok(()) => {
                    assert!(reserved.fetch_add(entries, Relaxed) + entries <= 3);
                    reserved.fetch_sub(entries, Relaxed);
                    room.release(entries);
                }
                Err(free) => assert!(free < entries),
            })
        });
        for qp in qps {
            qp.join().unwrap();
        }
        assert_eq!(room.free(), 3);
    });
}
