// SPDX-License-Identifier: GPL-2.0

//! The states of an MR, and what proves that a registration has ended.
//!
//! An MR is idle, being changed, registered, or being invalidated. It becomes idle again by the
//! completion of the local invalidation, or by that of a receive with which the peer has
//! invalidated the key. What proves neither leaves it registered, and only deregistration ends that.

use crate::{
    bindings,
    context::Sleepable,
    cqe::hand_on,
    deferred::{
        Fate,
        Teardown, //
    },
    gate::Hold,
    mr::memory::Kept,
    pd::Pd,
    wc::Success, //
};
use core::{
    cell::UnsafeCell,
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::{
            Acquire,
            Full,
            Relaxed,
            Release, //
        },
        Atomic, //
    }, //
};

/// No key gives access to the memory.
const IDLE: u64 = 0;
/// Somebody has the MR for himself, for a moment.
const BUSY: u64 = 1;
/// A registration was posted, or is about to be, and has perhaps not ended.
const REGISTERED: u64 = 2;
/// A local invalidation is posted, or is about to be.
const INVALIDATING: u64 = 3;

const STATE: u64 = 3;
/// One registration: what is above the state counts them.
const GENERATION: u64 = STATE + 1;

/// For how many registrations after a proof no completion can be left that has the same key: the
/// consumer's part of a key has eight bits.
const TRUSTED: u64 = 255 * GENERATION;

/// An MR and what it needs at its end.
///
/// # Invariants
///
/// - `raw` is an MR of `pd`.
/// - While the state is `IDLE` no key gives access to the memory, nor is any request posted that
///   would change that. Who changes the state from `IDLE` or `REGISTERED` to another has the fields
///   of `own` for himself until he changes it again; while it is `INVALIDATING` and the request is
///   posted, its completion has them.
#[repr(C)]
pub(crate) struct Fmr {
    /// What a local invalidation completes to. The first field, to get back from it.
    cqe: bindings::ib_cqe,
    own: UnsafeCell<Own>,
    /// The state, and the number of registrations.
    word: Atomic<u64>,
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
        // INVARIANT: A new MR is not registered.
        Self {
            cqe: bindings::ib_cqe {
                done: Some(invalidated),
            },
            own: UnsafeCell::new(Own {
                user: core::ptr::null_mut(),
                qp: core::ptr::null(),
                recv_cq: core::ptr::null(),
                trusted: TRUSTED,
            }),
            word: Atomic::new(IDLE),
            rkey: Atomic::new(0),
            pages,
            raw,
            kept: None,
            pd,
            _hold: hold,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.word.load(Acquire) & STATE == IDLE
    }

    /// Returns the key, if one was given that may still be valid.
    pub(super) fn rkey(&self) -> Option<u32> {
        let registered = self.word.load(Acquire) & STATE == REGISTERED;
        registered.then(|| self.rkey.load(Relaxed))
    }

    /// Changes state `from` to `to` and returns the word without its state.
    fn claim(&self, from: u64, to: u64) -> Option<u64> {
        let word = self.word.load(Relaxed);
        let generation = word & !STATE;
        (word & STATE == from
            && self
                .word
                .cmpxchg(generation | from, generation | to, Full)
                .is_ok())
        .then_some(generation)
    }

    /// Gives the MR a new key and marks it registered, for a request that is to be posted to `qp`.
    ///
    /// # Safety
    ///
    /// `qp` is valid. If the request is not posted, [`Fmr::undo`] is called.
    pub(super) unsafe fn register(&self, qp: *const bindings::ib_qp) -> Result<(u32, Registering)> {
        let generation = self
            .claim(IDLE, BUSY)
            .ok_or(EBUSY)?
            .wrapping_add(GENERATION);
        // SAFETY: By the caller's promise.
        let recv_cq = unsafe { (*qp).recv_cq };
        // SAFETY: The claim makes this the only user of `own` and of the MR's keys. The low byte of
        // a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        let rkey = unsafe {
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
            let next = |key: u32| (key & 0xffff_ff00) | (key.wrapping_add(1) & 0xff);
            (*mr).lkey = next((*mr).lkey);
            (*mr).rkey = next((*mr).rkey);
            (*mr).rkey
        };
        self.rkey.store(rkey, Relaxed);
        // INVARIANT: Marked before it is posted.
        self.word.store(generation | REGISTERED, Release);
        Ok((rkey, Registering(generation)))
    }

    /// Takes the mark of a registration back that was not posted.
    pub(super) fn undo(&self, registering: Registering) {
        let Registering(generation) = registering;
        // INVARIANT: Nothing was posted under this generation. If it is not registered any more,
        // somebody invalidates it: so be it.
        let _ = self
            .word
            .cmpxchg(generation | REGISTERED, generation | IDLE, Full);
    }

    /// Marks the MR as being invalidated by a request that is to be posted to `qp`, which must be
    /// the QP that registered it: one queue keeps the two in order.
    pub(super) fn invalidate(&self, qp: *const bindings::ib_qp) -> Result {
        let generation = self.claim(REGISTERED, INVALIDATING).ok_or(EBUSY)?;
        // SAFETY: The claim makes this the only user.
        if unsafe { (*self.own.get()).qp } != qp {
            self.word.store(generation | REGISTERED, Release);
            return Err(EINVAL);
        }
        Ok(())
    }

    /// Returns the request of an invalidation that was marked, whose owner's callback is `user`.
    ///
    /// # Safety
    ///
    /// [`Fmr::invalidate`] has just succeeded. If the request is not posted, [`Fmr::valid_still`] is
    /// called.
    pub(super) unsafe fn invalidation(&self, user: *mut bindings::ib_cqe) -> bindings::ib_send_wr {
        // SAFETY: By the caller's promise this is the only user.
        unsafe { (*self.own.get()).user = user };
        bindings::ib_send_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                // The first field of this; what is written through it is in cells.
                wr_cqe: ManuallyDrop::new(core::ptr::from_ref(self).cast_mut().cast()),
            },
            sg_list: core::ptr::null_mut(),
            num_sge: 0,
            opcode: bindings::ib_wr_opcode_IB_WR_LOCAL_INV,
            send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
            ex: bindings::ib_send_wr__bindgen_ty_2 {
                invalidate_rkey: ManuallyDrop::new(self.rkey.load(Relaxed)),
            },
        }
    }

    /// The invalidation has failed, or was not posted.
    pub(super) fn valid_still(&self) {
        let generation = self.word.load(Relaxed) & !STATE;
        self.word.store(generation | REGISTERED, Release);
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
        let Some(generation) = self.claim(REGISTERED, BUSY) else {
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
        // INVARIANT: A key is valid on one device, which the CQ belongs to, as the QP does that the
        // registration was posted to. The device says that it is not valid any more.
        let state = if proved { IDLE } else { REGISTERED };
        self.word.store(generation | state, Release);
        proved
    }
}

/// A registration that is marked and not posted yet: its generation.
pub(super) struct Registering(u64);

/// The `done` callback of every local invalidation. It belongs to the MR, so that nothing but its
/// own completion makes an MR idle, and the owner's callback finds that done.
///
/// # Safety
///
/// Called by the RDMA core for a request from [`Fmr::invalidation`].
unsafe extern "C" fn invalidated(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call. The request was posted with the address of an MR's
    // first field; the request's owner keeps the MR until its callback has it back.
    unsafe {
        let mr = &*(*(*wc).__bindgen_anon_1.wr_cqe).cast_const().cast::<Fmr>();
        let user = (*mr.own.get()).user;
        if (*wc).status == bindings::ib_wc_status_IB_WC_SUCCESS {
            let generation = mr.word.load(Relaxed) & !STATE;
            // INVARIANT: The invalidation followed the registration in one queue, and has been done.
            mr.word.store(generation | IDLE, Release);
        } else {
            mr.valid_still();
        }
        hand_on(user, cq, wc);
    }
}
