// SPDX-License-Identifier: GPL-2.0

//! Transfers whose completion a device has lost.
//!
//! `rdma_rw_ctx_destroy()` needs the QP, so such a transfer has to end before it. C finds it in a
//! list of the ULP. Here each context is listed when it is made, as its memory is allocated then,
//! and not when it is posted.

use crate::{
    prelude::internal::*,
    published::Published,
    wc, //
};
use core::cell::UnsafeCell;
use kernel::sync::SpinLockIrq;

static TABLE: Published<Table> = Published::new();

const BUCKETS: usize = 64;

/// A context of transfers.
pub(crate) trait Transfer: Sync {
    /// Returns the part by which the context is listed.
    fn links(&self) -> &Links;

    /// Returns the QP that a transfer of the context is posted to, or null.
    fn posted_to(&self) -> *mut bindings::ib_qp;

    /// Returns the callback of that transfer.
    fn cqe(&self) -> *mut bindings::ib_cqe;
}

type Listed = NonNull<dyn Transfer>;

/// The neighbours of a context in its list.
struct Neighbours {
    prev: Option<Listed>,
    next: Option<Listed>,
}

const NONE: Neighbours = Neighbours {
    prev: None,
    next: None,
};

/// The part of a context by which it is listed.
pub(crate) struct Links(UnsafeCell<Neighbours>);

// SAFETY: Links are used under the lock of the list only.
unsafe impl Sync for Links {}

impl Links {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new(NONE))
    }
}

/// The first context of a list, whose lock protects the links of all.
///
/// # Invariants
///
/// From there on each has the address of the next one and of the one before. All are valid until
/// they are removed.
struct List(Option<Listed>);

// SAFETY: Contexts are `Sync`, and have their links changed under the lock of the list only.
unsafe impl Send for List {}

impl List {
    /// Returns the links of a context.
    ///
    /// # Safety
    ///
    /// The context is in this list, which is locked.
    unsafe fn links<'a>(&'a mut self, at: Listed) -> &'a mut Neighbours {
        // SAFETY: By the type invariant the context is valid, and its links are used under the lock
        // only, which the exclusive reference to the list stands for.
        unsafe { &mut *at.as_ref().links().0.get() }
    }

    /// Returns the callback of a transfer that was posted to a QP and has not ended.
    fn find(&mut self, qp: *mut bindings::ib_qp) -> Option<*mut bindings::ib_cqe> {
        let mut next = self.0;
        while let Some(at) = next {
            // SAFETY: By the type invariant the context is valid.
            let context = unsafe { at.as_ref() };
            if ptr::eq(context.posted_to(), qp) {
                return Some(context.cqe());
            }
            // SAFETY: The context is in the list, which the caller has locked.
            next = unsafe { self.links(at) }.next;
        }
        None
    }
}

/// All contexts, in lists by their address; part of the core module.
#[pin_data]
pub(crate) struct Table {
    #[pin]
    lists: [SpinLockIrq<List>; BUCKETS],
}

impl Table {
    pub(crate) fn new() -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            lists <- pin_init::pin_init_array_from_fn(|_| {
                // INVARIANT: There is no context.
                kernel::new_spinlock_irq!(List(None), "rdma::lost::Table")
            }),
        });
        let table = KBox::pin_init(init, GFP_KERNEL)?;
        // SAFETY: The table is the core module's, which its users keep.
        unsafe { TABLE.set(&table) };
        Ok(table)
    }

    /// Returns the lists, of which there is none before the core module is loaded.
    fn lists() -> &'static [SpinLockIrq<List>] {
        TABLE.get().map_or(&[], |table| &table.lists)
    }

    fn list_of(at: Listed) -> Option<&'static SpinLockIrq<List>> {
        // The golden ratio, as in `hash_long`.
        let addr = at.cast::<u8>().as_ptr() as u64;
        let hash = addr.wrapping_mul(0x61c8_8646_80b5_83eb) >> 32;
        Self::lists().get(hash as usize % BUCKETS)
    }
}

/// Lists a context. Any context.
///
/// # Safety
///
/// The context is not listed, and is neither moved nor freed before [`remove`] was called for it.
#[inline(never)]
pub(crate) unsafe fn add(context: &(dyn Transfer + 'static)) {
    let at = NonNull::from(context);
    let Some(list) = Table::list_of(at) else {
        return;
    };
    let mut list = list.lock();
    let first = list.0.replace(at);
    // INVARIANT: The context is valid until it is removed, and the links are those of its place.
    //
    // SAFETY: Both are in the list, which is locked.
    unsafe {
        list.links(at).next = first;
        if let Some(first) = first {
            list.links(first).prev = Some(at);
        }
    }
}

/// Takes a context out of its list. Any context.
///
/// # Safety
///
/// The context is listed.
#[inline(never)]
pub(crate) unsafe fn remove(context: &(dyn Transfer + 'static)) {
    let at = NonNull::from(context);
    let Some(list) = Table::list_of(at) else {
        return;
    };
    let mut list = list.lock();
    // INVARIANT: The neighbours have the addresses of each other.
    //
    // SAFETY: All are in the list, which is locked: the context, as the caller promises, and its
    // neighbours by the invariant of the list.
    unsafe {
        let Neighbours { prev, next } = core::mem::replace(list.links(at), NONE);
        match prev {
            Some(prev) => list.links(prev).next = next,
            None => list.0 = next,
        }
        if let Some(next) = next {
            list.links(next).prev = prev;
        }
    }
}

/// Returns whether a transfer that was posted to a QP has not ended.
pub(crate) fn is_out(qp: *mut bindings::ib_qp) -> bool {
    let is_in = |list: &SpinLockIrq<List>| list.lock().find(qp).is_some();
    Table::lists().iter().any(is_in)
}

/// Completes the transfers that were posted to a QP and have not ended, as flushed: their handlers
/// get the owners.
///
/// # Safety
///
/// The QP is valid and `cq` that of its sends. The device has no request of the QP any longer, and
/// no completion of one is left, so that these are lost.
pub(crate) unsafe fn end(qp: *mut bindings::ib_qp, cq: *mut bindings::ib_cq, _cx: &Sleepable) {
    for list in Table::lists() {
        let mut last = ptr::null_mut();
        loop {
            let found = list.lock().find(qp);
            // One that does not end, as debugging finds its owner back, has the QP wait.
            let Some(cqe) = found.filter(|cqe| *cqe != last) else {
                break;
            };
            last = cqe;
            let mut wc = wc::flushed(qp, cqe);
            // SAFETY: The transfer is lost, as the caller promises, so its owner, which keeps the
            // context and the callback, is not back, and this completes it alone. The CQ is valid,
            // as the caller promises. The helper provides the context in which its handlers run.
            unsafe { bindings::rdma_helper_complete(cq, &raw mut wc) };
        }
    }
}
