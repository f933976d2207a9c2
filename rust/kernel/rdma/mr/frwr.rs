// SPDX-License-Identifier: GPL-2.0

//! MRs for fast registration, and what proves that a registration has ended: see
//! Documentation/mr.rst.

use crate::{
    context::Context,
    cq,
    cqe::{
        self,
        CqePointer, //
    },
    debug,
    deferred,
    identity,
    mr::{
        memory::AnyMemory,
        state,
        Exclusive,
        Shared,
        State, //
    },
    objects::Object,
    prelude::*,
    trace,
    wc,
    wr, //
};
use core::{
    cell::UnsafeCell,
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr, //
};
use kernel::sync::SetOnce;

/// The number of registrations after a proof for which no completion with the same key can be left:
/// the consumer's part of a key has eight bits.
const TRUSTED: u64 = 255 * state::GENERATION;

/// An MR and what it needs at its end.
///
/// # Invariants
///
/// - `raw` is an MR of `pd`.
/// - `state` is only used as the [`State`] of the region that the MR is part of, or by the owner of
///   an MR that is part of none.
/// - A claim of the state gives exclusive access to `cqe`, `claimed` and the keys of `raw`. While
///   an invalidation is posted its completion has the claim, and `cqe` has the callback for the
///   type of the owner that `claimed.user` is from.
/// - `claimed.qp` and `claimed.recv_cq` are of one QP, whose PD is or was `pd`, and which may be
///   gone; or of none.
#[repr(C)]
pub struct FastRegMr {
    /// The callback of a local invalidation. The first field, to get back from it.
    cqe: UnsafeCell<bindings::ib_cqe>,
    claimed: UnsafeCell<Claimed>,
    state: UnsafeCell<u64>,
    /// The number of pages that it can map.
    pub(super) pages: u32,
    pub(super) raw: NonNull<bindings::ib_mr>,
    /// The memory of a region that was dropped; dropped after the MR.
    pub(super) kept: SetOnce<AnyMemory>,
    pub(super) pd: Pd,
    object: Object,
}

struct Claimed {
    /// The callback of the owner of the local invalidation.
    user: *mut bindings::ib_cqe,
    /// The key of the last registration.
    rkey: u32,
    /// The QP that the registration was posted to.
    qp: wr::QpId,
    /// The CQ whose completions may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The mark of that CQ at the first registration there.
    mark: usize,
    /// The last generation whose key no earlier completion of that CQ can have, by the last proof
    /// there. Zero, which is none, before the first one.
    trusted: u64,
    /// The same before the first proof, once the CQ was found empty since the mark. Zero on iWARP.
    trusted_empty: u64,
}

impl Claimed {
    /// Ends the registration of this generation, whose end is proved, and the claim of `state`.
    /// Returns `true`.
    ///
    /// A key is valid on one device, which the CQ of the proof belongs to, as the QP does that the
    /// registration was posted to. That device says that the key was valid and is not any more. One
    /// of iWARP does not say that it was, but no generation is trusted there.
    #[inline]
    fn end<S: State>(&mut self, state: &S, generation: u64) -> bool {
        // Should it wrap, the next ones are not trusted.
        self.trusted = generation.wrapping_add(TRUSTED);
        state.set_idle();
        true
    }
}

// SAFETY: An MR may be used and deregistered from any thread.
unsafe impl Send for FastRegMr {}
// SAFETY: An MR may be used from any thread. By the type invariant `cqe` and `claimed` have one
// user at a time, and `state` is used as a type that is `Sync` if the region is.
unsafe impl Sync for FastRegMr {}

impl deferred::Teardown for FastRegMr {
    fn object(&self) -> Option<&Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> deferred::Fate {
        // SAFETY: By the type invariant `raw` is an MR of `pd`. It is owned by `self`, which is
        // dropped, so no request uses it. No peer can reach the memory after this, so it may be
        // unmapped.
        let ret = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), ptr::null_mut()) };
        deferred::Fate::of(fmt!("an MR with its memory"), ret)
    }
}

impl FastRegMr {
    /// `raw` is a new MR of `pd` that can map `pages` pages.
    pub(super) fn new(raw: NonNull<bindings::ib_mr>, pages: u32, pd: Pd, object: Object) -> Self {
        let trusted_empty = if pd.device().is_iwarp() { 0 } else { TRUSTED };
        Self {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            claimed: UnsafeCell::new(Claimed {
                user: ptr::null_mut(),
                rkey: 0,
                qp: wr::QpId::NONE,
                recv_cq: ptr::null(),
                mark: 0,
                trusted: 0,
                trusted_empty,
            }),
            state: UnsafeCell::new(state::IDLE),
            pages,
            raw,
            kept: SetOnce::new(),
            pd,
            object,
        }
    }

    /// Returns the state.
    ///
    /// # Safety
    ///
    /// `S` is the state of the region that the MR is part of, or the caller owns the MR.
    #[inline]
    pub(super) unsafe fn state<S: State>(&self) -> &S {
        // SAFETY: `S` is transparent over a `u64`, as each `State` is. As the caller promises, it
        // is the type that all others use, or there are no others.
        unsafe { &*self.state.get().cast() }
    }

    /// Claims an idle MR so that it is not registered again.
    ///
    /// # Safety
    ///
    /// Nobody else uses the MR meanwhile.
    pub(super) unsafe fn claim_for_ever(&self) {
        // SAFETY: Nobody else uses it, as the caller promises.
        unsafe { *self.state.get() = state::BUSY };
    }

    /// See [`Region::remote_invalidated`](crate::mr::Region::remote_invalidated).
    ///
    /// A completion with the key is not left over from an earlier registration, 256 or a multiple
    /// of that before, if it comes from the CQ that has proved the end of one of the last 255: the
    /// CQ's poller takes completions in order, so all earlier ones are gone.
    /// One of an earlier MR of that key came before this one was registered at that CQ, and a CQ
    /// that was found empty since has it no more.
    ///
    /// The poller of `cq`, the CQ of the receives of the QP `qp`, handles the completion of a
    /// receive that has invalidated `key`.
    #[inline]
    pub(super) fn remote_invalidated<S: State>(
        &self,
        state: &S,
        key: u32,
        qp: wr::QpId,
        cq: &cq::Inner,
    ) -> bool {
        if !state.claim_registered() {
            return false;
        }
        let generation = state.generation();
        // SAFETY: The state was just claimed, so by the type invariant `claimed` has no other user.
        let claimed = unsafe { &mut *self.claimed.get() };
        // The CQ of that QP is `claimed.recv_cq`. Of any other it is to be seen.
        if key != claimed.rkey || qp != claimed.qp || generation > claimed.trusted {
            // SAFETY: The state was just claimed, and `claimed` is not used any more.
            return unsafe { self.remote_invalidated_first(state, key, cq) };
        }
        claimed.end(state, generation)
    }

    /// As [`FastRegMr::remote_invalidated`], where it is no proof, or the first one, or the MR was
    /// registered through another QP of that CQ.
    ///
    /// # Safety
    ///
    /// `state` was claimed.
    #[cold]
    #[inline(never)]
    unsafe fn remote_invalidated_first<S: State>(
        &self,
        state: &S,
        key: u32,
        cq: &cq::Inner,
    ) -> bool {
        let generation = state.generation();
        // SAFETY: The state is claimed, as the caller promises, so by the type invariant `claimed`
        // has no other user.
        let claimed = unsafe { &mut *self.claimed.get() };
        // SAFETY: By the type invariant `raw` is an MR; its device does not change.
        let device = unsafe { (*self.raw.as_ptr()).device };
        // Of another device, the CQ may be at the address of one that is gone.
        let proved = key == claimed.rkey
            && ptr::eq(cq.raw.as_ptr(), claimed.recv_cq)
            && ptr::eq(cq.dev.as_raw(), device)
            && (generation <= claimed.trusted
                || generation <= claimed.trusted_empty && cq.empties.since(claimed.mark));
        if !proved {
            state.set_registered();
            return false;
        }
        claimed.end(state, generation)
    }

    /// Notes the QP that the MR is registered through from now on. Returns `false` if that is of
    /// another PD.
    ///
    /// # Safety
    ///
    /// The caller has claimed the MR, which was idle.
    #[cold]
    #[inline(never)]
    unsafe fn change_qp(&self, target: &wr::PostTarget) -> bool {
        if target.pd != self.pd.id() {
            return false;
        }
        let recv_cq = target.recv_cq().raw.as_ptr();
        // SAFETY: The caller has claimed the MR, so by the type invariant this has no other user.
        let claimed = unsafe { &mut *self.claimed.get() };
        if claimed.recv_cq != recv_cq {
            // Nothing is known of what is left in this CQ, unless it is the MR's first.
            if !claimed.recv_cq.is_null() {
                (claimed.trusted, claimed.trusted_empty) = (0, 0);
            }
            claimed.recv_cq = recv_cq;
            claimed.mark = target.recv_cq().empties.mark();
        }
        // INVARIANT: `recv_cq` is of this QP, too.
        claimed.qp = target.qp_id;
        true
    }

    /// Gives the MR a new key for a registration that is posted to `target`. Returns the MR, the
    /// key and the generation. Fails with `EBUSY` if the MR is not idle, `EINVAL` if the QP is of
    /// another PD.
    ///
    /// # Safety
    ///
    /// The state is an `S`. The caller commits the registration before it is posted, and aborts it
    /// if it is not.
    #[inline]
    pub(super) unsafe fn prepare<S: State>(
        &self,
        target: &wr::PostTarget,
    ) -> Result<(*mut bindings::ib_mr, u32, u64)> {
        // SAFETY: The state is an `S`, as the caller promises.
        let state = unsafe { self.state::<S>() };
        if !state.claim_idle() {
            wc::unlikely();
            return Err(EBUSY);
        }
        let claimed = self.claimed.get();
        // SAFETY: The state was just claimed, so by the type invariant `claimed` has no other user.
        if unsafe { (*claimed).qp != target.qp_id && !self.change_qp(target) } {
            state.set_idle();
            return Err(EINVAL);
        }
        let mr = self.raw.as_ptr();
        // SAFETY: By the type invariant `raw` is an MR, and the claim has its keys and `claimed`.
        // The low byte of a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        let rkey = unsafe {
            let own = (*mr).rkey.wrapping_add(1) & 0xff;
            (*mr).lkey = (*mr).lkey & 0xffff_ff00 | own;
            let rkey = (*mr).rkey & 0xffff_ff00 | own;
            (*mr).rkey = rkey;
            (*claimed).rkey = rkey;
            rkey
        };
        Ok((mr, rkey, state.prepare()))
    }

    /// Marks the MR as being invalidated and returns its key, for a request to the QP `qp`. That
    /// has to be the one that the registration was posted to: one queue keeps the two in order.
    /// Fails with `EBUSY` if the MR is not registered, `EINVAL` if that was through another QP.
    ///
    /// # Safety
    ///
    /// The state is an `S`. If it is shared, the caller holds the lock of the QP.
    #[inline]
    pub(super) unsafe fn prepare_invalidation<S: State>(&self, qp: wr::QpId) -> Result<u32> {
        // SAFETY: The state is an `S`, as the caller promises.
        let state = unsafe { self.state::<S>() };
        if !state.claim_registered() {
            return Err(EBUSY);
        }
        // SAFETY: The state was just claimed, so by the type invariant `claimed` has no other user.
        let claimed = unsafe { &*self.claimed.get() };
        if claimed.qp != qp {
            // The lock is not that of the QP of the registration, but nothing is posted. The claim
            // of an exclusive state was none.
            if S::SHARED {
                state.set_registered();
            }
            return Err(EINVAL);
        }
        let rkey = claimed.rkey;
        state.set_invalidating();
        Ok(rkey)
    }

    /// Sets the owner of an invalidation that was prepared, and returns the callback, which is in
    /// the MR: so nothing but its own completion makes an MR idle, and the owner's handler finds
    /// that done.
    ///
    /// # Safety
    ///
    /// [`FastRegMr::prepare_invalidation`] has just succeeded for the state `S`. `user` is from an
    /// owner of type `T`, given up by its callback `ID`, which keeps the MR. If the request is not
    /// posted, [`invalidation_refused`] is called.
    #[inline]
    pub(super) unsafe fn set_callback<T: CqeHandler<ID>, S: State, const ID: u64>(
        &self,
        user: *mut bindings::ib_cqe,
    ) -> *mut bindings::ib_cqe {
        // INVARIANT: The callback is that for the type of the owner.
        // SAFETY: The invalidation was prepared, as the caller promises, so the state is claimed,
        // and by the type invariant these have no other user.
        unsafe {
            (*self.cqe.get()).done = Some(done::<T, S, ID>);
            (*self.claimed.get()).user = user;
        }
        // The fields that are written through this address are cells.
        ptr::from_ref(self).cast_mut().cast()
    }

    /// The invalidation was not posted or has failed.
    ///
    /// # Safety
    ///
    /// The state is an `S`.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn set_registered<S: State>(&self) {
        // SAFETY: The state is an `S`, as the caller promises.
        unsafe { self.state::<S>() }.set_registered();
    }

    /// Makes the MR idle when its invalidation has completed and was successful. One that is
    /// exclusive becomes idle in any case, so that the compiler makes one test of that in the
    /// caller, which marks it registered, and in the handler.
    ///
    /// # Safety
    ///
    /// `S` is the state of the MR's region. `wc` is the completion, which this is called for once.
    #[inline]
    unsafe fn invalidated<S: State>(&self, wc: &Wc) {
        if !S::SHARED || wc.result().is_ok() {
            // SAFETY: `S` is the state of the MR's region, as the caller promises.
            unsafe { self.state::<S>() }.set_idle();
        }
    }
}

/// Marks the MR of an invalidation that was not posted registered, and gives the request the
/// callback of its owner. Not from what has posted it, which then need not save that.
///
/// # Safety
///
/// `wr` has the callback from [`FastRegMr::set_callback`] of an MR that is alive, for the state
/// `S`, and was not posted.
#[cold]
pub(super) unsafe fn invalidation_refused<S: State>(wr: *mut bindings::ib_send_wr) {
    // SAFETY: The callback is the first field of an MR that is alive, as the caller promises. The
    // invalidation was prepared, so the state is claimed, and by the invariant of `FastRegMr`
    // `claimed` has no other user.
    unsafe {
        let cqe = &mut (*wr).__bindgen_anon_1.wr_cqe;
        let mr = &*cqe.cast_const().cast::<FastRegMr>();
        **cqe = (*mr.claimed.get()).user;
        mr.set_registered::<S>();
    }
}

/// Returns the MR whose invalidation has completed, and the callback of its owner.
///
/// # Safety
///
/// `wc` is of a request from [`FastRegMr::set_callback`], whose owner was not taken back.
#[inline]
unsafe fn parts(wc: &Wc) -> (&FastRegMr, *mut bindings::ib_cqe) {
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
/// Called by the RDMA core, once for each request from [`FastRegMr::set_callback`] that has it.
unsafe extern "C" fn done<T: CqeHandler<ID>, S: State, const ID: u64>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // `take_invalidated` tells owners apart by this function's address.
    identity::keep_distinct::<(Callback, cqe::Cqe<T::Pointer, ID>, S)>();
    // SAFETY: The core passes a CQ and a completion that are valid during this call, and nothing
    // was done with it yet.
    if unsafe { trace::completion(cq, wc) } {
        return;
    }
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let completion = unsafe { &*wc.cast::<Wc>() };
    // SAFETY: The request is from `FastRegMr::set_callback`, as it has this callback. It completes
    // once, by the driver's contract, so its owner is not back.
    let (mr, user) = unsafe { parts(completion) };
    if !debug::is_active(user) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: The callback was made for the state of the MR's region, and is called once.
    unsafe { mr.invalidated::<S>(completion) };
    if completion.result().is_err() {
        // SAFETY: `wc` is of such a request, which has failed, and its owner is not back.
        return unsafe { failed::<S>(cq, wc) };
    }
    debug::deactivate(user);
    // SAFETY: The owner was given up as a `T` by its callback `ID`, and is taken back once, as the
    // request completes once.
    let owner = unsafe { T::Pointer::from_cqe(user) };
    // SAFETY: Posting checked that the completion queue, which the core passes, is polled in a
    // context that provides this one.
    let cx = unsafe { T::Needs::of_completion(cq, completion) };
    T::done(owner, completion, &cx);
}

/// Marks the MR of an invalidation that has failed registered, and passes the completion on to the
/// callback of the owner.
///
/// # Safety
///
/// `wc` is valid, and of a request from [`FastRegMr::set_callback`] for the state `S`, whose owner
/// was not taken back.
#[cold]
#[inline(never)]
unsafe fn failed<S: State>(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // A copy, as the original is borrowed where it was polled into an array.
    let mut copy = MaybeUninit::<bindings::ib_wc>::uninit();
    let copy = copy.as_mut_ptr();
    // SAFETY: The request is from `FastRegMr::set_callback`, for the state `S`, and its owner,
    // which was given up for `user`, was not taken back, as the caller promises. So `user` is
    // there, and has a callback by the invariant of `Cqe`. `wc` is valid.
    unsafe {
        let (mr, user) = parts(&*wc.cast::<Wc>());
        mr.set_registered::<S>();
        copy.copy_from_nonoverlapping(wc, 1);
        (*copy).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(user);
        (*user).done.unwrap_unchecked()(cq, copy);
    }
}

/// Marks an exclusive region registered whose invalidation has succeeded, as its registration came
/// behind that in the queue.
///
/// # Safety
///
/// `wc` is the completion of an [`InvWr`](crate::mr::InvWr) of an exclusive region that its handler
/// was called for, and nothing else uses that.
#[cold]
#[inline(never)]
pub(crate) unsafe fn undo_invalidated(wc: &Wc) {
    // SAFETY: The handler was called by `done`, so the request has the address of an MR's first
    // field. What was its owner keeps that still. The state is exclusive, as the caller promises.
    unsafe { (*wc.cqe().cast_const().cast::<FastRegMr>()).set_registered::<Exclusive>() };
}

/// Takes the owner of a local invalidation that has completed back, if it is a `T` that was given
/// up by its callback `ID`.
///
/// `None` proves nothing: a function may be there more than once, in several modules.
///
/// # Safety
///
/// `wc` is a completion whose owner, if there is one, was not taken back. If it is returned, it is
/// not taken back again.
#[inline]
pub(super) unsafe fn take_invalidated<T: CqeHandler<ID>, const ID: u64>(
    wc: &Wc,
) -> Option<T::Pointer> {
    // SAFETY: The owner was not taken back, and if it is returned it is not taken back again, as
    // the caller promises. If the first call has returned none, it is not back yet.
    unsafe {
        take::<T, Exclusive, ID>(wc).or_else(|| {
            wc::unlikely();
            take::<T, Shared, ID>(wc)
        })
    }
}

type Callback = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

/// As [`take_invalidated`], if the state of the region is an `S`.
///
/// # Safety
///
/// `wc` is a completion whose owner, if there is one, was not taken back. If it is returned, it is
/// not taken back again.
#[inline]
unsafe fn take<T: CqeHandler<ID>, S: State, const ID: u64>(wc: &Wc) -> Option<T::Pointer> {
    let cqe = NonNull::new(wc.cqe())?;
    // SAFETY: The request has a callback, and its owner, which was not taken back, keeps that, as
    // the caller promises.
    let callback = unsafe { (*cqe.as_ptr()).done }?;
    if !ptr::fn_addr_eq(callback, done::<T, S, ID> as Callback) {
        return None;
    }
    // SAFETY: By the callback the request is from `FastRegMr::set_callback`, for the state `S` and
    // an owner that was given up as a `T` by its callback `ID`. That was not taken back, and is
    // taken back here once, as the caller promises.
    unsafe {
        let (mr, user) = parts(wc);
        if !debug::deactivate(user) {
            return None;
        }
        mr.invalidated::<S>(wc);
        if wc.result().is_err() {
            mr.set_registered::<S>();
        }
        Some(T::Pointer::from_cqe(user))
    }
}
