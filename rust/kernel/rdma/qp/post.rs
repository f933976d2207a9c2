// SPDX-License-Identifier: GPL-2.0

//! Posting requests.

use crate::{
    cqe::{
        self,
        CqePointer,
        Queue,
        Runs, //
    },
    debug,
    noted,
    prelude::internal::*,
    qp::{
        Inner,
        Qp, //
    },
    trace,
    wc::{
        self,
        Status,
        Wc,
        WcError, //
    },
    wr::{
        self,
        PostError,
        RecvWr,
        SendWr, //
    }, //
};

/// Gives back the owner of a request that was not made. Not inlined, as the error would be loaded
/// before it is known whether there is one.
#[cold]
#[inline(never)]
fn unmade<P>(owner: P, error: Error) -> PostError<P> {
    PostError::new(owner, error)
}

/// Takes the callback of a request back that was refused, as of [`wr::Refusal::check`], unless it
/// may have been posted.
#[cold]
fn take_callback(
    ret: c_int,
    next: *const c_void,
    cqe: *mut bindings::ib_cqe,
) -> PostError<NonNull<bindings::ib_cqe>> {
    let cqe = if next.is_null() {
        unnamed();
        None
    } else {
        debug::deactivate(cqe);
        NonNull::new(cqe)
    };
    PostError::in_part(cqe, 0, Error::from_errno(ret))
}

/// Takes back a request of the send queue that was refused, and the callback of its owner, unless
/// it may have been posted. That is found out of the request, so that a post need not save it.
///
/// # Safety
///
/// `wr` is valid, with an owner's callback, and `ret` is what
/// [`post_one`](trace::PostVerb::post_one) has just returned for it, and not 0. `undo` is from
/// [`WrOp::prepare`](wr::WrOp::prepare) of it.
unsafe fn send_refused<O: wr::WrOp>(
    wr: *mut bindings::ib_send_wr,
    ret: c_int,
    undo: O::Undo,
) -> PostError<NonNull<bindings::ib_cqe>> {
    // SAFETY: `wr` is valid, as the caller promises; both members of the union are as wide. If it
    // was named, the only request was not posted. The owner, which is still given up, keeps what
    // it refers to.
    unsafe {
        if !(*wr).next.is_null() {
            O::undo(undo, wr);
        }
        take_callback(ret, (*wr).next.cast(), *(*wr).__bindgen_anon_1.wr_cqe)
    }
}

/// Reports a driver that has failed and did not name a request.
#[inline(never)]
pub(crate) fn unnamed() {
    let owner = if noted::is_on() {
        "stays until the end of the QP"
    } else {
        "is leaked"
    };
    pr_err!("a driver did not say which request it refused: the owner {owner}\n");
}

/// Returns whether the driver of a QP names the first request of a list when there is no room for
/// all of them, whichever it has refused (`erdma_post_send()`).
///
/// # Safety
///
/// `qp` is valid.
pub(crate) unsafe fn names_first(qp: *const bindings::ib_qp) -> bool {
    // SAFETY: `qp` is valid, as the caller promises, and its device is valid while it is.
    let driver = unsafe { (*(*qp).device).ops.driver_id };
    driver == bindings::rdma_driver_id_RDMA_DRIVER_ERDMA
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts a request to the send queue, of any kind of QP.
    ///
    /// Steps that can fail before the post are outside of the scope of the C request: the compiler
    /// would merge these failures with the success at the scope's end, and test the result again.
    ///
    /// # Safety
    ///
    /// The QP has such operations. The owner's handler may run where sends of this QP complete.
    // Always, so that a handler that posts again has no call of it.
    #[inline(always)]
    pub(crate) unsafe fn post_op<P, O, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N, O, ID>>,
    ) -> Result<O::Output, PostError<P>>
    where
        P: CqePointer<ID>,
        O: wr::WrOp,
    {
        let target = &self.inner.target;
        if !owner.may_post_to(target.qp_id, cqe::Sealed(())) {
            return Err(unmade(owner, EINVAL));
        }
        // SAFETY: The owner keeps what the request refers to until it has completed. If the request
        // is not posted, it is undone below.
        let prepared = wr(&owner).and_then(|wr| unsafe { wr.prepare(target) });
        let (wr, (output, undo)) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(unmade(owner, error)),
        };
        let refused = {
            let mut raw = MaybeUninit::<O::Raw>::uninit();
            let mut sges = MaybeUninit::uninit();
            // SAFETY: There is room for both, and the request is prepared.
            unsafe { wr.write(raw.as_mut_ptr(), sges.as_mut_ptr()) };
            let wr = raw.as_mut_ptr().cast();
            let cqe = owner.into_cqe(cqe::Sealed(()));
            // The lock is held until what was not posted is taken back.
            //
            // SAFETY: The request was prepared for this QP and is written. The owner, a
            // `P::Target` that was given up for `cqe`, keeps what it refers to and is the queue's
            // until `done`.
            let (_guard, ret) = unsafe {
                let guard = O::lock(&undo, target);
                let callback = O::callback::<P::Target, ID>(&undo, cqe);
                P::note_cqe(cqe, target.qp_id, Queue::Send, callback);
                wr::write_tail(wr, callback);
                debug::set_qp_of(target.raw.as_ptr(), cqe);
                let post = target.post_send;
                let qp = target.raw.as_ptr();
                let ret = trace::PostVerb::post_one(post, qp, wr, P::NOTED);
                (guard, ret)
            };
            if ret == 0 {
                return Ok(output);
            }
            wc::unlikely();
            // SAFETY: `wr` is valid, and `ret` is what the driver has just returned for it. `undo`
            // is of this request.
            unsafe { send_refused::<O>(wr, ret, undo) }
        };
        // SAFETY: The callback is that of the owner, which the only request was to give back, and
        // that was not posted.
        Err(refused.map(|cqe| unsafe { P::from_cqe(cqe.as_ptr()) }))
    }

    /// Posts a request to the send queue (`ib_post_send`), moving its owner in, and returns where
    /// the peer will find the region for a [`RegWr`], otherwise nothing.
    ///
    /// `wr` describes the request from what the owner has, and names the handler that gets the
    /// owner back ([`SendWr::done_by`]). After success the owner may already be in that.
    ///
    /// Any context. Gives the owner back with `EINVAL` if an entry is of another PD, or an atomic
    /// operation is not for eight bytes, aligned to eight; `EOPNOTSUPP` if iWARP is to carry
    /// immediate data, to read into any but one entry, or to do atomic operations; what a [`RegWr`]
    /// or an [`InvWr`] is refused with; or with the driver's error: `ENOMEM` when the queue is
    /// full. See [`PostError`] for when it does not.
    ///
    /// [`RegWr`]: crate::mr::RegWr
    /// [`InvWr`]: crate::mr::InvWr
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # #[derive(HasCqe)]
    /// # struct Message { cqe: Cqe<Self>, sge: Buf<ToDevice> }
    /// # impl CqeHandler for Message {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn send(qp: &Qp<Softirq>, message: Pin<KBox<Message>>) -> Result {
    ///     Ok(qp.post_send(message, |m| Ok(SendWr::send([m.sge.sge(0..16)?])))?)
    /// }
    /// ```
    #[inline]
    pub fn post_send<P, O, F, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: F,
    ) -> Result<O::Output, PostError<P>>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
        O: wr::SendOp<F>,
        F: for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N, O, ID>>,
    {
        // SAFETY: A connected QP has these operations, and `S` provides what the handler needs.
        unsafe { self.post_op(owner, wr) }
    }

    /// Posts a request to the receive queue (`ib_post_recv`), moving its owner in. As
    /// [`Qp::post_send`]; `EINVAL` also if the QP takes its receives from an SRQ.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::RecvWr};
    /// # #[derive(HasCqe)]
    /// # struct Message { cqe: Cqe<Self>, buf: Buf<FromDevice> }
    /// # impl CqeHandler for Message {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn receive(qp: &Qp<Softirq>, empty: Pin<KBox<Message>>) -> Result {
    ///     Ok(qp.post_recv(empty, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?)
    /// }
    /// ```
    #[inline]
    pub fn post_recv<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        R: Runs<P, ID>,
    {
        let inner: &Inner = &self.inner;
        let target = &inner.target;
        let wr = match wr(&owner) {
            Ok(wr) if wr.is_of(target.pd) && owner.may_post_to(target.qp_id, cqe::Sealed(())) => wr,
            Ok(_) => return Err(unmade(owner, EINVAL)),
            Err(error) => return Err(unmade(owner, error)),
        };
        let refused = {
            let mut sges = MaybeUninit::uninit();
            let mut raw = wr.into_raw(&mut sges);
            let cqe = owner.into_cqe(cqe::Sealed(()));
            raw.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
            // SAFETY: The owner was just given up for this address.
            unsafe { P::note_cqe(cqe, target.qp_id, Queue::Recv, cqe) };
            let qp = target.raw.as_ptr();
            debug::set_qp_of(qp, cqe);
            // SAFETY: The request was just written, and its memory is kept by the owner, which is
            // the queue's until `done`. The operation is that of the QP, or refuses all, by the
            // invariant of `Inner`.
            let ret =
                unsafe { trace::PostVerb::post_one(inner.post_recv, qp, &raw mut raw, P::NOTED) };
            if ret == 0 {
                return Ok(());
            }
            wc::unlikely();
            // As in `send_refused`, the request is looked at, so that the post need not save it.
            //
            // SAFETY: Both members of the union are as wide.
            let cqe = unsafe { *raw.__bindgen_anon_1.wr_cqe };
            take_callback(ret, raw.next.cast(), cqe)
        };
        // SAFETY: The callback is that of the owner, which the only receive was to give back, and
        // that was not posted.
        Err(refused.map(|cqe| unsafe { P::from_cqe(cqe.as_ptr()) }))
    }

    // An owner that is moved into the queue cannot lend its QP to the call that posts it. A handler
    // needs no reference if its owner goes back to the CQ that is being polled: that CQ's next
    // completion is dispatched after the handler has returned, and until then it keeps the QP.

    /// Returns a copy of the handle that is not counted, for a post that gives up the owner of the
    /// handle.
    ///
    /// # Safety
    ///
    /// What is returned is used only while there is a counted handle.
    #[inline]
    pub(crate) unsafe fn uncounted(&self) -> ManuallyDrop<Self> {
        // SAFETY: The handle is valid. The copy is not dropped, and is used only while there is a
        // counted one, as the caller promises.
        ManuallyDrop::new(unsafe { ptr::read(self) })
    }

    /// Calls `post` with another handle. Cold, so that callers that need none do not save the
    /// registers that this needs.
    #[cold]
    fn post_counted<P, T>(
        this: ManuallyDrop<Self>,
        owner: P,
        post: impl FnOnce(&Self, P) -> Result<T, PostError<P>>,
    ) -> Result<T, PostError<P>> {
        post(&Self::clone(&this), owner)
    }

    /// As [`Qp::post_send`], for an owner that has a handle of its QP, which `qp` returns. It is
    /// not cloned in a handler of `wc`, if the QP's sends complete to the CQ of `wc`, which is not
    /// shared; otherwise, as for completions of a [`WcArray`], it is.
    ///
    /// [`WcArray`]: crate::cq::WcArray
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// #[derive(HasCqe)]
    /// struct Beat {
    ///     cqe: Cqe<Self>,
    ///     buf: Buf<ToDevice>,
    ///     qp: Qp<Softirq>,
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
    ///                 pr_err!("no more: {:?}\n", e.error());
    ///             }
    ///         }
    ///     }
    /// }
    /// ```
    #[inline]
    pub fn repost_send<P, O, F, const ID: u64, const N: usize>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Self,
        wr: F,
    ) -> Result<O::Output, PostError<P>>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
        O: wr::SendOp<F>,
        F: for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N, O, ID>>,
    {
        // SAFETY: The owner has a handle. The caller is a handler that borrows `wc`: if the request
        // completes to the CQ that is dispatching that, the owner, which is posted or given back,
        // keeps the handle until the caller has returned. If not, another is made before the post.
        let qp = unsafe { qp(&owner).uncounted() };
        if wc.is_in(qp.inner.send_array) {
            // SAFETY: A connected QP has these operations, and `S` provides what the handler needs.
            return unsafe { qp.post_op(owner, wr) };
        }
        // Not returned as it is, or the compiler merges this with the result above, and tests that.
        let output = Self::post_counted(qp, owner, |qp, owner| qp.post_send(owner, wr))?;
        Ok(output)
    }

    /// As [`Qp::post_recv`], for an owner that has its QP: see [`Qp::repost_send`].
    #[inline]
    pub fn repost_recv<P, const ID: u64, const N: usize>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Self,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        R: Runs<P, ID>,
    {
        // SAFETY: The owner has a handle. The caller is a handler that borrows `wc`: if the receive
        // completes to the CQ that is dispatching that, the owner, which is posted or given back,
        // keeps the handle until the caller has returned. If not, another is made before the post.
        let qp = unsafe { qp(&owner).uncounted() };
        if wc.is_in(qp.inner.recv_array) {
            return qp.post_recv(owner, wr);
        }
        Self::post_recv_counted(qp, owner, wr)
    }

    /// As [`Qp::post_recv`], with another handle. Cold, as [`Qp::post_counted`] is: a ULP
    /// has this once for each kind of receive.
    #[cold]
    pub(crate) fn post_recv_counted<P, const ID: u64, const N: usize>(
        this: ManuallyDrop<Self>,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        R: Runs<P, ID>,
    {
        Self::clone(&this).post_recv(owner, wr)
    }
}

const SIGNALED: c_int = bindings::ib_send_flags_IB_SEND_SIGNALED as c_int;

/// The callback of requests that are not signaled, which complete when they fail or are flushed.
/// Their owner is that of the signaled request behind them.
static UNSIGNALED: bindings::ib_cqe = bindings::ib_cqe {
    done: Some(unsignaled),
};

/// The `done` callback of requests that are not signaled.
///
/// # Safety
///
/// Called as [`trace::completion`] requires.
unsafe extern "C" fn unsignaled(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    if let Err(WcError { status, .. }) = wc.result() {
        if status != Status::WR_FLUSH_ERR {
            crate::pr_err_ratelimited!("a request that is not signaled has failed: {status}\n");
        }
    }
}

/// Makes a request complete after the RDMA READs before it, on iWARP: siw completes what follows a
/// READ before that is done, unless it is another one or has a fence.
///
/// # Safety
///
/// `wr` is valid, and its flags are written.
pub(crate) unsafe fn come_after_reads(wr: *mut bindings::ib_send_wr) {
    // SAFETY: `wr` is valid and its flags are written, as the caller promises.
    unsafe {
        if (*wr).opcode != bindings::ib_wr_opcode_IB_WR_RDMA_READ {
            (*wr).send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        }
    }
}

/// Makes a request signaled, with the callback `cqe`, or one that is not signaled.
///
/// # Safety
///
/// `wr` is valid, and its flags are written.
#[inline]
pub(super) unsafe fn signal(wr: *mut bindings::ib_send_wr, cqe: Option<*mut bindings::ib_cqe>) {
    let unsignaled = (&raw const UNSIGNALED).cast_mut();
    // SAFETY: `wr` is valid and its flags are written, as the caller promises.
    unsafe {
        match cqe {
            Some(_) => (*wr).send_flags |= SIGNALED,
            None => (*wr).send_flags &= !SIGNALED,
        }
        (*wr).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe.unwrap_or(unsignaled));
    }
}
