// SPDX-License-Identifier: GPL-2.0

//! Transfers that the end of a QP has to end: those whose completion a device has lost, and those
//! that were prepared and not posted.
//!
//! `rdma_rw_ctx_destroy()` needs the QP, so such a transfer has to end before it. C finds it in a
//! list of the ULP. Here each context is listed when it is made, as its memory is allocated then,
//! and not when it is prepared or posted.

use crate::{
    links::{
        self,
        Linked,
        Links, //
    },
    prelude::internal::*,
    published::Published,
    sync::RwState,
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

    /// Returns the state of the context.
    fn state(&self) -> &RwState;

    /// Returns the callback of a transfer that is posted.
    fn cqe(&self) -> *mut bindings::ib_cqe;

    /// Returns whether the QP of a transfer that is prepared takes back what it finds, or has done
    /// so ([`take_back`]).
    ///
    /// # Safety
    ///
    /// There is such a transfer, whose QP is valid.
    unsafe fn is_qp_closed(&self) -> bool;

    /// Ends a transfer that is prepared. Any context.
    ///
    /// # Safety
    ///
    /// There is one, whose QP is valid, and which nothing else uses meanwhile.
    unsafe fn take_back(&self);
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
    let mut of_qp = list.iter().filter(|it| it.state().qp() == qp.addr());
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

/// Keeps the ends of QPs from taking back the transfer of a context, until this is dropped.
///
/// # Invariants
///
/// The context is borrowed exclusively for `'a`. If a transfer is prepared, it is held.
pub(crate) struct Held<'a>(&'a (dyn Transfer + 'static));

impl<'a> Held<'a> {
    /// Holds the transfer, if one is prepared. Any context.
    ///
    /// # Safety
    ///
    /// The context is borrowed exclusively for `'a`.
    pub(crate) unsafe fn new(context: &'a (dyn Transfer + 'static)) -> Self {
        let _list = Table::list_of(context).map(|list| list.lock());
        // `take_back` does not look at the context meanwhile.
        context.state().hold(true);
        // INVARIANT: The context is as the caller promises.
        Self(context)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _list = Table::list_of(self.0).map(|list| list.lock());
        self.0.state().hold(false);
        // SAFETY: By the type invariant the context is borrowed exclusively, and `take_back` does
        // not look at it while the list is locked. So if it has a QP, a transfer is prepared for
        // that, which counts it and is valid, and nothing else uses the transfer.
        unsafe {
            if self.0.state().any_qp() != 0 && self.0.is_qp_closed() {
                self.0.take_back();
            }
        }
    }
}

/// Takes back the transfers that are prepared for a QP and not held. Any context.
///
/// # Safety
///
/// The QP is valid, and has no handle, so that nobody can prepare or post.
pub(crate) unsafe fn take_back(qp: *mut bindings::ib_qp) {
    let at = qp.addr();
    for list in Table::lists() {
        // The lock is released in between, as interrupts are disabled while it is held.
        loop {
            let list = list.lock();
            let Some(context) = list.iter().find(|it| it.state().is_prepared_for(at)) else {
                break;
            };
            // SAFETY: The QP is valid and has no handle, as the caller promises, so the transfer is
            // not posted. The owner of the context holds it before ending it, or removes the
            // context, with the list locked, as it is here.
            unsafe { context.take_back() };
        }
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
