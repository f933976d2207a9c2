// SPDX-License-Identifier: GPL-2.0

//! The count of free places, and the line of those that wait for some. Nothing else is here, so
//! that loom can run this file in every order of its steps.

use crate::atomic::{
    AtomicU32,
    Ordering, //
};

/// An owner waits, or the room is closed: places are taken under the lock of the line.
const WAITING: u32 = 1 << 31;

/// The places of a send queue.
///
/// # Invariants
///
/// The low bits are the number of free places, at most `total` but between [`Places::give`] and
/// [`Places::trim`], which is far less than [`WAITING`]. That bit is changed under the lock of the
/// line, and is set while the line is not empty, and from when it is closed.
pub(super) struct Places {
    now: AtomicU32,
    total: u32,
}

impl Places {
    /// Returns so many places, far less than [`WAITING`], which are free.
    pub(super) fn new(total: u32) -> Self {
        // INVARIANT: All are free, and no owner waits.
        Self {
            now: AtomicU32::new(total),
            total,
        }
    }

    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// Takes `count` places, if so many are free and no owner waits. Acquire: all use of the
    /// places has happened.
    #[inline]
    pub(super) fn take(&self, count: u32) -> bool {
        // While an owner waits, this is less than zero.
        let without = |now: u32| (now as i32 >= count as i32).then(|| now.wrapping_sub(count));
        // INVARIANT: So many were free.
        let taken = (self.now).fetch_update(Ordering::Acquire, Ordering::Relaxed, without);
        taken.is_ok()
    }

    /// Gives `count` places back. Returns whether the caller has to [trim](Places::trim) the number
    /// and then to look at the line: an owner waits, or so many were not taken.
    #[inline]
    #[must_use]
    pub(super) fn give(&self, count: u32) -> bool {
        let count = count.min(self.total);
        // Release: see `take`.
        let before = self.now.fetch_add(count, Ordering::Release);
        before.wrapping_add(count) > self.total
    }

    /// Has no more places free than there are. Returns whether there were more.
    pub(super) fn trim(&self) -> bool {
        let less = |now: u32| {
            let excess = (now & !WAITING).saturating_sub(self.total);
            (excess > 0).then(|| now.wrapping_sub(excess))
        };
        // INVARIANT: Not more than all are free.
        let changed = (self.now).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        changed.is_ok()
    }

    /// Takes `count` places for the first in the line, under its lock.
    fn take_first(&self, count: u32) -> bool {
        let without = |now: u32| (now & !WAITING >= count).then(|| now.wrapping_sub(count));
        // INVARIANT: So many were free.
        let taken = (self.now).fetch_update(Ordering::Acquire, Ordering::Relaxed, without);
        taken.is_ok()
    }

    /// Sets whether an owner waits, under the lock of the line. A caller of `give` after this sees
    /// that; `take_first` finds what was given before this.
    fn set_waiting(&self, is_waiting: bool) {
        let order = Ordering::AcqRel;
        if is_waiting {
            self.now.fetch_or(WAITING, order);
        } else {
            self.now.fetch_and(!WAITING, order);
        }
    }
}

/// The owners that wait, each for a number of places, in the order in which they came.
pub(super) trait Waiters {
    type Owner;

    /// Returns the number of places that the first owner waits for.
    fn first(&self) -> Option<u32>;

    /// Adds an owner as the last one. Gives it back if there is no room for it.
    fn push(&mut self, count: u32, owner: Self::Owner) -> Result<(), Self::Owner>;

    /// Removes the first owner.
    fn pop(&mut self) -> Option<Self::Owner>;
}

/// The reason that an owner neither has its places nor waits.
pub(super) enum TakeError {
    /// The room is closed, with this error number.
    Closed(i32),
    /// Too many wait.
    Full,
}

/// The line of those that wait, which a lock protects.
pub(super) struct Line<Q> {
    queue: Q,
    /// Set while a thread resumes owners, and takes care of the line: it looks again at what others
    /// give meanwhile.
    is_resuming: bool,
    /// An error number once the room is closed. The queue is only emptied then.
    closed: i32,
}

impl<Q: Waiters> Line<Q> {
    pub(super) fn new(queue: Q) -> Self {
        Self {
            queue,
            is_resuming: false,
            closed: 0,
        }
    }

    /// Returns the owner if it has its places now; otherwise it waits.
    pub(super) fn take(
        &mut self,
        places: &Places,
        count: u32,
        owner: Q::Owner,
    ) -> Result<Option<Q::Owner>, (Q::Owner, TakeError)> {
        if self.closed != 0 {
            return Err((owner, TakeError::Closed(self.closed)));
        }
        places.set_waiting(true);
        // No owner is overtaken.
        if self.queue.first().is_none() && places.take_first(count) {
            // INVARIANT: The line is empty.
            places.set_waiting(false);
            return Ok(Some(owner));
        }
        let pushed = self.queue.push(count, owner);
        if self.queue.first().is_none() {
            // INVARIANT: The line is empty.
            places.set_waiting(false);
        }
        pushed.map_err(|owner| (owner, TakeError::Full))?;
        Ok(None)
    }

    /// Begins to resume owners. Returns whether the caller does, and calls [`Line::next`] until
    /// that returns `None`; otherwise another thread, or a caller of this one, does it.
    pub(super) fn begin(&mut self) -> bool {
        !core::mem::replace(&mut self.is_resuming, true)
    }

    /// Takes the first owner out, if there are its places, which it has then.
    pub(super) fn next(&mut self, places: &Places) -> Option<Q::Owner> {
        match self.queue.first() {
            Some(count) if places.take_first(count) => self.queue.pop(),
            first => {
                if first.is_none() && self.closed == 0 {
                    // INVARIANT: The line is empty.
                    places.set_waiting(false);
                }
                self.is_resuming = false;
                None
            }
        }
    }

    /// Closes the room, if it is not, and takes the first owner out, without places.
    pub(super) fn close(&mut self, places: &Places, error: i32) -> Option<Q::Owner> {
        if self.closed == 0 {
            self.closed = error;
            // INVARIANT: It stays so.
            places.set_waiting(true);
        }
        self.queue.pop()
    }
}
