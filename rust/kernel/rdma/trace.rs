// SPDX-License-Identifier: GPL-2.0

//! Trace events of posts and completions.
//!
//! These are inlined into ULPs, and begin with a static branch, which is a no-op while the event is
//! off. Where it is on, a function of `helpers.c` does the same, and traces it. Where
//! the architecture has no static branches there are no such events.

use crate::prelude::*;

/// A driver's operation that posts requests to a queue.
type Post<W> = unsafe extern "C" fn(*mut bindings::ib_qp, *const W, *mut *const W) -> c_int;

pub(crate) type PostSend = Post<bindings::ib_send_wr>;
pub(crate) type PostRecv = Post<bindings::ib_recv_wr>;

/// Returns the operation of a QP's driver that posts to the send queue.
///
/// # Safety
///
/// `qp` is valid.
#[inline(always)]
pub(crate) unsafe fn send_op(qp: *mut bindings::ib_qp) -> PostSend {
    // SAFETY: `qp` is valid, as the caller promises. Clients are only told of devices that have all
    // verbs (`kverbs_provider`), so the operation exists.
    unsafe { (*(*qp).device).ops.post_send.unwrap_unchecked() }
}

/// Returns the operation of a QP's driver that posts to the receive queue.
///
/// # Safety
///
/// `qp` is valid.
#[inline(always)]
pub(crate) unsafe fn recv_op(qp: *mut bindings::ib_qp) -> PostRecv {
    // SAFETY: `qp` is valid, as the caller promises. Clients are only told of devices that have all
    // verbs (`kverbs_provider`), so the operation exists.
    unsafe { (*(*qp).device).ops.post_recv.unwrap_unchecked() }
}

/// Returns whether the event of a tracepoint is on: `static_branch_unlikely!` of the kernel crate,
/// whose assembly lacks the options, so that the compiler would align the stack and read memory
/// again.
///
/// # Safety
///
/// The tracepoint is one that C has defined.
#[cfg(all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL))]
macro_rules! is_on {
    ($tracepoint:ident) => {
        'is_on: {
            ::kernel::asm!(
                ::rdma_bindings::static_branch_asm!();
                l_yes = label {
                    break 'is_on true;
                },
                symb = sym bindings::$tracepoint,
                off = const core::mem::offset_of!(::kernel::bindings::tracepoint, key),
                branch = const 0,
                options(nomem, nostack, preserves_flags),
            );
            false
        }
    };
}

#[cfg(not(all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL)))]
macro_rules! is_on {
    ($tracepoint:ident) => {
        false
    };
}

/// Calls `$traced` if the event of `$tracepoint` is on, and otherwise evaluates `$call`.
///
/// # Safety
///
/// As both say, and [`is_on`].
macro_rules! traced {
    ($tracepoint:ident, $traced:ident($($arg:expr),*), $call:expr) => {
        if is_on!($tracepoint) {
            crate::wc::unlikely();
            bindings::$traced($($arg),*)
        } else {
            $call
        }
    };
}

/// Posts a list of requests to the send queue (`ib_post_send`), by the driver's operation `post`.
///
/// # Safety
///
/// `qp` is valid, and `post` is the operation of its device. `first` is a valid list of requests,
/// whose memory is kept until they have completed. `bad` is valid for writes.
#[inline(always)]
pub(crate) unsafe fn post_send(
    post: PostSend,
    qp: *mut bindings::ib_qp,
    first: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: All are valid, as the caller promises. The tracepoint is C's, so it has a static key.
    unsafe {
        traced!(
            __tracepoint_post_send,
            rdma_helper_trace_post_send(qp, first, bad),
            post(qp, first, bad)
        )
    }
}

/// Posts a request to the receive queue (`ib_post_recv`), by the driver's operation `post`.
///
/// # Safety
///
/// `qp` is valid, and `post` is the operation of its device. `wr` is a valid request, whose memory
/// is kept until it has completed. `bad` is valid for writes.
#[inline(always)]
pub(crate) unsafe fn post_recv(
    post: PostRecv,
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: All are valid, as the caller promises. The tracepoint is C's, so it has a static key.
    unsafe {
        traced!(
            __tracepoint_post_recv,
            rdma_helper_trace_post_recv(qp, wr, bad),
            post(qp, wr, bad)
        )
    }
}

/// Posts a request to an SRQ (`ib_post_srq_recv`).
///
/// # Safety
///
/// `srq` is valid, and its device has the operation. `wr` is a valid request, whose memory is kept
/// until it has completed. `bad` is valid for writes.
#[inline(always)]
pub(crate) unsafe fn post_srq_recv(
    srq: *mut bindings::ib_srq,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: All are valid and the device has the operation, as the caller promises. The
    // tracepoint is C's, so it has a static key.
    unsafe {
        traced!(
            __tracepoint_post_srq_recv,
            rdma_helper_trace_post_srq_recv(srq, wr, bad),
            ((*(*srq).device).ops.post_srq_recv.unwrap_unchecked())(srq, wr, bad)
        )
    }
}

/// Polls at most `len` completions of a CQ that callers poll, and returns their number
/// (`ib_poll_cq`).
///
/// # Safety
///
/// `cq` is valid, and `wcs` has `len` entries.
#[inline(always)]
pub(crate) unsafe fn poll_cq(
    cq: *mut bindings::ib_cq,
    len: c_int,
    wcs: *mut bindings::ib_wc,
) -> c_int {
    // SAFETY: Both are valid, as the caller promises. Clients are only told of devices that have
    // all verbs (`kverbs_provider`), so the operation exists. The tracepoint is C's, so it has a
    // static key.
    unsafe {
        traced!(
            __tracepoint_wc,
            rdma_helper_trace_poll_cq(cq, len, wcs),
            ((*(*cq).device).ops.poll_cq.unwrap_unchecked())(cq, len, wcs)
        )
    }
}

/// Traces the completion that a callback was called with, and calls the callback again, if that is
/// due: then this returns `true`, and the callback returns. The completion of a CQ that callers
/// poll was traced when it was polled.
///
/// Nothing else is called, so that a callback that calls nothing needs no frame.
///
/// # Safety
///
/// The RDMA core has called the callback of the request with `cq` and its completion `wc`, which
/// are valid and were not used yet. They are not used after this if it returns `true`.
#[inline(always)]
pub(crate) unsafe fn completion(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) -> bool {
    #[cfg(all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL))]
    // SAFETY: Both are valid, and the callback may be called again, as the caller promises. The
    // tracepoint is C's.
    unsafe {
        if is_on!(__tracepoint_wc) {
            crate::wc::unlikely();
            let traced = bindings::rdma_helper_wc_flags_RDMA_HELPER_WC_TRACED as c_int;
            if (*cq).poll_ctx != bindings::ib_poll_context_IB_POLL_DIRECT
                && (*wc).wc_flags & traced == 0
            {
                bindings::rdma_helper_trace_wc(cq, wc);
                return true;
            }
        }
    }
    let _ = (cq, wc);
    false
}
