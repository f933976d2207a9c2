// SPDX-License-Identifier: GPL-2.0

//! The state of an exchange, and the words that say which of a table are free. Nothing else is
//! here, so that `tests/model` can run this file in every order of its steps.

use crate::atomic::{
    AtomicU32,
    AtomicUsize,
    Ordering, //
};
use kernel::sync::atomic::{
    Atomic,
    Full,
    Relaxed, //
};

/// The send is posted, or is about to be, and has not completed.
const SEND: u32 = 1;
/// The reply has not come.
const REPLY: u32 = 2;
/// The reply has come and is being handled.
const HANDLING: u32 = 4;

/// Of the strays: there was the last sweep.
const SWEPT: u32 = 8;

/// A half is not home.
const OUT: u32 = SEND | REPLY | HANDLING;

/// The bits above count the exchanges of a tag.
const GENERATION: u32 = 1 << 16;

/// A half of an exchange.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Send = SEND as isize,
    Reply = HANDLING as isize,
}

/// The state of an exchange.
///
/// While a half is out, only handlers of one CQ change it, which run one after the other, so each
/// change is a load and a store. What comes home elsewhere is noted in `strays`, and found when the
/// table is swept: then no handler uses it any more.
///
/// # Invariants
///
/// - While no half is out, what is there belongs to the holder of the tag.
/// - Until then, what is posted is only read. While the reply is being handled, its part belongs to
///   its handler; while it has not come, to nobody.
pub(super) struct State {
    now: AtomicU32,
    strays: Atomic<u32>,
}

impl State {
    pub(super) fn new() -> Self {
        // INVARIANT: No half is out.
        Self {
            now: AtomicU32::new(0),
            strays: Atomic::new(0),
        }
    }

    /// Returns the number of the exchange. The caller holds the tag.
    #[inline]
    pub(super) fn generation(&self) -> u16 {
        (self.now.load(Ordering::Relaxed) / GENERATION) as u16
    }

    /// Sends both halves out. The caller, which holds the tag, posts the send next: the reply may
    /// come, and all be home again, before the post returns.
    #[inline]
    pub(super) fn start(&self) {
        let now = self.now.load(Ordering::Relaxed);
        // INVARIANT: The caller held the tag. Release: what it wrote is there for the handlers.
        self.now.store(now | SEND | REPLY, Ordering::Release);
    }

    /// Takes the reply of exchange number `generation`, in the bits of `mask`. Returns whether it
    /// was waited for: its part belongs to the caller then, a handler of the CQ.
    #[inline]
    pub(super) fn take_reply(&self, generation: u16, mask: u16) -> bool {
        // Acquire: what the holder of the tag has written is there.
        let now = self.now.load(Ordering::Acquire);
        let differs = now ^ u32::from(generation) * GENERATION;
        if differs & (u32::from(mask) * GENERATION | REPLY) != REPLY {
            return false;
        }
        // INVARIANT: The reply had not come.
        self.now.store(now ^ (REPLY | HANDLING), Ordering::Relaxed);
        true
    }

    /// Ends the handling of the reply. Returns whether all is home: the caller, a handler of the
    /// CQ, then holds the tag.
    #[inline]
    pub(super) fn end_reply(&self) -> bool {
        self.end(HANDLING)
    }

    /// The send has completed. Returns whether all is home, as [`State::end_reply`]. If the table
    /// is `closed`, the reply is not waited for any more.
    #[inline]
    pub(super) fn end_send(&self, closed: bool) -> bool {
        self.end(if closed { SEND | REPLY } else { SEND })
    }

    #[inline]
    fn end(&self, halves: u32) -> bool {
        let left = self.now.load(Ordering::Relaxed) & !halves;
        if left & OUT == 0 {
            self.came_home(left);
            return true;
        }
        // The next one to look is a later handler, or comes after a drain.
        self.now.store(left, Ordering::Relaxed);
        false
    }

    /// All is home, for the caller. The next exchange has another number.
    #[inline]
    fn came_home(&self, left: u32) {
        // INVARIANT: No half is out.
        self.now
            .store((left & !OUT).wrapping_add(GENERATION), Ordering::Release);
    }

    /// Notes a half that has come home where handlers of the CQ may run at the same time, or that
    /// was not posted. [`State::sweep`] finds it. Returns `true` if there was the last sweep: then
    /// the caller holds the tag, and otherwise it does not touch the exchange any more.
    #[cold]
    pub(super) fn stray(&self, half: Half) -> bool {
        let now = self.now.load(Ordering::Acquire);
        // Full ordering: it is found by this or by the sweep.
        let strays = self.strays.fetch_add(half as u32, Full) | half as u32;
        strays & SWEPT != 0 && self.take_back(now, strays)
    }

    /// Takes an exchange of which only strays are out, and a reply that will not come. Returns
    /// whether the caller holds the tag by this. No handler of the CQ uses the state any more, and
    /// what they did has happened. After the `last` sweep nothing is posted.
    #[cold]
    pub(super) fn sweep(&self, last: bool) -> bool {
        let strays = self.strays.fetch_add(if last { SWEPT } else { 0 }, Full);
        self.take_back(self.now.load(Ordering::Acquire), strays)
    }

    fn take_back(&self, now: u32, strays: u32) -> bool {
        if now & OUT == 0 || now & (SEND | HANDLING) & !strays != 0 {
            return false;
        }
        // Several threads may sweep at the same time.
        let next = (now & !OUT).wrapping_add(GENERATION);
        let (acq_rel, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        // INVARIANT: No half is out.
        let taken = self.now.compare_exchange(now, next, acq_rel, relaxed);
        if taken.is_ok() {
            self.strays.store(strays & SWEPT, Relaxed);
        }
        taken.is_ok()
    }
}

/// The number of tags in a word: a power of two, so that finding the word of a tag is no division.
pub(super) const TAGS: u32 = usize::BITS / 2;

/// Somebody waits for a tag, or the table is to be freed with the last one: tags of this word are
/// put under the lock of the table.
const LOCKED: usize = 1 << TAGS;

/// Up to [`TAGS`] tags; a bit is set if the tag is free.
///
/// # Invariants
///
/// A tag whose bit is not set is held, or out. [`LOCKED`] is changed under the lock.
pub(super) struct Word(AtomicUsize);

impl Word {
    /// Returns a word of `tags` tags, which are free.
    pub(super) fn new(tags: u32) -> Self {
        Self(AtomicUsize::new((1 << tags.min(TAGS)) - 1))
    }

    /// Takes a free tag. Acquire: all use of it has happened.
    #[inline]
    pub(super) fn take(&self) -> Option<u32> {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            let free = old & !LOCKED;
            if free == 0 {
                return None;
            }
            let (new, acquire) = (old & !(free & free.wrapping_neg()), Ordering::Acquire);
            // INVARIANT: The caller holds the tag.
            match self
                .0
                .compare_exchange_weak(old, new, acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(free.trailing_zeros()),
                Err(now) => old = now,
            }
        }
    }

    /// Frees a tag that the caller holds. Returns whether it did: otherwise the caller takes the
    /// lock of the table for it. Release: see [`Word::take`]. The caller does not use the table
    /// after it.
    #[inline]
    #[must_use]
    pub(super) fn put(&self, tag: u32) -> bool {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            if old & LOCKED != 0 {
                return false;
            }
            let (new, release) = (old | 1 << tag, Ordering::Release);
            // INVARIANT: The caller held the tag, and does not any more.
            match self
                .0
                .compare_exchange_weak(old, new, release, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
    }

    /// Frees a tag that the caller holds, under the lock.
    pub(super) fn put_locked(&self, tag: u32) {
        // INVARIANT: The caller held the tag, and does not any more.
        self.0.fetch_or(1 << tag, Ordering::AcqRel);
    }

    /// Lets tags be put under the lock, which the caller holds, or not any more.
    pub(super) fn set_locked(&self, locked: bool) {
        let order = Ordering::AcqRel;
        match locked {
            true => self.0.fetch_or(LOCKED, order),
            false => self.0.fetch_and(!LOCKED, order),
        };
    }

    /// Returns the number of free tags. Acquire: all use of them has happened.
    pub(super) fn free(&self) -> u32 {
        (self.0.load(Ordering::Acquire) & !LOCKED).count_ones()
    }
}
