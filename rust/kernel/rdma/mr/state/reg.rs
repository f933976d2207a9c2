// SPDX-License-Identifier: GPL-2.0

//! Registrations, from their mark to their post.

use super::Fmr;
use crate::{
    bindings,
    qp::Place,
    wc::unlikely, //
};
use kernel::{
    prelude::*,
    sync::atomic::ordering::Relaxed, //
};

/// What a registration is posted with: the MR, its new key, and the mark.
pub(in crate::mr) type Prepared = (*mut bindings::ib_mr, u32, Registering);

/// A registration that is not posted yet: its generation, which is not zero, or that nobody else
/// can reach the MR.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::mr) struct Registering(u64);

impl Registering {
    const ALONE: Self = Self(0);
}

impl Fmr {
    /// Notes the QP that the MR is registered through from now on, and returns it; `None` if it is
    /// of another PD.
    ///
    /// # Safety
    ///
    /// The caller has `own` for himself, and the MR is not registered.
    #[cold]
    #[inline(never)]
    unsafe fn come_to<'p>(&self, place: &'p Place) -> Option<&'p Place> {
        if place.pd != self.pd.id() {
            return None;
        }
        // SAFETY: The QP is valid by the invariant of `Place`, and its receive CQ does not change.
        let recv_cq = unsafe { (*place.raw.as_ptr()).recv_cq };
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
        own.qp = place.serial;
        Some(place)
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
    /// [`Fmr::register`] is called before the request is posted. If that is not posted,
    /// [`Fmr::undo`] is called.
    pub(in crate::mr) unsafe fn prepare(&self, place: &Place) -> Result<Prepared> {
        let generation = self.word().begin().ok_or(EBUSY)?;
        // SAFETY: `begin` has claimed the word of an idle MR, so that is not registered, and by the
        // type invariant `own` has no other user.
        if unsafe { (*self.own.get()).qp != place.serial && self.come_to(place).is_none() } {
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

    /// Notes the QP at `place`, if that is another one than before, for [`Fmr::prepare_alone`].
    ///
    /// # Safety
    ///
    /// Nobody else can reach the MR until the request was posted.
    #[inline]
    pub(in crate::mr) unsafe fn place_alone<'p>(&self, place: &'p Place) -> Result<&'p Place> {
        // SAFETY: Nobody else can reach the MR, as the caller promises, so nobody else uses the
        // word, nor `own`. Where `come_to` is called the MR is idle, so it is not registered.
        unsafe {
            if !(*self.word.get()).is_idle_alone() {
                unlikely();
                return Err(EBUSY);
            }
            if (*self.own.get()).qp == place.serial {
                return Ok(place);
            }
            self.come_to(place).ok_or(EINVAL)
        }
    }

    /// As [`Fmr::prepare`], but marks the MR registered at once.
    ///
    /// # Safety
    ///
    /// [`Fmr::place_alone`] has noted the QP. Nobody else can reach the MR until the request was
    /// posted. If it is not posted, [`Fmr::undo`] is called.
    #[inline]
    pub(in crate::mr) unsafe fn prepare_alone(&self) -> Prepared {
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
    /// `registering` is from the last [`Fmr::prepare`] or [`Fmr::prepare_alone`], which was not
    /// undone. The caller has the turn of the QP until the post has returned.
    pub(in crate::mr) unsafe fn register(&self, registering: Registering) {
        if registering != Registering::ALONE {
            self.word().registered(registering.0);
        }
    }

    /// Takes the mark of a registration back that was not posted.
    ///
    /// # Safety
    ///
    /// The request was not posted. `registering` is from the last [`Fmr::prepare_alone`], or any
    /// [`Fmr::prepare`].
    #[cold]
    #[inline(never)]
    pub(in crate::mr) unsafe fn undo(&self, registering: Registering) {
        if registering == Registering::ALONE {
            // SAFETY: The caller of `prepare_alone` promised that nobody else can reach the MR
            // until the request was posted, and it was not.
            unsafe { (*self.word.get()).end_alone() };
        } else {
            self.word().not_posted(registering.0);
        }
    }
}
