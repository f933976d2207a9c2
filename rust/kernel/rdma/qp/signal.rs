// SPDX-License-Identifier: GPL-2.0

//! Which requests are signaled.

use crate::{
    bindings,
    wc::Status, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;

const SIGNALED: c_int = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;

/// The callback of requests that are not signaled. When they fail or are flushed they complete all
/// the same; their owner is that of the signaled request behind them.
static UNSIGNALED: Unsignaled = Unsignaled(bindings::ib_cqe {
    done: Some(unsignaled),
});

#[repr(transparent)]
struct Unsignaled(bindings::ib_cqe);

// SAFETY: Never written.
unsafe impl Sync for Unsignaled {}

/// The `done` callback of requests that are not signaled.
///
/// # Safety
///
/// Called by the RDMA core.
unsafe extern "C" fn unsignaled(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call.
    let status = unsafe { (*wc).status };
    if status != bindings::ib_wc_status_IB_WC_SUCCESS
        && status != bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR
    {
        let status = Status::from_raw(status);
        pr_err!("a request that is not signaled has failed: {status}\n");
    }
}

/// Has a request not be signaled.
///
/// # Safety
///
/// `wr` is valid, and its flags are written.
#[inline]
pub(super) unsafe fn no_signal(wr: *mut bindings::ib_send_wr) {
    // SAFETY: `wr` is valid and its flags are written, as the caller promises.
    unsafe {
        (*wr).send_flags &= !SIGNALED;
        (*wr).__bindgen_anon_1.wr_cqe = ManuallyDrop::new((&raw const UNSIGNALED.0).cast_mut());
    }
}

/// Has a request complete after the RDMA READs before it, on iWARP: siw completes what follows a
/// READ before that is done, unless it is another one or has a fence.
///
/// # Safety
///
/// `wr` is valid, and its flags are written.
#[cold]
pub(crate) unsafe fn come_after_reads(wr: *mut bindings::ib_send_wr) {
    // SAFETY: `wr` is valid and its flags are written, as the caller promises.
    unsafe {
        if (*wr).opcode != bindings::ib_wr_opcode_IB_WR_RDMA_READ {
            (*wr).send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        }
    }
}

/// Has a request be signaled, and complete to `cqe`.
///
/// # Safety
///
/// `wr` is valid, and its flags are written.
#[inline]
pub(super) unsafe fn signal(wr: *mut bindings::ib_send_wr, cqe: *mut bindings::ib_cqe) {
    // SAFETY: `wr` is valid and its flags are written, as the caller promises.
    unsafe {
        (*wr).send_flags |= SIGNALED;
        (*wr).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    }
}
