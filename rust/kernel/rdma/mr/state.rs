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

mod ended;
mod inv;
mod reg;

pub(crate) use ended::take_ended;
pub(super) use reg::Registering;

use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Fate,
        Teardown, //
    },
    mr::{
        memory::Kept,
        word::{
            Word,
            GENERATION, //
        }, //
    },
    objects::Listed,
    pd::Pd,
    qp::Serial,
    wc::Success, //
};
use core::{
    cell::UnsafeCell,
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
pub(crate) struct Fmr {
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
    pub(super) kept: Option<Kept>,
    pub(super) pd: Pd,
    _hold: Listed,
}

struct Own {
    /// The callback of the owner of the local invalidation.
    user: *mut bindings::ib_cqe,
    /// The QP that the registration was posted to.
    qp: Serial,
    /// Where the completions are that may prove a remote invalidation.
    recv_cq: *const bindings::ib_cq,
    /// The last generation whose key no earlier completion of that CQ can have. Zero, which is
    /// none, on iWARP.
    trusted: u64,
}

// SAFETY: An MR may be used and deregistered from any thread.
unsafe impl Send for Fmr {}
// SAFETY: An MR may be used from any thread, and by the type invariant what is not atomic has one
// user at a time.
unsafe impl Sync for Fmr {}

impl Teardown for Fmr {
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

impl Fmr {
    /// `raw` is a new MR of `pd` that can map `pages` pages.
    pub(super) fn new(raw: NonNull<bindings::ib_mr>, pages: u32, pd: Pd, hold: Listed) -> Self {
        let trusted = if pd.device().is_iwarp() { 0 } else { TRUSTED };
        Self {
            cqe: UnsafeCell::new(bindings::ib_cqe { done: None }),
            own: UnsafeCell::new(Own {
                user: core::ptr::null_mut(),
                qp: Serial::NONE,
                recv_cq: core::ptr::null(),
                trusted,
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
