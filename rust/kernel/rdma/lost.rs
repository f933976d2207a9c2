// SPDX-License-Identifier: GPL-2.0

//! Transfers whose completion a device has lost.
//!
//! `rdma_rw_ctx_destroy()` needs the QP, so such a transfer has to end before it. C finds it in a
//! list of the ULP. Here each context is listed when it is made, as its memory is allocated then,
//! and not when it is posted.

use crate::{
    links::{
        self,
        Linked,
        Links, //
    },
    prelude::internal::*,
    published::Published,
    wc, //
};
use kernel::sync::SpinLockIrq;

static TABLE: Published<Table> = Published::new();

const BUCKETS: usize = 64;

/// A context of transfers.
///
/// # Safety
///
/// `links` returns the same part of the context each time.
pub(crate) unsafe trait Transfer: Sync {
    /// Returns the part by which the context is listed.
    fn links(&self) -> &Links<dyn Transfer>;

    /// Returns the QP that a transfer of the context is posted to, or null.
    fn posted_to(&self) -> *mut bindings::ib_qp;

    /// Returns the callback of that transfer.
    fn cqe(&self) -> *mut bindings::ib_cqe;
}

// SAFETY: A context returns the same part each time.
unsafe impl Linked for dyn Transfer {
    #[inline]
    fn links(&self) -> &Links<Self> {
        Transfer::links(self)
    }
}

type List = links::List<dyn Transfer>;

/// Returns the callback of a transfer that was posted to a QP and has not ended.
fn find(list: &List, qp: *mut bindings::ib_qp) -> Option<*mut bindings::ib_cqe> {
    let mut of_qp = list.iter().filter(|it| ptr::eq(it.posted_to(), qp));
    of_qp.next().map(|it| it.cqe())
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
                kernel::new_spinlock_irq!(List::new(), "rdma::lost::Table")
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

    /// Returns the list of a context, the only one that it is put into.
    fn list_of(context: &dyn Transfer) -> Option<&'static SpinLockIrq<List>> {
        // The golden ratio, as in `hash_long`.
        let addr = ptr::from_ref(context).addr() as u64;
        let hash = addr.wrapping_mul(0x61c8_8646_80b5_83eb) >> 32;
        Self::lists().get(hash as usize % BUCKETS)
    }
}

/// Lists a context. Any context.
///
/// # Safety
///
/// The context is neither moved nor freed before [`remove`] was called for it.
pub(crate) unsafe fn add(context: &(dyn Transfer + 'static)) {
    if let Some(list) = Table::list_of(context) {
        // SAFETY: The context is put into no other list, and stays where it is until it is removed,
        // as the caller promises.
        unsafe { list.lock().push(context) };
    }
}

/// Takes a context out of its list. Any context.
pub(crate) fn remove(context: &(dyn Transfer + 'static)) {
    if let Some(list) = Table::list_of(context) {
        // SAFETY: The context is put into no other list.
        unsafe { list.lock().remove(context) };
    }
}

/// Returns whether a transfer that was posted to a QP has not ended.
pub(crate) fn is_out(qp: *mut bindings::ib_qp) -> bool {
    (Table::lists().iter()).any(|list| find(&list.lock(), qp).is_some())
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
            let found = find(&list.lock(), qp);
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
