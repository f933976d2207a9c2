// SPDX-License-Identifier: GPL-2.0

//! The requests at the ends of a QP's queues by which a drain finds that all before them are done.

use crate::{
    completion::Completion,
    debug,
    prelude::*,
    trace, //
};
use kernel::sync::atomic::{
    Atomic,
    Full,
    Relaxed, //
};

/// The requests at the ends of a QP's two queues, for one drain at a time. They are there until
/// each that was posted is reached, also if the drain has failed before that.
#[pin_data]
#[repr(C)]
pub(super) struct Markers {
    /// By [`Queue`]. The first field, to get back from it.
    cqes: [bindings::ib_cqe; 2],
    /// The markers that were given and not reached, a bit each; and [`BUSY`] or [`ABANDONED`].
    state: Atomic<u32>,
    /// Completed when none is left, so that the drain is woken up once.
    #[pin]
    reached: Completion,
}

/// Set until the drain waits.
const BUSY: u32 = 4;

/// Set if the drain has failed, and the last marker that is reached frees the memory.
const ABANDONED: u32 = 8;

/// A queue of a QP, by the number of its marker.
#[derive(Clone, Copy)]
pub(super) enum Queue {
    Send,
    Recv,
}

// SAFETY: A completion may be used from any thread, and the rest does not change.
unsafe impl Send for Markers {}
// SAFETY: A shared reference gives an atomic, a completion, and callbacks that are never written.
unsafe impl Sync for Markers {}

impl Markers {
    pub(super) fn new(flags: kernel::alloc::Flags) -> Result<Pin<KBox<Self>>> {
        let marker = |done| bindings::ib_cqe { done: Some(done) };
        let init = pin_init!(Self {
            cqes: [marker(reached::<0>), marker(reached::<1>)],
            state: Atomic::new(BUSY),
            reached <- Completion::new(),
        });
        KBox::pin_init(init, flags)
    }

    /// Changes the state, and returns the one before. All that was done before a marker was reached
    /// has happened for who finds that.
    fn change(&self, to: impl Fn(u32) -> u32) -> u32 {
        let mut state = self.state.load(Relaxed);
        while let Err(other) = self.state.cmpxchg(state, to(state), Full) {
            state = other;
        }
        state
    }

    /// Gives the marker of a queue, to be posted.
    pub(super) fn give(self: Pin<&Self>, queue: Queue) -> *mut bindings::ib_cqe {
        self.change(|state| state | 1 << queue as u32);
        let cqes: *mut bindings::ib_cqe = core::ptr::from_ref(self.get_ref()).cast_mut().cast();
        // SAFETY: The markers begin with those of both queues.
        let cqe = unsafe { cqes.add(queue as usize) };
        debug::activate(cqe, "the marker of a drain");
        cqe
    }

    /// Takes a marker back that was given, and not posted. The drain does not wait yet.
    pub(super) fn take_back(&self, queue: Queue, cqe: *mut bindings::ib_cqe) {
        debug::deactivate(cqe);
        self.change(|state| state & !(1 << queue as u32));
    }

    /// Waits until all markers that were given are reached, by calling `wait` until it returns
    /// whether they are, or fails. Then all that was done before has happened, and more can be
    /// given.
    pub(super) fn wait(&self, mut wait: impl FnMut(&Completion) -> Result<bool>) -> Result {
        if self.change(|state| state & !BUSY) != BUSY {
            loop {
                match wait(&self.reached) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(e) if self.change(|state| state | BUSY) != 0 => return Err(e),
                    Err(_) => {
                        // The last one has just been reached: its callback is about to say so.
                        while !matches!(wait(&self.reached), Ok(true)) {}
                        break;
                    }
                }
            }
        }
        self.state.store(BUSY, Relaxed);
        Ok(())
    }

    /// Lets go of the markers of a drain that has failed, unless none is posted: they are freed
    /// when all that were posted are reached.
    pub(super) fn abandon(markers: Pin<KBox<Self>>) -> Option<Pin<KBox<Self>>> {
        if markers.change(|state| state & !BUSY | ABANDONED) == BUSY {
            markers.state.store(BUSY, Relaxed);
            return Some(markers);
        }
        core::mem::forget(markers);
        None
    }
}

/// The `done` callback of the marker of number `QUEUE`.
///
/// # Safety
///
/// Called by the RDMA core for a request that was posted with the result of [`Markers::give`].
unsafe extern "C" fn reached<const QUEUE: usize>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: The core passes a CQ and a completion that are valid during this call, and nothing
    // was done with it yet.
    if unsafe { trace::completion(cq, wc) } {
        return;
    }
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let wc = unsafe { &*wc.cast::<Wc>() };
    let cqe = wc.cqe();
    if !debug::deactivate(cqe) {
        return debug::report("a drain");
    }
    let bit = 1 << QUEUE;
    // SAFETY: `cqe` is from `give`, which has added this number to the address of the markers.
    let markers: *mut Markers = unsafe { cqe.sub(QUEUE) }.cast();
    // SAFETY: The markers are there until this one is reached, which is noted here.
    let state = unsafe { &*markers }.change(|state| state & !bit);
    if state & bit == 0 {
        // Markers that nobody has abandoned are there for the next drain, which this does not end.
        return debug::report("a drain");
    }
    match state & !bit {
        // SAFETY: The drain waits for this, which is the last access.
        0 => unsafe { &*markers }.reached.complete(),
        // SAFETY: `abandon` has left the box to the last marker.
        ABANDONED => drop(unsafe { KBox::from_raw(markers) }),
        _ => {}
    }
}
