// SPDX-License-Identifier: GPL-2.0

//! What local invalidations complete to.

use super::{
    Fmr,
    ALONE, //
};
use crate::{
    bindings,
    cqe::hand_on, //
};
use core::mem::ManuallyDrop;

/// The `done` callback of every local invalidation. It belongs to the MR, so that nothing but its
/// own completion makes an MR idle, and the owner's callback finds that done.
///
/// # Safety
///
/// Called by the RDMA core for a request from [`Fmr::invalidation`].
pub(super) unsafe extern "C" fn invalidated(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call. The request was posted with the address of an MR's
    // first field; the request's owner keeps the MR until its callback has it back.
    unsafe {
        let mr = &*(*(*wc).__bindgen_anon_1.wr_cqe).cast_const().cast::<Fmr>();
        let user = (*mr.own.get()).user;
        if (*wc).status == bindings::ib_wc_status_IB_WC_SUCCESS {
            mr.word().invalidated();
        } else {
            mr.valid_still();
        }
        hand_on(user, cq, wc);
    }
}

/// As [`invalidated`], of an MR that nobody else can reach.
///
/// # Safety
///
/// As there, for a request that says so, from a CQ that the core polls.
pub(super) unsafe extern "C" fn invalidated_alone(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: As there. The completion is in an array of the core's, which may be changed.
    unsafe {
        let cqe = *(*wc).__bindgen_anon_1.wr_cqe;
        let mr = &*cqe.byte_sub(ALONE).cast_const().cast::<Fmr>();
        let user = (*mr.own.get()).user;
        if (*wc).status == bindings::ib_wc_status_IB_WC_SUCCESS {
            (*mr.word.get()).invalidated_alone();
        } else {
            mr.valid_still();
        }
        (*wc).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(user);
        (*user).done.unwrap_unchecked()(cq, wc);
    }
}
