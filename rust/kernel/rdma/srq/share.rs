// SPDX-License-Identifier: GPL-2.0

//! Which CQs the slots of an SRQ complete to.
//!
//! A slot has one completion at most that was not handled, as only its handler posts it again. So
//! however many QPs on an SRQ share a CQ, the SRQ leases as many entries of it as there are slots,
//! once.

use super::queue::Inner;
use crate::cq::{
    self,
    Lease, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// The QPs of an SRQ that complete to one CQ.
///
/// # Invariants
///
/// `qps` is the number of [`Share`]s for the CQ of the lease, and not zero.
struct Entry {
    lease: Lease,
    qps: usize,
}

#[pin_data]
pub(super) struct Shares {
    #[pin]
    list: Mutex<KVec<Entry>>,
}

impl Shares {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(KVec::new()),
        })
    }
}

/// A QP's part in an SRQ: keeps it, and its lease from the QP's CQ.
pub(crate) struct Share {
    srq: Arc<Inner>,
    cq: Arc<cq::Inner>,
}

impl Share {
    /// Takes part, for a QP that completes to `cq`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the CQ is shared with other modules: these may poll it, so that the QP's last
    /// receive would not be known to be over. `ENOSPC` if it has no room, or `ENOMEM`.
    pub(crate) fn new(srq: &Arc<Inner>, cq: &Arc<cq::Inner>) -> Result<Self> {
        if cq.is_shared() {
            return Err(EINVAL);
        }
        let mut list = srq.shares.list.lock();
        match list
            .iter_mut()
            .find(|entry| Arc::ptr_eq(entry.lease.cq(), cq))
        {
            // INVARIANT: One more.
            Some(entry) => entry.qps += 1,
            None => {
                let lease = cq::lease(cq, srq.slots)?;
                // INVARIANT: The first.
                list.push(Entry { lease, qps: 1 }, GFP_KERNEL)?;
            }
        }
        Ok(Self {
            srq: srq.clone(),
            cq: cq.clone(),
        })
    }

    pub(crate) fn cq(&self) -> &Arc<cq::Inner> {
        &self.cq
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.srq.shares.list.lock().retain(|entry| {
            if !Arc::ptr_eq(entry.lease.cq(), &self.cq) {
                return true;
            }
            // INVARIANT: This one goes.
            entry.qps -= 1;
            entry.qps != 0
        });
    }
}
