// SPDX-License-Identifier: GPL-2.0

//! The registration of an MR by work requests, and its end.

use crate::{
    cqe::{
        self,
        CqeHandler, //
    },
    debug,
    dma,
    mr::{
        Exclusive,
        FastRegMr,
        Memory,
        Region,
        Shared,
        State, //
    },
    prelude::internal::*,
    sg,
    trace,
    wc::{
        self,
        Wc, //
    },
    wr::{
        self,
        Entries as _,
        Remote,
        SendWr, //
    }, //
};
use kernel::sync::SpinLockIrqGuard;

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// A request to register a [`Region`], with the access that peers get (`IB_WR_REG_MR`).
///
/// Posting it returns where a peer will find the region, which can be sent at once. It is refused
/// with `EBUSY` if the region is not idle.
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// /// Lets the peer write to a region, as `qp.post_send(io, |io| Ok(writable(&io.region)))`.
/// fn writable(region: &Region<FromDevice>) -> RegWr<'_> {
///     RegWr::remote_write(region)
/// }
/// ```
pub type RegWr<'a, S = Exclusive> = SendWr<'a, 0, RegOp<S>>;

/// The operation of a [`RegWr`].
///
/// # Invariants
///
/// `mr` is a region's with the state `S`.
pub struct RegOp<S: State> {
    mr: NonNull<FastRegMr>,
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
    fn reg<D: dma::AnyDirection, M: Memory<D>>(region: &'a Region<D, M, S>, access: u32) -> Self {
        // INVARIANT: The MR is the region's.
        let op = RegOp {
            mr: NonNull::from(&*region.mr.0),
            _state: PhantomData,
            iova: region.iova,
            access,
            raw: ptr::null_mut(),
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

    /// Lets peers read the region if the device only reads its memory, and write it if the device
    /// only writes that.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{dma::OneWay, prelude::*, sg::{SgMap, SgOwner}};
    /// /// Starts a read or a write: what the peer may do goes with the request.
    /// fn start<O: SgOwner<OneWay>>(
    ///     region: &Region<OneWay, SgMap<O, OneWay>>,
    /// ) -> RegWr<'_> {
    ///     RegWr::remote_one_way(region)
    /// }
    /// ```
    #[inline]
    pub fn remote_one_way<O>(region: &'a Region<dma::OneWay, sg::SgMap<O, dma::OneWay>, S>) -> Self
    where
        O: sg::SgOwner<dma::OneWay>,
    {
        // Without the memory it is refused.
        let access = if region.memory().is_some_and(sg::SgMap::is_to_device) {
            REMOTE_READ
        } else {
            LOCAL_WRITE | REMOTE_WRITE
        };
        Self::reg(region, access)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// /// Peers take locks in the region, each a word, by compare and swap.
    /// fn locks(region: &Region<Bidirectional>) -> RegWr<'_> {
    ///     RegWr::remote_atomic(region)
    /// }
    /// ```
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M, S>) -> Self
    where
        D: dma::DeviceReads + dma::DeviceWrites,
        M: Memory<D>,
    {
        Self::reg(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }
}

impl<F, S: State> wr::SendOpFor<F> for RegOp<S> {}
impl<S: State> wr::WrOp for RegOp<S> {
    type Output = Remote;
    type Raw = bindings::ib_reg_wr;
    type Undo = PreparedReg;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<(Remote, PreparedReg)> {
        // SAFETY: The region lives until the request has completed, as the caller promises.
        let mr = unsafe { self.mr.as_ref() };
        // SAFETY: By the type invariant the state of the region is an `S`.
        let state = unsafe { mr.state::<S>() };
        if !state.claim_idle() {
            wc::unlikely();
            return Err(EBUSY);
        }
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &mut *mr.claimed.get() };
        if claimed.known != target.qp_id {
            wc::unlikely();
            if !claimed.change_qp(mr, target) {
                state.set_idle();
                return Err(EINVAL);
            }
        }
        self.raw = mr.raw.as_ptr();
        // SAFETY: By the invariant of `FastRegMr` `raw` is an MR, and the claim has its keys. The
        // low byte of a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        self.key = unsafe {
            let raw = self.raw;
            let own = (*raw).rkey.wrapping_add(1) & 0xff;
            (*raw).lkey = (*raw).lkey & 0xffff_ff00 | own;
            (*raw).rkey = (*raw).rkey & 0xffff_ff00 | own;
            (*raw).rkey
        };
        claimed.rkey = self.key;
        let remote = Remote {
            addr: self.iova,
            rkey: self.key,
        };
        // INVARIANT: The MR is prepared. `lock` or `Chain::post` commits that, or `undo` aborts it.
        let mr = self.mr;
        let generation = state.prepare();
        Ok((remote, PreparedReg { mr, generation }))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_reg_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe {
            wr::write_header(to.cast(), opcode, flags, 0);
            (*to).mr = self.raw;
            (*to).key = self.key;
            (*to).access = self.access as c_int;
        }
    }

    #[inline]
    unsafe fn lock<'t>(
        undo: &PreparedReg,
        target: &'t wr::PostTarget,
    ) -> Option<SpinLockIrqGuard<'t, ()>> {
        S::SHARED.then(|| {
            let guard = target.lock_regs();
            // SAFETY: The region is alive and the lock held until the request is posted.
            unsafe { undo.commit() };
            guard
        })
    }

    #[inline]
    unsafe fn undo(undo: PreparedReg, _wr: *mut bindings::ib_send_wr) {
        // SAFETY: The region is alive, and its registration was not posted, as the caller promises.
        unsafe { undo.abort() };
    }
}

/// A registration that was prepared and is not posted yet.
///
/// # Invariants
///
/// `generation` is from [`State::prepare`] of the state of `mr`: zero if that is exclusive.
#[doc(hidden)]
pub struct PreparedReg {
    mr: NonNull<FastRegMr>,
    generation: u64,
}

impl PreparedReg {
    /// Returns whether the state of the region is shared.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.generation != 0
    }

    /// Marks the region registered. An exclusive one is marked when it is prepared.
    ///
    /// # Safety
    ///
    /// The region is alive. The request is posted next. If the state is shared, the caller holds
    /// the lock of the QP until that has returned.
    #[inline]
    pub(crate) unsafe fn commit(&self) {
        if self.is_shared() {
            // SAFETY: The region is alive, as the caller promises. By the type invariant its state
            // is shared, as the generation is not zero.
            unsafe { self.mr.as_ref().state::<Shared>() }.commit(self.generation);
        }
    }

    /// Ends the registration.
    ///
    /// # Safety
    ///
    /// The region is alive, the request was not posted, and this was not called before.
    pub(crate) unsafe fn abort(&self) {
        // SAFETY: The region is alive, as the caller promises. By the type invariant the generation
        // is zero only if the state is `Exclusive`, which is the same word with and without `LENT`.
        unsafe {
            match self.generation {
                0 => self.mr.as_ref().state::<Exclusive>().set_idle(),
                generation => self.mr.as_ref().state::<Shared>().abort(generation),
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
/// with `EINVAL` if its registration was not posted to the same QP. The closure that makes one for
/// an exclusive region is `Send`, as that may become idle in another thread.
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
///     type Needs = context::Atomic;
///
///     fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
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
    mr: NonNull<FastRegMr>,
    _state: PhantomData<S>,
    key: u32,
}

// SAFETY: An MR may be used from any thread, and so may a state that is `Sync`.
unsafe impl<S: State + Sync> Send for InvOp<S> {}

impl<'a, S: State> InvWr<'a, S> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: dma::AnyDirection, M: Memory<D>>(region: &'a Region<D, M, S>) -> Self {
        // INVARIANT: The MR is the region's.
        let op = InvOp {
            mr: NonNull::from(&*region.mr.0),
            _state: PhantomData,
            key: 0,
        };
        let sges = [].into_list();
        Self { sges, op }
    }
}

// The completion may change the state of the region in another thread. An exclusive region is not
// `Sync`, so a closure that is `Send` has no reference to one that stays in this thread: it is the
// owner's.
impl<F: Send, const LENT: bool> wr::SendOpFor<F> for InvOp<Exclusive<LENT>> {}
impl<F> wr::SendOpFor<F> for InvOp<Shared> {}
impl<S: State> wr::WrOp for InvOp<S> {
    type Output = ();
    type Raw = bindings::ib_send_wr;
    type Undo = NonNull<FastRegMr>;

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<((), NonNull<FastRegMr>)> {
        // One queue keeps the registration and this in order; the lock, if the state is shared.
        let _guard = S::SHARED.then(|| target.lock_regs());
        // SAFETY: The region lives until the request has completed, as the caller promises.
        let mr = unsafe { self.mr.as_ref() };
        // SAFETY: By the type invariant the state of the region is an `S`.
        let state = unsafe { mr.state::<S>() };
        if !state.claim_registered() {
            return Err(EBUSY);
        }
        // SAFETY: The state was just claimed, so by the invariant of `FastRegMr` `claimed` has no
        // other user.
        let claimed = unsafe { &*mr.claimed.get() };
        if claimed.qp != target.qp_id {
            // The lock is not that of the QP of the registration, but nothing is posted. The claim
            // of an exclusive state was none.
            if S::SHARED {
                state.set_registered();
            }
            return Err(EINVAL);
        }
        self.key = claimed.rkey;
        state.set_invalidating();
        Ok(((), self.mr))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_send_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_LOCAL_INV;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: `to` is valid for writes, as the caller promises.
        unsafe { wr::write_header(to, opcode, flags, self.key) };
    }

    #[inline]
    unsafe fn callback<T: CqeHandler<ID>, const ID: u64>(
        mr: &NonNull<FastRegMr>,
        user: *mut bindings::ib_cqe,
    ) -> *mut bindings::ib_cqe {
        // INVARIANT: The callback is that for the type of the owner, which is a `T`.
        // SAFETY: The region is alive, as the request is not posted yet. That was prepared, so the
        // state is claimed, and by the invariant of `FastRegMr` these have no other user.
        unsafe {
            (*mr.as_ref().cqe.get()).done = Some(done::<T, S, ID>);
            (*mr.as_ref().claimed.get()).user = user;
        }
        // The callback of the MR, so that nothing but its own completion makes it idle, before the
        // owner's handler runs. The fields that are written through this address are cells.
        mr.as_ptr().cast()
    }

    #[inline]
    unsafe fn undo(_: NonNull<FastRegMr>, wr: *mut bindings::ib_send_wr) {
        // The MR is found by the request, so that what has posted it need not save it.
        //
        // SAFETY: The callback is the first field of an MR that is alive, as the request was not
        // posted. The invalidation was prepared, so the state, an `S`, is claimed, and by the
        // invariant of `FastRegMr` `claimed` has no other user.
        unsafe {
            let cqe = &mut (*wr).__bindgen_anon_1.wr_cqe;
            let mr = &*cqe.cast_const().cast::<FastRegMr>();
            **cqe = (*mr.claimed.get()).user;
            mr.state::<S>().set_registered();
        }
    }
}

/// Returns the MR whose invalidation has completed, and the callback of its owner.
///
/// # Safety
///
/// `wc` is of an [`InvWr`] that was posted, whose owner was not taken back.
#[inline]
unsafe fn mr_and_owner(wc: &Wc) -> (&FastRegMr, *mut bindings::ib_cqe) {
    // SAFETY: The request was posted with the address of an MR's first field, and its owner, which
    // is not back, keeps the MR. By the invariant of `FastRegMr` the completion has the claim.
    unsafe {
        let mr = &*wc.cqe().cast_const().cast::<FastRegMr>();
        (mr, (*mr.claimed.get()).user)
    }
}

/// The `done` callback of a local invalidation, of a region with the state `S`, whose owner was
/// given up as a `T` by its callback `ID`.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, once for each [`InvWr`] that was posted with it.
unsafe extern "C" fn done<T: CqeHandler<ID>, S: State, const ID: u64>(
    cq: *mut bindings::ib_cq,
    raw: *mut bindings::ib_wc,
) {
    // SAFETY: As the caller promises, this is the callback of the request, and `raw` its
    // completion, which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, raw) }) else {
        return;
    };
    // SAFETY: The request is an `InvWr`, as it has this callback. It completes once, by the
    // driver's contract, so its owner is not back.
    let (mr, user) = unsafe { mr_and_owner(wc) };
    if !debug::is_active(user) {
        return debug::report(core::any::type_name::<T>());
    }
    // One that is exclusive becomes idle in any case, and `failed` marks it registered: so the
    // compiler tests the result once.
    if !S::SHARED || wc.result().is_ok() {
        // SAFETY: The callback was made for the state of the MR's region.
        unsafe { mr.state::<S>() }.set_idle();
    }
    if wc.result().is_err() {
        wc::unlikely();
        // SAFETY: `raw` is of such a request, which has failed, and its owner is not back. Both are
        // what this was called with, and `wc` is not used any longer.
        return unsafe { failed::<S>(cq, raw) };
    }
    debug::deactivate(user);
    // SAFETY: The owner was given up as a `T` by its callback `ID`, and is taken back once, as the
    // request completes once. `cq` and `wc` are those of the call.
    unsafe { cqe::call_handler::<T, ID>(user, cq, wc) };
}

/// Marks the MR of a failed invalidation registered, and calls the callback of the owner.
///
/// # Safety
///
/// `wc` is of an [`InvWr`] for the state `S`, whose owner was not taken back. `cq` is its CQ, and
/// then C has passed `wc`, which may be written; or null if a caller has polled it.
unsafe fn failed<S: State>(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    let mut copy = MaybeUninit::<bindings::ib_wc>::uninit();
    // SAFETY: The request is an `InvWr` for the state `S`, and its owner, which was given up for
    // `user`, was not taken back, as the caller promises. So `user` is valid, and has a callback by
    // the invariant of `Cqe`. That is called as `trace::completion` requires. Where `cq` is not
    // null `wc` may be written; otherwise `copy` is.
    unsafe {
        let (mr, user) = mr_and_owner(&*wc.cast::<Wc>());
        mr.state::<S>().set_registered();
        let wc = if cq.is_null() {
            // One that a caller has polled is borrowed.
            copy.as_mut_ptr().copy_from_nonoverlapping(wc, 1);
            copy.as_mut_ptr()
        } else {
            // A `HandlerCell` knows it by its address.
            wc
        };
        (*wc).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(user);
        (*user).done.unwrap_unchecked()(cq, wc);
    }
}

/// Marks a region registered again whose invalidation came before its registration.
///
/// # Safety
///
/// `wc` is the completion of an [`InvWr`] of a region that its handler was called for, with a state
/// for one thread, and nothing else uses that.
pub(crate) unsafe fn undo_invalidated(wc: &Wc) {
    // SAFETY: The handler was called by `done`, so the request has the address of an MR's first
    // field. What was its owner keeps that still. The state is `Exclusive`, as the caller promises,
    // which is the same word with and without `LENT`.
    unsafe {
        let mr = &*wc.cqe().cast_const().cast::<FastRegMr>();
        mr.state::<Exclusive>().set_registered();
    }
}
