// SPDX-License-Identifier: GPL-2.0

//! Posting registrations and invalidations.

use super::{
    InvWr,
    Private,
    RegWr, //
};
use crate::{
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    qp::{
        post::{
            send_raw,
            Refusal, //
        },
        Qp, //
    },
    wc::Wc,
    wr::{
        end,
        PostError,
        Remote, //
    }, //
};
use core::mem::MaybeUninit;
use kernel::sync::Arc;

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
    /// As [`Qp::post_send`], and `EBUSY` if the region is not idle.
    #[inline(always)]
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
        let private = Private::of(&owner);
        let wr = wr(&owner);
        let shared = wr.is_shared(&private);
        // The turn is kept until what was not posted is taken back.
        let (cqe, marked, refusal, _turn) = {
            let mut raw = MaybeUninit::<bindings::ib_reg_wr>::uninit();
            let raw = raw.as_mut_ptr();
            // SAFETY: `shared` is what `is_shared` says of the owner.
            let place = match unsafe { wr.come_to(&self.place, shared) } {
                Ok(place) => place,
                Err(error) => return Err(PostError::new(owner, error)),
            };
            // SAFETY: `raw` has room for the request, `shared` is from `is_shared` and `place` from
            // `come_to`. A shared region is registered below, and what is not posted is undone.
            let (remote, marked) = match unsafe { wr.write(raw, place, shared) } {
                Ok(written) => written,
                Err(error) => return Err(PostError::new(owner, error)),
            };
            let cqe = owner.into_cqe(crate::cqe::Sealed::new());
            let turn = shared.then(|| {
                let turn = self.turn().lock();
                // SAFETY: The owner, which keeps the region, is not posted yet. The turn is kept to
                // the end.
                unsafe { marked.register() };
                turn
            });
            // SAFETY: The request was just written. The region is kept by the owner, which is the
            // queue's until `done`.
            let ret = unsafe {
                end(&raw mut (*raw).wr, cqe);
                send_raw(place.raw.as_ptr(), &raw mut (*raw).wr)
            };
            if ret == 0 {
                return Ok(remote);
            }
            // SAFETY: `raw` is valid, and `ret` is what `send_raw` has just returned for it.
            let refusal = unsafe { Refusal::of_send(ret, &raw mut (*raw).wr) };
            (cqe, marked, refusal, turn)
        };
        if refusal.named {
            // SAFETY: The only request was not posted. The owner, which is still given up, keeps
            // the region.
            unsafe { marked.undo() };
        }
        // SAFETY: It is the callback of the owner, and the request's.
        Err(unsafe { refusal.take_back(cqe) })
    }

    /// Posts a local invalidation (`IB_WR_LOCAL_INV`), moving the owner of the region in.
    ///
    /// When the owner's handler is called for success, the region is idle: it can be registered
    /// again, under a new key, or be taken apart. On failure (when it was flushed) it may still be
    /// registered, and only dropping it ends that.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`]; `EBUSY` if the region is not registered or is being invalidated;
    /// `EINVAL` if its registration was not posted to this QP.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, mr::{InvWr, Region}, qp::Qp, wc::Wc};
    /// #[derive(HasCqe)]
    /// struct Io {
    ///     cqe: Cqe<Self>,
    ///     region: Region<FromDevice>,
    /// }
    ///
    /// impl CqeHandler for Io {
    ///     type Pointer = Pin<KBox<Self>>;
    ///     type Needs = Atomic;
    ///
    ///     fn done(this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {
    ///         let io = KBox::into_inner(Pin::into_inner(this));
    ///         if let Ok((_mr, mut memory)) = io.region.into_parts() {
    ///             pr_info!("the peer wrote {:?}\n", &memory.cpu()[..]);
    ///         }
    ///     }
    /// }
    ///
    /// fn finish(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    ///     Ok(qp.post_inv(io, |io| InvWr::new(&io.region))?)
    /// }
    /// ```
    #[inline(always)]
    pub fn post_inv<P, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> InvWr<'a>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let private = Private::of(&owner);
        let wr = wr(&owner);
        let shared = wr.is_shared(&private);
        let marked = {
            let _turn = shared.then(|| self.turn().lock());
            // SAFETY: The turn is this QP's, or the region is the owner's alone.
            unsafe { wr.prepare(self.place.serial, shared) }
        };
        let marked = match marked {
            Ok(marked) => marked,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        let (cqe, refusal) = {
            let cqe = owner.into_cqe(crate::cqe::Sealed::new());
            // SAFETY: `cqe` is from the owner, a `P::Target`, which keeps the region and is the
            // queue's until the completion; `shared` is from `is_shared`. What is not posted is
            // undone below.
            let mut raw = unsafe { marked.request::<P::Target, ID>(cqe, shared) };
            // SAFETY: The request was just made. The owner, which keeps the region, is the queue's
            // until the MR's own callback, made for `P`, gives it back.
            let ret = unsafe { send_raw(self.as_raw(), &raw mut raw) };
            if ret == 0 {
                return Ok(());
            }
            // SAFETY: `raw` is valid, and `ret` is what `send_raw` has just returned for it.
            (cqe, unsafe { Refusal::of_send(ret, &raw mut raw) })
        };
        if refusal.named {
            // SAFETY: The only request was not posted. The owner, which is still given up, keeps
            // the region.
            unsafe { marked.undo() };
        }
        // SAFETY: It is the callback of the owner, which that of the MR would give back.
        Err(unsafe { refusal.take_back(cqe) })
    }

    /// Posts a fast registration as [`Qp::post_reg`], for an owner that has its QP: see
    /// [`Qp::repost_send`].
    ///
    /// # Errors
    ///
    /// As [`Qp::post_reg`].
    #[inline]
    pub fn repost_reg<P, const ID: u64>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a>,
    ) -> Result<Remote, PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let qp = qp(&owner);
        if qp.is_polled_at(wc) {
            let qp = Arc::as_ptr(qp);
            // SAFETY: The owner keeps the QP. It comes back from the queue only after the caller, a
            // handler that borrows `wc`, has returned, as `is_polled_at` says; one that is refused
            // is returned.
            return unsafe { &*qp }.post_reg(owner, wr);
        }
        let qp = core::ptr::from_ref(qp);
        // SAFETY: The reference is the owner's, which is there while it is not posted.
        let remote = unsafe { Self::post_reg_counted(qp, owner, wr) }?;
        Ok(remote)
    }

    /// As [`Qp::post_reg`], by a counted reference. Not inlined, as in `repost_send`.
    ///
    /// # Safety
    ///
    /// `this` is valid while the owner is not posted.
    #[inline(never)]
    unsafe fn post_reg_counted<P, const ID: u64>(
        this: *const Arc<Self>,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a>,
    ) -> Result<Remote, PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: `this` is valid, as the caller promises: the owner is not posted yet.
        let this = unsafe { &*this }.clone();
        this.post_reg(owner, wr)
    }

    /// Posts a local invalidation as [`Qp::post_inv`], for an owner that has its QP: see
    /// [`Qp::repost_send`].
    ///
    /// # Errors
    ///
    /// As [`Qp::post_inv`].
    #[inline]
    pub fn repost_inv<P, const ID: u64>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> InvWr<'a>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let qp = qp(&owner);
        if qp.is_polled_at(wc) {
            let qp = Arc::as_ptr(qp);
            // SAFETY: The owner keeps the QP. It comes back from the queue only after the caller, a
            // handler that borrows `wc`, has returned, as `is_polled_at` says; one that is refused
            // is returned.
            return unsafe { &*qp }.post_inv(owner, wr);
        }
        let qp = core::ptr::from_ref(qp);
        // SAFETY: The reference is the owner's, which is there while it is not posted.
        unsafe { Self::post_inv_counted(qp, owner, wr) }?;
        Ok(())
    }

    /// As [`Qp::post_inv`], by a counted reference. Not inlined, as in `repost_send`.
    ///
    /// # Safety
    ///
    /// `this` is valid while the owner is not posted.
    #[inline(never)]
    unsafe fn post_inv_counted<P, const ID: u64>(
        this: *const Arc<Self>,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> InvWr<'a>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: `this` is valid, as the caller promises: the owner is not posted yet.
        let this = unsafe { &*this }.clone();
        this.post_inv(owner, wr)
    }
}
