// SPDX-License-Identifier: GPL-2.0

//! Posting registrations.

use super::RegWr;
use crate::{
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    qp::Qp,
    wr::{
        PostError,
        Remote, //
    }, //
};
use core::mem::ManuallyDrop;

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts a fast registration (`IB_WR_REG_MR`), moving the owner of the region in, and returns
    /// where a peer will find the region.
    ///
    /// Requests posted after this one see the registration, so the advertisement can be sent at
    /// once.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`], and `EBUSY` if the region is registered.
    #[inline]
    pub fn post_reg<P, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a>,
    ) -> Result<Remote, PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let (mut raw, remote, registering) = match wr(&owner).prepare(self.pd) {
            Ok(prepared) => prepared,
            Err(error) => return Err(PostError { owner, error }),
        };
        let cqe = owner.into_cqe();
        raw.wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
        // SAFETY: The region is kept by the owner, which is the queue's until `done`.
        match unsafe { self.post_send_raw(&raw.wr, cqe) } {
            Ok(()) => Ok(remote),
            Err(e) => {
                // SAFETY: The owner is back, and the region that it keeps has not moved.
                unsafe { registering.undo() };
                Err(e)
            }
        }
    }
}
