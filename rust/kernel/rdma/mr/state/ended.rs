// SPDX-License-Identifier: GPL-2.0

//! What local invalidations complete to.
//!
//! The callback is in the MR, so that nothing but its own completion makes an MR idle, and the
//! owner's handler finds that done. It is written there when the invalidation is posted, and is
//! made for the type of the owner: it takes the owner back and calls the handler, with no other
//! callback between.

use super::Fmr;
use crate::{
    bindings,
    context::Context,
    cqe::{
        self,
        hand_on,
        identity,
        CqeHandler,
        CqePointer, //
    },
    ledger,
    wc::Wc, //
};
use core::arch::asm;

type Callback = unsafe extern "C" fn(*mut bindings::ib_cq, *mut bindings::ib_wc);

/// Returns the `done` callback of an invalidation that an owner of type `T` was given up for by its
/// callback `ID`. `shared` says whether others can reach the MR meanwhile.
#[inline]
pub(super) fn callback<T: CqeHandler<ID>, const ID: u64>(shared: bool) -> Callback {
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
/// `wc` is of a request from [`Fmr::invalidation`], whose owner was not taken back.
#[inline]
unsafe fn parts(wc: &Wc) -> (&Fmr, *mut bindings::ib_cqe) {
    // SAFETY: The request was posted with the address of an MR's first field; the request's owner,
    // who is not back, keeps the MR. Its completion has the field.
    unsafe {
        let mr = &*wc.cqe().cast_const().cast::<Fmr>();
        (mr, (*mr.own.get()).user)
    }
}

/// The `done` callback of a local invalidation, where nobody else can reach the MR.
///
/// # Safety
///
/// Called by the RDMA core, once for each request from [`Fmr::invalidation`] that has it.
unsafe extern "C" fn ended<T: CqeHandler<ID>, const ID: u64>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // As in `cqe::done`: no two of these functions may be merged, nor one of these with one of
    // those.
    //
    // SAFETY: A comment.
    unsafe {
        asm!(
            "/* ended: {} */",
            sym identity::<T::Pointer, ID>,
            options(nomem, nostack, preserves_flags)
        )
    };
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let done = unsafe { &*wc.cast::<Wc>() };
    // SAFETY: This is the callback of a request from `Fmr::invalidation`. Its owner is not back, as
    // a request completes once: the driver's contract.
    let (mr, user) = unsafe { parts(done) };
    if !ledger::is_posted(user) {
        return ledger::report(core::any::type_name::<T>());
    }
    // SAFETY: The owner is not back, so nobody can reach the MR. This is done before the look at
    // the status, so that the compiler makes one of that and the handler's.
    unsafe { (*mr.word.get()).end_alone() };
    if done.result().is_err() {
        // SAFETY: The request is from `Fmr::invalidation` and has failed, its owner is not back,
        // and this is its callback. The call marks the MR registered again.
        return unsafe { shared_ended(cq, wc) };
    }
    ledger::strike(user);
    // SAFETY: The owner was given up as a `T` by its callback `ID`.
    let this = unsafe { T::Pointer::from_cqe(user) };
    // SAFETY: Posting checked that the completion queue is polled in a context that provides this
    // one.
    let cx = unsafe { T::Needs::assume() };
    T::done(this, done, &cx);
}

/// The `done` callback of a local invalidation, where others may reach the MR. The owner's own is
/// called behind it.
///
/// # Safety
///
/// Called once for each request from [`Fmr::invalidation`] that has it, by the RDMA core, or for
/// one that has failed by its callback.
unsafe extern "C" fn shared_ended(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call, and of a request from `Fmr::invalidation`, for which
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
/// `wc` is of a request from [`Fmr::invalidation`], whose owner was not taken back, and this is not
/// called for it again.
unsafe fn note(wc: &Wc) -> *mut bindings::ib_cqe {
    // SAFETY: `wc` is of a request from `Fmr::invalidation`, whose owner was not taken back, as the
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
            if !ledger::is_posted(user) {
                return None;
            }
            // As in `ended`.
            (*mr.word.get()).end_alone();
            if wc.result().is_err() {
                mr.valid_still();
            }
            ledger::strike(user);
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
