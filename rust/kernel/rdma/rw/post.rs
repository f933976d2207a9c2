// SPDX-License-Identifier: GPL-2.0

//! Preparing and posting transfers.

use crate::{
    cqe::{
        self,
        CqeHandler,
        CqePointer,
        Runs, //
    },
    debug,
    identity,
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    rw::{
        ctx_of,
        Extents,
        RawCtx,
        Rw,
        READ,
        WRITE, //
    },
    sync::RwState,
    trace,
    wr::{
        self,
        PostError, //
    }, //
};

/// The way in which a transfer is to be posted.
#[derive(Clone, Copy)]
pub(super) struct PostArgs {
    /// The callback of the owner, which was given up.
    pub(super) user: *mut bindings::ib_cqe,
    /// The callback of the transfer.
    pub(super) done: unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc),
    /// Null, or what follows.
    pub(super) then: *mut bindings::ib_send_wr,
}

/// The `done` callback of transfers whose owner was given up as a `T` by its callback `ID`. With
/// `ALL` the transfer was begun by the fast path of [`Qp::post_rw`]: it is of all of the memory,
/// and not on iWARP.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, for the last request of such a transfer.
unsafe extern "C" fn done<T: CqeHandler<ID>, const ID: u64, const ALL: bool>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // `cqe::is_of` tells owners apart by the address of another function.
    identity::keep_distinct::<(RawCtx, cqe::Cqe<T::Pointer, ID>)>();
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    // SAFETY: The request was posted with the callback of a context, which the owner keeps, and
    // that is not back: a request completes once.
    let ctx = || unsafe { ctx_of(wc) };
    // SAFETY: The completion gives this exclusive access to the context, which is valid, as just
    // said.
    if !debug::deactivate(unsafe { (*ctx().inner.get()).user }) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: This is the last request, so none is outstanding. The completion has the context,
    // and its callback is that of the way in which it was begun.
    let user = unsafe {
        if ALL {
            RawCtx::end(wc)
        } else {
            let user = (*ctx().inner.get()).user;
            ctx().finish(wc.result().is_ok());
            user
        }
    };
    // SAFETY: The owner was given up as a `T` by its callback `ID`, and is taken back once, as the
    // request completes once. `cq` and `wc` are those of the call.
    unsafe { cqe::call_handler::<T, ID>(user, cq, wc) };
}

/// Why a post has failed, and after how many requests. `None` if the driver did not say: the last
/// one may be in the queue.
type Failed = (Error, Option<u32>);

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

// SAFETY: The context is `Send`, and so is the owner that keeps it.
unsafe impl<P: Send> Send for InPart<P> {}

impl<P> Drop for InPart<P> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the owner, which is dropped after this, keeps the context,
        // no request is outstanding, and the transfer still has the context for itself.
        unsafe { self.ctx.as_ref().finish(false) };
    }
}

/// Posts the requests of a transfer.
///
/// # Safety
///
/// `qp` is valid. The caller has claimed the context for it, and `first` is what
/// [`RawCtx::requests`] has just returned for `user`. The memory of the requests stays where it is
/// until `user` has completed or, if the post fails in part, until the QP is drained.
#[inline(always)]
unsafe fn post(
    ctx: NonNull<RawCtx>,
    qp: NonNull<bindings::ib_qp>,
    first: *mut bindings::ib_send_wr,
    user: *mut bindings::ib_cqe,
) -> Result<(), Failed> {
    debug::set_qp_of(qp.as_ptr(), user);
    // The request that the driver refuses, and the first one, in memory, which costs no register.
    let mut list = [ptr::null(), first.cast_const()];
    // SAFETY: `qp` is valid, and the memory of the requests stays where it is, as the caller
    // promises. They were just made and linked.
    let ret = unsafe {
        let qp = qp.as_ptr();
        trace::PostVerb::post(trace::PostVerb::op(qp), qp, first, &mut list[0], false)
    };
    if ret == 0 {
        // The context may be gone by now.
        return Ok(());
    }
    // SAFETY: The driver has just returned this for the list. If it has posted none, the context
    // is valid, as nothing gives the owner back.
    Err(unsafe { refused(ctx, &list, ret) })
}

/// Returns how far a post came that a driver has failed. If that is nowhere, the transfer ends.
///
/// # Safety
///
/// The driver has returned `ret` for the list that begins with the second request, of a transfer
/// whose context the caller has claimed, and named the first as the one that it refused. If the
/// context is gone, that is null.
unsafe fn refused(
    ctx: NonNull<RawCtx>,
    [bad, first]: &[*const bindings::ib_send_wr; 2],
    ret: c_int,
) -> Failed {
    let bad = *bad;
    let first = *first;
    let error = Error::from_errno(ret);
    if bad.is_null() {
        // The context may be gone by now.
        return (error, None);
    }
    // SAFETY: The requests are linked, and the owner, which no completion gives back, as the driver
    // has refused one, keeps them.
    let mut posted = unsafe { distance(first, bad) };
    // SAFETY: The context is valid and still claimed, as the caller promises.
    let qp = unsafe { ctx.as_ref() }.state.qp() as *const bindings::ib_qp;
    // Some driver does not name the one that had no room: all but the last are taken for posted.
    //
    // SAFETY: The QP is valid while it counts the transfer, which has not ended.
    if posted == 0 && error == ENOMEM && unsafe { qp::post::names_first(qp) } {
        // SAFETY: The requests are linked up to their end, and the owner keeps them.
        posted = unsafe { distance(first, ptr::null()) } - 1;
    }
    if posted == 0 {
        // SAFETY: The driver has refused the first request, so it has posted none, and the context
        // is valid and still claimed, as the caller promises.
        unsafe { ctx.as_ref().finish(true) };
    }
    (error, Some(posted))
}

/// Claims a context and maps its memory for a transfer that is posted later.
///
/// # Safety
///
/// The context is valid, and `target` is that of a QP to which the caller has a reference.
unsafe fn prepare(ctx: &RawCtx, extents: Extents, target: &wr::PostTarget) -> Result {
    let qp = target.raw;
    let at = qp.as_ptr() as usize;
    let dir = extents.dir;
    // SAFETY: The QP is valid, as the caller promises.
    if !unsafe { qp::transfers(qp.as_ptr()) }.has_contexts {
        return Err(EINVAL);
    }
    if extents.range.is_none() && ctx.state.claim(target.rw_idle, at).is_ok() {
        // SAFETY: The QP is valid, and the context was just claimed for it; QP and device have the
        // limits that C divides by, and the QP a port, as it need not look at the transfer.
        unsafe { ctx.map(qp, (*qp.as_ptr()).port, extents.remote, extents.dir) }?;
    } else {
        // SAFETY: The QP is valid, as the caller promises.
        unsafe { ctx.map_part(qp, extents) }?;
    }
    let stale = match dir {
        // SAFETY: The QP and its device are valid, as the caller promises.
        WRITE if unsafe { bindings::rdma_helper_dma_need_sync((*qp.as_ptr()).device) } => {
            RwState::STALE
        }
        _ => 0,
    };
    // INVARIANT: The transfer is mapped. The caller has a reference to the QP, so its end comes
    // later.
    ctx.state.set(at | RwState::PREPARED | stale);
    Ok(())
}

/// Claims a context, begins any transfer of its memory and posts the requests.
///
/// # Safety
///
/// `qp` is valid. The context, and the memory of what is `posted`, stays where it is until that has
/// completed to `user`, if this succeeds, or, if it fails in part, until the QP is drained.
/// `posted.then` is null or an initialised request.
unsafe fn begin(
    ctx: NonNull<RawCtx>,
    extents: Option<Extents>,
    qp: NonNull<bindings::ib_qp>,
    posted: PostArgs,
) -> Result<(), Failed> {
    // SAFETY: The context exists until a request is posted, as the caller promises.
    let this = unsafe { ctx.as_ref() };
    let at = qp.as_ptr() as usize;
    let claimed = match extents {
        // SAFETY: `qp` is valid, as the caller promises.
        Some(extents) => unsafe { this.map_part(qp, extents) },
        // INVARIANT: If it is prepared, the caller has this for itself from here on.
        None => match this.state.claim(at | RwState::PREPARED, at) {
            Ok(_) => Ok(()),
            // SAFETY: `qp` is valid, as the caller promises.
            Err(state) => unsafe { this.claim_stale(qp, state) },
        },
    };
    claimed.map_err(|error| (error, Some(0)))?;
    // SAFETY: The context was claimed above, which keeps all others from it, and the transfer is
    // mapped, so `first` is valid. So are the QP and `posted.then`, and the memory of the requests
    // stays where it is, as the caller promises.
    unsafe {
        this.note(&posted);
        let first = this.requests(qp, posted.then);
        if qp::transfers(qp.as_ptr()).iwarp {
            let inner = &mut *this.inner.get();
            if inner.dir == READ && !posted.then.is_null() {
                qp::post::come_after_reads(posted.then);
            }
            // If there is an MR, the first request registers it, or invalidates it before that.
            inner.exposed = matches!(
                (*first).opcode,
                bindings::ib_wr_opcode_IB_WR_REG_MR | bindings::ib_wr_opcode_IB_WR_LOCAL_INV
            );
            // A parameter of ib_core may ask for a key by which peers could write what is sent.
            if inner.exposed && inner.dir == WRITE {
                this.finish(true);
                return Err((EOPNOTSUPP, Some(0)));
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
unsafe fn distance(
    mut first: *const bindings::ib_send_wr,
    last: *const bindings::ib_send_wr,
) -> u32 {
    let mut n = 0u32;
    while !ptr::eq(first, last) && !first.is_null() {
        // SAFETY: The request is not behind the end of the list, whose requests are valid.
        first = unsafe { (*first).next };
        n = n.saturating_add(1);
    }
    n
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Maps the memory of a [`Ctx`] for a transfer and makes its requests (`rdma_rw_ctx_init`), so
    /// that it can be posted where one cannot sleep. What is written to the memory before it is
    /// posted is transferred, also by a device for which that is to be synchronised.
    ///
    /// When the last handle of the QP is gone, a transfer that was not posted is taken back, as by
    /// [`Ctx::cancel`], wherever its context is: that does not keep the QP. Only a view of
    /// [`Ctx::cpu`] does, until it is dropped.
    ///
    /// Fails with `EBUSY` if the context is posted or was prepared; `EINVAL` if `rw` is
    /// [`Rw::prepared`]; if the context has no memory, or the range is empty or not inside of that;
    /// if the QP was created without contexts, is not initialised, or has too few entries for C to
    /// make the requests in one piece; or if MRs are needed and cannot map the entries of the list;
    /// `EAGAIN` if MRs are needed and all are in use; `ENOMEM`.
    /// See Documentation/mr.rst.
    ///
    /// [`Ctx`]: crate::rw::Ctx
    /// [`Ctx::cancel`]: crate::rw::Ctx::cancel
    /// [`Ctx::cpu`]: crate::rw::Ctx::cpu
    pub fn prepare_rw(&self, rw: Rw<'_>) -> Result {
        let Some(extents) = rw.extents else {
            return Err(EINVAL);
        };
        // SAFETY: The context is borrowed, and so is the QP.
        unsafe { prepare(rw.ctx, extents, &self.inner.target) }
    }

    /// Transfers memory of a [`Ctx`](crate::rw::Ctx) to or from the peer (`rdma_rw_ctx_init`,
    /// `rdma_rw_ctx_post`), moving in their owner. Any context, if the transfer was prepared.
    ///
    /// The QP must be created with contexts for it
    /// ([`InitAttr::rw_contexts`](qp::InitAttr::rw_contexts)). In the owner's handler the memory is
    /// no longer mapped (`rdma_rw_ctx_destroy`).
    ///
    /// If a READ fails on iWARP, where the peer has a key, the context loses the memory: its length
    /// is zero, and it can be [filled](crate::rw::Ctx::fill) again. The owner of what is lost is
    /// dropped after the QP, and must not keep the QP.
    ///
    /// Fails with the error of `rw`, or as [`Qp::prepare_rw`]; with `EINVAL` also if `rw` is
    /// [`Rw::prepared`] and the context is not prepared for this QP, or if an entry of the request
    /// that follows is of another PD; `ENOMEM` also when the queue is full; `EOPNOTSUPP` for a
    /// WRITE on iWARP if ib_core was loaded with `force_mr`, by which peers could write the memory,
    /// and for a request behind it that iWARP does not have. A transfer that was prepared has to be
    /// prepared again then, unless it was `rw` that failed, or the request that follows.
    #[inline]
    pub fn post_rw<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        rw: impl for<'a> FnOnce(&'a P::Target) -> Result<Rw<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
    {
        let rw = match rw(&owner) {
            Ok(rw) if owner.may_post_to(self.id(), cqe::Sealed(())) => rw,
            Ok(_) => return Err(PostError::new(owner, EINVAL)),
            Err(error) => return Err(PostError::new(owner, error)),
        };
        let ctx = NonNull::from(rw.ctx);
        let extents = rw.extents;
        let target = &self.inner.target;
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let mut sges = MaybeUninit::uninit();
        let then = match rw.then {
            Some(then) => {
                let raw = raw.as_mut_ptr();
                let sges = sges.as_mut_ptr();
                // SAFETY: The owner keeps the memory of the request, which `rw` has borrowed from
                // it, until it completes. The operation is an `RdmaOp`, which has nothing to undo.
                match unsafe { then.prepare(target) } {
                    // SAFETY: There is room for the request and its entries; it is prepared.
                    Ok((then, _)) => unsafe { then.write(raw, sges) },
                    Err(error) => return Err(PostError::new(owner, error)),
                }
                raw.cast()
            }
            None => ptr::null_mut(),
        };
        let user = owner.into_cqe(cqe::Sealed(()));
        let begin = |extents| {
            let done = done::<P::Target, ID, false>;
            let posted = PostArgs { user, done, then };
            // SAFETY: The QP is valid. The owner keeps the context and the memory of `then`, which
            // `rw` has borrowed from it, and `then` is null or was just written. The owner is the
            // queue's until it completes, or is kept until the QP is drained below.
            unsafe { begin(ctx, extents, target.raw, posted) }
        };
        // SAFETY: The owner keeps the context, which `rw` has borrowed from it.
        let this = unsafe { ctx.as_ref() };
        let at = target.raw.as_ptr() as usize;
        let begun = match extents {
            Some(Extents {
                range: None,
                remote,
                dir,
            }) => match this.state.claim(target.rw_idle, at) {
                // SAFETY: The QP is valid, and the context was just claimed for it; QP and device
                // have the limits that C divides by, and the QP a port, as it need not look at the
                // transfer. The owner, which keeps the context and the memory of `then`, is the
                // queue's until it completes, or is kept until the QP is drained below. `then` is
                // null or was just written.
                Ok(_) => unsafe {
                    let qp = target.raw;
                    let done = done::<P::Target, ID, true>;
                    this.note(&PostArgs { user, done, then });
                    match this.map(qp, (*qp.as_ptr()).port, remote, dir) {
                        Ok(()) => post(ctx, qp, this.requests(qp, then), user),
                        Err(error) => Err((error, Some(0))),
                    }
                },
                // Made anew, so that it is not written to memory where it is not needed.
                Err(_) => begin(Some(Extents {
                    range: None,
                    remote,
                    dir,
                })),
            },
            None if !target.iwarp => match this.state.claim(at | RwState::PREPARED, at) {
                // SAFETY: The QP is valid, and the context was just claimed for it, with a transfer
                // that is mapped. The owner, which keeps the context and the memory of `then`, is
                // the queue's until it completes, or is kept until the QP is drained below. `then`
                // is null or was just written.
                Ok(_) => unsafe {
                    let done = done::<P::Target, ID, false>;
                    this.note(&PostArgs { user, done, then });
                    post(ctx, target.raw, this.requests(target.raw, then), user)
                },
                Err(_) => begin(None),
            },
            part => begin(part),
        };
        // SAFETY: The transfer was just refused, for this owner.
        begun.map_err(|failed| unsafe { self.not_posted(ctx, user, failed) })
    }

    /// Takes the owner of a transfer back, unless that was posted in part.
    ///
    /// # Safety
    ///
    /// Posting `ctx`, whose owner keeps it and was given up for `user`, has failed so.
    unsafe fn not_posted<P, const ID: u64>(
        &self,
        ctx: NonNull<RawCtx>,
        user: *mut bindings::ib_cqe,
        (error, posted): Failed,
    ) -> PostError<P>
    where
        P: CqePointer<ID>,
    {
        let Some(posted) = posted else {
            qp::post::unnamed();
            return PostError::in_part(None, 0, error);
        };
        // SAFETY: The last request, which completes to the owner, was not posted.
        let owner = unsafe { P::take_back(user) };
        if posted == 0 {
            return PostError::new(owner, error);
        }
        // INVARIANT: The owner keeps the context, by the caller's promise, and the transfer has
        // that. What is kept is dropped when the QP was drained, or never.
        (self.inner).keep_until_drained::<_, P::Target>(InPart { ctx, _owner: owner });
        PostError::in_part(None, posted, error)
    }
}
