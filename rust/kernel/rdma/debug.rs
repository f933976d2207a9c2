// SPDX-License-Identifier: GPL-2.0

//! Tracking of posted requests, for kernels with debug assertions (`CONFIG_RUST_DEBUG_ASSERTIONS`).
//!
//! A device that completes a request twice would return its owner twice. Here the address of each
//! posted callback is recorded, and a completion of a callback that is not posted is reported and
//! ignored. The addresses are spread over buckets with a lock each, as those of debug objects are:
//! one lock would hide the races that such kernels are to find.

use crate::prelude::internal::*;
use kernel::{
    rbtree,
    sync::{
        atomic,
        SpinLockIrq, //
    },
    time, //
};

/// The address of the table. It is no `Published`, nor are addresses hashed by a function that
/// other tables use: with either, a completion that is polled into an array takes one instruction
/// more, also where there is no table.
///
/// # Invariants
///
/// Zero, or the address of a table that lives as long as this module has users.
static TABLE: atomic::Atomic<usize> = atomic::Atomic::new(0);

const BUCKETS: usize = 256;

/// The requests that are posted to a callback, or to a QP.
#[derive(Clone, Copy)]
pub(crate) struct Posted {
    pub(crate) count: u32,
    /// The address of the QP; 0 while it is not known, or for an SRQ.
    qp: usize,
    /// The type of the owner that was posted first.
    pub(crate) owner: TypeName,
    pub(crate) since: time::Instant<time::Monotonic>,
}

/// A copy of the start of a type's name, which may be in a module that is unloaded meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct TypeName([u8; 64]);

impl TypeName {
    #[inline]
    fn new(name: &str) -> Self {
        let mut copy = [0; 64];
        for (to, from) in copy.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Self(copy)
    }
}

impl fmt::Display for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or(&[]);
        f.write_str(core::str::from_utf8(name).unwrap_or("?"))
    }
}

struct Callbacks {
    /// The posted callbacks, by address.
    posted: rbtree::RBTree<usize, Posted>,
    /// Set when memory was missing for a callback: one that is not found may be posted.
    incomplete: bool,
}

/// The posted callbacks; part of the core module.
#[pin_data]
pub(crate) struct Table {
    #[pin]
    buckets: [SpinLockIrq<Callbacks>; BUCKETS],
}

impl Table {
    /// Creates the table, in kernels with debug assertions.
    pub(crate) fn new() -> Result<Option<Pin<KBox<Self>>>> {
        if !cfg!(debug_assertions) {
            return Ok(None);
        }
        let init = try_pin_init!(Self {
            buckets <- pin_init::pin_init_array_from_fn(|_| kernel::new_spinlock_irq!(Callbacks {
                posted: rbtree::RBTree::new(),
                incomplete: false,
            })),
        }? Error);
        let table = KBox::pin_init(init, GFP_KERNEL)?;
        // INVARIANT: The table is the core module's, which its users keep.
        TABLE.store(ptr::from_ref(&*table) as usize, atomic::Release);
        Ok(Some(table))
    }

    /// Returns the table, if there is one.
    #[inline]
    fn get() -> Option<&'static Self> {
        // So the compiler drops the code that uses the table.
        if !cfg!(debug_assertions) {
            return None;
        }
        // SAFETY: By the invariant of `TABLE` the table lives as long as this module has users, and
        // the caller is, or works for, one.
        unsafe { (TABLE.load(atomic::Acquire) as *const Self).as_ref() }
    }

    /// Returns the bucket of a callback, if there is a table.
    #[inline]
    fn bucket(cqe: *mut bindings::ib_cqe) -> Option<&'static SpinLockIrq<Callbacks>> {
        // The golden ratio, as in `hash_long`.
        let hash = (cqe as u64).wrapping_mul(0x61c8_8646_80b5_83eb) >> 32;
        Self::get()?.buckets.get(hash as usize % BUCKETS)
    }
}

/// Records that a callback is posted, with the type of its owner.
#[cfg_attr(not(debug_assertions), inline)]
pub(crate) fn activate(cqe: *mut bindings::ib_cqe, owner: &'static str) {
    let Some(bucket) = Table::bucket(cqe) else {
        return;
    };
    let posted = Posted {
        count: 1,
        qp: 0,
        owner: TypeName::new(owner),
        since: time::Instant::now(),
    };
    let node = rbtree::RBTreeNode::new(cqe as usize, posted, GFP_ATOMIC);
    let mut state = bucket.lock();
    match (state.posted.get_mut(&(cqe as usize)), node) {
        (Some(posted), _) => posted.count += 1,
        (None, Ok(node)) => drop(state.posted.insert(node)),
        (None, Err(_)) => state.incomplete = true,
    }
}

/// Records the QP that a callback is about to be posted to.
#[cfg_attr(not(debug_assertions), inline)]
pub(crate) fn set_qp_of(qp: *const bindings::ib_qp, cqe: *mut bindings::ib_cqe) {
    if let Some(bucket) = Table::bucket(cqe) {
        if let Some(posted) = bucket.lock().posted.get_mut(&(cqe as usize)) {
            posted.qp = qp as usize;
        }
    }
}

/// Removes a callback that has completed, or was not posted after all. Returns whether it was
/// posted.
#[cfg_attr(not(debug_assertions), inline)]
pub(crate) fn deactivate(cqe: *mut bindings::ib_cqe) -> bool {
    let Some(bucket) = Table::bucket(cqe) else {
        return true;
    };
    let mut state = bucket.lock();
    match state.posted.get_mut(&(cqe as usize)) {
        Some(posted) if posted.count > 1 => posted.count -= 1,
        Some(_) => drop(state.posted.remove_node(&(cqe as usize))),
        None => return state.incomplete,
    }
    true
}

/// Returns `true` if a callback is posted, as far as is known.
#[cfg_attr(not(debug_assertions), inline)]
pub(crate) fn is_active(cqe: *mut bindings::ib_cqe) -> bool {
    Table::bucket(cqe).is_none_or(|bucket| {
        let state = bucket.lock();
        state.incomplete || state.posted.get(&(cqe as usize)).is_some()
    })
}

/// Returns the requests that are posted to a QP, as far as is known.
pub(crate) fn of_qp(qp: *const bindings::ib_qp) -> Option<Posted> {
    let mut found = None;
    for bucket in &Table::get()?.buckets {
        let state = bucket.lock();
        let of_qp = |posted: &&Posted| posted.qp == qp as usize;
        for posted in state.posted.values().filter(of_qp) {
            let first = found.get_or_insert(Posted {
                count: 0,
                ..*posted
            });
            let count = first.count + posted.count;
            if posted.since.elapsed() > first.since.elapsed() {
                *first = *posted;
            }
            first.count = count;
        }
    }
    found
}

/// Reports a completion of a callback that is not posted.
pub(crate) fn report(owner: &str) {
    pr_err!("a request of {owner} has completed twice: the device is broken; ignored\n");
}
