// SPDX-License-Identifier: GPL-2.0

//! Protection domains.
//!
//! Each post compares the PD of its memory with that of the QP. So a PD is told from others by the
//! address that all handles share, and two are compared without a load.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_pd`)

use crate::{
    deferred,
    device::Device,
    objects::Object,
    prelude::internal::*,
    refs::ObjectKind, //
};

/// # Invariants
///
/// `raw` is an allocated PD of `dev`.
struct OwnedPd {
    raw: NonNull<bindings::ib_pd>,
    dev: Device,
    object: Object,
}

// SAFETY: A PD may be used and deallocated from any thread, and the rest is `Send`.
unsafe impl Send for OwnedPd {}
// SAFETY: A PD may be used by several threads at once, and the rest is `Sync`.
unsafe impl Sync for OwnedPd {}

impl deferred::Teardown for OwnedPd {
    fn object(&self) -> Option<&Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        // SAFETY: By the type invariant `raw` is an allocated PD. All objects made from it have a
        // handle, so they are gone.
        let ret = unsafe { bindings::ib_dealloc_pd_user(self.raw.as_ptr(), ptr::null_mut()) };
        deferred::destroyed(fmt!("a PD"), ret)
    }
}

/// A protection domain, of QPs, MRs and buffers that can be used together.
///
/// A counted handle. The PD is deallocated, from a work item, when the last handle and all objects
/// made from it are gone.
#[derive(Clone, PartialEq)]
pub struct Pd(deferred::Deferred<OwnedPd>);

/// The identity of a PD, its address. It does not keep the PD.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PdId(usize);

impl Pd {
    /// Allocates a protection domain (`ib_alloc_pd`). Fails with `ENOMEM`, or the driver's error.
    pub fn alloc(dev: &Device, _cx: &Sleepable) -> Result<Self> {
        let reserved = deferred::Deferred::reserve()?;
        let mut object = dev.object(ObjectKind::Pd);
        // SAFETY: The device is registered while `dev` lives, and the client's name lives longer
        // than the PD.
        let raw = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(dev.as_raw(), 0, dev.client().name.as_char_ptr())
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // SAFETY: The PD was just allocated; the number does not change.
        object.num = Some(unsafe { (*raw.as_ptr()).res.id });
        // INVARIANT: The PD was just allocated.
        Ok(Self(reserved.fill(OwnedPd {
            raw,
            dev: dev.clone(),
            object,
        })))
    }

    #[inline]
    pub(crate) fn id(&self) -> PdId {
        PdId(self.0.addr())
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.0.dev
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.0.raw.as_ptr()
    }

    /// Returns the key of all DMA-mapped local memory of this PD.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: The PD is allocated while this lives; the key does not change.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }
}
