// SPDX-License-Identifier: GPL-2.0

//! The states of an MR, and what proves that a registration has ended.
//!
//! An MR is idle, being changed, registered, or being invalidated. It becomes idle again by the
//! completion of the local invalidation, or by that of a receive with which the peer has
//! invalidated the key. What proves neither leaves it registered, and only deregistration ends
//! that.
//!
//! On iWARP the receive proves nothing: there, what is invalid may be invalidated, so that the key
//! may have been invalidated before it was registered. siw does not even compare the key's low
//! byte, so a peer needs no key but the one before.
//!
//! An invalidation proves the end of a registration only if it comes after it in the send queue. An
//! MR has to be marked registered before the request is posted, as it may be gone when the post
//! returns, so the mark alone does not say that. Who shares an MR with others therefore marks and
//! posts in turn, see [`Qp::turn`](crate::qp::Qp::turn).

use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    },
    cqe::{
        self,
        hand_on,
        Cqe,
        CqeHandler,
        CqePointer, //
    },
    debug,
    deferred::{
        Fate,
        Teardown, //
    },
    identity,
    mr::{
        memory::AnyMemory, //
        state::{
            Word,
            GENERATION, //
        },
    },
    objects::Listed,
    pd::Pd,
    qp::{
        PostTarget,
        QpId, //
    },
    wc::{
        unlikely,
        Success,
        Wc, //
    }, //
};
use core::{
    cell::UnsafeCell,
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};

/// For how many registrations after a proof no completion can be left that has the same key: the
/// consumer's part of a key has eight bits.
const TRUSTED: u64 = 255 * GENERATION;

/// An MR and what it needs at its end.
///
/// # Invariants
///
/// - `raw` is an MR of `pd`.
/// - There is a mutable reference to `word` only while nobody else can reach the MR.
/// - Who has claimed `word` has `cqe` and the fields of `own` for himself until he changes it
///   again; while an invalidation is posted, its completion has them. Then `cqe` stands every
///   owner, or is made for the type of the one that `own.user` is from.
/// - `own.qp` and `own.recv_cq` are of one QP, whose PD is or was `pd`, and which may be gone; or
///   of none.
#[repr(C)]
pub(crate) struct FastRegMr {
    /// What a local invalidation completes to. The first field, to get back from it.
    cqe: UnsafeCell<bindings::ib_cqe>,
    own: UnsafeCell<Own>,
    word: UnsafeCell<Word>,
    /// The key of the last registration.
    rkey: Atomic<u32>,
    /// How many pages it can map.
    pub(super) pages: u32,
    pub(super) raw: NonNull<bindings::ib_mr>,
    /// What the MR maps, when nobody else has it any more: dropped after the MR.
    pub(super) kept: Option<AnyMemory>,
    pub(super) pd: Pd,
    _listed: Listed,
}

struct Own {
    /// The callback of the owner of the local invalidation.
    user: *mut bindings::ib_cqe,
    /// The QP that the registration was posted to.
    qp: QpId,
    /// Where the completions are that may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The last generation whose key no earlier completion of that CQ can have. Zero, which is
    /// none, on iWARP.
    trusted: u64,
}

// SAFETY: An MR may be used and deregistered from any thread.
unsafe impl Send for FastRegMr {}
// SAFETY: An MR may be used from any thread, and by the type invariant what is not atomic has one
// user at a time.
unsafe impl Sync for FastRegMr {}

impl Teardown for FastRegMr {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant `raw` is an MR of `pd`. Whoever drops it owns it, so no
        // request uses it. After this no peer can reach the memory, so it may be unmapped.
        let ret = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), core::ptr::null_mut()) };
        if ret != 0 {
            pr_err!("an MR could not be deregistered ({ret}); it is leaked with its memory\n");
            return Fate::Leak;
        }
        Fate::Gone
    }
}

impl FastRegMr {
    /// `raw` is a new MR of `pd` that can map `pages` pages.
    pub(super) fn new(raw: NonNull<bindings::ib_mr>, pages: u32, pd: Pd, listed: Listed) -> Self {
        let trusted = if pd.device().is_iwarp() { 0 } else { TRUSTED };
        Self {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            own: UnsafeCell::new(Own {
                user: core::ptr::null_mut(),
                qp: QpId::NONE,
                recv_cq: core::ptr::null(),
                trusted,
            }),
            word: UnsafeCell::new(Word::new()),
            rkey: Atomic::new(0),
            pages,
            raw,
            kept: None,
            pd,
            _listed: listed,
        }
    }

    #[inline]
    fn word(&self) -> &Word {
        // SAFETY: By the type invariant there is no mutable reference to `word`, as the caller can
        // reach the MR.
        unsafe { &*self.word.get() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.word().is_idle()
    }

    /// Returns the key, if one was given that may still be valid.
    pub(super) fn rkey(&self) -> Option<u32> {
        self.word().has_key().then(|| self.rkey.load(Relaxed))
    }

    /// The invalidation has failed.
    #[cold]
    #[inline(never)]
    fn valid_still(&self) {
        self.word().still_registered();
    }

    /// Takes the completion of a receive for the end of the registration, if it proves that.
    ///
    /// It does if it carries the key, and cannot be left over from an earlier registration that had
    /// the same one, 256 before or a multiple of that. It cannot if it comes from the CQ that has
    /// proved the end of one of the last 255: the CQ's poller takes completions in order, so all
    /// earlier ones are gone.
    pub(super) fn remote_invalidated(&self, wc: &Success<'_>, cq: &bindings::ib_cq) -> bool {
        let key = match wc.invalidated_rkey() {
            Some(key) if wc.is_polled_by(cq) => key,
            _ => return false,
        };
        let Some(generation) = self.word().look() else {
            return false;
        };
        // SAFETY: `look` has claimed the word, so by the type invariant `own` has no other user.
        let own = unsafe { &mut *self.own.get() };
        // SAFETY: By the type invariant `raw` is an MR; its device does not change.
        let device = unsafe { (*self.raw.as_ptr()).device };
        // Of another device, the CQ may be at the address of one that is gone.
        let proved = key == self.rkey.load(Relaxed)
            && core::ptr::eq(cq, own.recv_cq)
            && cq.device == device
            && generation <= own.trusted;
        if proved {
            own.trusted = generation.saturating_add(TRUSTED);
        }
        // A key is valid on one device, which the CQ belongs to, as the QP does that the
        // registration was posted to. The device says that it was valid, and is not any more; one
        // of iWARP does not say that it was, but there no generation is trusted.
        self.word().looked(generation, proved);
        proved
    }
}

/// What a registration is posted with: the MR, its new key, and the mark.
pub(super) type Prepared = (*mut bindings::ib_mr, u32, Registering);

/// A registration that is not posted yet: its generation, which is not zero, or that nobody else
/// can reach the MR.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Registering(u64);

impl Registering {
    const ALONE: Self = Self(0);
}

impl FastRegMr {
    /// Notes the QP that the MR is registered through from now on, and returns it; `None` if it is
    /// of another PD.
    ///
    /// # Safety
    ///
    /// The caller has `own` for himself, and the MR is not registered.
    #[cold]
    #[inline(never)]
    unsafe fn come_to<'p>(&self, target: &'p PostTarget) -> Option<&'p PostTarget> {
        if target.pd != self.pd.id() {
            return None;
        }
        // SAFETY: The QP is valid by the invariant of `PostTarget`, and its receive CQ does not change.
        let recv_cq = unsafe { (*target.raw.as_ptr()).recv_cq };
        // SAFETY: The caller promises to have `own` for himself.
        let own = unsafe { &mut *self.own.get() };
        if own.recv_cq != recv_cq {
            // Nothing is known of what is left in this CQ, unless it is the MR's first.
            if !own.recv_cq.is_null() {
                own.trusted = 0;
            }
            own.recv_cq = recv_cq;
        }
        // INVARIANT: Of this QP, as `recv_cq` is.
        own.qp = target.qp_id;
        Some(target)
    }

    /// Gives the MR a new key, for a request that is to be posted to the QP noted.
    ///
    /// # Safety
    ///
    /// The caller has the MR for himself.
    #[inline]
    unsafe fn renew(&self) -> (*mut bindings::ib_mr, u32) {
        let mr = self.raw.as_ptr();
        // SAFETY: The caller has the MR for himself, as he promises, so nobody else uses its keys.
        // The low byte of a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        unsafe {
            let own = (*mr).rkey.wrapping_add(1) & 0xff;
            (*mr).lkey = (*mr).lkey & 0xffff_ff00 | own;
            let rkey = (*mr).rkey & 0xffff_ff00 | own;
            (*mr).rkey = rkey;
            (mr, rkey)
        }
    }

    /// Gives the MR a new key, for a request that is to be posted to the QP at `place`.
    ///
    /// # Safety
    ///
    /// [`FastRegMr::register`] is called before the request is posted. If that is not posted,
    /// [`FastRegMr::undo`] is called.
    pub(super) unsafe fn prepare(&self, target: &PostTarget) -> Result<Prepared> {
        let generation = self.word().begin().ok_or(EBUSY)?;
        // SAFETY: `begin` has claimed the word of an idle MR, so that is not registered, and by the
        // type invariant `own` has no other user.
        if unsafe { (*self.own.get()).qp != target.qp_id && self.come_to(target).is_none() } {
            self.word().not_begun(generation);
            return Err(EINVAL);
        }
        // SAFETY: `begin` has claimed the word, so by the type invariant the caller has the MR for
        // himself.
        let (mr, rkey) = unsafe { self.renew() };
        self.rkey.store(rkey, Relaxed);
        self.word().prepared(generation);
        Ok((mr, rkey, Registering(generation)))
    }

    /// Notes the QP at `place`, if that is another one than before, for [`FastRegMr::prepare_alone`].
    ///
    /// # Safety
    ///
    /// Nobody else can reach the MR until the request was posted.
    #[inline]
    pub(super) unsafe fn target_alone<'p>(&self, target: &'p PostTarget) -> Result<&'p PostTarget> {
        // SAFETY: Nobody else can reach the MR, as the caller promises, so nobody else uses the
        // word, nor `own`. Where `come_to` is called the MR is idle, so it is not registered.
        unsafe {
            if !(*self.word.get()).is_idle_alone() {
                unlikely();
                return Err(EBUSY);
            }
            if (*self.own.get()).qp == target.qp_id {
                return Ok(target);
            }
            self.come_to(target).ok_or(EINVAL)
        }
    }

    /// As [`FastRegMr::prepare`], but marks the MR registered at once.
    ///
    /// # Safety
    ///
    /// [`FastRegMr::place_alone`] has noted the QP. Nobody else can reach the MR until the request was
    /// posted. If it is not posted, [`FastRegMr::undo`] is called.
    #[inline]
    pub(super) unsafe fn prepare_alone(&self) -> Prepared {
        // SAFETY: Nobody else can reach the MR, as the caller promises, so nobody else uses the
        // word or the key.
        unsafe {
            (*self.word.get()).register_alone();
            let (mr, rkey) = self.renew();
            *self.rkey.as_ptr() = rkey;
            (mr, rkey, Registering::ALONE)
        }
    }

    /// Marks the MR registered, whose request is about to be posted.
    ///
    /// # Safety
    ///
    /// `registering` is from the last [`FastRegMr::prepare`] or [`FastRegMr::prepare_alone`], which was not
    /// undone. The caller has the turn of the QP until the post has returned.
    pub(super) unsafe fn register(&self, registering: Registering) {
        if registering != Registering::ALONE {
            self.word().registered(registering.0);
        }
    }

    /// Takes the mark of a registration back that was not posted.
    ///
    /// # Safety
    ///
    /// The request was not posted. `registering` is from the last [`FastRegMr::prepare_alone`], or any
    /// [`FastRegMr::prepare`].
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn undo(&self, registering: Registering) {
        if registering == Registering::ALONE {
            // SAFETY: The caller of `prepare_alone` promised that nobody else can reach the MR
            // until the request was posted, and it was not.
            unsafe { (*self.word.get()).end_alone() };
        } else {
            self.word().not_posted(registering.0);
        }
    }
}

impl FastRegMr {
    /// Marks the MR as being invalidated by a request that is to be posted to the QP with this
    /// number, which must be the QP that registered it: one queue keeps the two in order.
    ///
    /// # Safety
    ///
    /// The caller has the turn of the QP.
    pub(super) unsafe fn invalidate(&self, qp_id: QpId) -> Result {
        if !self.word().invalidating() {
            return Err(EBUSY);
        }
        // SAFETY: `invalidating` has claimed the word, so by the type invariant `own` has no other
        // user.
        if unsafe { (*self.own.get()).qp } != qp_id {
            // The turn is not that of the QP that registered it, but nothing is posted.
            self.word().still_registered();
            return Err(EINVAL);
        }
        Ok(())
    }

    /// As [`FastRegMr::invalidate`].
    ///
    /// # Safety
    ///
    /// Nobody else can reach the MR until the request was posted.
    #[inline]
    pub(super) unsafe fn invalidate_alone(&self, qp_id: QpId) -> Result {
        // SAFETY: Nobody else can reach the MR, as the caller promises, so nobody else uses the
        // word, nor `own`.
        unsafe {
            if !(*self.word.get()).is_registered_alone() {
                return Err(EBUSY);
            }
            if (*self.own.get()).qp != qp_id {
                return Err(EINVAL);
            }
            (*self.word.get()).invalidate_alone();
        }
        Ok(())
    }

    /// Returns the request of an invalidation that was marked, whose owner's callback is `user`.
    ///
    /// # Safety
    ///
    /// [`FastRegMr::invalidate`] has just succeeded, or [`FastRegMr::invalidate_alone`] unless `shared`. `user`
    /// is from an owner of type `T`, given up by its callback `ID`, who keeps the MR. If the
    /// request is not posted, [`FastRegMr::not_invalidated`] is called.
    #[inline]
    pub(super) unsafe fn invalidation<T: CqeHandler<ID>, const ID: u64>(
        &self,
        user: *mut bindings::ib_cqe,
        shared: bool,
    ) -> bindings::ib_send_wr {
        // INVARIANT: Made for that type.
        // SAFETY: The word was claimed, or nobody else can reach the MR, as the caller promises. So
        // by the type invariant `cqe` and `own` have no other user.
        unsafe {
            (*self.cqe.get()).done = Some(callback::<T, ID>(shared));
            (*self.own.get()).user = user;
        }
        bindings::ib_send_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                // What is written through this address is in cells.
                wr_cqe: ManuallyDrop::new(core::ptr::from_ref(self).cast_mut().cast()),
            },
            sg_list: core::ptr::null_mut(),
            num_sge: 0,
            opcode: bindings::ib_wr_opcode_IB_WR_LOCAL_INV,
            send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
            ex: bindings::ib_send_wr__bindgen_ty_2 {
                // SAFETY: The word was claimed, or nobody else can reach the MR, as the caller
                // promises, so nobody gives it another key.
                invalidate_rkey: ManuallyDrop::new(unsafe { *self.rkey.as_ptr() }),
            },
        }
    }

    /// Takes the mark of an invalidation back that the driver has refused with `ret`, and returns
    /// that.
    #[cold]
    #[inline(never)]
    pub(super) fn not_invalidated(&self) {
        self.word().still_registered();
    }
}

// The callback is in the MR, so that nothing but its own completion makes an MR idle, and the
// owner's handler finds that done. It is written there when the invalidation is posted, and is
// made for the type of the owner: it takes the owner back and calls the handler, with no other
// callback between.

type Callback = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

/// Returns the `done` callback of an invalidation that an owner of type `T` was given up for by its
/// callback `ID`. `shared` says whether others can reach the MR meanwhile.
#[inline]
pub(crate) fn callback<T: CqeHandler<ID>, const ID: u64>(shared: bool) -> Callback {
    if const { T::Pointer::EXCLUSIVE } && !shared {
        ended::<T, ID>
    } else {
        shared_ended
    }
}

/// The MR whose invalidation has completed, and the callback of its owner.
///
/// # Safety
///
/// `wc` is of a request from [`FastRegMr::invalidation`], whose owner was not taken back.
#[inline]
unsafe fn parts(wc: &Wc) -> (&FastRegMr, *mut bindings::ib_cqe) {
    // SAFETY: The request was posted with the address of an MR's first field; the request's owner,
    // who is not back, keeps the MR. Its completion has the field.
    unsafe {
        let mr = &*wc.cqe().cast_const().cast::<FastRegMr>();
        (mr, (*mr.own.get()).user)
    }
}

/// The `done` callback of a local invalidation, where nobody else can reach the MR.
///
/// # Safety
///
/// Called by the RDMA core, once for each request from [`FastRegMr::invalidation`] that has it.
unsafe extern "C" fn ended<T: CqeHandler<ID>, const ID: u64>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // `take_ended` tells owners apart by this function's address.
    identity::keep_distinct::<(Callback, Cqe<T::Pointer, ID>)>();
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let done = unsafe { &*wc.cast::<Wc>() };
    // SAFETY: This is the callback of a request from `FastRegMr::invalidation`. Its owner is not back, as
    // a request completes once: the driver's contract.
    let (mr, user) = unsafe { parts(done) };
    if !debug::is_active(user) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: The owner is not back, so nobody can reach the MR. This is done before the look at
    // the status, so that the compiler makes one of that and the handler's.
    unsafe { (*mr.word.get()).end_alone() };
    if done.result().is_err() {
        // SAFETY: The request is from `FastRegMr::invalidation` and has failed, its owner is not back,
        // and this is its callback. The call marks the MR registered again.
        return unsafe { shared_ended(cq, wc) };
    }
    debug::deactivate(user);
    // SAFETY: The owner was given up as a `T` by its callback `ID`.
    let this = unsafe { T::Pointer::from_cqe(user) };
    // SAFETY: Posting checked that the completion queue, which the core passes, is polled in a
    // context that provides this one.
    let cx = unsafe { T::Needs::of_completion(cq, done) };
    T::done(this, done, &cx);
}

/// The `done` callback of a local invalidation, where others may reach the MR. The owner's own is
/// called behind it.
///
/// # Safety
///
/// Called once for each request from [`FastRegMr::invalidation`] that has it, by the RDMA core, or for
/// one that has failed by its callback.
unsafe extern "C" fn shared_ended(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call, and of a request from `FastRegMr::invalidation`, for which
    // this is called once: so its owner, given up for `user`, is not back.
    unsafe {
        let user = note(&*wc.cast::<Wc>());
        hand_on(user, cq, wc);
    }
}

/// Notes whether the registration has ended, of an MR that others may reach, and returns the
/// callback of its owner.
///
/// # Safety
///
/// `wc` is of a request from [`FastRegMr::invalidation`], whose owner was not taken back, and this is not
/// called for it again.
unsafe fn note(wc: &Wc) -> *mut bindings::ib_cqe {
    // SAFETY: `wc` is of a request from `FastRegMr::invalidation`, whose owner was not taken back, as the
    // caller promises.
    let (mr, user) = unsafe { parts(wc) };
    if wc.result().is_ok() {
        mr.word().invalidated();
    } else {
        mr.valid_still();
    }
    user
}

/// Takes the owner of a local invalidation that has completed back, if it is a `T` that was given
/// up by its callback `ID`.
///
/// `None` proves nothing: a function may be there more than once, in several modules.
///
/// # Safety
///
/// The request of `wc` has a callback, and its owner was not taken back. If it is returned, it is
/// not taken back again.
#[inline]
pub(crate) unsafe fn take_ended<T: CqeHandler<ID>, const ID: u64>(wc: &Wc) -> Option<T::Pointer> {
    // SAFETY: There is a callback, and its owner was not taken back, as the caller promises.
    let done = unsafe { (*wc.cqe()).done }?;
    if const { T::Pointer::EXCLUSIVE } && core::ptr::fn_addr_eq(done, callback::<T, ID>(false)) {
        // SAFETY: The callback says what the request is, and the owner's type; it completes once.
        return unsafe {
            let (mr, user) = parts(wc);
            if !debug::is_active(user) {
                return None;
            }
            // As in `ended`.
            (*mr.word.get()).end_alone();
            if wc.result().is_err() {
                mr.valid_still();
            }
            debug::deactivate(user);
            Some(T::Pointer::from_cqe(user))
        };
    }
    // SAFETY: `done` is the callback of the request, whose owner was not taken back and, if it is
    // returned, is not again, as the caller promises.
    unsafe { take_shared::<T, ID>(wc, done) }
}

/// As [`take_ended`], of an MR that others may reach.
///
/// # Safety
///
/// `done` is the callback of the request of `wc`, whose owner was not taken back. If it is
/// returned, it is not taken back again.
#[cold]
#[inline(never)]
unsafe fn take_shared<T: CqeHandler<ID>, const ID: u64>(
    wc: &Wc,
    done: Callback,
) -> Option<T::Pointer> {
    if !core::ptr::fn_addr_eq(done, shared_ended as Callback) {
        return None;
    }
    // SAFETY: The callback says what the request is. Its owner is not back, and is taken back once.
    unsafe {
        if !cqe::is_of::<T, ID>(parts(wc).1) {
            return None;
        }
        Some(cqe::take::<T, ID>(note(wc)))
    }
}
