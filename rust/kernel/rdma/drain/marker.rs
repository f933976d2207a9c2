// SPDX-License-Identifier: GPL-2.0

//! The requests that a drain waits for.

use crate::{
    bindings,
    ledger, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// The request at the end of a queue.
///
/// The drain and the queue have a reference each, so that a marker that is late does no harm.
#[repr(C)]
pub(super) struct Marker {
    cqe: bindings::ib_cqe,
    pub(super) reached: Opaque<bindings::completion>,
}

// SAFETY: A completion may be used from any thread, and the rest does not change.
unsafe impl Send for Marker {}
// SAFETY: As above.
unsafe impl Sync for Marker {}

impl Marker {
    fn new() -> Result<Arc<Self>> {
        let marker = Arc::new(
            Self {
                cqe: bindings::ib_cqe {
                    done: Some(reached),
                },
                reached: Opaque::uninit(),
            },
            GFP_KERNEL,
        )?;
        // SAFETY: The memory is valid and stays in place.
        unsafe { bindings::init_completion(marker.reached.get()) };
        Ok(marker)
    }
}

/// The `done` callback of a marker.
///
/// # Safety
///
/// Called by the RDMA core for a request that was posted with a marker's `cqe` and a reference to
/// it.
unsafe extern "C" fn reached(_cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call, and both members of the union are as wide.
    let cqe = unsafe { *(*wc).__bindgen_anon_1.wr_cqe };
    if !ledger::strike(cqe) {
        return ledger::report("a drain");
    }
    // SAFETY: The callback is a marker's first field, and the queue's reference is given up here.
    let marker = unsafe { Arc::from_raw(cqe.cast_const().cast::<Marker>()) };
    // SAFETY: The completion is initialised.
    unsafe { bindings::complete(marker.reached.get()) };
}

/// What a drain needs: allocated with the QP, so that its end needs no memory.
pub(crate) struct Markers {
    pub(super) send: Arc<Marker>,
    pub(super) recv: Arc<Marker>,
}

impl Markers {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            send: Marker::new()?,
            recv: Marker::new()?,
        })
    }
}
