// SPDX-License-Identifier: GPL-2.0

//! Local invalidations, from their mark to their post.

use super::{
    ended,
    Fmr, //
};
use crate::{
    bindings,
    cqe::CqeHandler,
    qp::Serial, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;

impl Fmr {
    /// Marks the MR as being invalidated by a request that is to be posted to the QP with this
    /// number, which must be the QP that registered it: one queue keeps the two in order.
    ///
    /// # Safety
    ///
    /// The caller has the turn of the QP.
    pub(in crate::mr) unsafe fn invalidate(&self, serial: Serial) -> Result {
        if !self.word().invalidating() {
            return Err(EBUSY);
        }
        // SAFETY: `invalidating` has claimed the word, so by the type invariant `own` has no other
        // user.
        if unsafe { (*self.own.get()).qp } != serial {
            // The turn is not that of the QP that registered it, but nothing is posted.
            self.word().still_registered();
            return Err(EINVAL);
        }
        Ok(())
    }

    /// As [`Fmr::invalidate`].
    ///
    /// # Safety
    ///
    /// Nobody else can reach the MR until the request was posted.
    #[inline]
    pub(in crate::mr) unsafe fn invalidate_alone(&self, serial: Serial) -> Result {
        // SAFETY: Nobody else can reach the MR, as the caller promises, so nobody else uses the
        // word, nor `own`.
        unsafe {
            if !(*self.word.get()).is_registered_alone() {
                return Err(EBUSY);
            }
            if (*self.own.get()).qp != serial {
                return Err(EINVAL);
            }
            (*self.word.get()).invalidate_alone();
        }
        Ok(())
    }

    /// Returns the request of an invalidation that was marked, whose owner's callback is `user`.
    ///
    /// # Safety
    ///
    /// [`Fmr::invalidate`] has just succeeded, or [`Fmr::invalidate_alone`] unless `shared`. `user`
    /// is from an owner of type `T`, given up by its callback `ID`, who keeps the MR. If the
    /// request is not posted, [`Fmr::not_invalidated`] is called.
    #[inline]
    pub(in crate::mr) unsafe fn invalidation<T: CqeHandler<ID>, const ID: u64>(
        &self,
        user: *mut bindings::ib_cqe,
        shared: bool,
    ) -> bindings::ib_send_wr {
        // INVARIANT: Made for that type.
        // SAFETY: The word was claimed, or nobody else can reach the MR, as the caller promises. So
        // by the type invariant `cqe` and `own` have no other user.
        unsafe {
            (*self.cqe.get()).done = Some(ended::callback::<T, ID>(shared));
            (*self.own.get()).user = user;
        }
        bindings::ib_send_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                // What is written through this address is in cells.
                wr_cqe: ManuallyDrop::new(core::ptr::from_ref(self).cast_mut().cast()),
            },
            sg_list: core::ptr::null_mut(),
            num_sge: 0,
            opcode: bindings::ib_wr_opcode_IB_WR_LOCAL_INV,
            send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
            ex: bindings::ib_send_wr__bindgen_ty_2 {
                // SAFETY: The word was claimed, or nobody else can reach the MR, as the caller
                // promises, so nobody gives it another key.
                invalidate_rkey: ManuallyDrop::new(unsafe { *self.rkey.as_ptr() }),
            },
        }
    }

    /// Takes the mark of an invalidation back that the driver has refused with `ret`, and returns
    /// that.
    #[cold]
    #[inline(never)]
    pub(in crate::mr) fn not_invalidated(&self) {
        self.word().still_registered();
    }
}
