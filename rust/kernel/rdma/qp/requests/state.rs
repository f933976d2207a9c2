// SPDX-License-Identifier: GPL-2.0

//! The state of a request of an array. Nothing else is here, so that loom can run this file in
//! every order of its steps.

use crate::{
    atomic::{
        AtomicUsize,
        Ordering, //
    },
    cqe::Queue, //
};

/// The request is in the array.
const IDLE: usize = 0;
/// There is an `Taken` of the request.
const HELD: usize = 1;

/// The state of a request: idle, held, or posted. Each change is a store, as only one thread may
/// make the next: the holder of the array takes what is idle, and the holder of the request, or the
/// poller of its completion, does the rest.
///
/// # Invariants
///
/// - [`IDLE`], [`HELD`], or the address of the callback that is posted, with the lowest bit set if
///   that is a receive's.
/// - While this is [`IDLE`], the request belongs to the holder of the array; otherwise to one
///   `Taken`, or to the queue that it was posted to.
pub(super) struct State(AtomicUsize);

impl State {
    pub(super) fn new() -> Self {
        // INVARIANT: There is no `Taken`, and nothing is posted.
        Self(AtomicUsize::new(IDLE))
    }

    /// Returns whether the request is idle. Acquire: all use of it has happened.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == IDLE
    }

    /// Takes the request if it is idle, for the holder of the array.
    #[inline]
    pub(super) fn take(&self) -> bool {
        let idle = self.is_idle();
        if idle {
            // INVARIANT: The caller, which alone takes requests, makes the only `Taken`.
            self.0.store(HELD, Ordering::Relaxed);
        }
        idle
    }

    /// The holder of the request is about to post it, with a callback of this address.
    #[inline]
    pub(super) fn post(&self, callback: usize, queue: Queue) {
        // INVARIANT: The address is aligned to more than one byte.
        self.0.store(callback | queue as usize, Ordering::Relaxed);
    }

    /// The request is held again: it has completed, or was not posted.
    #[inline]
    pub(super) fn hold(&self) {
        // INVARIANT: The caller has the only `Taken`.
        self.0.store(HELD, Ordering::Relaxed);
    }

    /// Puts the request back, which the caller holds, and does not use after this. Release: see
    /// [`State::is_idle`].
    #[inline]
    pub(super) fn put(&self) {
        // INVARIANT: The caller had the only `Taken`.
        self.0.store(IDLE, Ordering::Release);
    }

    /// Returns whether the request is posted to a queue that `of` selects.
    pub(super) fn is_posted(&self, of: impl FnOnce(Queue) -> bool) -> bool {
        posted(self.0.load(Ordering::Relaxed)).is_some_and(|(_, queue)| of(queue))
    }

    /// Takes a request that is posted to a queue that `of` selects, and returns the address of the
    /// callback. The caller knows that no completion comes, and nobody else takes it so.
    #[cold]
    pub(super) fn take_lost(&self, of: impl FnOnce(Queue) -> bool) -> Option<(usize, Queue)> {
        // What the thread has written that posted it has happened before the QP was drained.
        let (callback, queue) = posted(self.0.load(Ordering::Acquire))?;
        if !of(queue) {
            return None;
        }
        // INVARIANT: The caller has the request.
        self.0.store(HELD, Ordering::Relaxed);
        Some((callback, queue))
    }
}

/// Returns the callback and the queue of a request in this state, if it is posted.
fn posted(state: usize) -> Option<(usize, Queue)> {
    let queue = match state & 1 {
        0 => Queue::Send,
        _ => Queue::Recv,
    };
    match state & !1 {
        0 => None,
        callback => Some((callback, queue)),
    }
}
