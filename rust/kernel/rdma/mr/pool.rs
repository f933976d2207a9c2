// SPDX-License-Identifier: GPL-2.0

//! MRs made ahead of time.

use super::{
    alloc,
    state::Fmr,
    Mr, //
};
use crate::{
    context::Sleepable,
    deferred::Deferred,
    pd::Pd, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        SpinLockIrq, //
    }, //
};

/// A pool of MRs, to be taken where nothing can be allocated.
///
/// A counted handle. An [`Mr`] of the pool returns to it when it, or the [`Region`] that it is part
/// of, is dropped idle. If the end of the registration is not proved then, the MR is deregistered,
/// and the pool is one smaller until [`Pool::refill`].
///
/// C's `ib_mr_pool_init` keeps its MRs in a QP, and its users must have put all of them back before
/// they destroy the QP, and must know that each is invalid. This one belongs to no QP, an MR of it
/// lives as long as its user wants, and only those that are proved idle come back.
///
/// [`Region`]: super::Region
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

/// # Invariants
///
/// The MRs in `free` are idle, have no memory, and belong to `pd`; there is room for all of the
/// pool's.
#[pin_data]
struct Inner {
    #[pin]
    free: SpinLockIrq<KVec<Deferred<Fmr>>>,
    lost: Atomic<u32>,
    pages: u32,
    pd: Pd,
}

impl Pool {
    /// Allocates `count` MRs that can map `pages` pages each (`ib_mr_pool_init`).
    ///
    /// # Errors
    ///
    /// As [`Mr::alloc`].
    pub fn new(pd: &Pd, count: u32, pages: u32, cx: &Sleepable) -> Result<Self> {
        let mut free = KVec::with_capacity(count.try_into()?, GFP_KERNEL)?;
        for _ in 0..count {
            free.push_within_capacity(alloc(pd, pages, cx)?)?;
        }
        // INVARIANT: The MRs are new, and the vector has room for them.
        let init = pin_init!(Inner {
            free <- new_spinlock_irq!(free, "rdma::mr::Pool"),
            lost: Atomic::new(0),
            pages,
            pd: pd.clone(),
        });
        Ok(Self(Arc::pin_init(init, GFP_KERNEL)?))
    }

    /// Takes an MR, if one is there (`ib_mr_pool_get`).
    ///
    /// Any context.
    pub fn get(&self) -> Option<Mr> {
        let fmr = self.0.free.lock().pop()?;
        Some(Mr::of(fmr, Some(self.clone())))
    }

    /// Returns how many MRs are there to be taken.
    pub fn available(&self) -> usize {
        self.0.free.lock().len()
    }

    /// Returns how many MRs the pool has lost, as they were dropped without proof that they were
    /// idle, since it was filled last.
    pub fn lost(&self) -> u32 {
        self.0.lost.load(Relaxed)
    }

    /// Replaces the MRs that the pool has lost.
    ///
    /// # Errors
    ///
    /// As [`Mr::alloc`].
    pub fn refill(&self, cx: &Sleepable) -> Result {
        let inner = &*self.0;
        while take_one(&inner.lost) {
            match alloc(&inner.pd, inner.pages, cx) {
                Ok(fmr) => inner.put(fmr),
                Err(e) => {
                    inner.lost.add(1, Relaxed);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Takes an MR back (`ib_mr_pool_put`).
    pub(super) fn put(&self, fmr: Deferred<Fmr>) {
        if fmr.is_idle() {
            self.0.put(fmr);
        } else {
            self.0.lost.add(1, Relaxed);
        }
    }
}

impl Inner {
    fn put(&self, fmr: Deferred<Fmr>) {
        // INVARIANT: The caller has an idle one of the pool's, so there is room for it.
        let put = self.free.lock().push_within_capacity(fmr);
        drop(put);
    }
}

/// Subtracts one, unless it is zero.
fn take_one(count: &Atomic<u32>) -> bool {
    let mut old = count.load(Relaxed);
    while old != 0 {
        match count.cmpxchg(old, old - 1, Relaxed) {
            Ok(_) => return true,
            Err(now) => old = now,
        }
    }
    false
}
