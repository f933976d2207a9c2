// SPDX-License-Identifier: GPL-2.0

//! Credits: the number of messages that one side may send, as in SMB Direct and RPC over RDMA.
//!
//! [`SendCredits`] are those that this side has from its peer, and [`RecvCredits`] those that the
//! peer has from this side. To exceed the agreement is an error.

use crate::{
    completion::wait_event,
    prelude::internal::*, //
};
use core::mem::forget;
use kernel::sync::{
    self,
    atomic::{
        Atomic,
        Full,
        Relaxed, //
    }, //
};

/// The messages that may be sent to the peer, each of which takes a credit.
///
/// Where both sides take credits, the last one is kept for messages that grant credits to the peer
/// ([`SendCredits::with_reserve`], [`SendCredits::take_to_grant`]): two sides that had both spent
/// all of theirs could not tell each other of new ones.
///
/// # Invariants
///
/// `count` is at most `limit`. A negative one is an error number, and does not change. Only
/// messages that grant credits make `count` less than `reserve`.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::SendCredits};
///
/// /// Has `post` post a message when the peer has a receive for it.
/// fn send(credits: &SendCredits, post: impl FnOnce() -> Result, cx: &Sleepable) -> Result {
///     credits.wait(5_000, cx)?.spend(post)
/// }
///
/// /// The peer has posted so many receives again, by its message.
/// fn received(credits: &SendCredits, more: u16) -> Result {
///     credits.give(more.into())
/// }
///
/// fn disconnected(credits: &SendCredits) {
///     credits.close(ENOTCONN);
/// }
/// ```
#[pin_data]
pub struct SendCredits {
    count: Atomic<i32>,
    limit: i32,
    /// The number of credits that only messages which grant credits take.
    reserve: i32,
    /// The number of threads that wait, changed with the lock held.
    waiters: Atomic<i32>,
    #[pin]
    lock: sync::SpinLockIrq<()>,
    #[pin]
    given: sync::CondVar,
}

impl SendCredits {
    /// Makes credits of which the peer has given `initial`, and never gives more than `limit` that
    /// are not used. A limit above `i32::MAX` is that. For a peer whose messages that grant credits
    /// take none, as replies to requests do.
    pub fn new(initial: u32, limit: u32) -> impl PinInit<Self> {
        Self::reserving(initial, limit, 0)
    }

    /// As [`SendCredits::new`], for two sides whose messages all take credits, those that grant
    /// credits as well: keeps the last credit for these. Fails with `EINVAL` if the limit is less
    /// than three: with two, a message that grants one credit would be answered by another one for
    /// ever.
    pub fn with_reserve(initial: u32, limit: u32) -> Result<impl PinInit<Self>> {
        match limit {
            0..3 => Err(EINVAL),
            _ => Ok(Self::reserving(initial, limit, 1)),
        }
    }

    fn reserving(initial: u32, limit: u32, reserve: i32) -> impl PinInit<Self> {
        let limit = limit.try_into().unwrap_or(i32::MAX);
        // INVARIANT: The count is not above the limit.
        let count = initial.try_into().unwrap_or(i32::MAX).min(limit);
        pin_init!(Self {
            count: Atomic::new(count),
            limit,
            reserve,
            waiters: Atomic::new(0),
            lock <- kernel::new_spinlock_irq!(()),
            given <- kernel::new_condvar!(),
        })
    }

    /// Changes the count to what `change` returns for it. Returns `false` if that is `None`, and
    /// fails with the error of [`SendCredits::close`].
    #[inline]
    fn change(&self, change: impl Fn(i32) -> Option<i32>) -> Result<bool> {
        let mut old = self.count.load(Relaxed);
        loop {
            if old < 0 {
                return Err(Error::from_errno(old));
            }
            let Some(new) = change(old) else {
                return Ok(false);
            };
            match self.count.cmpxchg(old, new, Full) {
                Ok(_) => return Ok(true),
                Err(now) => old = now,
            }
        }
    }

    /// Takes a credit of which `left` or more others are left; `None` if there is none.
    #[inline]
    fn try_take(&self, left: i32) -> Result<Option<Credit<'_>>> {
        // INVARIANT: The count does not become negative, as `left` is not.
        let taken = self.change(|count| count.checked_sub(1).filter(|rest| *rest >= left))?;
        Ok(taken.then(|| Credit(self)))
    }

    /// Takes a credit. Any context. Fails with `EAGAIN` if there is none but the one that is
    /// reserved, or with the error of [`SendCredits::close`].
    pub fn take(&self) -> Result<Credit<'_>> {
        self.try_take(self.reserve)?.ok_or(EAGAIN)
    }

    /// Takes a credit for a message with this grant: the reserved one, too, unless nothing is
    /// granted. Any context. Fails as [`SendCredits::take`].
    pub fn take_to_grant(&self, grant: &Grant<'_>) -> Result<Credit<'_>> {
        match grant.count() {
            0 => self.take(),
            // INVARIANT: The message grants credits.
            _ => self.try_take(0)?.ok_or(EAGAIN),
        }
    }

    /// Takes a credit, and waits up to `timeout_ms` milliseconds for one. Fails with `ETIMEDOUT`,
    /// with `ERESTARTSYS` if a signal is pending, or with the error of [`SendCredits::close`].
    pub fn wait(&self, timeout_ms: u32, cx: &Sleepable) -> Result<Credit<'_>> {
        if let Some(credit) = self.try_take(self.reserve)? {
            return Ok(credit);
        }
        let mut guard = self.lock.lock();
        // Credits that are given after this are found below, or their giver finds the waiter.
        self.waiters.fetch_add(1, Full);
        let take = |(): &mut ()| self.try_take(self.reserve).transpose();
        let taken = wait_event(&self.given, &mut guard, Some(timeout_ms), take, cx);
        self.waiters.fetch_sub(1, Relaxed);
        taken?
    }

    /// Adds credits that the peer has given, and wakes threads that wait for them. Any context.
    /// Fails with `EPROTO` if there were more than the limit, and none are added: the peer does not
    /// keep to the protocol; or with the error of [`SendCredits::close`].
    pub fn give(&self, credits: u32) -> Result {
        // INVARIANT: It is not above the limit, as is checked.
        let given = self.change(|count| {
            let sum = count.checked_add_unsigned(credits);
            sum.filter(|sum| *sum <= self.limit)
        })?;
        if !given {
            return Err(EPROTO);
        }
        self.wake();
        Ok(())
    }

    /// Fails all waits and all later calls with `error`; only the first call does. Any context.
    pub fn close(&self, error: Error) {
        // INVARIANT: An error number is negative.
        if self.change(|_| Some(error.to_errno())).is_ok() {
            self.wake();
        }
    }

    /// Returns the number of credits that [`SendCredits::take`] can take; 0 after
    /// [`SendCredits::close`].
    pub fn available(&self) -> u32 {
        let free = self.count.load(Relaxed).saturating_sub(self.reserve);
        free.try_into().unwrap_or(0)
    }

    /// Wakes threads that wait. The caller has changed the count, with full ordering.
    #[inline]
    fn wake(&self) {
        if self.waiters.load(Relaxed) != 0 {
            // One that has looked before that holds the lock until it can be woken.
            drop(self.lock.lock());
            self.given.notify_all();
        }
    }
}

/// A credit that was taken from [`SendCredits`]. It is given back when this is dropped.
#[must_use = "a credit is for one message"]
pub struct Credit<'a>(&'a SendCredits);

impl Credit<'_> {
    /// Uses the credit for a message that `post` posts. If that fails the credit is given back. A
    /// [`PostError`] without an owner is to end the connection, as the message may have been sent.
    ///
    /// [`PostError`]: crate::wr::PostError
    #[inline]
    pub fn spend<T, E>(self, post: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let posted = post();
        if posted.is_ok() {
            forget(self);
        }
        posted
    }
}

impl Drop for Credit<'_> {
    fn drop(&mut self) {
        // A peer that has given more than it may meanwhile is found by the next that it gives, and
        // a connection that has ended needs none.
        let _ = self.0.give(1);
    }
}

/// The messages that the peer may send: receives that it knows of or will be told of.
///
/// # Invariants
///
/// The upper half of `counts` is the number of receives that the peer was not told of, the lower
/// half that of messages that it may send. Their sum is at most `limit`.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::{RecvCredits, SendCredits}};
///
/// /// The peer's message has come, and its receive is posted again. If the peer has to be told of
/// /// receives, and no other message goes, has `post` post one that grants so many.
/// fn received(
///     from: &RecvCredits,
///     to: &SendCredits,
///     post: impl FnOnce(u32) -> Result,
/// ) -> Result {
///     from.received()?;
///     from.posted(1)?;
///     if from.is_due() {
///         let grant = from.grant(u32::MAX);
///         match to.take_to_grant(&grant) {
///             Ok(credit) => credit.spend(|| grant.spend(post))?,
///             // The peer's next message has credits, and this is called again.
///             Err(EAGAIN) => {}
///             Err(closed) => return Err(closed),
///         }
///     }
///     Ok(())
/// }
/// ```
pub struct RecvCredits {
    counts: Atomic<u64>,
    limit: u32,
}

impl RecvCredits {
    /// Makes credits of which the peer has `initial`, by the agreement or since the connection was
    /// made, for a connection that never has more than `limit` receives.
    pub fn new(initial: u32, limit: u32) -> Self {
        // INVARIANT: There are no others, and these are not above the limit.
        Self {
            counts: Atomic::new(initial.min(limit).into()),
            limit,
        }
    }

    /// Changes both counts to what `change` returns for them. Returns the first, as it was before.
    /// Full ordering, as a message that was received is read after this.
    #[inline]
    fn change(&self, change: impl Fn(u32, u32) -> Result<(u32, u32)>) -> Result<u32> {
        let mut old = self.counts.load(Relaxed);
        loop {
            let before = (old >> 32) as u32;
            let (untold, granted) = change(before, old as u32)?;
            let new = u64::from(untold) << 32 | u64::from(granted);
            match self.counts.cmpxchg(old, new, Full) {
                Ok(_) => return Ok(before),
                Err(now) => old = now,
            }
        }
    }

    /// Takes the credit of a message that has come. Any context. Fails with `EPROTO` if the peer
    /// had none: it does not keep to the protocol.
    pub fn received(&self) -> Result {
        // INVARIANT: The sum is less than before.
        self.change(|untold, granted| Ok((untold, granted.checked_sub(1).ok_or(EPROTO)?)))?;
        Ok(())
    }

    /// Adds receives that were posted, of which the peer will be told. Any context. Fails with
    /// `EOVERFLOW` if there were more than the limit: none are added.
    pub fn posted(&self, recvs: u32) -> Result {
        // INVARIANT: The sum is not above the limit, as is checked.
        self.change(|untold, granted| {
            let untold = untold.checked_add(recvs).ok_or(EOVERFLOW)?;
            let sum = untold.checked_add(granted).filter(|sum| *sum <= self.limit);
            sum.map(|_| (untold, granted)).ok_or(EOVERFLOW)
        })?;
        Ok(())
    }

    /// Grants the peer credits, all that it was not told of and at most `most`, by the message that
    /// [`Grant::spend`] posts. Any context.
    pub fn grant(&self, most: u32) -> Grant<'_> {
        // INVARIANT: The sum stays the same.
        let untold = self.change(|untold, granted| {
            let count = untold.min(most);
            Ok((untold.saturating_sub(count), granted.saturating_add(count)))
        });
        Grant {
            count: untold.map_or(0, |untold| untold.min(most)),
            credits: self,
        }
    }

    /// Returns whether the peer is to be told of receives by a message of its own, if no other one
    /// goes: it was not told of more than half of them. Looked at whenever a message was handled
    /// and its receive was posted again.
    pub fn is_due(&self) -> bool {
        (self.counts.load(Relaxed) >> 32) as u32 > self.limit / 2
    }
}

/// Credits for the peer, which it can use as soon as the message that grants them is posted. They
/// are taken back when this is dropped.
#[must_use = "the credits are for a message that grants them"]
pub struct Grant<'a> {
    credits: &'a RecvCredits,
    count: u32,
}

impl Grant<'_> {
    /// Returns the number of credits, for the message.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Has `post` post the message that grants so many credits. If that fails they are taken back,
    /// for the next message. A [`PostError`] without an owner is to end the connection, as the
    /// message may have been sent.
    ///
    /// [`PostError`]: crate::wr::PostError
    #[inline]
    pub fn spend<T, E>(self, post: impl FnOnce(u32) -> Result<T, E>) -> Result<T, E> {
        let posted = post(self.count);
        if posted.is_ok() {
            forget(self);
        }
        posted
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        // INVARIANT: The sum stays the same.
        let _ = self.credits.change(|untold, granted| {
            // A peer that has used credits which it was not told of has taken their receives, too.
            let count = granted.min(self.count);
            Ok((untold.saturating_add(count), granted.saturating_sub(count)))
        });
    }
}
