// SPDX-License-Identifier: GPL-2.0

//! Credits: the number of messages that one side may send to the other.
//!
//! A reliable connection has no flow control of its own: a message that finds no receive is sent
//! again after a while, or ends the connection. So protocols count. Each side tells the other how
//! many receives it has posted, and then, with the messages that it sends anyway, how many it has
//! posted again (as SMB Direct and RPC over RDMA do).
//!
//! [`SendCredits`] are those that this side has from its peer. [`RecvCredits`] are those that the
//! peer has from this side. The counts that are exchanged are from a stranger: what exceeds the
//! agreement is an error.

use crate::prelude::*;
use kernel::{
    new_condvar,
    new_spinlock_irq,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed, //
        },
        CondVar,
        CondVarTimeoutResult,
        SpinLockIrq, //
    },
    time::msecs_to_jiffies, //
};

/// The messages that may be sent to the peer, each of which takes a credit.
///
/// # Invariants
///
/// `count` is at most `limit`. If it is negative it is an error number, and does not change any
/// more.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::SendCredits};
///
/// #[pin_data]
/// struct Conn {
///     qp: Qp<Softirq>,
///     #[pin]
///     credits: SendCredits,
/// }
///
/// # #[derive(HasCqe)]
/// # struct Message { cqe: Cqe<Self>, buf: Buf<ToDevice> }
/// # impl CqeHandler for Message {
/// #     type Pointer = Pin<KBox<Self>>;
/// #     type Needs = Atomic;
/// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
/// # }
/// impl Conn {
///     /// Sends a message when the peer has a receive for it.
///     fn send(&self, message: Pin<KBox<Message>>, cx: &Sleepable) -> Result {
///         let credit = self.credits.wait(5_000, cx)?;
///         credit.spend(|| {
///             let posted = self
///                 .qp
///                 .post_send(message, |m| Ok(SendWr::send([m.buf.whole()])));
///             posted.map_err(Error::from)
///         })
///     }
///
///     /// The peer's message says that it has posted so many receives again.
///     fn given(&self, credits: u16) -> Result {
///         self.credits.give(credits.into())
///     }
///
///     fn disconnected(&self) {
///         self.credits.close(ENOTCONN);
///     }
/// }
/// ```
#[pin_data]
pub struct SendCredits {
    count: Atomic<i32>,
    limit: i32,
    /// The number of threads that wait, changed with the lock held.
    waiters: Atomic<i32>,
    #[pin]
    lock: SpinLockIrq<()>,
    #[pin]
    given: CondVar,
}

impl SendCredits {
    /// Makes credits of which the peer has given `initial`, and never gives more than `limit` that
    /// are not used. A limit above `i32::MAX` is that.
    pub fn new(initial: u32, limit: u32) -> impl PinInit<Self> {
        let limit = limit.try_into().unwrap_or(i32::MAX);
        // INVARIANT: The count is not above the limit.
        let count = initial.try_into().unwrap_or(i32::MAX).min(limit);
        pin_init!(Self {
            count: Atomic::new(count),
            limit,
            waiters: Atomic::new(0),
            lock <- new_spinlock_irq!(()),
            given <- new_condvar!(),
        })
    }

    /// Takes a credit. Any context.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is none; the error of [`SendCredits::close`].
    pub fn take(&self) -> Result<Credit<'_>> {
        let mut old = self.count.load(Relaxed);
        loop {
            match old {
                0 => return Err(EAGAIN),
                ..0 => return Err(Error::from_errno(old)),
                _ => {}
            }
            // INVARIANT: It was positive.
            match self.count.cmpxchg(old, old - 1, Acquire) {
                Ok(_) => return Ok(Credit(self)),
                Err(now) => old = now,
            }
        }
    }

    /// Takes a credit, and waits up to `timeout_ms` milliseconds for one.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `ERESTARTSYS` if a signal is pending; the error of [`SendCredits::close`].
    pub fn wait(&self, timeout_ms: u32, _cx: &Sleepable) -> Result<Credit<'_>> {
        match self.take() {
            Err(e) if e == EAGAIN => {}
            taken => return taken,
        }
        let mut left = msecs_to_jiffies(timeout_ms);
        let mut guard = self.lock.lock();
        // Credits that are given after this are found below, or their giver finds the waiter.
        self.waiters.fetch_add(1, Full);
        let taken = loop {
            match self.take() {
                Err(e) if e == EAGAIN => {}
                taken => break taken,
            }
            if left == 0 {
                break Err(ETIMEDOUT);
            }
            match self.given.wait_interruptible_timeout(&mut guard, left) {
                CondVarTimeoutResult::Signal { .. } => break Err(ERESTARTSYS),
                CondVarTimeoutResult::Timeout => left = 0,
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
            }
        };
        self.waiters.fetch_sub(1, Relaxed);
        taken
    }

    /// Adds credits that the peer has given, and wakes threads that wait for them. Any context.
    ///
    /// # Errors
    ///
    /// `EPROTO` if there were more than the limit, and none are added: the peer does not keep to
    /// the protocol. The error of [`SendCredits::close`].
    pub fn give(&self, credits: u32) -> Result {
        let mut old = self.count.load(Relaxed);
        loop {
            if old < 0 {
                return Err(Error::from_errno(old));
            }
            let new = i32::try_from(credits).ok().and_then(|n| old.checked_add(n));
            let new = new.filter(|n| *n <= self.limit).ok_or(EPROTO)?;
            // INVARIANT: It is not above the limit, as just checked.
            match self.count.cmpxchg(old, new, Full) {
                Ok(_) => break,
                Err(now) => old = now,
            }
        }
        self.wake();
        Ok(())
    }

    /// Fails all waits, and all later calls, with `error`. Only the first call does. For the end of
    /// the connection. Any context.
    pub fn close(&self, error: Error) {
        let mut old = self.count.load(Relaxed);
        while old >= 0 {
            // INVARIANT: An error number is negative.
            match self.count.cmpxchg(old, error.to_errno(), Full) {
                Ok(_) => return self.wake(),
                Err(now) => old = now,
            }
        }
    }

    /// Returns the number of credits that are there; 0 after [`SendCredits::close`].
    pub fn available(&self) -> u32 {
        self.count.load(Relaxed).try_into().unwrap_or(0)
    }

    /// Wakes threads that wait. The caller has changed the count, with full ordering.
    #[inline]
    fn wake(&self) {
        if self.waiters.load(Relaxed) != 0 {
            // One that waits has looked before the count was changed, and holds the lock until it
            // can be woken.
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
    #[inline]
    pub fn spend<T, E>(self, post: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let posted = post();
        if posted.is_ok() {
            core::mem::forget(self);
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

/// The messages that the peer may send: receives that it knows of, and those that it will be told
/// of.
///
/// # Invariants
///
/// The upper half of `counts` is the number of receives that the peer was not told of, the lower
/// half that of messages that it may send. Their sum is at most `limit`.
///
/// # Examples
///
/// ```
/// use rdma::session::RecvCredits;
///
/// /// The peer's message has come, its receive is posted again, and an answer goes out.
/// fn answer(credits: &RecvCredits, header: &mut [u8; 2]) -> Result {
///     credits.received()?;
///     credits.posted(1)?;
///     *header = (credits.grant(u16::MAX.into()) as u16).to_le_bytes();
///     Ok(())
/// }
///
/// /// Returns whether the peer may soon have no credit left, and is to get an empty message.
/// fn is_due(credits: &RecvCredits, recvs: u32) -> bool {
///     credits.untold() > recvs / 2
/// }
/// ```
pub struct RecvCredits {
    counts: Atomic<u64>,
    limit: u32,
}

/// A receive that the peer was not told of.
const UNTOLD: u64 = 1 << 32;

/// Returns the number of receives that the peer was not told of, and that of messages it may send.
fn halves(counts: u64) -> (u32, u32) {
    ((counts >> 32) as u32, counts as u32)
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

    /// Changes the counts to what `change` returns. Full ordering, as a message that was received
    /// is read after this.
    #[inline]
    fn change(&self, change: impl Fn(u32, u32) -> Result<u64>) -> Result<u64> {
        let mut old = self.counts.load(Relaxed);
        loop {
            let (untold, granted) = halves(old);
            match self.counts.cmpxchg(old, change(untold, granted)?, Full) {
                Ok(_) => return Ok(old),
                Err(now) => old = now,
            }
        }
    }

    /// Takes the credit of a message that has come. Any context.
    ///
    /// # Errors
    ///
    /// `EPROTO` if the peer had none: it does not keep to the protocol.
    pub fn received(&self) -> Result {
        // INVARIANT: The sum is less than before.
        self.change(|untold, granted| {
            let granted = granted.checked_sub(1).ok_or(EPROTO)?;
            Ok(u64::from(untold) * UNTOLD + u64::from(granted))
        })
        .map(drop)
    }

    /// Adds receives that were posted, of which the peer will be told. Any context.
    ///
    /// # Errors
    ///
    /// `EOVERFLOW` if there were more than the limit: none are added.
    pub fn posted(&self, recvs: u32) -> Result {
        // INVARIANT: The sum is not above the limit, as is checked.
        self.change(|untold, granted| {
            let sum = untold
                .checked_add(granted)
                .and_then(|n| n.checked_add(recvs));
            sum.filter(|n| *n <= self.limit).ok_or(EOVERFLOW)?;
            Ok(u64::from(untold + recvs) * UNTOLD + u64::from(granted))
        })
        .map(drop)
    }

    /// Returns how many credits to give the peer with a message, at most `most`: all that it was
    /// not told of. They are given with that, so the message has to be sent, or the connection to
    /// end. Any context.
    pub fn grant(&self, most: u32) -> u32 {
        // INVARIANT: The sum stays the same.
        let old = self.change(|untold, granted| {
            let grant = untold.min(most);
            Ok(u64::from(untold - grant) * UNTOLD + u64::from(granted + grant))
        });
        old.map_or(0, |old| halves(old).0.min(most))
    }

    /// Returns the number of receives that the peer was not told of: a protocol whose side has
    /// nothing to send sends an empty message when there are too many.
    pub fn untold(&self) -> u32 {
        halves(self.counts.load(Relaxed)).0
    }
}
