// SPDX-License-Identifier: GPL-2.0

//! Requests that change the state of an MR.

use crate::{
    dma,
    mr::{
        frwr,
        Exclusive,
        Memory,
        Shared,
        State, //
    },
    prelude::*,
    wc,
    wr::{
        self,
        Entries as _, //
    }, //
};
use core::{
    marker::PhantomData,
    mem::ManuallyDrop, //
};
use kernel::sync::SpinLockIrqGuard;

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// A request to register a [`Region`], with the access that peers get (`IB_WR_REG_MR`).
///
/// Posting it returns where a peer will find the region. Requests posted after it see the
/// registration, so the advertisement can be sent at once. It is refused with `EBUSY` if the region
/// is not idle.
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// # #[derive(HasCqe)]
/// # struct Io { cqe: Cqe<Self>, region: Region<FromDevice> }
/// # impl CqeHandler for Io {
/// #     type Pointer = Pin<KBox<Self>>;
/// #     type Needs = Atomic;
/// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
/// # }
/// /// Registers a region, and returns what the peer is to be told.
/// fn register(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result<Remote> {
///     Ok(qp.post_send(io, |io| Ok(RegWr::remote_write(&io.region)))?)
/// }
/// ```
pub type RegWr<'a, S = Exclusive> = SendWr<'a, 0, RegOp<S>>;

/// The operation of a [`RegWr`].
///
/// # Invariants
///
/// `mr` is a region's with the state `S`.
pub struct RegOp<S: State> {
    mr: NonNull<Mr>,
    _state: PhantomData<S>,
    iova: u64,
    access: u32,
    /// The MR and its new key, once the request is prepared.
    raw: *mut bindings::ib_mr,
    key: u32,
}

// SAFETY: An MR may be used from any thread, and so may a state that is `Sync`.
unsafe impl<S: State + Sync> Send for RegOp<S> {}

impl<'a, S: State> RegWr<'a, S> {
    #[inline]
    fn reg<D: dma::Direction, M: Memory<D>>(region: &'a Region<D, M, S>, access: u32) -> Self {
        // INVARIANT: The MR is the region's.
        let op = RegOp {
            mr: NonNull::from(&*region.mr),
            _state: PhantomData,
            iova: region.iova,
            access,
            raw: core::ptr::null_mut(),
            key: 0,
        };
        let sges = [].into_list();
        Self { sges, op }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: dma::DeviceReads, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::reg(region, REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: dma::DeviceWrites, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        Self::reg(region, LOCAL_WRITE | REMOTE_WRITE)
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: dma::DeviceReads + dma::DeviceWrites,
        M: Memory<D>,
    {
        Self::reg(region, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: dma::DeviceReads + dma::DeviceWrites,
        M: Memory<D>,
    {
        Self::reg(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }
}

impl<S: State> wr::SendOp for RegOp<S> {}
impl<S: State> wr::Op for RegOp<S> {
    type Output = Remote;
    type Raw = bindings::ib_reg_wr;
    type Undo = Registration;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<(Remote, Registration)> {
        // SAFETY: The region lives until the request has completed, as the caller promises. By the
        // type invariant its state is an `S`. The registration is committed by `lock` or
        // `Chain::post`, and aborted by `undo` if it is not posted.
        let (raw, key, generation) = unsafe { self.mr.as_ref().0.prepare::<S>(target) }?;
        (self.raw, self.key) = (raw, key);
        let remote = Remote {
            addr: self.iova,
            rkey: key,
        };
        let mr = self.mr;
        // INVARIANT: The MR was just prepared.
        Ok((remote, Registration { mr, generation }))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_reg_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe {
            wr::fill(to.cast(), opcode, flags, 0);
            (*to).mr = self.raw;
            (*to).key = self.key;
            (*to).access = self.access as c_int;
        }
    }

    #[inline]
    unsafe fn lock<'t>(
        undo: &Registration,
        target: &'t wr::PostTarget,
    ) -> Option<SpinLockIrqGuard<'t, ()>> {
        S::SHARED.then(|| {
            let guard = target.lock_regs();
            // SAFETY: The region is alive, as the request is not posted yet, and the lock is held
            // until it is.
            unsafe { undo.commit() };
            guard
        })
    }

    #[inline]
    unsafe fn undo(undo: Registration, _wr: *mut bindings::ib_send_wr) {
        // SAFETY: The region is alive and has not moved, and its registration was not posted, as
        // the caller promises.
        unsafe { undo.abort() };
    }
}

/// A registration that was prepared and is not posted yet.
///
/// # Invariants
///
/// `generation` is from [`State::prepare`] of the state of `mr`: zero if that is exclusive.
pub struct Registration {
    mr: NonNull<Mr>,
    generation: u64,
}

impl Registration {
    /// Returns whether the state of the region is shared.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.generation != 0
    }

    /// Marks the region registered. An exclusive one is marked when it is prepared.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved. The request is posted next. If the state is shared,
    /// the caller holds the lock of the QP until that has returned.
    #[inline]
    pub(crate) unsafe fn commit(&self) {
        if self.is_shared() {
            // SAFETY: The region is alive and has not moved, as the caller promises. By the type
            // invariant its state is shared, as the generation is not zero.
            unsafe { self.mr.as_ref().0.state::<Shared>() }.commit(self.generation);
        }
    }

    /// Ends the registration.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, the request was not posted, and this was not called
    /// before.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn abort(&self) {
        // SAFETY: The region is alive and has not moved, as the caller promises.
        let fmr = unsafe { &self.mr.as_ref().0 };
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
/// When the owner's handler is called for success, the region is idle. On failure (when it was
/// flushed) it may still be registered, and only dropping it ends that.
///
/// Posting it is refused with `EBUSY` if the region is not registered or is being invalidated, and
/// with `EINVAL` if its registration was not posted to the same QP.
///
/// # Examples
///
/// ```
/// # use rdma::{prelude::*, wc::Success};
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
///         if this.region.is_idle() {
///             complete(&this.region);
///         }
///     }
/// }
///
/// /// The reply has come. Has the key invalidated here if the peer has not done that.
/// fn replied(io: Pin<KBox<Io>>, wc: &Success<'_>, qp: &Qp<Softirq>) -> Result {
///     if io.region.remote_invalidated(wc, qp) {
///         complete(&io.region);
///         return Ok(());
///     }
///     Ok(qp.post_send(io, |io| Ok(InvWr::new(&io.region)))?)
/// }
///
/// fn complete(region: &Region<FromDevice>) {
///     let mut bytes = [0; 4];
///     if region.read(0, &mut bytes).is_ok() {
///         pr_info!("the peer wrote {bytes:?}\n");
///     }
/// }
/// ```
pub type InvWr<'a, S = Exclusive> = SendWr<'a, 0, InvOp<S>>;

/// The operation of an [`InvWr`].
///
/// # Invariants
///
/// `mr` is a region's with the state `S`.
pub struct InvOp<S: State> {
    mr: NonNull<Mr>,
    _state: PhantomData<S>,
    key: u32,
}

// SAFETY: An MR may be used from any thread, and so may a state that is `Sync`.
unsafe impl<S: State + Sync> Send for InvOp<S> {}

impl<'a, S: State> InvWr<'a, S> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: dma::Direction, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        // INVARIANT: The MR is the region's.
        let op = InvOp {
            mr: NonNull::from(&*region.mr),
            _state: PhantomData,
            key: 0,
        };
        let sges = [].into_list();
        Self { sges, op }
    }
}

impl<S: State> wr::SendOp for InvOp<S> {}
impl<S: State> wr::Op for InvOp<S> {
    type Output = ();
    type Raw = bindings::ib_send_wr;
    type Undo = NonNull<frwr::FastRegMr>;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<((), NonNull<frwr::FastRegMr>)> {
        let _guard = S::SHARED.then(|| target.lock_regs());
        // SAFETY: The region lives until the request has completed, as the caller promises.
        let mr = unsafe { &*self.mr.as_ref().0 };
        // SAFETY: By the type invariant the state of the region is an `S`. The lock of the QP is
        // held if that is shared.
        self.key = unsafe { mr.prepare_invalidation::<S>(target.qp_id) }?;
        Ok(((), mr.into()))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_send_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_LOCAL_INV;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe { wr::fill(to, opcode, flags, self.key) };
    }

    #[inline]
    unsafe fn callback<T: CqeHandler<ID>, const ID: u64>(
        undo: &NonNull<frwr::FastRegMr>,
        user: *mut bindings::ib_cqe,
    ) -> *mut bindings::ib_cqe {
        // SAFETY: The region is alive, as the request is not posted yet, and was prepared. `user`
        // is from a `T`, as the caller promises.
        unsafe { undo.as_ref().set_callback::<T, S, ID>(user) }
    }

    #[inline]
    unsafe fn undo(_undo: NonNull<frwr::FastRegMr>, wr: *mut bindings::ib_send_wr) {
        // SAFETY: The request has the callback of an MR, which is alive, as the request was not
        // posted, and whose state is an `S`.
        unsafe { frwr::invalidation_refused::<S>(wr) };
    }
}

impl<'a> Completion<'a> {
    /// As [`Completion::take`], of an owner that was posted with a local invalidation ([`InvWr`]):
    /// that completes to a callback in the MR. If it was successful, the region is idle. Gives the
    /// completion back if it is another one.
    #[inline]
    pub fn take_inv<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant the owner was not taken back. If there is one, `this` is
        // not dropped.
        match unsafe { frwr::take_invalidated::<T, ID>(this.wc) } {
            Some(owner) => Ok((owner, this.wc)),
            None => {
                wc::unlikely();
                Err(ManuallyDrop::into_inner(this))
            }
        }
    }
}
