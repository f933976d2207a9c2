// SPDX-License-Identifier: GPL-2.0

//! The part of a table of exchanges that does not depend on their type, so that its functions are
//! in the crate once, and not in each ULP.

use super::state::{
    BitmapWord,
    Mask,
    TAGS, //
};
use crate::{
    atomic::{
        AtomicI32,
        Ordering, //
    },
    completion::Completion,
    cq,
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    qp_id::QpId, //
};
use kernel::{
    sync,
    time::Jiffies, //
};

/// A wait of a [`Completion`], which tells what ends it.
pub(super) type WaitFn = fn(&Completion, Jiffies, &Sleepable) -> Result<Jiffies>;

/// See the module.
///
/// # Invariants
///
/// `poller` is that of the CQ of both queues of the QP until that is destroyed, and none after it.
/// `words` have `count` tags, one at least.
#[pin_data]
pub(super) struct Header {
    pub(super) poller: cq::Poller,
    pub(super) qp: QpId,
    /// That of the QP: see [`qp::Inner::names_first`].
    pub(super) names_first: bool,
    pub(super) mask: Mask,
    /// An error number once the table is closed.
    closed: AtomicI32,
    pub(super) words: KVec<BitmapWord>,
    count: usize,
    #[pin]
    lock: sync::SpinLockIrq<Locked>,
    /// Completed, under the lock, for each tag that is put while threads wait.
    #[pin]
    freed: Completion,
}

struct Locked {
    /// The number of threads that wait for a tag.
    waiters: u32,
    /// The number of handles of the table.
    handles: u32,
}

impl Header {
    /// Makes that of `count` free tags of a QP. Fails as [`Tags::new`](super::Tags::new).
    pub(super) fn new(
        qp: &qp::Inner,
        count: u32,
        generation_bits: u32,
    ) -> Result<impl PinInit<Self>> {
        // SAFETY: The QP keeps the table, of which this is part, by a `Keeper`, whose drop forgets
        // the CQ.
        let poller = unsafe { qp.only_poller() }.ok_or(EINVAL)?;
        if !(1..=1 << 16).contains(&count) || generation_bits > 16 {
            return Err(EINVAL);
        }
        let mut words = KVec::new();
        for first in (0..count).step_by(TAGS as usize) {
            let tags = count.saturating_sub(first).min(TAGS);
            words.push(BitmapWord::new(tags), GFP_KERNEL)?;
        }
        let qp_id = qp.target.qp_id;
        let names_first = qp.names_first();
        let mask = Mask::new(generation_bits);
        Ok(pin_init!(Self {
            poller,
            qp: qp_id,
            names_first,
            mask,
            closed: AtomicI32::new(0),
            words,
            count: count as usize,
            lock <- kernel::new_spinlock_irq!(Locked {
                waiters: 0,
                // The `Tags`, and the keeper.
                handles: 2,
            }),
            freed <- Completion::new(),
        }))
    }

    /// Fails with the error of [`Header::close`].
    #[inline]
    pub(super) fn open(&self) -> Result {
        match self.closed.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Error::from_errno(errno)),
        }
    }

    /// Fails if this is another QP than that of the table, or if that is closed.
    #[inline]
    pub(super) fn posts_to<S: PollContext, R: PollContext>(&self, qp: &Qp<S, R>) -> Result {
        if self.qp != qp.id() {
            return Err(EINVAL);
        }
        self.open()
    }

    pub(super) fn close(&self, error: Error) {
        let errno = error.to_errno();
        let relaxed = Ordering::Relaxed;
        let closed = (self.closed).compare_exchange(0, errno, relaxed, relaxed);
        if closed.is_ok() {
            // A thread that has not seen this is counted when the lock is free.
            let locked = self.lock.lock();
            (0..locked.waiters).for_each(|_| self.freed.complete());
        }
    }

    fn set_locked(&self, locked: bool) {
        for word in &self.words {
            word.set_locked(locked);
        }
    }

    /// Returns the first word.
    #[inline]
    pub(super) fn first(&self) -> &BitmapWord {
        // SAFETY: By the type invariant there is a word.
        unsafe { self.words.get_unchecked(0) }
    }

    /// Takes a free tag of the other words. Not inlined, so that the first word is no loop.
    #[inline(never)]
    pub(super) fn take_behind_first(&self) -> Result<usize> {
        let mut words = self.words.iter().enumerate().skip(1);
        let taken = words.find_map(|(n, word)| Some(Self::number(n, word.take()?)));
        taken.ok_or(EAGAIN)
    }

    /// Returns the number of a tag by those of its word, and in that.
    fn number(word: usize, tag: u32) -> usize {
        word.wrapping_mul(TAGS as usize) | tag as usize
    }

    /// Takes a free tag, as [`Tags::take`](super::Tags::take).
    fn take(&self) -> Result<usize> {
        self.open()?;
        match self.first().take() {
            Some(tag) => Ok(Self::number(0, tag)),
            None => self.take_behind_first(),
        }
    }

    /// Takes a free tag, for which this waits at most so many jiffies.
    pub(super) fn wait(&self, wait: WaitFn, mut left: Jiffies, cx: &Sleepable) -> Result<usize> {
        let mut guard = self.lock.lock();
        // From here on tags are put under the lock.
        guard.waiters = guard.waiters.saturating_add(1);
        self.set_locked(true);
        let taken = loop {
            match (self.take(), self.open()) {
                (Err(EAGAIN), Ok(())) if left > 0 => {}
                (Err(EAGAIN), open) => break open.and(Err(ETIMEDOUT)),
                (taken, _) => break taken,
            }
            drop(guard);
            let waited = wait(&self.freed, left, cx);
            guard = self.lock.lock();
            match waited {
                Ok(jiffies) => left = jiffies,
                Err(error) => break Err(error),
            }
        };
        guard.waiters = guard.waiters.saturating_sub(1);
        if guard.waiters == 0 {
            self.set_locked(false);
            // Nothing is left of tags that were found without a wait.
            while self.freed.try_wait() {}
        }
        taken
    }

    /// Frees the tag of this bit of a word. Returns whether it was the last part of the table that
    /// something had, which the caller frees then.
    ///
    /// # Safety
    ///
    /// The caller holds the tag, which is of this table, and no longer uses it.
    pub(super) unsafe fn put_tag(this: NonNull<Self>, word: &BitmapWord, bit: usize) -> bool {
        let give_up = |header: &Self, locked: &mut Locked| {
            word.put_locked(bit);
            if locked.waiters > 0 {
                header.freed.complete();
            }
        };
        // SAFETY: The caller holds the tag until `give_up` puts it.
        unsafe { Self::put(this, give_up) }
    }

    /// Gives up a handle, as [`Header::put_tag`] a tag.
    ///
    /// # Safety
    ///
    /// The caller has a handle, which is counted, and no longer uses it.
    pub(super) unsafe fn put_handle(this: NonNull<Self>) -> bool {
        let give_up = |header: &Self, locked: &mut Locked| {
            locked.handles = locked.handles.saturating_sub(1);
            if locked.handles == 0 {
                // From here on tags are put under the lock, and none is taken.
                header.set_locked(true);
            }
        };
        // SAFETY: The caller has the handle until `give_up` gives it up.
        unsafe { Self::put(this, give_up) }
    }

    /// Has a tag or a handle given up under the lock. Returns whether it was the last.
    ///
    /// # Safety
    ///
    /// The caller has the tag or the handle that `give_up` gives up.
    unsafe fn put(this: NonNull<Self>, give_up: impl FnOnce(&Self, &mut Locked)) -> bool {
        // SAFETY: The table is valid, as the caller has a part of it, and is freed by one that
        // holds the lock after this, if not by the caller.
        let header = unsafe { this.as_ref() };
        let mut locked = header.lock.lock();
        give_up(header, &mut locked);
        let free = || header.words.iter().map(BitmapWord::free).sum::<u32>();
        locked.handles == 0 && free() as usize == header.count
    }
}
