// SPDX-License-Identifier: GPL-2.0

//! The sends that are not signaled, and the requests behind them whose completions prove that they
//! are done. Nothing else is here, so that loom can run this file in every order of its steps.

use crate::atomic::{
    AtomicU32,
    Ordering, //
};

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The next exchange of a list, by its index.
///
/// Written under the lock of the [`Turns`], or by the holder of the tag. In a list that was taken
/// it is read by the handler of the request that has the list, or by the thread that has taken it.
pub(super) struct Link(AtomicU32);

impl Link {
    pub(super) fn new() -> Self {
        Self(AtomicU32::new(NONE))
    }

    /// Makes this the end of a list.
    #[inline]
    pub(super) fn end(&self) {
        self.set(NONE);
    }

    #[inline]
    fn set(&self, next: u32) {
        // The lock, and then the completion of what is posted under it, order this and the load.
        self.0.store(next, Ordering::Relaxed);
    }

    #[inline]
    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the index of the next exchange.
    #[inline]
    pub(super) fn next(&self) -> Option<u16> {
        index(self.get())
    }
}

#[inline]
fn index(raw: u32) -> Option<u16> {
    u16::try_from(raw).ok()
}

/// The sends that are not signaled, and that are behind the last request which is signaled.
///
/// There is a lock around it that is held while a request is posted. So the order in which it is
/// taken is that of the send queue: a signaled request that is posted under the lock, and has taken
/// the list before, is behind all sends of the list. A send queue is worked on in order, so its
/// completion, successful or not, proves that they are done.
///
/// # Invariants
///
/// The post of each send of the list has returned. None of them is in another list. `count` is the
/// length of the list.
pub(super) struct Turns {
    first: u32,
    count: u32,
}

impl Turns {
    pub(super) const fn new() -> Self {
        // INVARIANT: The list is empty.
        Self {
            first: NONE,
            count: 0,
        }
    }

    /// Returns whether the next send is to be signaled, where one in `interval` is.
    #[inline]
    pub(super) fn is_due(&self, interval: u32) -> bool {
        self.count.saturating_add(1) >= interval
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Gives the list to the signaled request that is posted next, which begins it with `link`, as
    /// its completion may come before the post returns. Returns the length.
    #[inline]
    pub(super) fn give(&mut self, link: &Link) -> u32 {
        link.set(self.first);
        // INVARIANT: The list is empty.
        self.first = NONE;
        core::mem::take(&mut self.count)
    }

    /// Takes the list of `count` sends back from a request that was not posted.
    #[inline]
    pub(super) fn take_back(&mut self, link: &Link, count: u32) {
        // INVARIANT: It is what `give` has given, and no handler has it, as no completion comes.
        // The lock was held since.
        (self.first, self.count) = (link.get(), count);
    }

    /// Adds a send that was just posted, and is not signaled: exchange number `index`.
    #[inline]
    pub(super) fn add(&mut self, index: u16, link: &Link) {
        link.set(self.first);
        // INVARIANT: The post has returned. It was in no list, as it was not posted before.
        self.first = index.into();
        self.count = self.count.saturating_add(1);
    }

    /// Takes the list, of which nothing is in the queue: it was drained after the last send was
    /// posted. Returns the first.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u16> {
        self.count = 0;
        // INVARIANT: The list is empty.
        index(core::mem::replace(&mut self.first, NONE))
    }
}
