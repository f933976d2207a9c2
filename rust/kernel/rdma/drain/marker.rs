// SPDX-License-Identifier: GPL-2.0

//! The requests that a drain waits for.

use crate::{
    bindings,
    ledger, //
};
use core::mem::offset_of;
use kernel::{
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// The requests at the ends of a QP's two queues. A drain uses them once; they are allocated with
/// the QP, so that its end needs no memory.
///
/// The drain, and each queue that one was posted to, have a reference, so that one that is late does
/// no harm.
pub(crate) struct Markers {
    send: bindings::ib_cqe,
    recv: bindings::ib_cqe,
    /// Completed by each of them.
    pub(super) reached: Opaque<bindings::completion>,
}

/// The offsets of the two.
pub(super) const SEND: usize = offset_of!(Markers, send);
pub(super) const RECV: usize = offset_of!(Markers, recv);

// SAFETY: A completion may be used from any thread, and the rest does not change.
unsafe impl Send for Markers {}
// SAFETY: As above.
unsafe impl Sync for Markers {}

impl Markers {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let marker = |done| bindings::ib_cqe { done: Some(done) };
        let markers = Arc::new(
            Self {
                send: marker(reached::<SEND>),
                recv: marker(reached::<RECV>),
                reached: Opaque::uninit(),
            },
            GFP_KERNEL,
        )?;
        // SAFETY: The memory is valid and stays in place.
        unsafe { bindings::init_completion(markers.reached.get()) };
        Ok(markers)
    }

    /// Gives a reference up for the address of the marker at `OFFSET`.
    pub(super) fn give<const OFFSET: usize>(self: Arc<Self>) -> *mut bindings::ib_cqe {
        // SAFETY: The offset is that of a field.
        let cqe = unsafe { Arc::into_raw(self).byte_add(OFFSET) };
        let cqe = cqe.cast_mut().cast();
        ledger::post(cqe);
        cqe
    }

    /// Takes the reference back.
    ///
    /// # Safety
    ///
    /// `cqe` is from [`Markers::give`] with this offset. Each one is taken back once.
    unsafe fn from_cqe<const OFFSET: usize>(cqe: *mut bindings::ib_cqe) -> Arc<Self> {
        // SAFETY: By the caller's promise.
        unsafe { Arc::from_raw(cqe.byte_sub(OFFSET).cast_const().cast()) }
    }

    /// Takes the reference of a marker back that was not posted.
    ///
    /// # Safety
    ///
    /// As [`Markers::from_cqe`].
    pub(super) unsafe fn take_back<const OFFSET: usize>(cqe: *mut bindings::ib_cqe) {
        ledger::strike(cqe);
        // SAFETY: By the caller's promise.
        drop(unsafe { Self::from_cqe::<OFFSET>(cqe) });
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
    if !ledger::strike(cqe) {
        return ledger::report("a drain");
    }
    // SAFETY: The queue's reference is given up here.
    let markers = unsafe { Markers::from_cqe::<OFFSET>(cqe) };
    // SAFETY: The completion is initialised.
    unsafe { bindings::complete(markers.reached.get()) };
}
