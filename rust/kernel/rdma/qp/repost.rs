// SPDX-License-Identifier: GPL-2.0

//! Posting from a handler, where the owner has the QP.
//!
//! An owner that is moved into the queue cannot lend its QP to the call that posts it, and a
//! reference of the caller's own is counted twice for each request. A handler needs none if its
//! owner goes back to the CQ that is being polled: what is posted can come back only after the
//! handler has returned, and until then keeps the QP.

use super::Qp;
use crate::{
    context::{
        PollContext,
        Provides, //
    },
    cq,
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    wc::Wc,
    wr::{
        PostError,
        RecvWr,
        SendWr, //
    }, //
};
use core::ops::Deref;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Where a CQ's poller has the completions that it is dispatching.
///
/// # Invariants
///
/// While a completion is dispatched from there, none is polled from the CQ; or null.
#[derive(Clone, Copy)]
pub(super) struct Poller(*const Wc);

impl Poller {
    pub(super) fn of(cq: &cq::Inner) -> Self {
        // INVARIANT: The RDMA core polls its own CQs by one softirq or work item, and others are
        // polled by who has the seat. Of a shared one, which C's drain of an SRQ may poll, it is
        // null.
        Self(cq.polled_into())
    }

    /// Says whether it is dispatching this completion.
    #[inline]
    fn is_at(self, wc: &Wc) -> bool {
        wc.is_in(self.0)
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Says whether sends complete where `wc` is being dispatched, by one who does not come to
    /// another completion before who has borrowed it has returned.
    #[inline]
    pub(crate) fn is_polled_at(&self, wc: &Wc) -> bool {
        self.pollers.0.is_at(wc)
    }

    /// Has `post` post an owner to the QP that it has, by a counted reference unless `at_poller`
    /// says that none is needed.
    ///
    /// # Safety
    ///
    /// `post` posts the owner or gives it back. Where `at_poller` is true, the request completes to
    /// a CQ of which the caller handles a completion, and whose poller comes to no other one before
    /// the caller has returned.
    #[inline]
    unsafe fn repost<P: Deref>(
        owner: P,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        at_poller: impl FnOnce(&Self) -> bool,
        post: impl FnOnce(&Self, P) -> Result<(), PostError<P>>,
    ) -> Result<(), PostError<P>> {
        let qp = qp(&owner);
        if at_poller(qp) {
            let qp = Arc::as_ptr(qp);
            // SAFETY: `post` gives the owner back, or posts it to a CQ whose poller comes to
            // nothing else before the caller has returned, as the caller promises. Until then the
            // owner is there, and what it lends.
            return post(unsafe { &*qp }, owner);
        }
        Self::post_counted(qp.clone(), owner, post)?;
        Ok(())
    }

    /// Has `post` post an owner, by a reference that the caller has. Not inlined, so that the
    /// registers that this needs are not saved in vain.
    #[inline(never)]
    fn post_counted<P>(
        this: Arc<Self>,
        owner: P,
        post: impl FnOnce(&Self, P) -> Result<(), PostError<P>>,
    ) -> Result<(), PostError<P>> {
        post(&this, owner)
    }

    /// Posts a request to the send queue as [`Qp::post_send`], for an owner that has its QP: `qp`
    /// finds it there.
    ///
    /// In a handler of `wc`, on a CQ that is not shared and is where the QP's sends complete, the
    /// QP's references are not counted. Elsewhere, and for what comes out of a
    /// [`Batch`](crate::cq::Batch), this does what cloning the reference does.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # use kernel::sync::Arc;
    /// #[derive(HasCqe)]
    /// struct Beat {
    ///     cqe: Cqe<Self>,
    ///     buf: Buf<ToDevice>,
    ///     qp: Arc<Qp<Softirq>>,
    /// }
    ///
    /// impl CqeHandler for Beat {
    ///     type Pointer = Pin<KBox<Self>>;
    ///     type Needs = Atomic;
    ///
    ///     fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
    ///         if wc.result().is_ok() {
    ///             let posted = Qp::repost_send(this, wc, |b| &b.qp, |b| {
    ///                 Ok(SendWr::send([b.buf.whole()]))
    ///             });
    ///             if let Err(e) = posted {
    ///                 pr_err!("no more: {:?}\n", e.error);
    ///             }
    ///         }
    ///     }
    /// }
    /// ```
    #[inline]
    pub fn repost_send<P, const ID: u64, const N: usize>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: The owner is posted, and what is refused does not drop it. The caller is a
        // handler that borrows `wc`, and the request completes to the CQ that is dispatching it.
        unsafe {
            let at = |qp: &Self| qp.is_polled_at(wc);
            Self::repost(owner, qp, at, |qp, owner| qp.post_send(owner, wr))
        }
    }

    /// Posts a request to the receive queue as [`Qp::post_recv`], for an owner that has its QP: see
    /// [`Qp::repost_send`].
    ///
    /// # Errors
    ///
    /// As [`Qp::post_recv`].
    #[inline]
    pub fn repost_recv<P, const ID: u64, const N: usize>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        R: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: The owner is posted, and what is refused does not drop it. The caller is a
        // handler that borrows `wc`, and the receive completes to the CQ that is dispatching it.
        unsafe {
            let at = |qp: &Self| qp.pollers.1.is_at(wc);
            Self::repost(owner, qp, at, |qp, owner| qp.post_recv(owner, wr))
        }
    }
}
