// SPDX-License-Identifier: GPL-2.0

//! Protection domains.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_pd`)

use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    gate::{
        Hold,
        Kind, //
    }, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::Arc, //
};

/// What the handles of one protection domain share.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_pd>,
    pub(crate) dev: Device,
    _state: Deferred<State>,
}

// SAFETY: `struct ib_pd` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: As above.
unsafe impl Sync for Inner {}

/// # Invariants
///
/// `raw` is an allocated PD.
struct State {
    raw: NonNull<bindings::ib_pd>,
    _hold: Hold,
}

// SAFETY: A PD may be deallocated from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant; all that was made from the PD is gone, as it held `Inner`.
        let ret = unsafe { bindings::ib_dealloc_pd_user(self.raw.as_ptr(), core::ptr::null_mut()) };
        if ret != 0 {
            pr_err!("a PD could not be deallocated ({ret}); it is leaked\n");
            return Fate::Leak;
        }
        Fate::Gone
    }
}

/// A protection domain: what QPs, MRs and buffers that work together belong to.
///
/// A counted handle. The PD is deallocated, from a work item, when the last handle and all that was
/// made from it are gone.
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Arc<Inner>,
}

impl Pd {
    /// Allocates a protection domain (`ib_alloc_pd`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or the driver's error.
    #[inline(never)]
    pub fn alloc(dev: &Device, _cx: &Sleepable) -> Result<Self> {
        let reserved = Deferred::reserve()?;
        let hold = dev.hold(Kind::Pd);
        // SAFETY: The device is registered while `dev` lives, and the client's name outlives the
        // PD.
        let raw = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(dev.as_raw(), 0, dev.client().name.as_char_ptr())
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // INVARIANT: Just allocated.
        let state = reserved.fill(State { raw, _hold: hold });
        let inner = Arc::new(
            Inner {
                raw,
                dev: dev.clone(),
                _state: state,
            },
            GFP_KERNEL,
        )?;
        Ok(Self { inner })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.dev
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.inner.raw.as_ptr()
    }

    /// Returns the key of all DMA-mapped local memory of this PD.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: The PD is allocated while `inner` lives; the key does not change.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }
}

impl PartialEq for Pd {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}
