// SPDX-License-Identifier: GPL-2.0

//! Data races of Rust code. Two processors run each function at once.

use core::{
    cell::UnsafeCell,
    hint::black_box,
    sync::atomic::{
        AtomicBool,
        Ordering, //
    }, //
};
use kernel::prelude::*;

const ROUNDS: u64 = 1_000_000;

struct Racy(UnsafeCell<u64>);

// SAFETY: This is not so. It is what has to be found.
unsafe impl Sync for Racy {}

static SUM: Racy = Racy(UnsafeCell::new(0));
static LOCK: AtomicBool = AtomicBool::new(false);

#[inline(always)]
fn add() {
    // SAFETY: The pointer is that of a static. The race is meant.
    unsafe { *black_box(SUM.0.get()) += 1 };
}

#[inline(always)]
fn add_locked(unlock: Ordering) {
    let mut left = ROUNDS;
    // If KCSAN delays the thread that has the lock, many tries fail.
    for _ in 0..100 * ROUNDS {
        if !LOCK.swap(true, Ordering::Acquire) {
            add();
            LOCK.store(false, unlock);
            left -= 1;
            if left == 0 {
                break;
            }
        }
    }
}

/// Adds without a lock.
#[no_mangle]
extern "C" fn planted_rust_race(_work: *mut c_void) {
    for _ in 0..ROUNDS {
        add();
    }
}

/// Adds under a lock whose release orders nothing.
#[no_mangle]
extern "C" fn planted_rust_order(_work: *mut c_void) {
    add_locked(Ordering::Relaxed);
}

/// Adds under a lock, which is no race.
#[no_mangle]
extern "C" fn planted_rust_lock(_work: *mut c_void) {
    add_locked(Ordering::Release);
}
