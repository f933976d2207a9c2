// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

mod attr;
mod batch;
mod caps;
mod chain;
mod events;
mod init;
pub(crate) mod inner;
mod link;
mod modify;
mod owner;
mod parked;
mod place;
pub(crate) mod post;
mod query;
mod repost;
mod signal;
mod state;
mod times;
mod transfers;

pub use attr::{
    Access,
    Attr,
    Mtu, //
};
pub use batch::{
    Batch,
    BatchError, //
};
pub use caps::Caps;
pub use chain::{
    Chain,
    ChainError, //
};
pub use events::{
    Event,
    Events, //
};
pub use init::Init;
pub(crate) use init::Rw;
pub use link::Link;
pub use modify::ModifyError;
pub(crate) use place::{
    Place,
    Serial, //
};
pub use query::Info;
pub use state::{
    AttrMask,
    Service,
    State,
    Transition, //
};
pub(crate) use transfers::Transfers;

use crate::{
    bindings,
    cm,
    context::{
        PollContext,
        Sleepable, //
    },
    cq::Cq,
    deferred::Deferred,
    drain::{
        Markers,
        PATIENCE_MS, //
    },
    pd::{
        self,
        Pd, //
    }, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use inner::{
    Inner,
    Parts, //
};
use kernel::{
    prelude::*,
    sync::SpinLockIrq, //
};
use owner::Origin;
use repost::Poller;

/// A reliable connected queue pair, whose queues complete in contexts `S` and `R`.
///
/// A `&Qp` proves that the QP exists, so posting checks nothing. When the last reference to it is
/// dropped, a work item moves it to the error state, waits until every request has completed, and
/// only then destroys it.
///
/// # Invariants
///
/// `place` is that of the QP of `inner`, and its queues complete to CQs that are polled in `S` and
/// `R`, by `pollers`.
pub struct Qp<S: PollContext, R: PollContext = S> {
    pub(crate) place: Place,
    /// The PD of receives; none if the QP takes them from an SRQ, so that no entry is of it.
    recv_pd: pd::Id,
    /// Of the CQs of both queues.
    pollers: (Poller, Poller),
    /// How many sends it was made for.
    sends: u32,
    pub(crate) inner: Deferred<Inner>,
    _contexts: PhantomData<fn() -> (S, R)>,
}

// SAFETY: `struct ib_qp` may be used from any thread.
unsafe impl<S: PollContext, R: PollContext> Send for Qp<S, R> {}
// SAFETY: Drivers lock the queues, so several threads may post at once; the rest is `Sync`, or is
// only read.
unsafe impl<S: PollContext, R: PollContext> Sync for Qp<S, R> {}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Creates the QP of a connection (`rdma_create_qp`), ready for receives.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device cannot have such queues, or if `id`, `pd` and the CQs are not all of
    /// one device; `EBUSY` if the id has a QP; `ENOSPC` if a CQ has not enough free entries: see
    /// [`Caps::entries`]; or the driver's error.
    pub fn create(
        id: &cm::Id,
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        cx: &Sleepable,
    ) -> Result<Self> {
        Init::new(pd, send_cq, recv_cq, caps).create_for(id, cx)
    }

    /// Creates a QP that belongs to no connection manager's id (`ib_create_qp`), in the reset
    /// state: nothing can be posted to it yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device cannot have such queues, or if `pd` and the CQs are not all of one
    /// device; `ENOSPC` if a CQ has not enough free entries: see [`Caps::entries`]; or the driver's
    /// error.
    pub fn create_raw(
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        cx: &Sleepable,
    ) -> Result<Self> {
        Init::new(pd, send_cq, recv_cq, caps).create(cx)
    }

    fn new(parts: &Parts<'_>, origin: Origin<'_>, cx: &Sleepable) -> Result<Self> {
        let inner = inner::create(parts, origin, cx)?;
        // INVARIANT: As created.
        Ok(Self {
            // SAFETY: It was just created for this PD, and `inner` keeps it.
            place: unsafe { Place::new(inner.raw, parts.pd) },
            recv_pd: match parts.srq {
                Some(_) => pd::Id::NONE,
                None => parts.pd.id(),
            },
            pollers: (Poller::of(parts.send_cq), Poller::of(parts.recv_cq)),
            sends: parts.caps.send_wr,
            inner,
            _contexts: PhantomData,
        })
    }

    /// Returns the lock under which shared regions are marked registered and posted. Who has it,
    /// and finds one registered through this QP, knows that the request is in the queue.
    ///
    /// Drivers do not call back from a post, so nothing else is locked under it but what is theirs.
    pub(crate) fn turn(&self) -> &SpinLockIrq<()> {
        &self.inner.context.turn
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_qp {
        self.place.raw.as_ptr()
    }

    pub(crate) fn as_non_null(&self) -> NonNull<bindings::ib_qp> {
        self.place.raw
    }

    /// Returns the count of what keeps the QP after its drain.
    pub(crate) fn transfers(&self) -> &Transfers {
        &self.inner.context.transfers
    }

    /// Keeps an owner, of which requests were posted whose completion does not give it back, until
    /// the QP was drained. It is called a `T` where the QP is shown.
    pub(crate) fn park<P: Send + 'static, T: ?Sized>(&self, owner: P) {
        self.inner.park::<P, T>(owner);
    }

    /// Returns the QP's number.
    pub fn num(&self) -> u32 {
        // SAFETY: The QP is valid by the invariant of `Place`; its number does not change.
        unsafe { self.place.raw.as_ref() }.qp_num
    }

    /// Moves the QP to the error state and waits until every request that was posted has completed
    /// (`ib_drain_qp`).
    ///
    /// Their handlers have then returned, too, but for those of a direct CQ that another thread, or
    /// a caller of this one, is processing. What they post meanwhile is flushed as well, some time:
    /// where the caller polls the CQ, a second drain waits for it.
    ///
    /// # Errors
    ///
    /// Nothing is known to be drained on any error: `EDEADLK` in a handler of the QP's CQs,
    /// `EOVERFLOW` if a CQ has lost completions, `ETIMEDOUT` after a minute, `ENOMEM`, or what the
    /// driver said.
    pub fn drain(&self, cx: &Sleepable) -> Result {
        self.drain_within(PATIENCE_MS, cx)
    }

    /// As [`Qp::drain`], but gives up after `timeout_ms` milliseconds.
    ///
    /// # Errors
    ///
    /// As [`Qp::drain`], with its own time.
    pub fn drain_within(&self, timeout_ms: u32, cx: &Sleepable) -> Result {
        self.inner.drain(Markers::new()?, timeout_ms, cx)
    }

    /// Drains and destroys the QP and waits for that, where dropping it leaves it to a work item.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a handler of the QP's CQs: the QP is then destroyed by a work item. `EIO` if
    /// the QP could not be drained or destroyed: it is leaked, and was reported.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        Inner::destroy(self.inner, cx)
    }
}
