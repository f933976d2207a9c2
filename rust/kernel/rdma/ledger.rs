// SPDX-License-Identifier: GPL-2.0

//! What is posted, for kernels with debug assertions (`CONFIG_RUST_DEBUG_ASSERTIONS`).
//!
//! That a request completes once is the driver's promise, on which giving its owner back rests. A
//! device that breaks it would have the owner given back twice. Posting has no room for a check of
//! that, so there is none in other kernels; here the address of each posted callback is kept, and a
//! completion that nobody waits for is reported and goes no further.
//!
//! The addresses are spread over buckets with a lock each, as those of debug objects are. One lock
//! would serialise all posts and completions, and hide the races that such kernels are to find.

use crate::bindings;
use kernel::{
    new_spinlock_irq,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Release, //
            },
            Atomic, //
        },
        SpinLockIrq, //
    }, //
};

/// The ledger, owned by the core module.
///
/// # Invariants
///
/// Zero, or the address of a ledger that lives as long as this module has users.
static LEDGER: Atomic<usize> = Atomic::new(0);

/// How many buckets there are.
const BUCKETS: usize = 256;

struct State {
    /// How often each callback is posted.
    posted: RBTree<usize, u32>,
    /// Whether memory was missing for an entry, so that nothing can be said any more.
    incomplete: bool,
}

#[pin_data]
struct Bucket {
    #[pin]
    state: SpinLockIrq<State>,
}

impl Bucket {
    fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            state <- new_spinlock_irq!(State {
                posted: RBTree::new(),
                incomplete: false,
            }),
        })
    }
}

#[pin_data]
pub(crate) struct Ledger {
    #[pin]
    buckets: [Bucket; BUCKETS],
}

impl Ledger {
    /// Begins a ledger, where there is to be one.
    pub(crate) fn new() -> Result<Option<Pin<KBox<Self>>>> {
        if !cfg!(debug_assertions) {
            return Ok(None);
        }
        let init = try_pin_init!(Self {
            buckets <- pin_init::pin_init_array_from_fn(|_| Bucket::new()),
        }? Error);
        let ledger = KBox::pin_init(init, GFP_KERNEL)?;
        // INVARIANT: It is the core module's, which its users keep.
        LEDGER.store(core::ptr::from_ref(&*ledger) as usize, Release);
        Ok(Some(ledger))
    }

    /// Returns the state of the bucket of a callback, if there is a ledger.
    fn of(cqe: usize) -> Option<&'static SpinLockIrq<State>> {
        // SAFETY: By the invariant: the caller is, or works for, a user of this module.
        let ledger = unsafe { (LEDGER.load(Acquire) as *const Self).as_ref() }?;
        // The golden ratio, as in `hash_long`.
        let hash = (cqe as u64).wrapping_mul(0x61c8_8646_80b5_83eb) >> 32;
        Some(&ledger.buckets.get(hash as usize % BUCKETS)?.state)
    }
}

/// Notes that a callback is posted.
#[inline]
pub(crate) fn post(cqe: *mut bindings::ib_cqe) {
    if cfg!(debug_assertions) {
        add(cqe as usize);
    }
}

/// Strikes out a callback that has completed, or was not posted after all. Says whether it was
/// posted, as far as is known.
#[inline]
pub(crate) fn strike(cqe: *mut bindings::ib_cqe) -> bool {
    !cfg!(debug_assertions) || remove(cqe as usize)
}

/// Says whether a callback is posted, as far as is known.
#[inline]
pub(crate) fn is_posted(cqe: *mut bindings::ib_cqe) -> bool {
    !cfg!(debug_assertions) || find(cqe as usize)
}

#[inline(never)]
fn find(cqe: usize) -> bool {
    Ledger::of(cqe).is_none_or(|bucket| {
        let state = bucket.lock();
        state.incomplete || state.posted.get(&cqe).is_some()
    })
}

#[inline(never)]
fn add(cqe: usize) {
    let Some(bucket) = Ledger::of(cqe) else {
        return;
    };
    let node = RBTreeNode::new(cqe, 1, GFP_ATOMIC);
    let mut state = bucket.lock();
    match (state.posted.get_mut(&cqe), node) {
        (Some(times), _) => *times += 1,
        (None, Ok(node)) => drop(state.posted.insert(node)),
        (None, Err(_)) => state.incomplete = true,
    }
}

#[inline(never)]
fn remove(cqe: usize) -> bool {
    let Some(bucket) = Ledger::of(cqe) else {
        return true;
    };
    let mut state = bucket.lock();
    match state.posted.get_mut(&cqe) {
        Some(times) if *times > 1 => *times -= 1,
        Some(_) => drop(state.posted.remove_node(&cqe)),
        None => return state.incomplete,
    }
    true
}

/// Reports a completion that nobody waits for.
#[cold]
#[inline(never)]
pub(crate) fn report(owner: &str) {
    pr_err!("a request of {owner} has completed twice: the device is broken; ignored\n");
}
