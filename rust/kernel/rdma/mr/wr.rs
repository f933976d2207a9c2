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
        CqePointer,
        Sealed, //
    },
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    mr::{
        frwr::take_invalidated,
        state::{
            Exclusive,
            Shared,
            State, //
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
        Qp, //
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
    ptr::{
        null_mut,
        NonNull, //
    }, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// A request to register a [`Region`], with the access that peers get.
///
/// # Invariants
///
/// `state` is that of `mr`.
pub struct RegWr<'a, S: State = Exclusive> {
    mr: &'a Mr,
    // If it is exclusive, this is not `Send`, as a reference to the region is not.
    state: &'a S,
    iova: u64,
    access: u32,
}

impl<'a, S: State> RegWr<'a, S> {
    #[inline]
    fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M, S>, access: u32) -> Self {
        // INVARIANT: The MR is the region's.
        Self {
            mr: &region.mr,
            state: region.state(),
            iova: region.iova,
            access,
        }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: DeviceReads, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::new(region, REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: DeviceWrites, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE)
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }

    /// Gives the region a new key and writes the C request, all but the callback and the successor,
    /// for `target`, which is returned.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes. The registration is committed before the request is posted, and
    /// aborted if it is not.
    #[inline]
    pub(crate) unsafe fn prepare<'t>(
        self,
        to: *mut bindings::ib_reg_wr,
        target: &'t PostTarget,
    ) -> Result<(&'t PostTarget, Remote, Registration)> {
        let fmr = &self.mr.fmr;
        // SAFETY: By the type invariant the state is that of the MR. The caller promises to commit
        // the registration and to abort it if it is not posted.
        let (target, mr, rkey, generation) = unsafe { fmr.prepare(self.state, target) }?;
        let (opcode, flags) = (
            bindings::ib_wr_opcode_IB_WR_REG_MR,
            bindings::ib_send_flags_IB_SEND_SIGNALED,
        );
        // SAFETY: The caller promises that `to` is valid for writes.
        unsafe {
            fill(&raw mut (*to).wr, opcode, flags, 0, null_mut(), 0);
            (*to).mr = mr;
            (*to).key = rkey;
            (*to).access = self.access as c_int;
        }
        let remote = Remote {
            addr: self.iova,
            rkey,
        };
        let mr = NonNull::from(self.mr);
        // INVARIANT: The MR was just prepared.
        Ok((target, remote, Registration { mr, generation }))
    }
}

/// A registration that was prepared and is not posted yet.
///
/// This has the address of the MR's handle, which is in the region and so, as a rule, in the owner:
/// it need not be kept during the post.
///
/// # Invariants
///
/// `generation` is from [`State::prepare`] of the state of `mr`: zero if that is exclusive.
pub(crate) struct Registration {
    mr: NonNull<Mr>,
    generation: u64,
}

impl Registration {
    /// Marks the region registered. An exclusive one is marked when it is prepared.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved. The request is posted next. If the state is shared,
    /// the caller holds the lock of the QP until that has returned.
    #[inline]
    pub(crate) unsafe fn commit(&self) {
        if self.generation != 0 {
            // SAFETY: The region is alive and has not moved, as the caller promises. By the type
            // invariant its state is shared, as the generation is not zero.
            unsafe { self.mr.as_ref().fmr.state::<Shared>() }.commit(self.generation);
        }
    }

    /// Ends the registration.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, and the request was not posted.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn abort(self) {
        // SAFETY: The region is alive and has not moved, as the caller promises.
        let fmr = unsafe { &self.mr.as_ref().fmr };
        // SAFETY: By the type invariant the generation is zero if the state is exclusive only.
        unsafe {
            match self.generation {
                0 => fmr.state::<Exclusive>().set_idle(),
                generation => fmr.state::<Shared>().abort(generation),
            }
        }
    }
}

/// A request to invalidate the key of a [`Region`] locally (`IB_WR_LOCAL_INV`).
///
/// # Invariants
///
/// `state` is that of `mr`.
pub struct InvWr<'a, S: State = Exclusive> {
    mr: &'a Mr,
    // If it is exclusive, this is not `Send`, as a reference to the region is not.
    state: &'a S,
}

impl<'a, S: State> InvWr<'a, S> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        // INVARIANT: The MR is the region's.
        Self {
            mr: &region.mr,
            state: region.state(),
        }
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
    pub fn post_reg<P, K: State, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a, K>,
    ) -> Result<Remote, PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // The lock is held until a registration that was not posted has ended.
        let (cqe, registration, refusal, _lock) = {
            let mut raw = MaybeUninit::<bindings::ib_reg_wr>::uninit();
            let (raw, wr) = (raw.as_mut_ptr(), wr(&owner));
            // SAFETY: `raw` has room for the request. The registration is committed and posted
            // below, and aborted if that is refused.
            let (target, remote, registration) = match unsafe { wr.prepare(raw, &self.target) } {
                Ok(prepared) => prepared,
                Err(error) => return Err(PostError::new(owner, error)),
            };
            let cqe = owner.into_cqe(Sealed::new());
            let lock = K::SHARED.then(|| self.reg_lock().lock());
            // SAFETY: The owner, which keeps the region, is not posted yet. The lock of a shared
            // state is held to the end.
            unsafe { registration.commit() };
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
            (cqe, registration, refusal, lock)
        };
        if refusal.named {
            // SAFETY: The only request was not posted. The owner, which is still given up, keeps
            // the region.
            unsafe { registration.abort() };
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
    /// `wr` is `Send`, as the owner is: the completion changes the state of the region in another
    /// thread, so no reference to an exclusive region may stay in this one.
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
    pub fn post_inv<P, K: State, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> InvWr<'a, K> + Send,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let (fmr, mr) = {
            let InvWr { mr, state } = wr(&owner);
            let fmr = &**mr.fmr;
            let _lock = K::SHARED.then(|| self.reg_lock().lock());
            // SAFETY: By the invariant of `InvWr` the state is that of the MR. The lock is held if
            // it is shared.
            match unsafe { fmr.prepare_invalidation(state, self.target.qp_id) } {
                Ok(()) => (NonNull::from(fmr), NonNull::from(mr)),
                Err(error) => return Err(PostError::new(owner, error)),
            }
        };
        let (cqe, refusal) = {
            let cqe = owner.into_cqe(Sealed::new());
            // SAFETY: `cqe` is from the owner, a `P::Target`, which keeps the region and is the
            // queue's until the completion. The MR was just prepared, and is marked registered
            // below if the request is not posted.
            let mut raw = unsafe { fmr.as_ref().invalidation::<P::Target, K, ID>(cqe) };
            // SAFETY: The request was just made. The owner, which keeps the region, is the queue's
            // until the MR's callback, made for `P`, gives it back.
            let ret = unsafe { send_raw(self.as_raw(), &raw mut raw) };
            if ret == 0 {
                return Ok(());
            }
            // SAFETY: `raw` is valid, and `ret` is what `send_raw` has just returned for it.
            (cqe, unsafe { Refusal::of_send(ret, &raw mut raw) })
        };
        if refusal.named {
            // SAFETY: The only request was not posted. The owner, which is still given up, keeps
            // the region, so the MR's handle is where it was, and its state is a `K`.
            unsafe {
                let fmr = &mr.as_ref().fmr;
                fmr.set_registered(fmr.state::<K>());
            }
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
    pub fn repost_reg<P, K: State, const ID: u64>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a, K>,
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
        // SAFETY: The reference is the owner's, which is not posted yet.
        let remote = unsafe { Self::post_by_ref(qp, owner, |qp, owner| qp.post_reg(owner, wr)) }?;
        Ok(remote)
    }

    /// Posts a local invalidation as [`Qp::post_inv`], for an owner that has its QP: see
    /// [`Qp::repost_send`].
    ///
    /// # Errors
    ///
    /// As [`Qp::post_inv`].
    #[inline]
    pub fn repost_inv<P, K: State, const ID: u64>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> InvWr<'a, K> + Send,
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
        // SAFETY: The reference is the owner's, which is not posted yet.
        unsafe { Self::post_by_ref(qp, owner, |qp, owner| qp.post_inv(owner, wr)) }?;
        Ok(())
    }

    /// Has `post` post an owner by a counted reference. Not inlined, so that the registers that
    /// this needs are not saved elsewhere.
    ///
    /// # Safety
    ///
    /// `this` is valid while the owner is not posted.
    #[inline(never)]
    unsafe fn post_by_ref<P, X>(
        this: *const Arc<Self>,
        owner: P,
        post: impl FnOnce(&Self, P) -> Result<X, PostError<P>>,
    ) -> Result<X, PostError<P>> {
        // SAFETY: `this` is valid, as the caller promises: the owner is not posted yet.
        let this = unsafe { &*this }.clone();
        post(&this, owner)
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
            if let Some(owner) = unsafe { take_invalidated::<T, ID>(this.wc) } {
                return Ok((owner, this.wc));
            }
        }
        unlikely();
        Err(ManuallyDrop::into_inner(this))
    }
}
