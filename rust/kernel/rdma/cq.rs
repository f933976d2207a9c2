// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! Who polls a [`Cq`], and where handlers run, is the type's parameter:
//!
//! - [`Softirq`](crate::context::Softirq), [`Workqueue`](crate::context::Workqueue) and
//!   [`UnboundWorkqueue`](crate::context::UnboundWorkqueue): the RDMA core, which calls the
//!   [`CqeHandler`](crate::cqe::CqeHandler) of each request ([`Cq::alloc`]). Such CQs can be shared
//!   ([`Cq::pool_get`]).
//! - [`Direct`]: whoever has it, which calls handlers ([`Cq::process`],
//!   [`Cq::process_with`]) or takes completions without ([`Cq::poll`], [`Cq::next`]).
//! - [`Waited`](crate::context::Waited): as a direct one, and completions can be waited for
//!   ([`Cq::wait`]).
//!
//! Overrun is made impossible by leases: a QP takes as many entries as its queues can have
//! outstanding when it is created, and creation fails where there is no room.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cq`);
//! C source: `drivers/infiniband/core/cq.c`

mod batch;
mod lease;
mod poll;
mod pool;
mod room;
mod set;
mod wait;
mod watch;

pub use batch::{
    Batch,
    Completion,
    Completions, //
};
pub(crate) use lease::{
    lease,
    Lease, //
};
pub use set::CqSet;
pub use wait::Wait;

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
    cpu::nr_cpu_ids,
    error::{
        from_err_ptr,
        to_result, //
    },
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
use watch::Watch;

/// What the handles of one completion queue share.
///
/// # Invariants
///
/// `entries` are the CQ's own, or those taken of it where it is shared.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_cq>,
    pub(crate) dev: Device,
    entries: u32,
    room: Room,
    state: Deferred<State>,
}

// SAFETY: `struct ib_cq` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: As above.
unsafe impl Sync for Inner {}

impl Inner {
    fn new(dev: &Device, entries: u32, state: Deferred<State>) -> Result<Arc<Self>> {
        let inner = Self {
            raw: state.raw,
            dev: dev.clone(),
            entries,
            room: Room::new(entries.try_into()?),
            state,
        };
        Ok(Arc::new(inner, GFP_KERNEL)?)
    }

    /// Says whether the current task is in a handler of this CQ, where waiting for the CQ would
    /// never end.
    pub(crate) fn is_polled_by_current(&self) -> bool {
        // SAFETY: The CQ is there while `self` lives; the helper only compares.
        unsafe { bindings::rdma_helper_cq_is_polled_by_current(self.raw.as_ptr()) }
    }

    /// Says whether the CQ has lost completions.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.watch().is_some_and(|watch| watch.has_failed())
    }

    /// Says whether nobody but its users polls the CQ.
    pub(crate) fn is_caller_polled(&self) -> bool {
        // SAFETY: The CQ is there while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).poll_ctx == Direct::RAW }
    }

    /// Says whether other modules may use, and poll, the CQ too.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.state.origin, Origin::Pooled { .. })
    }

    #[inline]
    fn watch(&self) -> Option<&Watch> {
        match &self.state.origin {
            Origin::Allocated(watch) | Origin::Created(watch) => Some(watch),
            Origin::Pooled { .. } => None,
        }
    }
}

/// How a CQ was made, and so how it ends.
enum Origin {
    Allocated(Arc<Watch>),
    Created(Arc<Watch>),
    Pooled { entries: u32 },
}

/// # Invariants
///
/// `raw` is a CQ of `dev` that was made as `origin` says; the watch is its context.
struct State {
    raw: NonNull<bindings::ib_cq>,
    origin: Origin,
    dev: Device,
    _hold: Hold,
}

// SAFETY: A CQ may be freed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        let cq = self.raw.as_ptr();
        match &self.origin {
            // SAFETY: By the type invariant; QPs hold `Inner`, so none uses the CQ. This is the
            // fence after which no handler runs.
            Origin::Allocated(_) => unsafe { bindings::ib_free_cq(cq) },
            Origin::Created(watch) => {
                self.dev.inner().removal.remove(watch);
                // SAFETY: As above. Nobody polls the CQ any more, and this is the fence after which
                // no `comp_handler` runs.
                let ret = unsafe { bindings::ib_destroy_cq_user(cq, core::ptr::null_mut()) };
                if ret != 0 {
                    pr_err!("a CQ could not be destroyed ({ret}); it is leaked\n");
                    return Fate::Leak;
                }
            }
            // SAFETY: By the type invariant, and no QP of ours uses the CQ, as above.
            Origin::Pooled { entries } => unsafe { pool::put(cq, *entries, cx) },
        }
        Fate::Gone
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
        Self::from_inner(self.inner.clone())
    }
}

/// Checks the size of a CQ.
fn check(dev: &Device, entries: u32) -> Result {
    if entries == 0 || entries > dev.max_cqe() {
        pr_err!(
            "{dev}: a CQ of {entries} entries was asked for; 1 to {} are possible\n",
            dev.max_cqe()
        );
        return Err(EINVAL);
    }
    Ok(())
}

/// What a CQ is to be.
struct Request {
    entries: u32,
    vector: Option<u32>,
    context: bindings::ib_poll_context,
    waited: bool,
}

impl Request {
    fn new<C: PollContext>(entries: u32, vector: Option<u32>) -> Self {
        Self {
            entries,
            vector,
            context: C::RAW,
            waited: C::WAITED,
        }
    }
}

/// Allocates or creates a CQ. Not generic, so that what the CQ needs at its end is code of this
/// module.
#[inline(never)]
fn alloc(dev: &Device, request: &Request, _cx: &Sleepable) -> Result<Arc<Inner>> {
    check(dev, request.entries)?;
    let entries = request.entries.try_into()?;
    if request.vector.is_some_and(|n| n >= dev.num_comp_vectors()) {
        return Err(EINVAL);
    }
    let reserved = Deferred::reserve()?;
    let watch = Watch::new()?;
    let hold = dev.hold(Kind::Cq);
    let caller = dev.client().name.as_char_ptr();
    let private = Arc::as_ptr(&watch).cast_mut().cast();
    let attr = bindings::ib_cq_init_attr {
        cqe: request.entries,
        comp_vector: request.vector.unwrap_or_else(|| any_vector(dev)),
        flags: 0,
    };
    let raw = match request.vector {
        _ if request.waited => {
            dev.inner().removal.add(watch.clone())?;
            // SAFETY: The device is registered while `dev` lives, the arguments are in range, the
            // callbacks' context and the client's name outlive the CQ.
            unsafe {
                bindings::__ib_create_cq(
                    dev.as_raw(),
                    Some(watch::completed),
                    Some(watch::event),
                    private,
                    &attr,
                    caller,
                )
            }
        }
        // SAFETY: As above.
        Some(vector) => unsafe {
            bindings::__ib_alloc_cq(
                dev.as_raw(),
                private,
                entries,
                vector.try_into()?,
                request.context,
                caller,
            )
        },
        // SAFETY: As above.
        None => unsafe {
            bindings::__ib_alloc_cq_any(dev.as_raw(), private, entries, request.context, caller)
        },
    };
    let raw = from_err_ptr(raw).and_then(|raw| NonNull::new(raw).ok_or(ENOMEM));
    let raw = raw.inspect_err(|_| {
        if request.waited {
            dev.inner().removal.remove(&watch);
        }
    })?;
    // SAFETY: Just made; nothing completes to it yet, so nothing fails, and nobody looks at how it
    // is polled.
    unsafe {
        (*raw.as_ptr()).event_handler = Some(watch::event);
        if request.waited {
            (*raw.as_ptr()).poll_ctx = request.context;
            (*raw.as_ptr()).comp_vector = attr.comp_vector;
        }
    }
    // SAFETY: As above. The driver may have given more entries than were asked for.
    let given = unsafe { (*raw.as_ptr()).cqe };
    let origin = if request.waited {
        Origin::Created(watch)
    } else {
        Origin::Allocated(watch)
    };
    // INVARIANT: Just made.
    let state = reserved.fill(State {
        raw,
        origin,
        dev: dev.clone(),
        _hold: hold,
    });
    Inner::new(dev, given.try_into()?, state)
}

/// Chooses a completion vector as `ib_alloc_cq_any` does.
fn any_vector(dev: &Device) -> u32 {
    static NEXT: Atomic<u32> = Atomic::new(0);
    let vectors = dev.num_comp_vectors().min(nr_cpu_ids());
    NEXT.fetch_add(1, Relaxed).checked_rem(vectors).unwrap_or(0)
}

impl<C: PollContext> Cq<C> {
    /// Allocates a CQ with at least `entries` entries on completion vector `vector`
    /// (`ib_alloc_cq`; `ib_create_cq` for a [`Waited`](crate::context::Waited) one).
    ///
    /// Size it by [`Caps::entries`](crate::qp::Caps::entries) of the QPs that will use it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device has no CQ of that size or no such vector; `ENODEV` for a `Waited` one
    /// if the device is being removed; `ENOMEM`, or the driver's error.
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
        let request = Request::new::<C>(entries, Some(vector));
        Ok(Self::from_inner(alloc(dev, &request, cx)?))
    }

    /// Allocates a CQ on a completion vector of the core's choice (`ib_alloc_cq_any`).
    ///
    /// # Errors
    ///
    /// As [`Cq::alloc`].
    pub fn alloc_any(dev: &Device, entries: u32, cx: &Sleepable) -> Result<Self> {
        let request = Request::new::<C>(entries, None);
        Ok(Self::from_inner(alloc(dev, &request, cx)?))
    }

    fn from_inner(inner: Arc<Inner>) -> Self {
        Self {
            inner,
            _context: PhantomData,
        }
    }

    /// Has the device tell of completions once there are `count` of them, or `period_us`
    /// microseconds after the first (`rdma_set_cq_moderation`).
    ///
    /// Process context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot, or if the CQ is shared; or the driver's error.
    pub fn moderate(&self, count: u16, period_us: u16, _cx: &Sleepable) -> Result {
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is there while `self` lives.
        to_result(unsafe { bindings::rdma_set_cq_moderation(cq, count, period_us) })
    }

    /// Returns the number of entries: those that the driver gave or, of a shared CQ, those that
    /// were taken.
    pub fn entries(&self) -> u32 {
        self.inner.entries
    }

    /// Returns the number of entries that no QP has leased.
    pub fn free_entries(&self) -> u32 {
        self.inner.room.free().try_into().unwrap_or(0)
    }

    /// Returns the completion vector that the CQ is on.
    pub fn vector(&self) -> u32 {
        // SAFETY: The CQ is there while `self` lives; the field does not change.
        unsafe { (*self.inner.raw.as_ptr()).comp_vector }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.dev
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}
