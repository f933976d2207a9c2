// SPDX-License-Identifier: GPL-2.0

//! Requests that change the state of an MR.

use crate::{
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cq::Completion,
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    mr::{
        self,
        frwr::{
            FastRegMr,
            Registering, //
        },
        Memory,
        Mr,
        Region, //
    },
    qp::{
        post::{
            send_raw,
            Refusal, //
        },
        PostTarget,
        Qp,
        QpId, //
    },
    wc::{
        unlikely,
        Wc, //
    },
    wr::{
        end,
        fill,
        PostError,
        Remote, //
    }, //
};
use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// The memory of a request's owner, if nobody else can have a reference to it.
///
/// A region that lies there is out of everybody's reach until the owner is back: it need not be
/// marked and posted in turn. A region that the owner only refers to may be shared.
pub(crate) struct Private {
    addr: usize,
    size: usize,
}

impl Private {
    #[inline]
    pub(crate) fn of<P, const ID: u64>(owner: &P) -> Self
    where
        P: CqePointer<ID>,
        P::Target: Sized,
    {
        let owner: *const P::Target = &**owner;
        Self {
            addr: owner.addr(),
            size: const {
                if P::EXCLUSIVE {
                    size_of::<P::Target>()
                } else {
                    0
                }
            },
        }
    }

    /// Says whether the region lies in this memory. If it does, the compiler knows its offset, and
    /// nothing is left of this.
    #[inline]
    fn has(&self, mr: &Mr) -> bool {
        core::ptr::from_ref(mr).addr().wrapping_sub(self.addr) < self.size
    }
}

/// A request to register a [`Region`], with the access that peers get.
pub struct RegWr<'a> {
    mr: &'a Mr,
    iova: u64,
    access: u32,
}

impl<'a> RegWr<'a> {
    #[inline]
    fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>, access: u32) -> Self {
        Self {
            mr: &region.mr,
            iova: region.iova,
            access,
        }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: DeviceReads, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self::new(region, REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: DeviceWrites, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE)
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D, M>(region: &'a Region<D, M>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }

    /// Says whether others may reach the region before `owner` is back.
    #[inline]
    pub(crate) fn is_shared(&self, owner: &Private) -> bool {
        !owner.has(self.mr)
    }

    /// Has the region note the QP at `place`. That is returned, so that it need not be kept over
    /// the call which a QP that is new to the region needs.
    ///
    /// # Safety
    ///
    /// `shared` is what [`RegWr::is_shared`] says of the owner.
    #[inline]
    pub(crate) unsafe fn come_to<'p>(
        &self,
        target: &'p PostTarget,
        shared: bool,
    ) -> Result<&'p PostTarget> {
        if shared {
            // That is for who has claimed the region.
            return Ok(target);
        }
        // SAFETY: A region that is not shared is a part of an owner that nobody else has.
        unsafe { self.mr.fmr.target_alone(target) }
    }

    /// Gives the region a new key and writes the C request, all but the callback and the successor,
    /// for the QP at `place`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes. `shared` is what [`RegWr::is_shared`] says of the owner, and
    /// `place` is from [`RegWr::come_to`]. If it is shared, [`Marked::register`] is called. If the
    /// request is not posted, what is returned is undone.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_reg_wr,
        target: &PostTarget,
        shared: bool,
    ) -> Result<(Remote, Marked)> {
        // SAFETY: `shared` is what `is_shared` says and `place` is from `come_to`, as the caller
        // promises, who also calls `register` and undoes what is not posted. A region that is not
        // shared is a part of an owner that nobody else has until the request has completed.
        let (mr, rkey, registering) = unsafe {
            if shared {
                self.mr.fmr.prepare(target)?
            } else {
                self.mr.fmr.prepare_alone()
            }
        };
        let (opcode, flags) = (
            bindings::ib_wr_opcode_IB_WR_REG_MR,
            bindings::ib_send_flags_IB_SEND_SIGNALED,
        );
        // SAFETY: The caller promises that `to` is valid for writes.
        unsafe {
            fill(
                &raw mut (*to).wr,
                opcode,
                flags,
                0,
                core::ptr::null_mut(),
                0,
            );
            (*to).mr = mr;
            (*to).key = rkey;
            (*to).access = self.access as c_int;
        }
        let remote = Remote {
            addr: self.iova,
            rkey,
        };
        Ok((remote, Marked(NonNull::from(self.mr), registering)))
    }
}

/// A region that has a new key, by a request that is not posted yet.
///
/// It is found by the MR's handle, which is in the region, so as a rule in the owner: its address
/// need not be kept during the post.
pub(crate) struct Marked(NonNull<Mr>, Registering);

impl Marked {
    /// Marks the region registered, if it is not.
    ///
    /// # Safety
    ///
    /// The region is alive. The request is about to be posted, and the caller has the turn of the
    /// QP that it was made for until that has returned.
    pub(crate) unsafe fn register(&self) {
        // SAFETY: The region is alive and the caller has the turn of the QP, as he promises. What
        // is not undone is from the last `prepare`.
        unsafe { self.0.as_ref().fmr.register(self.1) };
    }

    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, and its registration was not posted.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: The region is alive and has not moved, and its registration was not posted, as
        // the caller promises.
        unsafe { self.0.as_ref().fmr.undo(self.1) };
    }
}

/// A request to invalidate the key of a [`Region`] locally (`IB_WR_LOCAL_INV`).
pub struct InvWr<'a> {
    mr: &'a Mr,
}

impl<'a> InvWr<'a> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self { mr: &region.mr }
    }

    /// Says whether others may reach the region now.
    #[inline]
    pub(crate) fn is_shared(&self, owner: &Private) -> bool {
        !owner.has(self.mr)
    }

    /// Marks the region as being invalidated by a request for the QP with this number.
    ///
    /// # Safety
    ///
    /// `shared` is what [`InvWr::is_shared`] says of the owner. If so, the caller has the turn of
    /// the QP.
    #[inline]
    pub(crate) unsafe fn prepare(self, qp_id: QpId, shared: bool) -> Result<Invalidating> {
        // SAFETY: `shared` is what `is_shared` says and, if it is set, the caller has the turn of
        // the QP, as he promises. A region that is not shared is a part of an owner that nobody
        // else has.
        unsafe {
            if shared {
                self.mr.fmr.invalidate(qp_id)
            } else {
                self.mr.fmr.invalidate_alone(qp_id)
            }
        }?;
        Ok(Invalidating {
            fmr: NonNull::from(&**self.mr.fmr),
            mr: NonNull::from(self.mr),
        })
    }
}

/// A region that is marked as being invalidated, by a request that is not posted yet.
///
/// When it was refused, the MR is found again by its handle, as in [`Marked`].
pub(crate) struct Invalidating {
    fmr: NonNull<FastRegMr>,
    mr: NonNull<Mr>,
}

impl Invalidating {
    /// Makes the C request, whose completion gives the owner of `user` to its handler.
    ///
    /// # Safety
    ///
    /// The region lives until that completion. `user` is from an owner of type `T`, given up by its
    /// callback `ID`. `shared` is what [`InvWr::is_shared`] has said. If the request is not posted,
    /// [`Invalidating::undo`] is called.
    #[inline]
    pub(crate) unsafe fn request<T: CqeHandler<ID>, const ID: u64>(
        &self,
        user: *mut bindings::ib_cqe,
        shared: bool,
    ) -> bindings::ib_send_wr {
        // SAFETY: The type says that the region is marked. It lives until the completion, `user` is
        // from a `T`, and what is not posted is undone, as the caller promises.
        unsafe { self.fmr.as_ref().invalidation::<T, ID>(user, shared) }
    }

    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, and the invalidation was not posted.
    #[inline]
    pub(crate) unsafe fn undo(self) {
        // SAFETY: The region is alive and has not moved, as the caller promises.
        unsafe { self.mr.as_ref() }.fmr.not_invalidated();
    }
}

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
            let target = match unsafe { wr.come_to(&self.target, shared) } {
                Ok(target) => target,
                Err(error) => return Err(PostError::new(owner, error)),
            };
            // SAFETY: `raw` has room for the request, `shared` is from `is_shared` and `place` from
            // `come_to`. A shared region is registered below, and what is not posted is undone.
            let (remote, marked) = match unsafe { wr.write(raw, target, shared) } {
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
                send_raw(target.raw.as_ptr(), &raw mut (*raw).wr)
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
            unsafe { wr.prepare(self.target.qp_id, shared) }
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

impl<'a> Completion<'a> {
    /// Takes the owner, if it is a `T` that was posted by its callback `ID` with a local
    /// invalidation ([`Qp::post_inv`](crate::qp::Qp::post_inv)); its handler is not called. If that
    /// was successful, the region is idle.
    ///
    /// [`Completion::take`] does not know these: an invalidation completes to a callback in its MR.
    ///
    /// Where `T` is generic and of another crate, a module may not recognise owners that another
    /// module has made.
    ///
    /// # Errors
    ///
    /// The completion, if it is another one.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{Batch, Cq}, cqe::*, dma::*, mr::Region, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Io { cqe: Cqe<Self>, region: Region<Bidirectional> }
    /// # impl CqeHandler for Io {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// /// Drops what is idle again; other requests go to their handlers.
    /// fn reap(cq: &Cq<Direct>, batch: &mut Batch<16>) -> Result {
    ///     cq.poll(batch)?;
    ///     for completion in batch.completions() {
    ///         if let Ok((io, _wc)) = completion.take_inv::<Io, 0>() {
    ///             drop(io);
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// ```
    #[inline]
    pub fn take_inv<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let this = ManuallyDrop::new(self);
        if !this.wc.cqe().is_null() {
            // SAFETY: By the type invariant the owner was not taken back, and there is a callback.
            // If there is an owner, `this` is not dropped.
            if let Some(owner) = unsafe { mr::take_ended::<T, ID>(this.wc) } {
                return Ok((owner, this.wc));
            }
        }
        unlikely();
        Err(ManuallyDrop::into_inner(this))
    }
}
