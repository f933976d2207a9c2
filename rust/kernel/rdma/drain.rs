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

use marker::Marker;
pub(crate) use marker::Markers;

use crate::{
    ah::Ah,
    bindings,
    context::Sleepable,
    cq,
    ledger, //
};
use core::mem::ManuallyDrop;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc,
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta, //
    }, //
};

/// How long a drain may take before the QP is given up, in milliseconds.
pub(crate) const PATIENCE_MS: u32 = 60_000;

/// The length of one wait, in milliseconds. CQs that nobody else polls are polled, and full queues
/// tried again, this often.
const STEP_MS: u32 = 10;

/// How many completions of such a CQ are processed in a row, and how many rows in a step.
const BUDGET: i32 = 64;
const ROWS: u32 = 16;

/// Counts one wait, unless it is in vain.
fn step(cq: &cq::Inner, left: &mut u32) -> Result {
    if cq.has_failed() {
        return Err(EOVERFLOW);
    }
    *left = left.checked_sub(STEP_MS).ok_or(ETIMEDOUT)?;
    Ok(())
}

/// Posts a marker by `post` and waits until it completes.
fn drain_queue(
    cq: &cq::Inner,
    marker: Arc<Marker>,
    post: impl Fn(*mut bindings::ib_cqe) -> c_int,
    left: &mut u32,
) -> Result {
    // The queue's reference.
    let cqe: *mut bindings::ib_cqe = Arc::into_raw(marker.clone()).cast_mut().cast();
    ledger::post(cqe);

    // A full queue has room again once something was flushed.
    let posted = loop {
        match to_result(post(cqe)) {
            Ok(()) => break Ok(()),
            Err(e) if e == ENOMEM => {
                if let Err(e) = step(cq, left) {
                    break Err(e);
                }
                poll(cq);
                fsleep(Delta::from_millis(STEP_MS.into()));
            }
            Err(e) => break Err(e),
        }
    };
    if let Err(e) = posted {
        ledger::strike(cqe);
        // SAFETY: The marker was not posted, so its reference is still ours.
        drop(unsafe { Arc::from_raw(cqe.cast_const().cast::<Marker>()) });
        return Err(e);
    }

    loop {
        poll(cq);
        // SAFETY: The completion is initialised, and the caller may sleep.
        let reached = unsafe {
            bindings::wait_for_completion_timeout(marker.reached.get(), msecs_to_jiffies(STEP_MS))
        };
        if reached != 0 {
            return Ok(());
        }
        step(cq, left)?;
    }
}

fn poll(cq: &cq::Inner) {
    if cq.is_caller_polled() {
        for _ in 0..ROWS {
            // SAFETY: The CQ is there while `cq` lives, and its users poll it.
            if unsafe { bindings::ib_process_cq_direct(cq.raw.as_ptr(), BUDGET) } < BUDGET {
                break;
            }
        }
    }
}

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
) -> c_int {
    wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    wr.opcode = opcode;
    wr.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;
    let mut bad = core::ptr::null();
    // SAFETY: By the caller's promise.
    unsafe {
        (*(*qp).device)
            .ops
            .post_send
            .map_or(EOPNOTSUPP.to_errno(), |post| post(qp, wr, &mut bad))
    }
}

/// Moves a QP to the error state.
///
/// There is no way there from the reset state, so such a QP is initialised first: some drivers take
/// receives in that state too, against the rules.
///
/// # Safety
///
/// `qp` is valid.
unsafe fn to_error(qp: *mut bindings::ib_qp) -> Result {
    let mut attr = bindings::ib_qp_attr::default();
    let mut init = bindings::ib_qp_init_attr::default();
    let state = bindings::ib_qp_attr_mask_IB_QP_STATE;
    // SAFETY: By the caller's promise.
    let asked = unsafe { bindings::ib_query_qp(qp, &raw mut attr, state as c_int, &raw mut init) };
    if asked == 0 && attr.qp_state == bindings::ib_qp_state_IB_QPS_RESET {
        attr = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_INIT,
            port_num: 1,
            ..Default::default()
        };
        // SAFETY: As above.
        let own = match unsafe { (*qp).qp_type } {
            bindings::ib_qp_type_IB_QPT_UD => bindings::ib_qp_attr_mask_IB_QP_QKEY,
            _ => bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
        };
        let mask = state
            | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
            | bindings::ib_qp_attr_mask_IB_QP_PORT
            | own;
        // SAFETY: As above; the attributes are complete for this mask.
        to_result(unsafe { bindings::ib_modify_qp(qp, &raw mut attr, mask as c_int) })?;
    }
    attr = bindings::ib_qp_attr {
        qp_state: bindings::ib_qp_state_IB_QPS_ERR,
        ..Default::default()
    };
    // SAFETY: As above.
    to_result(unsafe { bindings::ib_modify_qp(qp, &raw mut attr, state as c_int) })
}

/// Waits until a QP that is in the error state takes nothing from its SRQ any more, and the
/// completions of all that it took are in its CQ (`IB_EVENT_QP_LAST_WQE_REACHED`).
///
/// # Safety
///
/// `qp` is a valid QP on an SRQ, and completes to `cq`.
unsafe fn last_wqe_reached(qp: *mut bindings::ib_qp, cq: &cq::Inner, left: &mut u32) -> Result {
    // SAFETY: By the caller's promise; the core has initialised the completion.
    let reached = unsafe { &raw mut (*qp).srq_completion };
    loop {
        // SAFETY: As above, and the caller may sleep.
        if unsafe { bindings::wait_for_completion_timeout(reached, msecs_to_jiffies(STEP_MS)) } != 0
        {
            // The event comes once, and there may be another drain.
            // SAFETY: As above.
            unsafe { bindings::complete_all(reached) };
            return Ok(());
        }
        step(cq, left)?;
    }
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
/// nothing was posted to its send queue.
pub(crate) unsafe fn drain(
    qp: *mut bindings::ib_qp,
    send_cq: &cq::Inner,
    recv_cq: &cq::Inner,
    nowhere: Option<&Ah>,
    markers: Markers,
    patience_ms: u32,
    _cx: &Sleepable,
) -> Result {
    if send_cq.is_polled_by_current() || recv_cq.is_polled_by_current() {
        return Err(EDEADLK);
    }
    let mut left = patience_ms;
    // SAFETY: The QP is valid, so its device is, and the operations of a device do not change.
    let ops = unsafe { &(*(*qp).device).ops };

    // SAFETY: By the caller's promise.
    unsafe { to_error(qp) }?;

    // SAFETY: By the caller's promise; the SRQ of a QP does not change.
    let on_srq = unsafe { !(*qp).srq.is_null() };
    if on_srq {
        // SAFETY: As above.
        unsafe { last_wqe_reached(qp, recv_cq, &mut left) }?;
    }

    // SAFETY: As above.
    let is_ud = unsafe { (*qp).qp_type } == bindings::ib_qp_type_IB_QPT_UD;
    match (nowhere, ops.drain_sq) {
        // Drivers' own drains, and the core's, post an RDMA WRITE.
        (Some(ah), _) => drain_queue(
            send_cq,
            markers.send,
            |cqe| {
                let mut wr = bindings::ib_ud_wr {
                    ah: ah.as_raw(),
                    ..Default::default()
                };
                // SAFETY: The QP is valid, for datagrams, and the request has no memory.
                unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_SEND, cqe) }
            },
            &mut left,
        )?,
        (None, _) if is_ud => {}
        // SAFETY: The driver's own drain takes any connected QP, in process context.
        (None, Some(drain_sq)) => unsafe { drain_sq(qp) },
        (None, None) => drain_queue(
            send_cq,
            markers.send,
            |cqe| {
                let mut wr = bindings::ib_rdma_wr::default();
                // SAFETY: The QP is valid, and the request has no memory.
                unsafe { post_marker(qp, &mut wr.wr, bindings::ib_wr_opcode_IB_WR_RDMA_WRITE, cqe) }
            },
            &mut left,
        )?,
    }

    if on_srq {
        return Ok(());
    }
    match ops.drain_rq {
        // SAFETY: As above.
        Some(drain_rq) => unsafe { drain_rq(qp) },
        None => drain_queue(
            recv_cq,
            markers.recv,
            |cqe| {
                let mut wr = bindings::ib_recv_wr::default();
                wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
                let mut bad = core::ptr::null();
                // SAFETY: As above.
                ops.post_recv.map_or(EOPNOTSUPP.to_errno(), |post| unsafe {
                    post(qp, &wr, &mut bad)
                })
            },
            &mut left,
        )?,
    }
    Ok(())
}
