// SPDX-License-Identifier: GPL-2.0

//! What all kinds of CQs are made of: the C object, its room, and its end.

use super::{
    pool,
    room::Room,
    seat::Seat,
    watch::Watch, //
};
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
    objects::Listed,
    wc::Wc, //
};
use core::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// What the handles of one completion queue share.
///
/// # Invariants
///
/// `entries` are the CQ's own, or those taken of it where it is shared.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_cq>,
    pub(crate) dev: Device,
    pub(super) entries: u32,
    pub(super) room: Room,
    seat: Seat,
    /// Of a CQ that the RDMA core does not poll, for who has the seat.
    wcs: Option<KBox<UnsafeCell<Wcs>>>,
    state: Deferred<State>,
}

// SAFETY: `struct ib_cq` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: `struct ib_cq` may be used from any thread, and only who has the seat uses `wcs`.
unsafe impl Sync for Inner {}

impl Inner {
    pub(super) fn new(dev: &Device, entries: u32, state: Deferred<State>) -> Result<Arc<Self>> {
        let mut inner = Self {
            raw: state.raw,
            dev: dev.clone(),
            entries,
            room: Room::new(entries.try_into()?),
            seat: Seat::new(),
            wcs: None,
            state,
        };
        if inner.is_caller_polled() {
            let wcs = [const { MaybeUninit::uninit() }; ROW];
            inner.wcs = Some(KBox::new(UnsafeCell::new(wcs), GFP_KERNEL)?);
        }
        Ok(Arc::new(inner, GFP_KERNEL)?)
    }

    /// Says whether the current task is in a handler of this CQ, where waiting for the CQ would
    /// never end.
    pub(crate) fn is_polled_by_current(&self) -> bool {
        let holder = self.seat.holder();
        // SAFETY: The CQ is there while `self` lives; the helper only compares.
        unsafe { bindings::rdma_helper_cq_is_polled_by_current(self.raw.as_ptr(), holder) }
    }

    /// Takes the seat of a CQ that the RDMA core does not poll, for as long as what is returned
    /// lives; `None` if somebody else has it.
    #[inline]
    pub(crate) fn sit(&self) -> Option<Seated<'_>> {
        let here = MaybeUninit::<u8>::uninit();
        let wcs = self.wcs.as_ref()?.get();
        self.seat.take((&raw const here).addr()).then(|| {
            let seat = &self.seat;
            // INVARIANT: Just taken.
            Seated { seat, wcs }
        })
    }

    /// Says whether somebody has the seat.
    pub(super) fn is_taken(&self) -> bool {
        self.seat.holder() != 0
    }

    /// Returns where the completions are that its poller dispatches; null if there may be others.
    pub(crate) fn polled_into(&self) -> *const Wc {
        match &self.wcs {
            Some(wcs) => wcs.get().cast_const().cast(),
            None if self.is_shared() => core::ptr::null(),
            // SAFETY: The CQ is there while `self` lives, and its array does not change.
            None => unsafe { (*self.raw.as_ptr()).wc }.cast_const().cast(),
        }
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
    pub(super) fn watch(&self) -> Option<&Watch> {
        match &self.state.origin {
            Origin::Allocated(watch) | Origin::Created(watch) => Some(watch),
            Origin::Pooled { .. } => None,
        }
    }
}

/// The right to poll a CQ that the RDMA core does not poll: see [`Seat`].
///
/// # Invariants
///
/// Who has this has the seat, and with it the room at `wcs`, which is valid for `'a`.
pub(crate) struct Seated<'a> {
    seat: &'a Seat,
    wcs: *mut Wcs,
}

impl Seated<'_> {
    /// Returns the room for what is polled.
    #[inline]
    pub(super) fn room(&mut self) -> &mut Wcs {
        // SAFETY: By the type invariant who has this has the room, which is valid for `'a`.
        unsafe { &mut *self.wcs }
    }
}

impl Drop for Seated<'_> {
    #[inline]
    fn drop(&mut self) {
        self.seat.leave();
    }
}

/// Room for the completions that are polled at once.
type Wcs = [MaybeUninit<bindings::ib_wc>; ROW];

/// How many completions are polled at once (`IB_POLL_BATCH`).
pub(super) const ROW: usize = 16;

/// How a CQ was made, and so how it ends.
pub(super) enum Origin {
    Allocated(Arc<Watch>),
    Created(Arc<Watch>),
    Pooled { entries: u32 },
}

/// A CQ, and what it needs at its end.
///
/// # Invariants
///
/// `raw` is a CQ of `dev` that was made as `origin` says; the watch is its context.
pub(super) struct State {
    pub(super) raw: NonNull<bindings::ib_cq>,
    pub(super) origin: Origin,
    pub(super) dev: Device,
    pub(super) _hold: Listed,
}

// SAFETY: A CQ may be freed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        let cq = self.raw.as_ptr();
        match &self.origin {
            // SAFETY: By the type invariant `raw` is from `ib_alloc_cq`; QPs hold `Inner`, so none
            // uses the CQ. This is the fence after which no handler runs: first for the poll of a
            // softirq CQ, which the second call would free under its last steps, and then, in the
            // second, for that of others.
            Origin::Allocated(_) => unsafe {
                bindings::rdma_helper_cq_end_poll(cq);
                bindings::ib_free_cq(cq);
            },
            Origin::Created(watch) => {
                self.dev.inner().removal.remove(watch);
                // SAFETY: By the type invariant `raw` is from `ib_create_cq`; QPs hold `Inner`, so
                // none uses the CQ, and nobody polls it any more. This is the fence after which no
                // `comp_handler` runs.
                let ret = unsafe { bindings::ib_destroy_cq_user(cq, core::ptr::null_mut()) };
                if ret != 0 {
                    pr_err!("a CQ could not be destroyed ({ret}); it is leaked\n");
                    return Fate::Leak;
                }
            }
            // SAFETY: By the type invariant so many entries were taken of `raw`; QPs hold `Inner`,
            // so none of ours uses the CQ.
            Origin::Pooled { entries } => unsafe { pool::put(cq, *entries, cx) },
        }
        Fate::Gone
    }
}
