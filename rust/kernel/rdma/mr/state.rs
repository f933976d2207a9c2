// SPDX-License-Identifier: GPL-2.0

//! The states of an MR, and what proves that a registration has ended.
//!
//! An MR is idle, being changed, registered, or being invalidated. It becomes idle again by the
//! completion of the local invalidation, or by that of a receive with which the peer has
//! invalidated the key. What proves neither leaves it registered, and only deregistration ends that.
//!
//! An invalidation proves the end of a registration only if it comes after it in the send queue. An
//! MR has to be marked registered before the request is posted, as it may be gone when the post
//! returns, so the mark alone does not say that. Who shares an MR with others therefore marks and
//! posts in turn, see [`Qp::turn`](crate::qp::Qp::turn).

mod ended;

use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Fate,
        Teardown, //
    },
    gate::Hold,
    mr::{
        memory::Kept,
        word::{
            Word,
            GENERATION, //
        }, //
    },
    pd::Pd,
    wc::Success, //
};
use core::{
    cell::UnsafeCell,
    mem::{
        offset_of,
        ManuallyDrop, //
    },
    ptr::NonNull, //
};
use ended::{
    invalidated,
    invalidated_alone, //
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

/// Where an MR's other callback is.
const ALONE: usize = offset_of!(Fmr, alone);

/// An MR and what it needs at its end.
///
/// # Invariants
///
/// - `raw` is an MR of `pd`.
/// - There is a mutable reference to `word` only while nobody else can reach the MR.
/// - Who has claimed `word` has the fields of `own` for himself until he changes it again; while an
///   invalidation is posted, its completion has them.
#[repr(C)]
pub(crate) struct Fmr {
    /// What a local invalidation completes to. The first field, to get back from it.
    cqe: bindings::ib_cqe,
    /// What it completes to if nobody else can reach the MR, and the RDMA core polls.
    alone: bindings::ib_cqe,
    own: UnsafeCell<Own>,
    word: UnsafeCell<Word>,
    /// The key of the last registration.
    rkey: Atomic<u32>,
    /// How many pages it can map.
    pub(super) pages: u32,
    pub(super) raw: NonNull<bindings::ib_mr>,
    /// What the MR maps, when nobody else has it any more: dropped after the MR.
    pub(super) kept: Option<Kept>,
    pub(super) pd: Pd,
    _hold: Hold,
}

struct Own {
    /// The callback of the owner of the local invalidation.
    user: *mut bindings::ib_cqe,
    /// The QP that the registration was posted to.
    qp: *const bindings::ib_qp,
    /// Where the completions are that may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The last generation whose key no earlier completion of that CQ can have.
    trusted: u64,
}

// SAFETY: An MR may be used and deregistered from any thread.
unsafe impl Send for Fmr {}
// SAFETY: As above, and the fields that are not atomic have one user at a time by the invariants.
unsafe impl Sync for Fmr {}

impl Teardown for Fmr {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant. Whoever drops an MR owns it, so no request uses it. After
        // this no peer can reach the memory, so it may be unmapped.
        let ret = unsafe { bindings::ib_dereg_mr_user(self.raw.as_ptr(), core::ptr::null_mut()) };
        if ret != 0 {
            pr_err!("an MR could not be deregistered ({ret}); it is leaked with its memory\n");
            return Fate::Leak;
        }
        Fate::Gone
    }
}

impl Fmr {
    /// `raw` is a new MR of `pd` that can map `pages` pages.
    pub(super) fn new(raw: NonNull<bindings::ib_mr>, pages: u32, pd: Pd, hold: Hold) -> Self {
        Self {
            cqe: bindings::ib_cqe {
                done: Some(invalidated),
            },
            alone: bindings::ib_cqe {
                done: Some(invalidated_alone),
            },
            own: UnsafeCell::new(Own {
                user: core::ptr::null_mut(),
                qp: core::ptr::null(),
                recv_cq: core::ptr::null(),
                trusted: TRUSTED,
            }),
            word: UnsafeCell::new(Word::new()),
            rkey: Atomic::new(0),
            pages,
            raw,
            kept: None,
            pd,
            _hold: hold,
        }
    }

    #[inline]
    fn word(&self) -> &Word {
        // SAFETY: By the type invariant, as the caller can reach the MR.
        unsafe { &*self.word.get() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.word().is_idle()
    }

    /// Returns the key, if one was given that may still be valid.
    pub(super) fn rkey(&self) -> Option<u32> {
        self.word().has_key().then(|| self.rkey.load(Relaxed))
    }

    /// Gives the MR a new key, for a request that is to be posted to `qp`.
    ///
    /// # Safety
    ///
    /// `qp` is valid. The caller has claimed the MR.
    #[inline]
    unsafe fn renew(&self, qp: *const bindings::ib_qp) -> u32 {
        // SAFETY: By the caller's promise.
        let recv_cq = unsafe { (*qp).recv_cq };
        // SAFETY: The claim makes this the only user of `own` and of the MR's keys. The low byte of
        // a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        unsafe {
            let own = &mut *self.own.get();
            if own.recv_cq != recv_cq {
                // Nothing is known of what is left in this CQ, unless it is the MR's first.
                if !own.recv_cq.is_null() {
                    own.trusted = 0;
                }
                own.recv_cq = recv_cq;
            }
            own.qp = qp;
            let mr = self.raw.as_ptr();
            let own = (*mr).rkey.wrapping_add(1) & 0xff;
            (*mr).lkey = (*mr).lkey & 0xffff_ff00 | own;
            (*mr).rkey = (*mr).rkey & 0xffff_ff00 | own;
            (*mr).rkey
        }
    }

    /// Gives the MR a new key, for a request that is to be posted to `qp`.
    ///
    /// # Safety
    ///
    /// `qp` is valid. [`Fmr::register`] is called before the request is posted. If that is not
    /// posted, [`Fmr::undo`] is called.
    pub(super) unsafe fn prepare(&self, qp: *const bindings::ib_qp) -> Result<(u32, Registering)> {
        let generation = self.word().begin().ok_or(EBUSY)?;
        // SAFETY: By the caller's promise, and just claimed.
        let rkey = unsafe { self.renew(qp) };
        self.rkey.store(rkey, Relaxed);
        self.word().prepared(generation);
        Ok((rkey, Registering(generation)))
    }

    /// As [`Fmr::prepare`], but marks the MR registered at once.
    ///
    /// # Safety
    ///
    /// `qp` is valid. Nobody else can reach the MR until the request was posted. If it is not
    /// posted, [`Fmr::undo`] is called.
    #[inline]
    pub(super) unsafe fn prepare_alone(
        &self,
        qp: *const bindings::ib_qp,
    ) -> Result<(u32, Registering)> {
        // SAFETY: By the caller's promise nobody else uses the word, the key, or anything else.
        unsafe {
            let generation = (*self.word.get()).register_alone().ok_or(EBUSY)?;
            let rkey = self.renew(qp);
            *self.rkey.as_ptr() = rkey;
            Ok((rkey, Registering(generation)))
        }
    }

    /// Marks the MR registered, whose request is about to be posted.
    ///
    /// # Safety
    ///
    /// `registering` is from the last [`Fmr::prepare`] or [`Fmr::prepare_alone`], which was not
    /// undone. The caller has the turn of the QP until the post has returned.
    pub(super) unsafe fn register(&self, registering: &Registering) {
        self.word().registered(registering.0);
    }

    /// Takes the mark of a registration back that was not posted.
    pub(super) fn undo(&self, registering: Registering) {
        self.word().not_posted(registering.0);
    }

    /// Marks the MR as being invalidated by a request that is to be posted to `qp`, which must be
    /// the QP that registered it: one queue keeps the two in order.
    ///
    /// # Safety
    ///
    /// The caller has the turn of `qp`, or nobody else can reach the MR.
    pub(super) unsafe fn invalidate(&self, qp: *const bindings::ib_qp) -> Result {
        if !self.word().invalidating() {
            return Err(EBUSY);
        }
        // SAFETY: Just claimed.
        unsafe { self.is_of(qp) }
    }

    /// As [`Fmr::invalidate`].
    ///
    /// # Safety
    ///
    /// Nobody else can reach the MR until the request was posted.
    #[inline]
    pub(super) unsafe fn invalidate_alone(&self, qp: *const bindings::ib_qp) -> Result {
        // SAFETY: By the caller's promise.
        if !unsafe { (*self.word.get()).invalidate_alone() } {
            return Err(EBUSY);
        }
        // SAFETY: Just claimed.
        unsafe { self.is_of(qp) }
    }

    /// Fails unless the registration was posted to `qp`; then the MR is registered as before.
    ///
    /// # Safety
    ///
    /// The caller has claimed the MR for an invalidation.
    #[inline]
    unsafe fn is_of(&self, qp: *const bindings::ib_qp) -> Result {
        // SAFETY: The claim makes this the only user.
        if unsafe { (*self.own.get()).qp } != qp {
            // The turn is not that of the QP that registered it, but nothing is posted.
            self.word().still_registered();
            return Err(EINVAL);
        }
        Ok(())
    }

    /// Returns the request of an invalidation that was marked, whose owner's callback is `user`.
    /// `alone` says that nobody else can reach the MR until the owner is back, and that the RDMA
    /// core polls where the request completes.
    ///
    /// # Safety
    ///
    /// [`Fmr::invalidate`] has just succeeded. If the request is not posted, [`Fmr::valid_still`] is
    /// called.
    #[inline]
    pub(super) unsafe fn invalidation(
        &self,
        user: *mut bindings::ib_cqe,
        alone: bool,
    ) -> bindings::ib_send_wr {
        // SAFETY: By the caller's promise this is the only user.
        unsafe { (*self.own.get()).user = user };
        let this = core::ptr::from_ref(self).cast_mut();
        // What is written through the callback's address is in cells.
        let (cqe, rkey) = if alone {
            // SAFETY: A field of this, and there is no other user.
            unsafe { (this.byte_add(ALONE).cast(), *self.rkey.as_ptr()) }
        } else {
            (this.cast(), self.rkey.load(Relaxed))
        };
        bindings::ib_send_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                wr_cqe: ManuallyDrop::new(cqe),
            },
            sg_list: core::ptr::null_mut(),
            num_sge: 0,
            opcode: bindings::ib_wr_opcode_IB_WR_LOCAL_INV,
            send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
            ex: bindings::ib_send_wr__bindgen_ty_2 {
                invalidate_rkey: ManuallyDrop::new(rkey),
            },
        }
    }

    /// The invalidation has failed, or was not posted.
    pub(super) fn valid_still(&self) {
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
        // SAFETY: The claim makes this the only user.
        let own = unsafe { &mut *self.own.get() };
        let proved = key == self.rkey.load(Relaxed)
            && core::ptr::eq(cq, own.recv_cq)
            && generation <= own.trusted;
        if proved {
            own.trusted = generation.saturating_add(TRUSTED);
        }
        // A key is valid on one device, which the CQ belongs to, as the QP does that the
        // registration was posted to. The device says that it was valid, and is not any more.
        self.word().looked(generation, proved);
        proved
    }
}

/// A registration that is not posted yet: its generation.
pub(super) struct Registering(u64);
