// SPDX-License-Identifier: GPL-2.0

//! What all kinds of CQs are made of: the C object, its room, and its end.

use super::{
    pool,
    room::Room,
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
    gate::Hold, //
};
use core::ptr::NonNull;
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
    state: Deferred<State>,
}

// SAFETY: `struct ib_cq` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: As above.
unsafe impl Sync for Inner {}

impl Inner {
    pub(super) fn new(dev: &Device, entries: u32, state: Deferred<State>) -> Result<Arc<Self>> {
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
    pub(super) fn watch(&self) -> Option<&Watch> {
        match &self.state.origin {
            Origin::Allocated(watch) | Origin::Created(watch) => Some(watch),
            Origin::Pooled { .. } => None,
        }
    }
}

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
    pub(super) _hold: Hold,
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
