// SPDX-License-Identifier: GPL-2.0

//! The slots of an SRQ are freed after the last one that was kept has come back.

use crate::{completion::Completion, counters::SlotsOut};
use loom::{cell::UnsafeCell, sync::Arc, thread};

/// An SRQ that is closed, with slots that are kept.
struct Srq {
    kept: SlotsOut,
    back: Completion,
    slots: [UnsafeCell<u32>; 2],
}

#[test]
fn kept_slots_come_back_at_the_end() {
    loom::model(|| {
        let srq = Arc::new(Srq {
            kept: SlotsOut::new(),
            back: Completion::new(),
            slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
        });
        let keepers = [0, 1].map(|i| {
            let srq = srq.clone();
            thread::spawn(move || {
                // SAFETY: This is what is checked.
                srq.slots[i].with_mut(|slot| unsafe { *slot = 1 });
                // As `Slot::drop` when the queue is closed.
                if srq.kept.put() {
                    srq.back.complete();
                }
            })
        });
        // As `Queue::close`.
        if srq.kept.wait_for(2) {
            srq.back.wait();
        }
        for slot in &srq.slots {
            // SAFETY: This is what is checked.
            assert_eq!(slot.with_mut(|slot| unsafe { *slot }), 1);
        }
        for keeper in keepers {
            keeper.join().unwrap();
        }
    });
}
