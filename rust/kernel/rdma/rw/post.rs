// SPDX-License-Identifier: GPL-2.0

//! Posting transfers.

use super::{
    Ctx,
    Plan,
    Rw, //
};
use crate::{
    bindings,
    context::{
        PollContext,
        Provides,
        Sleepable, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    ledger,
    qp::{
        post::{
            post_list,
            unnamed, //
        },
        Qp,
        Transfers, //
    },
    wr::{
        end,
        SendWr, //
    }, //
};
use core::{
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::prelude::*;

/// A transfer that was not posted, or not to its end.
pub struct RwError<P> {
    /// The owner, if nothing was posted.
    ///
    /// Otherwise the QP keeps it and drops it once a drain has proved that it is out of use; or, if
    /// the driver did not say how far it came, it is the queue's: see
    /// [`PostError`](crate::wr::PostError).
    pub owner: Option<P>,
    /// Why.
    pub error: Error,
}

impl<P> From<RwError<P>> for Error {
    fn from(e: RwError<P>) -> Self {
        e.error
    }
}

/// How far a post came that has failed.
enum Failed {
    Nowhere(Error),
    InPart(Error),
    /// The driver did not say how far: the last request may be in the queue.
    Unnamed(Error),
}

/// A transfer that was posted in part, and its owner, which others may have too. It is ended when
/// this is dropped, and only then can it begin again.
///
/// # Invariants
///
/// `ctx` is the context of a transfer that was begun, and is kept by the owner. This is dropped
/// when no request of it is outstanding.
struct InPart<P> {
    ctx: NonNull<Ctx>,
    _owner: P,
}

// SAFETY: A context may end on any thread.
unsafe impl<P: Send> Send for InPart<P> {}

impl<P> Drop for InPart<P> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the owner keeps the context; it is dropped after this.
        let ctx = unsafe { self.ctx.as_ref() };
        // SAFETY: By the type invariant no request is outstanding. As the state still is that of a
        // transfer that was posted, nobody else uses the rest.
        unsafe { ctx.finish(false) };
        ctx.release();
    }
}

/// Begins a transfer and posts its requests, and `then` behind them.
///
/// # Safety
///
/// `qp` is valid and counts its transfers in `transfers`. `then` is null, or a request that is
/// written. What that is made of, and the context of `plan`, stay where they are until `user` has
/// completed or, on failure in part, until the QP was drained.
#[inline(never)]
unsafe fn begin(
    plan: &Plan,
    qp: NonNull<bindings::ib_qp>,
    transfers: &Transfers,
    user: *mut bindings::ib_cqe,
    then: *mut bindings::ib_send_wr,
    _cx: &Sleepable,
) -> Result<(), Failed> {
    // SAFETY: The context stays where it is at least until something was posted, as the caller
    // promises.
    let ctx = unsafe { plan.ctx.as_ref() };
    ctx.claim().map_err(Failed::Nowhere)?;
    // SAFETY: The state was just set to `POSTED`, so nobody else uses the context. `qp` is valid
    // and counts in `transfers`, and `then` is null or written, as the caller promises.
    let first = unsafe {
        ctx.start(plan, qp, transfers, user).map_err(|e| {
            ctx.release();
            Failed::Nowhere(e)
        })?;
        if !then.is_null() {
            end(then, (&raw const ctx.cqe).cast_mut());
            let read = bindings::ib_wr_opcode_IB_WR_RDMA_READ;
            if transfers.iwarp && plan.reads() && (*then).opcode != read {
                // siw completes what follows a READ before that is done, unless it is another one.
                (*then).send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
            }
        }
        ctx.requests(then)
    };
    ledger::post_to(qp.as_ptr(), user);
    let mut bad = core::ptr::null();
    // SAFETY: `qp` is valid, and what the requests are made of stays where it is, as the caller
    // promises. They were just made and, with `then`, linked.
    let ret = unsafe { post_list(qp.as_ptr(), first, &mut bad) };
    if ret == 0 {
        // The context may be gone by now.
        return Ok(());
    }
    let error = Error::from_errno(ret);
    if bad.is_null() {
        // The context may be gone by now.
        return Err(Failed::Unnamed(error));
    }
    if !core::ptr::eq(bad, first) {
        return Err(Failed::InPart(error));
    }
    // SAFETY: The transfer was begun, the driver says that it has posted none of its requests, and
    // the state keeps others from it.
    unsafe { ctx.cancel() };
    ctx.release();
    Err(Failed::Nowhere(error))
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Transfers pages of a [`Ctx`] to or from the peer (`rdma_rw_ctx_init`,
    /// `rdma_rw_ctx_post`), moving their owner in.
    ///
    /// The QP needs room for it: see [`Init::rw_contexts`](crate::qp::Init::rw_contexts) and
    /// [`Port::rw_contexts`](crate::device::Port::rw_contexts). In the owner's handler the pages
    /// are not mapped any more (`rdma_rw_ctx_destroy`).
    ///
    /// On iWARP the peer of a READ gets a key by which it can write to the pages, and which ends
    /// only with a READ that succeeds. The pages of one that has failed are lost to the [`Ctx`],
    /// whose length is zero then; they are freed when the QP was destroyed.
    ///
    /// Sleeps, as C allocates.
    ///
    /// # Errors
    ///
    /// What `rw` says; `EBUSY` if the context is in use; `EINVAL` if the range is empty or not
    /// inside of the pages, if these are lost, or the QP is not initialised or has no entries;
    /// `EAGAIN` if MRs are needed and all of the QP's are in use; `ENOMEM` also when the queue is
    /// full. See [`RwError`] for what becomes of the owner.
    pub fn post_rw<P, const ID: u64>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<Rw<'a>>,
        cx: &Sleepable,
    ) -> Result<(), RwError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let plan = match rw(&owner) {
            Ok(rw) => rw.plan,
            Err(error) => return Err(refused(owner, error)),
        };
        // SAFETY: The owner keeps the context, and no request follows.
        unsafe { self.post_plan(owner, &plan, core::ptr::null_mut(), cx) }
    }

    /// As [`Qp::post_rw`], followed by a request that completes in its stead: data, then the
    /// message that says so.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_rw`], and `EINVAL` if an entry of the request is of another PD.
    pub fn post_rw_then<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<(Rw<'a>, SendWr<'a, N>)>,
        cx: &Sleepable,
    ) -> Result<(), RwError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let mut sges = MaybeUninit::uninit();
        let (raw, sges) = (raw.as_mut_ptr(), sges.as_mut_ptr());
        let made = rw(&owner).and_then(|(rw, then)| {
            // SAFETY: There is room for the request and its entries.
            unsafe { then.write(raw, sges, &self.place) }?;
            Ok(rw.plan)
        });
        match made {
            // SAFETY: The owner keeps the context and what the request is made of.
            Ok(plan) => unsafe { self.post_plan(owner, &plan, raw.cast(), cx) },
            Err(error) => Err(refused(owner, error)),
        }
    }

    /// # Safety
    ///
    /// The owner keeps the context, and what `then` is made of, which is null or a request that is
    /// written.
    unsafe fn post_plan<P, const ID: u64>(
        &self,
        owner: P,
        plan: &Plan,
        then: *mut bindings::ib_send_wr,
        cx: &Sleepable,
    ) -> Result<(), RwError<P>>
    where
        P: CqePointer<ID>,
    {
        let cqe = owner.into_cqe(crate::cqe::Sealed::new());
        // SAFETY: The QP is valid and counts in `transfers()`. The owner keeps the context and what
        // `then` is made of, as the caller promises; it is the queue's, or parked below.
        let begun = unsafe { begin(plan, self.as_non_null(), self.transfers(), cqe, then, cx) };
        let Err(failed) = begun else {
            return Ok(());
        };
        match failed {
            // SAFETY: Nothing was posted, so nothing else will take the owner back.
            Failed::Nowhere(error) => Err(refused(unsafe { P::take_back(cqe) }, error)),
            Failed::InPart(error) => {
                // SAFETY: The last request, which completes to the owner, was not posted.
                let owner = unsafe { P::take_back(cqe) };
                // INVARIANT: The owner keeps the context, by the caller's promise. What is parked
                // is dropped when the QP was drained, or never.
                let kept = InPart {
                    ctx: plan.ctx,
                    _owner: owner,
                };
                self.park::<_, P::Target>(kept);
                Err(RwError { owner: None, error })
            }
            Failed::Unnamed(error) => {
                unnamed();
                Err(RwError { owner: None, error })
            }
        }
    }
}

fn refused<P>(owner: P, error: Error) -> RwError<P> {
    RwError {
        owner: Some(owner),
        error,
    }
}
