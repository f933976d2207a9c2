// SPDX-License-Identifier: GPL-2.0

//! What is dropped is torn down once, and after all use of it: by the work item of the first of a
//! batch.

use crate::batch_state::{Batch, Batched, Next};
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicU32, Ordering},
        Arc,
    },
    thread,
};

struct Item {
    next: Next<Item>,
    used: UnsafeCell<u32>,
}

impl Batched for Item {
    fn next(&self) -> &Next<Item> {
        &self.next
    }
}

struct Device {
    items: Batch<Item>,
    ended: AtomicU32,
}

/// As `Deferred::drop`, and the work item that this queues.
fn drop_one(device: &Device) {
    let item = Box::new(Item {
        next: Next::new(),
        used: UnsafeCell::new(0),
    });
    // SAFETY: This is what is checked.
    item.used.with_mut(|used| unsafe { *used = 1 });
    let item = Box::into_raw(item);
    // SAFETY: The item is valid, and not used after this unless it is the first.
    if !unsafe { device.items.add(item) } {
        return;
    }
    let mut last = std::ptr::null_mut();
    for taken in device.items.take() {
        last = taken;
        // SAFETY: Each was given up to the batch. That it is taken once is what is checked.
        let taken = unsafe { Box::from_raw(taken) };
        // SAFETY: This is what is checked.
        assert_eq!(taken.used.with_mut(|used| unsafe { *used }), 1);
        device.ended.fetch_add(1, Ordering::Relaxed);
    }
    assert_eq!(last, item);
}

#[test]
fn what_is_dropped_is_torn_down_once() {
    loom::model(|| {
        let device = Arc::new(Device {
            items: Batch::new(),
            ended: AtomicU32::new(0),
        });
        let threads = [(); 2].map(|()| {
            let device = device.clone();
            thread::spawn(move || drop_one(&device))
        });
        drop_one(&device);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(device.ended.load(Ordering::Relaxed), 3);
    });
}
