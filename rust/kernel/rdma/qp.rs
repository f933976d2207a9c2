// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

mod post;

use crate::{
    bindings,
    cm,
    context::{
        PollContext,
        Sleepable, //
    },
    cq::{
        self,
        Cq,
        Lease, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    drain::{
        drain,
        Markers, //
    },
    gate::{
        Hold,
        Kind, //
    },
    pd::Pd, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// The sizes of a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Requests that can be outstanding on the send queue.
    pub send_wr: u32,
    /// Requests that can be outstanding on the receive queue.
    pub recv_wr: u32,
    /// Entries of a send request.
    pub send_sge: u32,
    /// Entries of a receive request.
    pub recv_sge: u32,
}

impl Caps {
    /// Returns the sizes of queues whose requests have one entry each.
    pub const fn new(send_wr: u32, recv_wr: u32) -> Self {
        Self {
            send_wr,
            recv_wr,
            send_sge: 1,
            recv_sge: 1,
        }
    }

    /// Returns how many CQ entries a QP of this size leases, at the most, from a CQ that serves
    /// both its queues.
    ///
    /// That is one for each request and one for the drain of each queue, rounded up as drivers do.
    pub const fn entries(&self) -> u32 {
        const fn round_up(wr: u32) -> u32 {
            match wr.saturating_add(2).checked_next_power_of_two() {
                Some(entries) => entries,
                None => u32::MAX,
            }
        }
        round_up(self.send_wr).saturating_add(round_up(self.recv_wr))
    }
}

/// What a QP needs at its end.
///
/// # Invariants
///
/// `raw` is the QP of `id`, completes to the CQs of the leases and belongs to `_pd`.
struct State {
    raw: NonNull<bindings::ib_qp>,
    send: Lease,
    recv: Lease,
    markers: Option<Markers>,
    id: cm::QpClaim,
    _pd: Pd,
    _hold: Hold,
}

// SAFETY: A QP may be drained and destroyed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant.
        let drained = self.markers.take().ok_or(EIO).and_then(|markers| unsafe {
            drain(
                self.raw.as_ptr(),
                self.send.cq(),
                self.recv.cq(),
                markers,
                cx,
            )
        });
        if let Err(e) = drained {
            // SAFETY: As above.
            let num = unsafe { (*self.raw.as_ptr()).qp_num };
            let dev = &self.send.cq().dev;
            pr_err!("{dev}: QP {num} was not drained ({e:?}): it is leaked and holds its device\n");
            return Fate::Leak;
        }
        // SAFETY: The QP is the id's, is drained, and nobody can post to it any more.
        unsafe { bindings::rdma_destroy_qp(self.id.as_raw()) };
        Fate::Gone
    }
}

/// Returns how many requests the driver really lets be outstanding, given the sizes that it
/// returned.
///
/// Some round up and do not say so at creation, so they are asked again. Those that cannot tell are
/// taken to round up to a power of two.
///
/// # Safety
///
/// `qp` is valid.
unsafe fn given(qp: *mut bindings::ib_qp, returned: &bindings::ib_qp_cap) -> bindings::ib_qp_cap {
    let mut attr = bindings::ib_qp_attr::default();
    let mut init = bindings::ib_qp_init_attr::default();
    let mask = bindings::ib_qp_attr_mask_IB_QP_CAP as c_int;
    // SAFETY: By the caller's promise.
    let asked = unsafe { bindings::ib_query_qp(qp, &raw mut attr, mask, &raw mut init) } == 0;
    let more = |returned: u32, attr: u32, init: u32| {
        if asked {
            returned.max(attr).max(init)
        } else {
            returned.checked_next_power_of_two().unwrap_or(u32::MAX)
        }
    };
    bindings::ib_qp_cap {
        max_send_wr: more(
            returned.max_send_wr,
            attr.cap.max_send_wr,
            init.cap.max_send_wr,
        ),
        max_recv_wr: more(
            returned.max_recv_wr,
            attr.cap.max_recv_wr,
            init.cap.max_recv_wr,
        ),
        ..Default::default()
    }
}

/// Creates the QP of an id. Not generic, so that what the QP needs at its end is code of this
/// module.
#[inline(never)]
fn create(
    id: &Arc<cm::Inner>,
    pd: &Pd,
    send_cq: &Arc<cq::Inner>,
    recv_cq: &Arc<cq::Inner>,
    caps: &Caps,
    _cx: &Sleepable,
) -> Result<Deferred<State>> {
    let dev = pd.device();
    if send_cq.dev != *dev || recv_cq.dev != *dev || id.device_raw() != dev.as_raw() {
        return Err(EINVAL);
    }
    // The marker of a drain needs a place of its own.
    let with_marker = |wr: u32| {
        wr.checked_add(1)
            .filter(|n| *n <= dev.max_qp_wr())
            .ok_or(EINVAL)
    };
    let mut attr = bindings::ib_qp_init_attr {
        send_cq: send_cq.raw.as_ptr(),
        recv_cq: recv_cq.raw.as_ptr(),
        cap: bindings::ib_qp_cap {
            max_send_wr: with_marker(caps.send_wr)?,
            max_recv_wr: with_marker(caps.recv_wr)?,
            max_send_sge: caps.send_sge,
            max_recv_sge: caps.recv_sge,
            ..Default::default()
        },
        sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
        qp_type: bindings::ib_qp_type_IB_QPT_RC,
        ..Default::default()
    };
    let reserved = Deferred::reserve()?;
    let markers = Markers::new()?;
    let hold = dev.hold(Kind::Qp);
    let claim = id.claim_qp()?;
    // SAFETY: The id is bound to this device and has no QP, and PD and CQs are alive.
    to_result(unsafe { bindings::rdma_create_qp(id.as_raw(), pd.as_raw(), &raw mut attr) })?;
    // SAFETY: Creation has set the id's QP.
    let raw = unsafe { (*id.as_raw()).qp };

    // SAFETY: The QP was just created.
    let given = unsafe { given(raw, &attr.cap) };
    let leases = cq::lease(send_cq, given.max_send_wr)
        .and_then(|send| Ok((send, cq::lease(recv_cq, given.max_recv_wr)?)));
    match (NonNull::new(raw), leases) {
        (Some(raw), Ok((send, recv))) => {
            // INVARIANT: As created.
            Ok(reserved.fill(State {
                raw,
                send,
                recv,
                markers: Some(markers),
                id: claim,
                _pd: pd.clone(),
                _hold: hold,
            }))
        }
        (_, leases) => {
            // SAFETY: Nothing was posted to the QP.
            unsafe { bindings::rdma_destroy_qp(id.as_raw()) };
            Err(leases.err().unwrap_or(ENOMEM))
        }
    }
}

/// A reliable connected queue pair, whose queues complete in contexts `S` and `R`.
///
/// A `&Qp` proves that the QP exists, so posting checks nothing. When the last reference to it is
/// dropped, a work item moves it to the error state, waits until every request has completed, and
/// only then destroys it.
///
/// # Invariants
///
/// `raw` is the QP of `state`, its PD is `pd`, and its queues complete to CQs that are polled in
/// `S` and `R`.
pub struct Qp<S: PollContext, R: PollContext = S> {
    raw: NonNull<bindings::ib_qp>,
    pub(crate) pd: *const bindings::ib_pd,
    state: Deferred<State>,
    _contexts: PhantomData<fn() -> (S, R)>,
}

// SAFETY: `struct ib_qp` may be used from any thread.
unsafe impl<S: PollContext, R: PollContext> Send for Qp<S, R> {}
// SAFETY: As above; drivers lock the queues.
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
        let state = create(id.inner(), pd, send_cq.inner(), recv_cq.inner(), caps, cx)?;
        // INVARIANT: As created.
        Ok(Self {
            raw: state.raw,
            pd: pd.as_raw(),
            state,
            _contexts: PhantomData,
        })
    }

    /// Returns the QP's number.
    pub fn num(&self) -> u32 {
        // SAFETY: By the type invariant; the number does not change.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Moves the QP to the error state and waits until every request that was posted has completed
    /// (`ib_drain_qp`).
    ///
    /// Their handlers have then returned, too, but for those of a direct CQ that another thread, or a
    /// caller of this one, is processing. What is posted meanwhile is flushed as well, some time.
    ///
    /// # Errors
    ///
    /// Nothing is known to be drained on any error: `EDEADLK` in a handler of the QP's CQs,
    /// `EOVERFLOW` if a CQ has lost completions, `ETIMEDOUT` after a minute, `ENOMEM`, or what the
    /// driver said.
    pub fn drain(&self, cx: &Sleepable) -> Result {
        let state = &*self.state;
        let markers = Markers::new()?;
        // SAFETY: By the type invariant.
        unsafe {
            drain(
                self.raw.as_ptr(),
                state.send.cq(),
                state.recv.cq(),
                markers,
                cx,
            )
        }
    }

    /// Drains and destroys the QP and waits for that, where dropping it leaves it to a work item.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a handler of the QP's CQs: the QP is then destroyed by a work item. `EIO` if
    /// the QP could not be drained: it is leaked, and was reported.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        let state = &*self.state;
        if state.send.cq().is_polled_by_current() || state.recv.cq().is_polled_by_current() {
            return Err(EDEADLK);
        }
        match self.state.destroy(cx) {
            Fate::Gone => Ok(()),
            Fate::Leak => Err(EIO),
        }
    }
}
