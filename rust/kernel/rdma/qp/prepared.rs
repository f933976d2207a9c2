// SPDX-License-Identifier: GPL-2.0

//! The contexts for which transfers were prepared, which the QP takes back when it ends.
//!
//! A transfer that is prepared and not posted is no request, so no drain ends it, and what has its
//! context may be kept by the QP itself: by a table, a ring, an SRQ or the QP's own context.

use crate::prelude::internal::*;
use kernel::{
    list::{
        impl_list_arc_safe,
        impl_list_item,
        AtomicTracker,
        List,
        ListArc,
        ListLinks,
        TryNewListArc, //
    },
    new_spinlock_irq,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        SpinLockIrq, //
    }, //
};

/// A context of transfers by `rdma_rw`.
pub(crate) trait PreparedCtx: Send + Sync {
    /// Ends the transfer if it is prepared and was not posted. Any context.
    ///
    /// # Safety
    ///
    /// The QP of the transfer is valid, and nobody else takes the transfer back meanwhile.
    unsafe fn take_back(&self);
}

/// The contexts for which transfers of a QP were prepared. They stay here when the transfer is
/// posted, which so costs nothing, until they are dropped, cancelled, or prepared for another QP.
#[pin_data]
pub(crate) struct PreparedList {
    #[pin]
    list: SpinLockIrq<Listed>,
}

struct Listed {
    entries: List<PreparedEntry>,
    /// Set once the QP has ended.
    is_closed: bool,
}

/// The place of a context in the list of a QP.
///
/// # Invariants
///
/// While this is in `list`, `ctx` is valid, and only the QP's end, with the list locked, takes back
/// what is prepared.
#[pin_data]
pub(crate) struct PreparedEntry {
    list: Arc<PreparedList>,
    ctx: NonNull<dyn PreparedCtx>,
    #[pin]
    links: ListLinks,
    #[pin]
    tracker: AtomicTracker,
    /// Set while this is in `list`. It changes with the list locked.
    is_listed: Atomic<bool>,
}

// SAFETY: A context may be used from any thread, and the rest is `Send`.
unsafe impl Send for PreparedEntry {}
// SAFETY: A shared reference gives a context only with the list locked, and the rest is `Sync`.
unsafe impl Sync for PreparedEntry {}

impl_list_arc_safe! {
    impl ListArcSafe<0> for PreparedEntry {
        tracked_by tracker: AtomicTracker;
    }
}

impl_list_item! {
    impl ListItem<0> for PreparedEntry {
        using ListLinks { self.links };
    }
}

impl PreparedList {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let list = pin_init!(Self {
            list <- new_spinlock_irq!(
                Listed {
                    entries: List::new(),
                    is_closed: false,
                },
                "rdma::Qp::prepared"
            ),
        });
        Arc::pin_init(list, GFP_KERNEL)
    }

    /// Takes back the transfers that are prepared for the QP. Any context.
    ///
    /// # Safety
    ///
    /// The QP is valid, and there is no handle of it, so that nobody can prepare or post.
    pub(super) unsafe fn close(&self) {
        // The lock is released in between, as interrupts are disabled while it is held.
        loop {
            let mut listed = self.list.lock();
            listed.is_closed = true;
            let Some(entry) = listed.entries.pop_front() else {
                return;
            };
            entry.is_listed.store(false, Relaxed);
            // SAFETY: The entry was in the list, which is still locked, so by the invariant of
            // `PreparedEntry` the context is valid, and nobody else takes its transfer back. The QP
            // is valid, as the caller promises.
            unsafe { entry.ctx.as_ref().take_back() };
            // With the lock held, as an entry that is listed is known to be so until it is dropped.
            drop(entry);
        }
    }
}

impl PreparedEntry {
    /// Makes the entry of a context in the list of a QP, and lists it.
    ///
    /// # Safety
    ///
    /// The context is valid until the entry was removed. It is prepared by nobody but the caller,
    /// who has a handle of the QP.
    pub(crate) unsafe fn new(
        list: &Arc<PreparedList>,
        ctx: &(dyn PreparedCtx + 'static),
    ) -> Result<Arc<Self>> {
        let entry = Arc::pin_init(
            pin_init!(Self {
                list: list.clone(),
                ctx: NonNull::from(ctx),
                links <- ListLinks::new(),
                tracker <- AtomicTracker::new(),
                is_listed: Atomic::new(false),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The context is valid until the entry was removed, and nobody else uses the
        // transfer, as the caller promises.
        unsafe { entry.add() };
        Ok(entry)
    }

    /// Returns whether this is an entry of this list.
    pub(crate) fn is_of(&self, list: &Arc<PreparedList>) -> bool {
        Arc::ptr_eq(&self.list, list)
    }

    /// Returns whether this is in its list. The caller has a handle of the QP and has the context
    /// for itself: so nobody adds or removes this meanwhile, and the QP does not end.
    #[inline]
    pub(crate) fn is_listed(&self) -> bool {
        self.is_listed.load(Relaxed)
    }

    /// Adds this to its list, unless it is listed. If the end of the QP has closed that, a transfer
    /// that is prepared ends here.
    ///
    /// # Safety
    ///
    /// The context is valid until this was removed, and nobody else uses its transfer.
    pub(crate) unsafe fn add(self: &Arc<Self>) {
        let mut listed = self.list.list.lock();
        if !listed.is_closed {
            // Fails if it is listed.
            //
            // INVARIANT: The context is valid, as the caller promises.
            if let Ok(entry) = ListArc::try_from_arc(self.clone()) {
                self.is_listed.store(true, Relaxed);
                listed.entries.push_back(entry);
            }
            return;
        }
        drop(listed);
        // SAFETY: The context is valid and nobody else uses its transfer, as the caller promises.
        // The QP's end has not found this here, so if there is a transfer, it waits for that.
        unsafe { self.ctx.as_ref().take_back() };
    }

    /// Removes this from its list, if it is listed. From then on the QP is not destroyed before a
    /// transfer of the context has ended.
    pub(crate) fn remove(&self) {
        let mut listed = self.list.list.lock();
        // SAFETY: An entry is only ever put into `self.list`, whose lock is held.
        let entry = unsafe { listed.entries.remove(self) };
        self.is_listed.store(false, Relaxed);
        // With the lock held, as an entry that is listed is known to be so until it is dropped. The
        // caller has another reference.
        drop(entry);
    }
}

/// An entry that is not in its list while the CPU accesses the memory of its context.
///
/// # Invariants
///
/// The entry was removed, and its context is borrowed exclusively for `'a`.
pub(crate) struct Unlisted<'a>(&'a Arc<PreparedEntry>);

impl<'a> Unlisted<'a> {
    /// # Safety
    ///
    /// The context of the entry is borrowed exclusively for `'a`.
    pub(crate) unsafe fn new(entry: &'a Arc<PreparedEntry>) -> Self {
        entry.remove();
        // INVARIANT: It was just removed, and the context is as the caller promises.
        Self(entry)
    }
}

impl Drop for Unlisted<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the context is borrowed exclusively, so nobody else uses
        // the transfer. A context removes its entry before it is freed.
        unsafe { self.0.add() };
    }
}
