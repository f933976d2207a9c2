// SPDX-License-Identifier: GPL-2.0

//! Posting transfers, and their completion.

use crate::{
    cqe::{
        self,
        CqePointer, //
    },
    debug,
    identity,
    prelude::*,
    qp,
    rw::{
        of,
        Extents,
        Plan,
        RawCtx,
        Rw, //
    },
    sync::RwState,
    trace, //
};
use core::{
    mem::MaybeUninit,
    ptr, //
};

/// The type of a callback.
type Done = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

/// The way in which a transfer is to be posted.
#[derive(Clone, Copy)]
struct Posted {
    /// The callback of the owner, which was given up.
    user: *mut bindings::ib_cqe,
    /// The callback of the transfer.
    done: Done,
    /// Null, or what follows.
    then: *mut bindings::ib_send_wr,
}

impl RawCtx {
    /// Notes to whom the transfer is to complete, before it is mapped: then that need not be kept
    /// in registers.
    ///
    /// # Safety
    ///
    /// The caller has claimed this.
    #[inline]
    unsafe fn note(&self, posted: &Posted) {
        // SAFETY: The claim keeps all others from this.
        unsafe {
            (*self.inner.get()).user = posted.user;
            (*self.cqe.get()).done = Some(posted.done);
        }
    }
}

/// The `done` callback of transfers, of `ALL` of the memory by [`transfer_all`] or of any by
/// [`begin`], whose owner was given up as a `T` by its callback `ID`.
///
/// # Safety
///
/// Called by the RDMA core for the last request of such a transfer.
unsafe extern "C" fn done<T: CqeHandler<ID>, const ID: u64, const ALL: bool>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // `cqe::is_of` tells owners apart by the address of another function.
    identity::keep_distinct::<(RawCtx, cqe::Cqe<T::Pointer, ID>)>();
    // SAFETY: The core passes a CQ and a completion that are valid during this call, and nothing
    // was done with it yet.
    if unsafe { trace::completion(cq, wc) } {
        return;
    }
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let wc = unsafe { &*wc.cast::<Wc>() };
    // SAFETY: The request was posted with the callback of a context, which the owner keeps, and
    // that is not back: a request completes once.
    let ctx = || unsafe { of(wc) };
    // SAFETY: The completion has the context.
    if !debug::deactivate(unsafe { ctx().user() }) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: This is the last request, so none is outstanding. The completion has the context,
    // and its callback says by which function it was begun.
    let user = unsafe {
        match ALL {
            true => RawCtx::end(wc),
            false => {
                let user = ctx().user();
                ctx().finish(wc.result().is_ok());
                user
            }
        }
    };
    // SAFETY: The owner was given up as a `T` by its callback `ID`, and is taken back once, as the
    // request completes once.
    let owner = unsafe { T::Pointer::from_cqe(user) };
    // SAFETY: Posting checked that the completion queue, which the core passes, is polled in a
    // context that provides this one.
    let cx = unsafe { T::Needs::of_completion(cq, wc) };
    T::done(owner, wc, &cx);
}

/// The progress of a post that has failed.
enum Failed {
    Nowhere(Error),
    /// After so many requests.
    InPart(u32, Error),
    /// The driver did not say how far: the last request may be in the queue.
    Unnamed(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Nowhere(e) | Failed::InPart(_, e) | Failed::Unnamed(e) => e,
        }
    }
}

/// A transfer that was posted in part, and its owner. The transfer ends when this is dropped.
///
/// # Invariants
///
/// `ctx` is a context whose transfer was posted in part, which still has it, and is kept by the
/// owner. This is dropped when none of its requests is outstanding.
struct InPart<P> {
    ctx: NonNull<RawCtx>,
    _owner: P,
}

// SAFETY: A transfer may end on any thread.
unsafe impl<P: Send> Send for InPart<P> {}

impl<P> Drop for InPart<P> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the owner keeps the context; it is dropped after this.
        let ctx = unsafe { self.ctx.as_ref() };
        // SAFETY: By the type invariant no request is outstanding, and the transfer still has the
        // context, which keeps all others from it.
        unsafe { ctx.finish(false) };
    }
}

/// Posts the requests of a transfer.
///
/// # Safety
///
/// `qp` is valid. The caller has claimed the context for it, and `first` is what
/// [`RawCtx::requests`] has just returned for `user`. The memory of the requests stays where it is
/// until `user` has completed or, if the post fails in part, until the QP is drained.
#[inline]
unsafe fn post(
    ctx: NonNull<RawCtx>,
    qp: NonNull<bindings::ib_qp>,
    first: *mut bindings::ib_send_wr,
    user: *mut bindings::ib_cqe,
) -> Result<(), Failed> {
    debug::set_qp_of(qp.as_ptr(), user);
    let mut list = List {
        bad: ptr::null(),
        first,
    };
    // SAFETY: `qp` is valid, and the memory of the requests stays where it is, as the caller
    // promises. They were just made and linked.
    let ret = unsafe {
        let qp = qp.as_ptr();
        trace::post_send(trace::send_op(qp), qp, first, &mut list.bad)
    };
    if ret == 0 {
        // The context may be gone by now.
        return Ok(());
    }
    // SAFETY: The driver has just returned this for the list. If it has posted none, the context
    // is there, as nothing gives the owner back.
    Err(unsafe { refused(ctx, &list, ret) })
}

/// A list of requests that is posted, and the one that the driver has refused. In memory, which
/// costs no register.
#[derive(Clone, Copy)]
struct List {
    bad: *const bindings::ib_send_wr,
    first: *const bindings::ib_send_wr,
}

/// Returns how far a post came that a driver has failed. If that is nowhere, the transfer ends.
///
/// # Safety
///
/// As the driver has returned `ret` for the list, of a transfer whose context the caller has
/// claimed, and named the request `bad`. If the context is there no longer, that is null.
#[cold]
#[inline(never)]
unsafe fn refused(ctx: NonNull<RawCtx>, list: &List, ret: c_int) -> Failed {
    let (List { bad, first }, error) = (*list, Error::from_errno(ret));
    if bad.is_null() {
        // The context may be gone by now.
        return Failed::Unnamed(error);
    }
    // SAFETY: The requests are linked, and the owner, which no completion gives back, as the driver
    // has refused one, keeps them.
    let mut posted = unsafe { distance(first, bad) };
    // SAFETY: The context is there and still claimed, as the caller promises.
    let qp = unsafe { ctx.as_ref() }.state.qp() as *const bindings::ib_qp;
    // Some driver does not name the one that had no room: all but the last are taken for posted.
    //
    // SAFETY: The QP is valid while it counts the transfer, which has not ended.
    if posted == 0 && error == ENOMEM && unsafe { qp::post::names_first(qp) } {
        // SAFETY: The requests are linked up to their end, and the owner keeps them.
        posted = unsafe { distance(first, ptr::null()) } - 1;
    }
    if posted > 0 {
        return Failed::InPart(posted, error);
    }
    // SAFETY: The driver has refused the first request, so it has posted none, and the context is
    // there and still claimed, as the caller promises.
    unsafe { ctx.as_ref().undo() };
    Failed::Nowhere(error)
}

/// Maps all of the memory of a context and posts its requests.
///
/// # Safety
///
/// `qp` is valid, and the context was claimed for it by [`RwState::claim_unseen`] with the
/// [`rw_idle`](wr::PostTarget::rw_idle) of the QP. The context, and the memory of what is `posted`,
/// stays where it is until that has completed to `user`, if this succeeds, or, if it fails in part,
/// until the QP is drained. `posted.then` is null or an initialised request.
#[inline(always)]
unsafe fn transfer_all(
    ctx: NonNull<RawCtx>,
    qp: NonNull<bindings::ib_qp>,
    remote: Remote,
    dir: bindings::dma_data_direction,
    posted: Posted,
) -> Result<(), Failed> {
    // SAFETY: The context stays where it is at least until a request is posted, as the caller
    // promises.
    let this = unsafe { ctx.as_ref() };
    // SAFETY: This was claimed, and `qp` is valid, as the caller promises. It and its device have
    // the limits that C divides by, and it has a port, as it need not look at the transfer.
    let mapped = unsafe {
        this.note(&posted);
        this.map(qp, qp.as_ref().port, remote, dir)
    };
    if let Err(error) = mapped {
        return Err(Failed::Nowhere(error));
    }
    // SAFETY: The context was claimed, and the transfer is mapped. The memory of the requests
    // stays where it is, as the caller promises.
    unsafe {
        let first = this.requests(qp, posted.then);
        post(ctx, qp, first, posted.user)
    }
}

/// Begins any transfer and posts its requests. If there is no `posted`, it is only prepared.
///
/// # Safety
///
/// As [`transfer_all`], but the context need not be claimed: this does it.
#[inline(never)]
unsafe fn begin(
    ctx: NonNull<RawCtx>,
    extents: Option<Extents>,
    qp: NonNull<bindings::ib_qp>,
    posted: Option<Posted>,
) -> Result<(), Failed> {
    // SAFETY: The context stays where it is at least until a request is posted, as the caller
    // promises.
    let this = unsafe { ctx.as_ref() };
    let claimed = match extents {
        // SAFETY: `qp` is valid, as the caller promises.
        Some(extents) => unsafe { this.map_part(qp, extents) },
        // INVARIANT: If it is prepared, the caller has this for itself from here on.
        None => match this.state.claim_prepared(qp.as_ptr() as usize) {
            Ok(()) => Ok(()),
            Err(state) if RwState::is_claimed(state) => Err(EBUSY),
            Err(_) => Err(EINVAL),
        },
    };
    claimed.map_err(Failed::Nowhere)?;
    let Some(posted) = posted else {
        // INVARIANT: The transfer is mapped.
        this.state.set_prepared(qp.as_ptr() as usize);
        return Ok(());
    };
    // SAFETY: The context was claimed above, and the transfer is mapped. The QP is valid, and the
    // memory of the requests stays where it is, as the caller promises.
    unsafe {
        this.note(&posted);
        let first = this.requests(qp, posted.then);
        if qp::transfers(qp.as_ptr()).iwarp {
            if let Err(error) = this.expose(first, posted.then) {
                this.undo();
                return Err(Failed::Nowhere(error));
            }
        }
        post(ctx, qp, first, posted.user)
    }
}

/// Returns the number of requests between two of a list.
///
/// # Safety
///
/// `first` is a list of valid requests.
#[cold]
unsafe fn distance(
    mut first: *const bindings::ib_send_wr,
    last: *const bindings::ib_send_wr,
) -> u32 {
    let mut n = 0u32;
    while !ptr::eq(first, last) && !first.is_null() {
        // SAFETY: The request is one of the list, as it is not behind its end, and valid, as the
        // caller promises.
        first = unsafe { (*first).next };
        n = n.saturating_add(1);
    }
    n
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Maps the memory of a [`Ctx`](super::Ctx) for a transfer and makes its requests
    /// (`rdma_rw_ctx_init`), so that it can be posted where one cannot sleep.
    ///
    /// The QP is not destroyed before the transfer has completed, or was cancelled
    /// ([`Ctx::cancel`](super::Ctx::cancel)), as dropping the context does, too: if that takes more
    /// than a minute after the last reference to the QP is gone, the QP is leaked and holds its
    /// device. Fails with `EBUSY` if the context is posted or was prepared; `EINVAL` if the range
    /// is empty or not inside of the memory, if that is lost, or the QP is not initialised or has
    /// no entries, or MRs are needed and cannot map the entries of the list; `EAGAIN` if MRs are
    /// needed and all of the QP's are in use; `ENOMEM`.
    ///
    /// Documentation/mr.rst has an example.
    pub fn prepare_rw(&self, rw: Rw<'_>) -> Result {
        // SAFETY: By the invariant of `Rw` the context is borrowed. The QP is valid. Nothing is
        // posted.
        Ok(unsafe { begin(rw.plan.ctx, rw.plan.extents, self.any.target.raw, None) }?)
    }

    /// Transfers memory of a [`Ctx`](super::Ctx) to or from the peer (`rdma_rw_ctx_init`,
    /// `rdma_rw_ctx_post`), moving in their owner. Any context, if the transfer was prepared.
    ///
    /// The QP must be created with contexts for it: see
    /// [`InitAttr::rw_contexts`](crate::qp::InitAttr::rw_contexts). In the owner's handler the
    /// memory is not mapped any more (`rdma_rw_ctx_destroy`). A request may follow: see
    /// [`Rw::then`].
    ///
    /// If a READ fails on iWARP, where the peer has a key, the memory is lost to its context,
    /// whose length is zero then; its owner is dropped after the QP is destroyed, so that must not
    /// keep the QP.
    ///
    /// Fails with what `rw` says, or as [`Qp::prepare_rw`]; with `EINVAL` also if the context is to
    /// be prepared for this QP and is not, or an entry of the request that follows is of another
    /// PD; `ENOMEM` also when the queue is full; `EOPNOTSUPP` for a WRITE on iWARP if ib_core was
    /// loaded with `force_mr`, by which peers could write the memory, and for a request behind it
    /// that iWARP does not have.
    /// See [`PostError`] for what becomes of the owner. A transfer that was prepared and that was
    /// refused is to be prepared again, unless it was `rw` that failed, or the request that
    /// follows.
    #[inline]
    pub fn post_rw<P, const ID: u64, const N: usize, const THEN: bool>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<Rw<'a, N, THEN>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let Rw { plan, then, .. } = match rw(&owner) {
            Ok(rw) => rw,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let mut sges = MaybeUninit::uninit();
        let next = match then {
            Some(then) if THEN => {
                let (raw, sges) = (raw.as_mut_ptr(), sges.as_mut_ptr());
                // SAFETY: The owner keeps the memory of the request, which `rw` has borrowed from
                // it, until it completes. The operation is an `RdmaOp`, which has nothing to undo.
                match unsafe { then.prepare(&self.any.target) } {
                    // SAFETY: There is room for the request and its entries; it is prepared.
                    Ok((then, _)) => unsafe { then.write(raw, sges) },
                    Err(error) => return Err(PostError::new(owner, error)),
                }
                raw.cast()
            }
            _ => ptr::null_mut(),
        };
        // SAFETY: The owner keeps the context and the memory of the request, which `rw` has
        // borrowed from it. The request, if there is one, was just written.
        unsafe { self.post_plan(owner, plan, next) }
    }

    /// # Safety
    ///
    /// The owner keeps the context and the memory of `then`, which is null or an initialised
    /// request. Its handler may run where sends of this QP complete.
    #[inline(always)]
    unsafe fn post_plan<P, const ID: u64>(
        &self,
        owner: P,
        plan: Plan,
        then: *mut bindings::ib_send_wr,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let (Plan { ctx, extents }, target) = (plan, &self.any.target);
        let user = owner.into_cqe(cqe::Sealed::new());
        let posted = |done| Posted { user, done, then };
        let begin = |extents| {
            let posted = Some(posted(done::<P::Target, ID, false>));
            // SAFETY: The QP is valid. The owner keeps the context and the memory of `then`, as the
            // caller promises. It is the queue's until it completes, or is kept until the QP is
            // drained below.
            unsafe { begin(ctx, extents, target.raw, posted) }
        };
        let claim = || {
            // SAFETY: The owner keeps the context, as the caller promises.
            let state = unsafe { &ctx.as_ref().state };
            state.claim_unseen(target.rw_idle, target.raw.as_ptr() as usize)
        };
        let begun = match extents {
            Some(Extents {
                range: None,
                remote,
                dir,
            }) => match claim() {
                true => {
                    let posted = posted(done::<P::Target, ID, true>);
                    // SAFETY: The QP is valid, and the context was just claimed for it. The owner
                    // keeps the context and the memory of `then`, as the caller promises. It is the
                    // queue's until it completes, or is kept until the QP is drained below.
                    unsafe { transfer_all(ctx, target.raw, remote, dir, posted) }
                }
                // Made anew, so that it is not written to memory where it is not needed.
                false => begin(Some(Extents {
                    range: None,
                    remote,
                    dir,
                })),
            },
            part => begin(part),
        };
        match begun {
            Ok(()) => Ok(()),
            // SAFETY: The transfer was just refused, for this owner.
            Err(failed) => Err(unsafe { self.not_posted(ctx, user, failed) }),
        }
    }

    /// Takes the owner of a transfer back, unless that was posted in part.
    ///
    /// # Safety
    ///
    /// Posting the transfer of `ctx`, whose owner was given up for `user` and keeps the context,
    /// has failed so.
    #[cold]
    #[inline(never)]
    unsafe fn not_posted<P, const ID: u64>(
        &self,
        ctx: NonNull<RawCtx>,
        user: *mut bindings::ib_cqe,
        failed: Failed,
    ) -> PostError<P>
    where
        P: CqePointer<ID>,
    {
        match failed {
            // SAFETY: Nothing was posted, so nothing else will take the owner back.
            Failed::Nowhere(error) => PostError::new(unsafe { P::take_back(user) }, error),
            Failed::InPart(posted, error) => {
                // SAFETY: The last request, which completes to the owner, was not posted.
                let owner = unsafe { P::take_back(user) };
                // INVARIANT: The owner keeps the context, by the caller's promise, and the transfer
                // has that. What is kept is dropped when the QP was drained, or never.
                let kept = InPart { ctx, _owner: owner };
                (self.any.inner).keep_until_drained::<_, P::Target>(kept);
                PostError::in_part(None, posted, error)
            }
            Failed::Unnamed(error) => {
                qp::post::unnamed();
                PostError::in_part(None, 0, error)
            }
        }
    }
}
