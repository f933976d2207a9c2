// SPDX-License-Identifier: GPL-2.0

//! Proof that a QP has no request outstanding.
//!
//! `ib_drain_qp` returns nothing and only warns when it fails. This does what it does (the QP goes
//! to the error state, and a marker request at the end of each queue completes after everything
//! before it) with every result checked. A driver's own drain returns nothing, and is called only
//! where that cannot be done.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`ib_drain_qp`)

mod marker;
mod wait;

pub(crate) use marker::Markers;
use marker::{
    RECV,
    SEND, //
};

use crate::{
    ah::Ah,
    bindings,
    context::Sleepable,
    cq,
    qp::{
        self,
        post::{
            recv_raw,
            send_raw,
            Refusal, //
        }, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::{
    prelude::*,
    sync::Arc, //
};
use wait::{
    Unposted,
    Wait, //
};

/// How long a drain may take before the QP is given up, in milliseconds.
pub(crate) const PATIENCE_MS: u32 = 60_000;

/// Posts the marker of a send queue.
///
/// # Safety
///
/// `qp` is valid. `wr` is of the kind that its type and the opcode ask for, and has no entries.
/// `cqe` is that of a marker which is there until the request has completed.
unsafe fn post_marker(
    qp: *mut bindings::ib_qp,
    wr: &mut bindings::ib_send_wr,
    opcode: bindings::ib_wr_opcode,
    cqe: *mut bindings::ib_cqe,
) -> Result<(), Refusal> {
    wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    wr.opcode = opcode;
    wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
    // What an earlier try has left.
    wr.next = core::ptr::null_mut();
    // SAFETY: `qp` and `wr`, now without a successor, are valid, and the marker is there until the
    // request has completed, as the caller promises.
    match unsafe { send_raw(qp, wr) } {
        0 => Ok(()),
        // SAFETY: `wr` is valid, and `ret` is what `send_raw` has just returned for it.
        ret => Err(unsafe { Refusal::of_send(ret, wr) }),
    }
}

/// Says whether a driver tells that a QP takes nothing from its SRQ any more.
///
/// siw does not (`siw_verbs_modify_qp()`): it moves a QP to the error state under a lock that
/// excludes its receives, and completes the one that it is in the midst of before the call returns.
fn has_last_wqe_event(ops: &bindings::ib_device_ops) -> bool {
    ops.driver_id != bindings::rdma_driver_id_RDMA_DRIVER_SIW
}

/// Waits until a QP that is in the error state takes nothing from its SRQ any more, and the
/// completions of all that it took are in its CQ (`IB_EVENT_QP_LAST_WQE_REACHED`).
///
/// # Safety
///
/// `qp` is a valid QP on an SRQ.
unsafe fn last_wqe_reached(qp: *mut bindings::ib_qp, wait: &Wait<'_>) -> Result {
    // SAFETY: `qp` is valid and on an SRQ, as the caller promises. The core has initialised the
    // completion of every QP.
    unsafe {
        let reached = &raw mut (*qp).srq_completion;
        wait.wait_for(reached)?;
        // The event comes once, and there may be another drain.
        bindings::complete_all(reached);
    }
    Ok(())
}

/// Has the driver drain a queue by itself if it can, after a marker was refused, or fails with what
/// it has said.
///
/// mlx4, mlx5 and hns bring a drain for devices that are dead, to which nothing can be posted any
/// more; their reset completes what is left. It returns nothing, and nothing is said if its own
/// marker finds no room. So it is called only where a marker was refused.
///
/// # Safety
///
/// `qp` is valid. `drain` is its device's, for a queue that completes to `cq`; if that is the send
/// queue, `qp` is not for datagrams. The caller may sleep.
unsafe fn drain_by_driver(
    qp: *mut bindings::ib_qp,
    drain: Option<unsafe extern "C" fn(*mut bindings::ib_qp)>,
    wait: &Wait<'_>,
    cq: &cq::Inner,
    e: Error,
) -> Result {
    let drain = drain.ok_or(e)?;
    let _seat = wait.sit(cq)?;
    // SAFETY: `drain` is for a queue of this QP, which is valid, and this may sleep, as the caller
    // promises.
    unsafe { drain(qp) };
    Ok(())
}

/// Moves a QP to the error state and waits until every request that was posted to it before has
/// completed.
///
/// # Errors
///
/// Nothing is proved on any error: `EDEADLK` in a handler of one of the CQs; `EOVERFLOW` if a CQ
/// has lost completions; `ETIMEDOUT`; or what the driver said.
///
/// # Safety
///
/// The QP completes to the two CQs. If it is on an SRQ they are the same, and not a direct one. If
/// it is for datagrams, `nowhere` is an address handle of its PD; without one nothing was posted to
/// its send queue.
pub(crate) unsafe fn drain(
    inner: &qp::inner::Inner,
    send_cq: &cq::Inner,
    recv_cq: &cq::Inner,
    nowhere: Option<&Ah>,
    markers: Arc<Markers>,
    patience_ms: u32,
    cx: &Sleepable,
) -> Result {
    if send_cq.is_polled_by_current() || recv_cq.is_polled_by_current() {
        return Err(EDEADLK);
    }
    let restart_receiver = || inner.modifier().restart_receiver();
    let wait = Wait::new(
        send_cq,
        recv_cq,
        markers,
        patience_ms,
        &restart_receiver,
        cx,
    );
    let qp = inner.raw.as_ptr();
    let ops = inner.ops();

    inner.modifier().to_error()?;

    let on_srq = inner.is_on_srq();
    if on_srq && has_last_wqe_event(ops) {
        // SAFETY: The QP is valid and on an SRQ.
        unsafe { last_wqe_reached(qp, &wait) }?;
    }

    let is_ud = inner.qp_type() == bindings::ib_qp_type_IB_QPT_UD;
    // Drivers' own drains, and the core's, post an RDMA WRITE.
    let send = |cqe| match nowhere {
        Some(ah) => {
            let mut wr = bindings::ib_ud_wr {
                ah: ah.as_raw(),
                ..Default::default()
            };
            // SAFETY: The QP is valid and for datagrams, the request has no entries, and the queue
            // is given a reference to the marker of `cqe`: see `Wait::post`.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_SEND, cqe) }
        }
        None => {
            let mut wr = bindings::ib_rdma_wr::default();
            // SAFETY: The QP is valid, the request has no entries, and the queue is given a
            // reference to the marker of `cqe`: see `Wait::post`.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, cqe) }
        }
    };
    let recv = |cqe| {
        let mut wr = bindings::ib_recv_wr::default();
        wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
        // SAFETY: The QP is valid, the request has no entries, and the queue is given a reference
        // to the marker of `cqe`: see `Wait::post`.
        match unsafe { recv_raw(qp, &raw mut wr) } {
            0 => Ok(()),
            // SAFETY: `wr` is valid, and `ret` is what `recv_raw` has just returned for it.
            ret => Err(unsafe { Refusal::of_recv(ret, &raw mut wr) }),
        }
    };

    // Both queues flush at the same time: each has its marker before one is waited for.
    let has_sends = nowhere.is_some() || !is_ud;
    let mut full = false;
    if has_sends {
        match wait.post::<SEND>(true, &send) {
            Ok(()) => {}
            Err(Unposted::Full) => full = true,
            Err(Unposted::Lost(e)) => return Err(e),
            Err(Unposted::Refused(e)) => {
                let drain = ops.drain_sq.filter(|_| !is_ud);
                // SAFETY: The QP is valid and not for datagrams, its send queue completes to this
                // CQ, and the token says that this may sleep.
                unsafe { drain_by_driver(qp, drain, &wait, send_cq, e) }?
            }
        }
    }
    if !on_srq {
        match wait.post::<RECV>(false, recv) {
            Ok(()) => {}
            Err(Unposted::Full) => return Err(ETIMEDOUT),
            Err(Unposted::Lost(e)) => return Err(e),
            Err(Unposted::Refused(e)) => {
                // SAFETY: The QP is valid, its receive queue completes to this CQ, and the token
                // says that this may sleep.
                unsafe { drain_by_driver(qp, ops.drain_rq, &wait, recv_cq, e) }?
            }
        }
    }
    wait.wait()?;
    if full {
        // What fills the queue was done, or flushed, without a completion of its own, and nothing
        // is behind it that would have one. In the reset state a device forgets all that it was
        // given. The receives have come back by now, and so have sends, for as long as was waited
        // for room.
        inner.modifier().restart()?;
        wait.post::<SEND>(true, send)
            .map_err(Unposted::into_error)?;
        wait.wait()?;
    }
    Ok(())
}
