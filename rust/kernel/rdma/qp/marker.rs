// SPDX-License-Identifier: GPL-2.0

//! Marker requests, which a drain posts to the ends of queues.

use crate::{
    completion::Completion,
    debug,
    prelude::*, //
};
use core::mem::offset_of;
use kernel::sync::atomic::{
    Atomic,
    Full,
    Relaxed, //
};

/// The requests at the ends of a QP's two queues. A drain uses them once; they are allocated with
/// the QP, so that its end needs no memory.
///
/// The drain, and each queue that one was posted to, have a reference, so that one that is late
/// does no harm.
#[pin_data]
pub(super) struct Markers {
    send: bindings::ib_cqe,
    recv: bindings::ib_cqe,
    /// The number of markers that were given and not reached, and one more until the drain waits.
    left: Atomic<u32>,
    /// Completed when none is left, so that the drain is woken up once.
    #[pin]
    pub(super) reached: Completion,
}

/// A queue of a QP, by the offset of its marker.
#[derive(Clone, Copy)]
#[repr(usize)]
pub(super) enum Queue {
    Send = offset_of!(Markers, send),
    Recv = offset_of!(Markers, recv),
}

impl Markers {
    pub(super) fn new() -> Result<Arc<Self>> {
        let marker = |done| bindings::ib_cqe { done: Some(done) };
        let init = pin_init!(Self {
            send: marker(reached::<{ Queue::Send as usize }>),
            recv: marker(reached::<{ Queue::Recv as usize }>),
            left: Atomic::new(1),
            reached <- Completion::new(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Gives a reference up for the address of the marker of a queue.
    pub(super) fn give(self: Arc<Self>, queue: Queue) -> *mut bindings::ib_cqe {
        self.left.add(1, Relaxed);
        // SAFETY: The offset is that of a field.
        let cqe = unsafe { Arc::into_raw(self).byte_add(queue as usize) };
        let cqe = cqe.cast_mut().cast();
        debug::activate(cqe, "the marker of a drain");
        cqe
    }

    /// Takes the reference back.
    ///
    /// # Safety
    ///
    /// `cqe` is from [`Markers::give`] for the queue of this offset. Each one is taken back once.
    unsafe fn from_cqe(cqe: *mut bindings::ib_cqe, offset: usize) -> Arc<Self> {
        // SAFETY: `cqe` is from `give`, which has added this offset to the address of a reference
        // that it gave up, and is taken back once, as the caller promises.
        unsafe { Arc::from_raw(cqe.byte_sub(offset).cast_const().cast()) }
    }

    /// Takes the reference of a marker back that was not posted.
    ///
    /// # Safety
    ///
    /// `cqe` is from [`Markers::give`] for this queue. Each one is taken back once.
    pub(super) unsafe fn take_back(cqe: *mut bindings::ib_cqe, queue: Queue) {
        debug::deactivate(cqe);
        // SAFETY: `cqe` is from `give` for this queue and is taken back once, as the caller
        // promises.
        let markers = unsafe { Self::from_cqe(cqe, queue as usize) };
        // The drain does not wait yet, so it is not the last one.
        markers.left.fetch_sub(1, Relaxed);
    }

    /// Counts one less, and returns whether it was the last. Then all that was done before the
    /// others has happened.
    ///
    /// The drain begins to wait by this, unless it was the last.
    pub(super) fn put(&self) -> bool {
        self.left.fetch_sub(1, Full) == 1
    }

    /// Prepares for more markers. All that were given have been reached.
    pub(super) fn begin_again(&self) {
        self.left.store(1, Relaxed);
    }
}

/// The `done` callback of the marker at `OFFSET`.
///
/// # Safety
///
/// Called by the RDMA core for a request that was posted with the result of [`Markers::give`].
unsafe extern "C" fn reached<const OFFSET: usize>(
    _cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: `wc` is valid during this call, and both members of the union are as wide.
    let cqe = unsafe { *(*wc).__bindgen_anon_1.wr_cqe };
    if !debug::deactivate(cqe) {
        return debug::report("a drain");
    }
    // SAFETY: The queue's reference is given up here.
    let markers = unsafe { Markers::from_cqe(cqe, OFFSET) };
    if markers.put() {
        markers.reached.complete();
    }
}
