// SPDX-License-Identifier: GPL-2.0

//! The room of a send queue.

mod state;

use crate::{
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    wc,
    wr::PostError, //
};
use kernel::sync::SpinLockIrq;
use state::{
    Line,
    Places,
    TakeError,
    Waiters, //
};

/// The places of a send queue, and the owners of requests that wait for some, as `sq_wr_avail` and
/// `rsp_wr_wait_list` of nvmet. With it a queue need not have room for all requests at their
/// largest ([`Load::at_once`](super::Load::at_once)).
///
/// An owner takes as many places as all work requests of its request need, before the first one is
/// posted, so that it never waits with some. If there are not so many, it waits, and so do all that
/// come after it: the order is that of the calls, and small requests do not overtake a large one.
/// Places are given back when their work requests have completed, or were refused, by a call that
/// also resumes the owners whose turn it is: mostly a completion handler, which posts for them.
///
/// The places are numbers. A caller that gives back more than it has taken finds the queue full; if
/// it gives back less, owners wait for too long. Neither breaks memory safety.
///
/// Owners that wait are dropped, and no other waits, when the QP was drained ([`Qp::drain`]) or is
/// about to be destroyed, and when this is dropped: their places would be those of requests whose
/// completions are lost, and a QP in the error state sends nothing. [`Room::close`] gives them
/// back.
///
/// Documentation/session.rst has an example.
///
/// # Invariants
///
/// This is invariant in `W`, as the owners wait behind a lock, where the QP finds them as well.
pub struct Room<W: Send + 'static>(Arc<Inner<W>>);

/// The largest number of places.
const MOST: u32 = 1 << 20;

/// The part that the QP keeps, too.
#[pin_data]
struct Inner<W> {
    places: Places,
    #[pin]
    line: SpinLockIrq<Line<Ring<W>>>,
}

impl<W: Send + 'static> Room<W> {
    /// Makes the room of a QP's send queue, of `places` places, for which at most `waiters` owners
    /// wait at a time: the number of requests that the peer may have outstanding.
    ///
    /// Fails with `EINVAL` if there are no places, or more than the send queue has besides that of
    /// the drain; `ENOMEM`.
    pub fn new<S, R>(qp: &Qp<S, R>, places: u32, waiters: u32, cx: &Sleepable) -> Result<Self>
    where
        S: PollContext,
        R: PollContext,
    {
        let most = qp.inner.max_sends().min(MOST);
        if !(1..=most).contains(&places) {
            return Err(EINVAL);
        }
        let place = qp.place_of_table(cx)?;
        let line = Line::new(Ring::new(waiters)?);
        let init = pin_init!(Inner {
            places: Places::new(places),
            line <- kernel::new_spinlock_irq!(line),
        });
        let inner = Arc::pin_init(init, GFP_KERNEL)?;
        qp.keep_table(place, Keeper(inner.clone()));
        Ok(Self(inner))
    }

    /// Takes `count` places for an owner, which is returned if it has them. Otherwise it waits, and
    /// is resumed by [`Room::give`]. Any context.
    ///
    /// Gives the owner back with `EINVAL` if the room has not so many places at all; with `EAGAIN`
    /// if as many owners wait as can; or with the error of [`Room::close`], which is `ENOTCONN`
    /// when the QP was drained.
    #[inline]
    pub fn take(&self, count: u32, owner: W) -> Result<Option<W>, PostError<W>> {
        // Not more than all, so that it is no negative number.
        if count <= self.0.places.total() && self.0.places.take(count) {
            return Ok(Some(owner));
        }
        wc::unlikely();
        self.wait(count, owner)
    }

    fn wait(&self, count: u32, owner: W) -> Result<Option<W>, PostError<W>> {
        let places = &self.0.places;
        if count > places.total() {
            return Err(PostError::new(owner, EINVAL));
        }
        let taken = self.0.line.lock().take(places, count, owner);
        taken.map_err(|(owner, refusal)| {
            let error = match refusal {
                TakeError::Closed(errno) => Error::from_errno(errno),
                TakeError::Full => EAGAIN,
            };
            PostError::new(owner, error)
        })
    }

    /// Gives `count` places back, whose work requests have completed or were not posted, and calls
    /// `resume` with each owner that has its places by that, in their order. Any context; `resume`
    /// is called without a lock.
    ///
    /// One thread resumes at a time. What it is given by others meanwhile, or by what `resume`
    /// calls, as where a post is refused, it gives to those that wait next; these calls return at
    /// once. So `resume` must accept any owner of the room.
    #[inline]
    pub fn give(&self, count: u32, resume: impl FnMut(W)) {
        if self.0.places.give(count) {
            wc::unlikely();
            self.resume(resume);
        }
    }

    fn resume(&self, mut resume: impl FnMut(W)) {
        let Inner { places, line } = &*self.0;
        if places.trim() {
            crate::pr_err_ratelimited!("places of a send queue were given back that were free\n");
        }
        if !line.lock().begin() {
            return;
        }
        // The lock is not held when an owner is resumed.
        let next = || line.lock().next(places);
        while let Some(owner) = next() {
            resume(owner);
        }
    }

    /// Has calls of [`Room::take`] fail with `error` from now on, and calls `back` with each owner
    /// that waits, in their order; only the first call sets the error. Any context; `back` is
    /// called without a lock.
    ///
    /// It is for the end of the connection, before the QP is drained: what is resumed during the
    /// drain may complete after it.
    pub fn close(&self, error: Error, back: impl FnMut(W)) {
        self.0.close(error, back);
    }
}

impl<W> Inner<W> {
    fn close(&self, error: Error, mut back: impl FnMut(W)) {
        let next = || self.line.lock().close(&self.places, error.to_errno());
        while let Some(owner) = next() {
            back(owner);
        }
    }
}

impl<W: Send + 'static> Drop for Room<W> {
    fn drop(&mut self) {
        self.0.close(ENOTCONN, drop);
    }
}

/// The reference that the QP has.
struct Keeper<W>(Arc<Inner<W>>);

impl<W: Send> qp::OnEnd for Keeper<W> {
    fn closing(&self) {
        self.0.close(ENOTCONN, drop);
    }

    /// A room has no receives. Requests that would give places back have done it, or are lost.
    fn suspect(&self) -> bool {
        self.closing();
        false
    }
}

/// A ring of owners, and the numbers of places that they wait for.
struct Ring<W> {
    slots: KVec<Option<(u32, W)>>,
    first: usize,
    len: usize,
}

impl<W> Ring<W> {
    fn new(len: u32) -> Result<Self> {
        let mut slots = KVec::with_capacity(len as usize, GFP_KERNEL | __GFP_NOWARN)?;
        for _ in 0..len {
            slots.push_within_capacity(None)?;
        }
        Ok(Self {
            slots,
            first: 0,
            len: 0,
        })
    }

    /// Returns the slot `n` behind the first.
    fn slot(&self, n: usize) -> usize {
        let at = self.first.wrapping_add(n);
        at.checked_rem(self.slots.len()).unwrap_or(0)
    }
}

impl<W> Waiters for Ring<W> {
    type Owner = W;

    fn first(&self) -> Option<u32> {
        let (count, _) = self.slots.get(self.first)?.as_ref()?;
        Some(*count)
    }

    fn push(&mut self, count: u32, owner: W) -> Result<(), W> {
        let at = self.slot(self.len);
        match self.slots.get_mut(at) {
            Some(free @ None) => *free = Some((count, owner)),
            _ => return Err(owner),
        }
        self.len = self.len.wrapping_add(1);
        Ok(())
    }

    fn pop(&mut self) -> Option<W> {
        let (_, owner) = self.slots.get_mut(self.first)?.take()?;
        (self.first, self.len) = (self.slot(1), self.len.wrapping_sub(1));
        Some(owner)
    }
}
