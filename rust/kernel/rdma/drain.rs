// SPDX-License-Identifier: GPL-2.0

//! Proof that a QP has no request outstanding.
//!
//! `ib_drain_qp` returns nothing and only warns when it fails. This does what it does (the QP goes
//! to the error state, and a marker request at the end of each queue completes after everything
//! before it) with every result checked. Where a driver brings its own drain, that is called, and
//! its contract is the proof.
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
    qp::post::{
        recv_raw,
        send_raw,
        Refusal, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::{
    prelude::*,
    sync::Arc, //
};
use wait::Wait;

/// How long a drain may take before the QP is given up, in milliseconds.
pub(crate) const PATIENCE_MS: u32 = 60_000;

/// Posts the marker of a send queue.
///
/// # Safety
///
/// `qp` is valid, and `wr` is of the kind that its type and the opcode ask for.
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
    // SAFETY: By the caller's promise.
    match unsafe { send_raw(qp, wr) } {
        0 => Ok(()),
        // SAFETY: As just posted.
        ret => Err(unsafe { Refusal::of_send(ret, wr) }),
    }
}

/// Waits until a QP that is in the error state takes nothing from its SRQ any more, and the
/// completions of all that it took are in its CQ (`IB_EVENT_QP_LAST_WQE_REACHED`).
///
/// # Safety
///
/// `qp` is a valid QP on an SRQ. The caller may sleep.
unsafe fn last_wqe_reached(qp: *mut bindings::ib_qp, wait: &Wait<'_>) -> Result {
    // SAFETY: By the caller's promise; the core has initialised the completion.
    unsafe {
        let reached = &raw mut (*qp).srq_completion;
        wait.wait_for(reached)?;
        // The event comes once, and there may be another drain.
        bindings::complete_all(reached);
    }
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
/// `qp` is a valid QP that completes to the two CQs. If it is on an SRQ they are the same, and not
/// a direct one. If it is for datagrams, `nowhere` is an address handle of its PD; without one
/// nothing was posted to its send queue. If `to_error` succeeds, it is in the error state.
#[expect(clippy::too_many_arguments)]
pub(crate) unsafe fn drain(
    qp: *mut bindings::ib_qp,
    send_cq: &cq::Inner,
    recv_cq: &cq::Inner,
    nowhere: Option<&Ah>,
    to_error: impl FnOnce() -> Result,
    markers: Arc<Markers>,
    patience_ms: u32,
    _cx: &Sleepable,
) -> Result {
    if send_cq.is_polled_by_current() || recv_cq.is_polled_by_current() {
        return Err(EDEADLK);
    }
    let wait = Wait::new(send_cq, recv_cq, markers, patience_ms);
    // SAFETY: The QP is valid, so its device is, and the operations of a device do not change.
    let ops = unsafe { &(*(*qp).device).ops };

    to_error()?;

    // SAFETY: By the caller's promise; the SRQ of a QP does not change.
    let on_srq = unsafe { !(*qp).srq.is_null() };
    if on_srq {
        // SAFETY: As above, and the token says that this may sleep.
        unsafe { last_wqe_reached(qp, &wait) }?;
    }

    // Both queues flush at the same time: each has its marker before one is waited for.
    //
    // SAFETY: As above.
    let is_ud = unsafe { (*qp).qp_type } == bindings::ib_qp_type_IB_QPT_UD;
    match (nowhere, ops.drain_sq) {
        // Drivers' own drains, and the core's, post an RDMA WRITE.
        (Some(ah), _) => wait.post::<SEND>(|cqe| {
            let mut wr = bindings::ib_ud_wr {
                ah: ah.as_raw(),
                ..Default::default()
            };
            // SAFETY: The QP is valid, for datagrams, and the request has no memory.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_SEND, cqe) }
        })?,
        (None, _) if is_ud => {}
        (None, Some(drain_sq)) => {
            let _seat = wait.sit(send_cq)?;
            // SAFETY: The driver's own drain takes any connected QP, in process context.
            unsafe { drain_sq(qp) }
        }
        (None, None) => wait.post::<SEND>(|cqe| {
            let mut wr = bindings::ib_rdma_wr::default();
            // SAFETY: The QP is valid, and the request has no memory.
            unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, cqe) }
        })?,
    }
    match ops.drain_rq {
        _ if on_srq => {}
        Some(drain_rq) => {
            let _seat = wait.sit(recv_cq)?;
            // SAFETY: As above.
            unsafe { drain_rq(qp) }
        }
        None => wait.post::<RECV>(|cqe| {
            let mut wr = bindings::ib_recv_wr::default();
            wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
            // SAFETY: The QP is valid, and the request has no memory.
            match unsafe { recv_raw(qp, &raw mut wr) } {
                0 => Ok(()),
                // SAFETY: As just posted.
                ret => Err(unsafe { Refusal::of_recv(ret, &raw mut wr) }),
            }
        })?,
    }
    wait.wait()
}
