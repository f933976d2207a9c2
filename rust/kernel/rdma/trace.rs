// SPDX-License-Identifier: GPL-2.0

//! Trace events of posts and completions.
//!
//! These are inlined into ULPs, and begin with a static branch, which is a no-op while the event is
//! off. Where it is on, a function of `helpers.c` does the same, and traces it. Architectures
//! without static branches have no such events.
//!
//! The branches are on as well where posts are [noted].

use crate::{
    code,
    noted,
    prelude::internal::*,
    wc::Wc, //
};

/// Returns whether the event of a tracepoint is on, or posts are noted: `static_branch_unlikely!`
/// of the kernel crate, whose assembly lacks the options, so that the compiler would align the
/// stack and read memory again.
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

/// Without such branches no post is noted, but with debug assertions.
#[cfg(not(all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL)))]
macro_rules! is_on {
    ($tracepoint:ident) => {
        cfg!(debug_assertions) && noted::is_on()
    };
}

/// Evaluates `$traced` if the branch of `$tracepoint` is on, and otherwise `$call`.
///
/// # Safety
///
/// As both say, and [`is_on`].
macro_rules! traced {
    ($tracepoint:ident, $traced:expr, $call:expr) => {
        if is_on!($tracepoint) {
            crate::wc::unlikely();
            $traced
        } else {
            $call
        }
    };
}

/// A driver's operation that posts requests `W` to a queue of a `Q`.
pub(crate) type Post<Q, W> = unsafe extern "C" fn(*mut Q, *const W, *mut *const W) -> c_int;

/// A QP or an SRQ, with a queue of requests `W`.
pub(crate) trait PostVerb<W> {
    /// Returns the operation of its driver that posts.
    ///
    /// # Safety
    ///
    /// `queue` is valid. If it is an SRQ, its device has the operation.
    unsafe fn op(queue: *mut Self) -> Post<Self, W>;

    /// Returns whether the last of a list of requests, which gives the owner back, completes to
    /// code that the module which has the queue keeps loaded.
    ///
    /// # Safety
    ///
    /// `queue` is valid and one of this crate, and `first` a valid list of requests.
    unsafe fn completes_to_own_code(queue: *mut Self, first: *const W) -> bool;

    /// Posts a list of requests (`ib_post_send`, `ib_post_recv`, `ib_post_srq_recv`). With debug
    /// assertions, one that would complete to other code is refused with `EPERM`, as if by the
    /// driver. Where posts are [noted](crate::noted), this one is if `noted` is set.
    ///
    /// # Safety
    ///
    /// `queue` is valid and one of this crate, and `post` is [`PostVerb::op`] of it, or refuses
    /// every request, as the traced path does by itself for a QP on an SRQ. `first` is a valid list
    /// of requests, whose memory is kept until they have completed. `bad` is valid for writes. With
    /// `noted` the last request gives an owner back that exists until it has completed.
    unsafe fn post(
        post: Post<Self, W>,
        queue: *mut Self,
        first: *const W,
        bad: *mut *const W,
        noted: bool,
    ) -> c_int;

    /// Posts a request that is alone. The driver names a request that it refuses (`bad_wr`), as the
    /// last thing that it does with it, in the successor of the request itself: that is null, so it
    /// shows whether there is a name.
    ///
    /// # Safety
    ///
    /// As [`PostVerb::post`]; `wr` has no successor.
    unsafe fn post_one(post: Post<Self, W>, queue: *mut Self, wr: *mut W, noted: bool) -> c_int;
}

macro_rules! post_verb {
    (
        $queue:ident: $context:ident, $wr:ident, $op:ident, $tracepoint:ident, $traced:ident,
        $noted:path
    ) => {
        impl PostVerb<bindings::$wr> for bindings::$queue {
            #[inline(always)]
            unsafe fn op(queue: *mut Self) -> Post<Self, bindings::$wr> {
                // SAFETY: `queue` is valid, as the caller promises. Clients are only told of
                // devices that have all verbs (`kverbs_provider`), and that of an SRQ has the
                // operation, as the caller promises.
                unsafe { (*(*queue).device).ops.$op.unwrap_unchecked() }
            }

            #[cfg_attr(not(debug_assertions), inline)]
            unsafe fn completes_to_own_code(queue: *mut Self, first: *const bindings::$wr) -> bool {
                let mut last = first;
                // SAFETY: The list is valid, as the caller promises, and its last request has an
                // owner's callback. Both members of the union are as wide.
                let done = unsafe {
                    while !(*last).next.is_null() {
                        last = (*last).next;
                    }
                    (*(*last).__bindgen_anon_1.wr_cqe.cast_const()).done
                };
                // SAFETY: The queue is valid and one of this crate, as the caller promises.
                let module = unsafe { code::Module::of((*queue).$context) };
                done.is_none_or(|done| module.check(done as usize).is_ok())
            }

            #[inline(always)]
            unsafe fn post(
                post: Post<Self, bindings::$wr>,
                queue: *mut Self,
                first: *const bindings::$wr,
                bad: *mut *const bindings::$wr,
                noted: bool,
            ) -> c_int {
                // SAFETY: All are valid, and the queue is one of this crate, as the caller
                // promises.
                if cfg!(debug_assertions) && unsafe { !Self::completes_to_own_code(queue, first) } {
                    // SAFETY: `bad` is valid for writes, as the caller promises.
                    unsafe { *bad = first };
                    return EPERM.to_errno();
                }
                // SAFETY: All are valid, as the caller promises. The tracepoint is C's, so it has a
                // static key.
                unsafe {
                    traced!(
                        $tracepoint,
                        if noted {
                            $noted(queue, first, bad)
                        } else {
                            bindings::$traced(queue, first, bad)
                        },
                        post(queue, first, bad)
                    )
                }
            }

            #[inline(always)]
            unsafe fn post_one(
                post: Post<Self, bindings::$wr>,
                queue: *mut Self,
                wr: *mut bindings::$wr,
                noted: bool,
            ) -> c_int {
                // SAFETY: All are valid, as the caller promises; so is the place of the successor.
                unsafe { Self::post(post, queue, wr, (&raw mut (*wr).next).cast(), noted) }
            }
        }
    };
}

post_verb!(
    ib_qp: qp_context,
    ib_send_wr,
    post_send,
    __tracepoint_post_send,
    rdma_helper_trace_post_send,
    noted::post_send
);
post_verb!(
    ib_qp: qp_context,
    ib_recv_wr,
    post_recv,
    __tracepoint_post_recv,
    rdma_helper_trace_post_recv,
    noted::post_recv
);
post_verb!(
    ib_srq: srq_context,
    ib_recv_wr,
    post_srq_recv,
    __tracepoint_post_srq_recv,
    rdma_helper_trace_post_srq_recv,
    bindings::rdma_helper_trace_post_srq_recv
);

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
            noted::poll_cq(cq, len, wcs),
            ((*(*cq).device).ops.poll_cq.unwrap_unchecked())(cq, len, wcs)
        )
    }
}

/// Returns the completion that a callback, `ib_cqe.done`, was called with; the callback begins with
/// this. `None` if the event has made this trace the completion and call the callback again, which
/// then returns. A completion that a caller of this crate has polled was traced then.
///
/// Nothing else is called, so that a callback that calls nothing needs no frame.
///
/// # Safety
///
/// The callback is that of the request whose completion is `wc`, which is valid for `'a` and was
/// not used yet. Either C has called it, with the CQ, which is valid during the call; or
/// [`Completion`](crate::cq::Completion) has, with a null `cq`, as the CQ may have been destroyed,
/// and with a `wc` that is borrowed, so that it is only read.
#[inline(always)]
pub(crate) unsafe fn completion<'a>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) -> Option<&'a Wc> {
    #[cfg(all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL))]
    // SAFETY: As the caller promises, `cq` is valid unless it is null. Where it is valid, C has
    // passed `wc`, which may be written, and which the callback may be called with again. The
    // tracepoint is C's.
    unsafe {
        if is_on!(__tracepoint_wc) {
            crate::wc::unlikely();
            let mask = bindings::rdma_helper_wc_flags_RDMA_HELPER_WC_TRACED_MASK as c_int;
            let traced = bindings::rdma_helper_wc_flags_RDMA_HELPER_WC_TRACED as c_int;
            if !cq.is_null() && (*wc).wc_flags & mask != traced {
                bindings::rdma_helper_trace_wc(cq, wc);
                return None;
            }
        }
    }
    let _ = cq;
    // SAFETY: `wc` is valid for `'a`, as the caller promises, and `Wc` is transparent.
    Some(unsafe { &*wc.cast::<Wc>() })
}
