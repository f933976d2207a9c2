// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! A [`Cq`] is what `ib_alloc_cq` gives: completions are dispatched to the
//! [`CqeHandler`](crate::cqe::CqeHandler) of each request, in the polling context that is the
//! type's parameter.
//!
//! Overrun is made impossible by leases: a QP takes as many entries as its queues can have
//! outstanding when it is created, and creation fails where there is no room.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cq`);
//! C source: `drivers/infiniband/core/cq.c`

mod room;

use crate::{
    bindings,
    context::{
        Direct,
        PollContext,
        Sleepable, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    gate::{
        Hold,
        Kind, //
    }, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    }, //
};
use room::Room;

/// What the handles of one completion queue share.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_cq>,
    pub(crate) dev: Device,
    room: Room,
    state: Deferred<State>,
}

// SAFETY: `struct ib_cq` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: As above.
unsafe impl Sync for Inner {}

impl Inner {
    /// Says whether the current task is in a handler of this CQ, where waiting for the CQ would
    /// never end.
    pub(crate) fn is_polled_by_current(&self) -> bool {
        // SAFETY: The CQ is allocated while `self` lives; the helper only compares.
        unsafe { bindings::rdma_helper_cq_is_polled_by_current(self.raw.as_ptr()) }
    }

    /// Says whether the CQ has lost completions.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.failed.load(Relaxed) != 0
    }

    pub(crate) fn is_direct(&self) -> bool {
        // SAFETY: The CQ is allocated while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).poll_ctx == Direct::RAW }
    }

    fn entries(&self) -> u32 {
        // SAFETY: The CQ is allocated while `self` lives; nothing resizes it.
        let entries = unsafe { (*self.raw.as_ptr()).cqe };
        entries.try_into().unwrap_or(0)
    }
}

/// # Invariants
///
/// `raw` is an allocated CQ.
struct State {
    raw: NonNull<bindings::ib_cq>,
    /// Set by C when the device says that the CQ has failed; its address is the CQ's context.
    failed: KBox<Atomic<u32>>,
    _hold: Hold,
}

// SAFETY: A CQ may be freed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant; QPs hold `Inner`, so none uses the CQ. This is the fence
        // after which no handler runs.
        unsafe { bindings::ib_free_cq(self.raw.as_ptr()) };
        Fate::Gone
    }
}

/// Entries of a CQ that a QP has reserved; given back when dropped.
///
/// # Invariants
///
/// `entries` were taken from the room of `cq`.
pub(crate) struct Lease {
    cq: Arc<Inner>,
    entries: i32,
}

impl Lease {
    pub(crate) fn cq(&self) -> &Arc<Inner> {
        &self.cq
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.cq.room.give(self.entries);
    }
}

/// A completion queue that is polled in context `C`.
///
/// A counted handle. The CQ is freed, from a work item, when the last handle and every QP that uses
/// it are gone.
pub struct Cq<C: PollContext> {
    inner: Arc<Inner>,
    _context: PhantomData<fn() -> C>,
}

impl<C: PollContext> Clone for Cq<C> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            _context: PhantomData,
        }
    }
}

/// Allocates a CQ. Not generic, so that what the CQ needs at its end is code of this module.
#[inline(never)]
fn alloc(
    dev: &Device,
    entries: u32,
    vector: Option<u32>,
    context: bindings::ib_poll_context,
    _cx: &Sleepable,
) -> Result<Arc<Inner>> {
    if entries == 0 || entries > dev.max_cqe() {
        pr_err!(
            "{dev}: a CQ of {entries} entries was asked for; 1 to {} are possible\n",
            dev.max_cqe()
        );
        return Err(EINVAL);
    }
    let reserved = Deferred::reserve()?;
    let hold = dev.hold(Kind::Cq);
    let entries = entries.try_into()?;
    let caller = dev.client().name.as_char_ptr();
    let failed = KBox::new(Atomic::new(0u32), GFP_KERNEL)?;
    let private = core::ptr::from_ref(&*failed).cast_mut().cast();
    let raw = match vector {
        Some(vector) if vector >= dev.num_comp_vectors() => return Err(EINVAL),
        // SAFETY: The device is registered while `dev` lives, the arguments are in range, and the
        // client's name outlives the CQ.
        Some(vector) => unsafe {
            bindings::__ib_alloc_cq(
                dev.as_raw(),
                private,
                entries,
                vector.try_into()?,
                context,
                caller,
            )
        },
        // SAFETY: As above.
        None => unsafe {
            bindings::__ib_alloc_cq_any(dev.as_raw(), private, entries, context, caller)
        },
    };
    let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
    // INVARIANT: Just allocated.
    let state = reserved.fill(State {
        raw,
        failed,
        _hold: hold,
    });
    // SAFETY: Just allocated; nothing completes to it yet, so nothing fails.
    unsafe { bindings::rdma_helper_cq_watch(raw.as_ptr()) };
    // SAFETY: Just allocated. The driver may have given more entries than were asked for.
    let given = unsafe { (*raw.as_ptr()).cqe };
    Ok(Arc::new(
        Inner {
            raw,
            dev: dev.clone(),
            room: Room::new(given),
            state,
        },
        GFP_KERNEL,
    )?)
}

/// Takes `entries` entries, all or nothing.
pub(crate) fn lease(cq: &Arc<Inner>, entries: u32) -> Result<Lease> {
    let entries: i32 = entries.try_into()?;
    cq.room.take(entries).map_err(|free| {
        pr_err!(
            "{}: a QP needs {entries} CQ entries, {free} of {} are free\n",
            cq.dev,
            cq.entries()
        );
        ENOSPC
    })?;
    // INVARIANT: Just taken.
    Ok(Lease {
        cq: cq.clone(),
        entries,
    })
}

impl<C: PollContext> Cq<C> {
    /// Allocates a CQ with at least `entries` entries on completion vector `vector`
    /// (`ib_alloc_cq`).
    ///
    /// Size it by [`Caps::entries`](crate::qp::Caps::entries) of the QPs that will use it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device has no CQ of that size or no such vector; `ENOMEM`, or the driver's
    /// error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Softirq}, cq::Cq, device::Device};
    /// fn make(dev: &Device, cx: &Sleepable) -> Result<Cq<Softirq>> {
    ///     Cq::alloc(dev, 128, 0, cx)
    /// }
    /// ```
    pub fn alloc(dev: &Device, entries: u32, vector: u32, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            inner: alloc(dev, entries, Some(vector), C::RAW, cx)?,
            _context: PhantomData,
        })
    }

    /// Allocates a CQ on a completion vector of the core's choice (`ib_alloc_cq_any`).
    ///
    /// # Errors
    ///
    /// As [`Cq::alloc`].
    pub fn alloc_any(dev: &Device, entries: u32, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            inner: alloc(dev, entries, None, C::RAW, cx)?,
            _context: PhantomData,
        })
    }

    /// Returns the number of entries that the driver gave.
    pub fn entries(&self) -> u32 {
        self.inner.entries()
    }

    /// Returns the number of entries that no QP has leased.
    pub fn free_entries(&self) -> u32 {
        self.inner.room.free().try_into().unwrap_or(0)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.dev
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Cq<Direct> {
    /// Runs the handlers of at most `budget` completions and returns their number
    /// (`ib_process_cq_direct`).
    ///
    /// May be called in any context, also from several threads at once; handlers then run at the
    /// same time.
    #[inline]
    pub fn process(&self, budget: u32) -> u32 {
        let budget = i32::try_from(budget).unwrap_or(i32::MAX);
        // SAFETY: The CQ is allocated while `self` lives, and is a direct one by its type. The
        // budget is not negative, so it is bounded.
        let n = unsafe { bindings::ib_process_cq_direct(self.inner.raw.as_ptr(), budget) };
        n.try_into().unwrap_or(0)
    }
}
