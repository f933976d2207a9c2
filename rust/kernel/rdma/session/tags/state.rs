// SPDX-License-Identifier: GPL-2.0

//! The state of an exchange, and the words that say which of a table are free. Nothing else is
//! here, so that loom can run this file in every order of its steps.

use crate::atomic::{
    AtomicU32,
    AtomicUsize,
    Ordering, //
};

/// The send is posted, or is about to be, and has not completed.
const SEND: u32 = 1;
/// The reply has not come.
const REPLY: u32 = 2;
/// The reply has come and is being handled.
const HANDLING: u32 = 4;

/// Of the strays: the driver has refused a request behind some that it has posted, so no completion
/// will come for the send.
const PARTLY: u32 = 8;
/// Of the strays: there was the last sweep.
const SWEPT: u32 = 16;

/// Of the strays: both halves are back after the last sweep.
const ALL: u32 = SWEPT | SEND | HANDLING;

/// A half is not back.
const OUT: u32 = SEND | REPLY | HANDLING;

/// The bits above count the exchanges of a tag.
const GENERATION: u32 = 1 << 16;

/// The bits of a state that a reply is compared by: those of the generation, and [`REPLY`].
#[derive(Clone, Copy)]
pub(super) struct Mask(u32);

impl Mask {
    /// A mask of `bits` bits of the generation, at most 16.
    #[inline]
    pub(super) const fn new(bits: u32) -> Self {
        Self((1u32 << bits).wrapping_sub(1).wrapping_mul(GENERATION) | REPLY)
    }
}

/// Returns the state of the next exchange of the tag, which has another number: no half is out.
#[inline]
fn next(now: u32) -> u32 {
    (now & !OUT).wrapping_add(GENERATION)
}

/// A half of an exchange.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Send = SEND as isize,
    /// A send of which some requests were posted, and not the last one.
    SentInPart = PARTLY as isize,
    Reply = HANDLING as isize,
}

/// The state of an exchange.
///
/// While a half is out, only handlers of one CQ change `now`, which run one after the other, so
/// each change is a load and a store. What comes back elsewhere is noted in `strays`, and found
/// when the table is swept: no handler uses the exchange then.
///
/// # Invariants
///
/// - While no half is out, the parts belong to the holder of the tag.
/// - Until then, what is posted is only read. While the reply is being handled, its part belongs to
///   its handler; while it has not come, nothing uses it.
pub(super) struct State {
    now: AtomicU32,
    strays: AtomicU32,
}

impl State {
    pub(super) fn new() -> Self {
        // INVARIANT: No half is out.
        Self {
            now: AtomicU32::new(0),
            strays: AtomicU32::new(0),
        }
    }

    /// Returns the number of the exchange, in the bits of `mask`. The caller holds the tag.
    #[inline]
    pub(super) fn generation(&self, mask: Mask) -> u16 {
        ((self.now.load(Ordering::Relaxed) & mask.0) / GENERATION) as u16
    }

    /// Sends both halves out. The caller, which holds the tag, posts the send next: the reply may
    /// come, and both be back again, before the post returns.
    #[inline]
    pub(super) fn start(&self) {
        let now = self.now.load(Ordering::Relaxed);
        // INVARIANT: The caller held the tag. Release: what it wrote is seen by the handlers.
        self.now.store(now | SEND | REPLY, Ordering::Release);
    }

    /// Takes the reply of exchange number `generation`, in the bits of `mask`. Returns whether it
    /// was waited for: its part belongs to the caller then, a handler of the CQ.
    #[inline]
    pub(super) fn take_reply(&self, generation: u16, mask: Mask) -> bool {
        // Acquire: what the holder of the tag has written is seen.
        let now = self.now.load(Ordering::Acquire);
        let differs = now ^ u32::from(generation).wrapping_mul(GENERATION);
        if differs & mask.0 != REPLY {
            return false;
        }
        // INVARIANT: The reply had not come.
        self.now.store(now ^ (REPLY | HANDLING), Ordering::Relaxed);
        true
    }

    /// The reply is handled. Returns whether both are back: the caller, a handler, has the tag.
    #[inline]
    pub(super) fn end_reply(&self) -> bool {
        self.end(HANDLING)
    }

    /// The send has completed. Returns whether both are back, as [`State::end_reply`]. If the table
    /// is `closed`, the reply is no longer waited for.
    #[inline]
    pub(super) fn end_send(&self, closed: bool) -> bool {
        self.end(if closed { SEND | REPLY } else { SEND })
    }

    #[inline]
    fn end(&self, halves: u32) -> bool {
        let left = self.now.load(Ordering::Relaxed) & !halves;
        if left & OUT != 0 {
            // The next one to look is a later handler, or comes after a drain.
            self.now.store(left, Ordering::Relaxed);
            return false;
        }
        // INVARIANT: No half is out.
        self.now.store(next(left), Ordering::Release);
        true
    }

    /// Returns whether the send has not completed.
    #[inline]
    pub(super) fn is_send_out(&self) -> bool {
        self.now.load(Ordering::Relaxed) & SEND != 0
    }

    /// Notes a half that has come back where handlers of the CQ may run at the same time, or that
    /// was not posted. A sweep finds it; the last one, if the send was posted in part. Returns
    /// `true` if that has been: the caller then holds the tag. Otherwise it touches nothing.
    #[inline]
    pub(super) fn stray(&self, half: Half) -> bool {
        self.note(half as u32)
    }

    /// Sets bits of the strays, and returns whether both are back by that, for the caller. Each bit
    /// is set once, so one call returns `true`.
    fn note(&self, bits: u32) -> bool {
        // AcqRel: what others did with the exchange has happened for the last one.
        let strays = self.strays.fetch_or(bits, Ordering::AcqRel) | bits;
        if strays & ALL != ALL {
            return false;
        }
        // INVARIANT: No half is out.
        let now = self.now.load(Ordering::Relaxed);
        self.now.store(next(now), Ordering::Release);
        true
    }

    /// Returns whether a half is out that has not strayed.
    #[inline]
    pub(super) fn is_out(&self) -> bool {
        let now = self.now.load(Ordering::Acquire);
        now & (SEND | HANDLING) & !self.strays.load(Ordering::Acquire) != 0
    }

    /// Takes an exchange of which only strays are out, and a reply that will not come. Returns
    /// whether the caller holds the tag by this. The handlers of the CQ no longer use the
    /// exchange, and what they did has happened; another exchange may have begun.
    pub(super) fn sweep(&self) -> bool {
        let now = self.now.load(Ordering::Acquire);
        // These are of this exchange, or of a later one: then the change below fails.
        let strays = self.strays.load(Ordering::Acquire);
        if now & OUT == 0 || now & (SEND | HANDLING) & !strays != 0 {
            return false;
        }
        let acq_rel = Ordering::AcqRel;
        let relaxed = Ordering::Relaxed;
        // INVARIANT: No half is out. Of several threads that sweep one has it.
        let taken = self.now.compare_exchange(now, next(now), acq_rel, relaxed);
        if taken.is_ok() {
            self.strays.store(0, relaxed);
        }
        taken.is_ok()
    }

    /// As [`State::sweep`], after which nothing is posted and no handler of the CQ runs. What is
    /// out still is taken by the stray that comes last.
    pub(super) fn last_sweep(&self) -> bool {
        let now = self.now.load(Ordering::Acquire);
        if now & OUT == 0 {
            return false;
        }
        let mut back = !now & (SEND | HANDLING);
        if self.strays.load(Ordering::Relaxed) & PARTLY != 0 {
            back |= SEND;
        }
        self.note(SWEPT | back)
    }

    /// Takes an exchange that is out, after the last request of the QP has completed that ever
    /// does. Returns whether the caller holds the tag by this. No other thread uses the exchange.
    pub(super) fn end_lost(&self) -> bool {
        self.now.load(Ordering::Acquire) & OUT != 0 && self.note(ALL)
    }
}

/// The number of tags in a word: a power of two, so that finding the word of a tag is no division.
pub(super) const TAGS: u32 = usize::BITS / 2;

/// A task waits for a tag, or the last one is to free the table: tags are put under the lock.
const LOCKED: usize = 1 << TAGS;

/// Up to [`TAGS`] tags, as `struct sbitmap_word`; a bit is set if the tag is free.
///
/// # Invariants
///
/// A tag whose bit is not set is held, or out. [`LOCKED`] is changed under the lock.
pub(super) struct BitmapWord(AtomicUsize);

impl BitmapWord {
    /// Returns a word of `tags` tags, which are free.
    pub(super) fn new(tags: u32) -> Self {
        Self(AtomicUsize::new((1usize << tags.min(TAGS)).wrapping_sub(1)))
    }

    /// Takes a free tag. Acquire: all use of it has happened.
    #[inline]
    pub(super) fn take(&self) -> Option<u32> {
        // The lowest bit is that of a free tag, as the one of the lock is above all.
        let without = |old: usize| (old & (LOCKED - 1) != 0).then(|| old & old.wrapping_sub(1));
        // INVARIANT: The caller holds the tag.
        let old = (self.0).fetch_update(Ordering::Acquire, Ordering::Relaxed, without);
        old.ok().map(usize::trailing_zeros)
    }

    /// Takes the tag of this bit. Returns whether it was free. Acquire: see [`BitmapWord::take`].
    #[inline]
    pub(super) fn take_at(&self, bit: usize) -> bool {
        // INVARIANT: The caller holds the tag if it was free. Otherwise nothing changes.
        self.0.fetch_and(!bit, Ordering::Acquire) & bit != 0
    }

    /// Frees the tag of this bit, which the caller holds. Returns whether it did: otherwise the
    /// caller takes the lock of the table for it. Release: see [`BitmapWord::take`]. The caller
    /// does not use the table after it.
    #[inline]
    #[must_use]
    pub(super) fn put(&self, bit: usize) -> bool {
        let with = |old| (old & LOCKED == 0).then_some(old | bit);
        // INVARIANT: The caller has given up the tag.
        let put = (self.0).fetch_update(Ordering::Release, Ordering::Relaxed, with);
        put.is_ok()
    }

    /// Frees the tag of this bit, which the caller holds, under the lock.
    pub(super) fn put_locked(&self, bit: usize) {
        // INVARIANT: The caller has given up the tag.
        self.0.fetch_or(bit, Ordering::AcqRel);
    }

    /// Has tags put under the lock only, or ends that. The caller holds the lock.
    pub(super) fn set_locked(&self, locked: bool) {
        let order = Ordering::AcqRel;
        if locked {
            self.0.fetch_or(LOCKED, order);
        } else {
            self.0.fetch_and(!LOCKED, order);
        }
    }

    /// Returns the number of free tags. Acquire: all use of them has happened.
    pub(super) fn free(&self) -> u32 {
        (self.0.load(Ordering::Acquire) & !LOCKED).count_ones()
    }
}
