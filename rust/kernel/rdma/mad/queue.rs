// SPDX-License-Identifier: GPL-2.0

//! MADs that wait to be received, and threads that wait for them.

use super::Received;
use kernel::{
    new_condvar,
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        CondVar,
        CondVarTimeoutResult,
        SpinLock, //
    },
    task::MAX_SCHEDULE_TIMEOUT,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    }, //
};

/// A ring of MADs, with as many places as it was made with: a peer cannot make it grow.
struct Ring {
    places: KVec<Option<Received>>,
    first: usize,
    len: usize,
    closed: Option<Error>,
}

impl Ring {
    fn push(&mut self, mad: Received) -> Result<(), Received> {
        let capacity = self.places.len();
        if self.closed.is_some() || self.len == capacity {
            return Err(mad);
        }
        let mut at = self.first + self.len;
        if at >= capacity {
            at -= capacity;
        }
        match self.places.get_mut(at) {
            Some(place) => *place = Some(mad),
            None => return Err(mad),
        }
        self.len += 1;
        Ok(())
    }

    fn pop(&mut self) -> Option<Received> {
        let mad = self.places.get_mut(self.first)?.take()?;
        self.first += 1;
        if self.first == self.places.len() {
            self.first = 0;
        }
        self.len -= 1;
        Some(mad)
    }
}

/// A bounded queue of MADs that many threads may wait at.
#[pin_data]
pub(super) struct Queue {
    #[pin]
    ring: SpinLock<Ring>,
    #[pin]
    changed: CondVar,
    /// Not in the ring, whose lock is not for softirqs.
    dropped: Atomic<u64>,
}

impl Queue {
    pub(super) fn new(capacity: usize) -> Result<impl PinInit<Self>> {
        let mut places = KVec::with_capacity(capacity, GFP_KERNEL)?;
        for _ in 0..capacity {
            places.push_within_capacity(None)?;
        }
        Ok(pin_init!(Self {
            ring <- new_spinlock!(Ring {
                places,
                first: 0,
                len: 0,
                closed: None,
            }),
            changed <- new_condvar!(),
            dropped: Atomic::new(0),
        }))
    }

    /// Adds a MAD, or drops it where there is no room, and wakes up one thread.
    pub(super) fn push(&self, mad: Received) {
        let pushed = self.ring.lock().push(mad);
        match pushed {
            Ok(()) => self.changed.notify_one(),
            Err(_) => self.dropped.add(1, Relaxed),
        }
    }

    /// Returns how many MADs were dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Takes the MAD that came first, or waits for one, for ever if there is no time limit.
    pub(super) fn pop(&self, timeout_ms: Option<u32>) -> Result<Received> {
        let mut left: Jiffies = match timeout_ms {
            Some(ms) => msecs_to_jiffies(ms),
            None => MAX_SCHEDULE_TIMEOUT as Jiffies,
        };
        let mut ring = self.ring.lock();
        loop {
            // First of all, as whoever was woken up for a MAD has to take it.
            if let Some(mad) = ring.pop() {
                return Ok(mad);
            }
            if let Some(reason) = ring.closed {
                return Err(reason);
            }
            if left == 0 {
                return Err(ETIMEDOUT);
            }
            match self.changed.wait_interruptible_timeout(&mut ring, left) {
                CondVarTimeoutResult::Woken { jiffies } => left = jiffies,
                CondVarTimeoutResult::Timeout => left = 0,
                CondVarTimeoutResult::Signal { .. } => return ring.pop().ok_or(ERESTARTSYS),
            }
        }
    }

    /// Drops what is queued and what is still to come, and gives all threads the reason.
    pub(super) fn close(&self, reason: Error) {
        let mut ring = self.ring.lock();
        ring.closed = Some(reason);
        let places = core::mem::take(&mut ring.places);
        ring.len = 0;
        drop(ring);
        drop(places);
        self.changed.notify_all();
    }

    /// Returns why the queue was closed, if it was.
    pub(super) fn closed(&self) -> Option<Error> {
        self.ring.lock().closed
    }
}
