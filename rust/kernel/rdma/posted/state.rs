// SPDX-License-Identifier: GPL-2.0

//! The state of a request of an array. Nothing else is here, so that loom can run this file in
//! every order of its steps.

use crate::{
    atomic::{
        AtomicPtr,
        AtomicU64,
        Ordering, //
    },
    cqe::Queue, //
};

/// The request is in the array.
const IDLE: u64 = 0;
/// There is a `Taken` of the request.
const HELD: u64 = 1;

/// Set with a QP's number if the request is posted to its receive queue.
const RECV: u64 = 1;
/// Set with a QP's number if the callback is not in the request.
const ELSEWHERE: u64 = 2;
/// The bits that numbers of QPs leave free: these, and the offset of a callback, which is aligned.
const FREE: u64 = (1 << FREE_BITS) - 1;
pub(crate) const FREE_BITS: u32 = 16;

/// The callback of a posted request.
#[derive(Clone, Copy)]
pub(crate) enum Callback<C> {
    /// At this offset in the request, aligned to 4 bytes at least and below `1 << FREE_BITS`.
    At(usize),
    Elsewhere(*mut C),
}

/// The state of a request: idle, held, or posted. Each change is a store, as only one thread may
/// make the next: the holder of the array takes what is idle, and the holder of the request, or the
/// poller of its completion, does the rest.
///
/// # Invariants
///
/// - `state` is [`IDLE`], [`HELD`], or the number of the QP that the request is posted to, the
///   queue and the place of the callback: its offset in the request, or [`ELSEWHERE`], at
///   `callback`.
/// - While it is [`IDLE`], the request belongs to the holder of the array; otherwise to one
///   `Taken`, or to the queue that it was posted to.
pub(crate) struct State<C> {
    state: AtomicU64,
    callback: AtomicPtr<C>,
}

impl<C> State<C> {
    pub(crate) fn new() -> Self {
        // INVARIANT: There is no `Taken`, and nothing is posted.
        Self {
            state: AtomicU64::new(IDLE),
            callback: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Returns whether the request is idle. Acquire: all use of it has happened.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.state.load(Ordering::Acquire) == IDLE
    }

    /// Takes the request if it is idle, for the holder of the array.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        let idle = self.is_idle();
        if idle {
            // INVARIANT: The caller, which alone takes requests, makes the only `Taken`.
            self.state.store(HELD, Ordering::Relaxed);
        }
        idle
    }

    /// The holder of the request is about to post it to a queue of this QP, with this callback.
    /// Release: who finds it posted there finds the callback.
    #[inline]
    pub(crate) fn post(&self, qp: u64, queue: Queue, callback: Callback<C>) {
        let place = match callback {
            Callback::At(offset) => offset as u64,
            Callback::Elsewhere(callback) => {
                self.callback.store(callback, Ordering::Relaxed);
                ELSEWHERE
            }
        };
        // INVARIANT: The low bits of the number are free for the place and the queue.
        self.state
            .store(qp | place | queue as u64, Ordering::Release);
    }

    /// The request is held again: it has completed, or was not posted.
    #[inline]
    pub(crate) fn hold(&self) {
        // INVARIANT: The caller has the only `Taken`.
        self.state.store(HELD, Ordering::Relaxed);
    }

    /// Puts the request back, which the caller holds, and does not use after this. Release: see
    /// [`State::is_idle`].
    #[inline]
    pub(crate) fn put(&self) {
        // INVARIANT: The caller had the only `Taken`.
        self.state.store(IDLE, Ordering::Release);
    }

    /// Returns whether the request is posted to a queue of this QP that `of` selects.
    pub(crate) fn is_posted(&self, qp: u64, of: impl FnOnce(Queue) -> bool) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state & !FREE == qp && of(queue(state))
    }

    /// Takes a request that is posted to a queue of this QP that `of` selects, and returns its
    /// callback. The caller knows that no completion of this QP comes, that nothing is posted to
    /// it, and that no other task takes it so.
    pub(crate) fn take_lost(
        &self,
        qp: u64,
        of: impl FnOnce(Queue) -> bool,
    ) -> Option<(Callback<C>, Queue)> {
        // What is posted elsewhere may change its state at any time, but not to this QP.
        let state = self.state.load(Ordering::Acquire);
        if state & !FREE != qp || !of(queue(state)) {
            return None;
        }
        let callback = match state & ELSEWHERE {
            0 => Callback::At((state & FREE & !RECV) as usize),
            _ => Callback::Elsewhere(self.callback.load(Ordering::Relaxed)),
        };
        // INVARIANT: The caller has the request.
        self.state.store(HELD, Ordering::Relaxed);
        Some((callback, queue(state)))
    }
}

/// Returns the queue that a request in this state is posted to.
fn queue(state: u64) -> Queue {
    match state & RECV {
        0 => Queue::Send,
        _ => Queue::Recv,
    }
}
