// SPDX-License-Identifier: GPL-2.0

//! CQs that the RDMA core shares among its users.
//!
//! C source: `drivers/infiniband/core/cq.c` (`ib_cq_pool_get`)

use super::{
    alloc::check,
    inner::{
        Origin,
        State, //
    },
    Cq,
    Inner, //
};
use crate::{
    bindings,
    context::{
        CorePolled,
        PollContext,
        Sleepable,
        Softirq, //
    },
    deferred::Deferred,
    device::Device,
    gate::Kind, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::{
        rcu::synchronize_rcu,
        Arc, //
    }, //
};

/// Takes entries of a pooled CQ. Not generic, so that what they need at their end is code of this
/// module.
#[inline(never)]
fn get(
    dev: &Device,
    entries: u32,
    vector: Option<u32>,
    context: bindings::ib_poll_context,
    _cx: &Sleepable,
) -> Result<Arc<Inner>> {
    // For more than a CQ can have, the core would look for ever.
    check(dev, entries)?;
    let reserved = Deferred::reserve()?;
    let hold = dev.list(Kind::Cq)?;
    let vector = match vector {
        Some(vector) => vector.try_into()?,
        None => -1,
    };
    // SAFETY: The device is registered while `dev` lives, and the arguments are in range.
    let raw = unsafe { bindings::ib_cq_pool_get(dev.as_raw(), entries, vector, context) };
    let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
    // SAFETY: Just taken; the number does not change.
    hold.set_num(unsafe { raw.as_ref() }.res.id);
    // INVARIANT: Just taken.
    let state = reserved.fill(State {
        raw,
        origin: Origin::Pooled { entries },
        dev: dev.clone(),
        _hold: hold,
    });
    Inner::new(dev, entries, state)
}

/// Gives entries back and waits until no handler of theirs is running.
///
/// Others go on using the CQ, and nothing but the last drain has told that the handlers have run.
/// The last of them may still have to return, and its code may be about to go.
///
/// # Safety
///
/// `cq` is a pooled CQ of which the caller has that many entries, and no QP of the caller's uses
/// it.
pub(super) unsafe fn put(cq: *mut bindings::ib_cq, entries: u32, _cx: &Sleepable) {
    // SAFETY: The CQ is there, and the union is what the context says.
    unsafe {
        if (*cq).poll_ctx == Softirq::RAW {
            // Softirqs are sections that RCU waits for.
            synchronize_rcu();
        } else {
            bindings::flush_work(&raw mut *(*cq).__bindgen_anon_1.work);
        }
        bindings::ib_cq_pool_put(cq, entries);
    }
}

impl<C: CorePolled> Cq<C> {
    /// Takes `entries` entries of a CQ that other users of the device share, other modules among
    /// them (`ib_cq_pool_get`). QPs lease from those entries as from those of a CQ of one's own.
    ///
    /// `vector` is a hint: the number of a completion vector or, modulo the number of vectors, of a
    /// CPU; or the core's choice.
    ///
    /// A shared CQ does not tell that it has failed, cannot be moderated, and is not for QPs on an
    /// SRQ. The entries are given
    /// back, from a work item, when the last handle and every QP that uses them are gone.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device has no CQ of that size; `ENOMEM`, or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Workqueue}, cq::Cq, device::Device};
    /// fn take(dev: &Device, cx: &Sleepable) -> Result<Cq<Workqueue>> {
    ///     Cq::pool_get(dev, 128, None, cx)
    /// }
    /// ```
    pub fn pool_get(
        dev: &Device,
        entries: u32,
        vector: Option<u32>,
        cx: &Sleepable,
    ) -> Result<Self> {
        Ok(Self::from_inner(get(dev, entries, vector, C::RAW, cx)?))
    }
}
