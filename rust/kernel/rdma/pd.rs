// SPDX-License-Identifier: GPL-2.0

//! Protection domains.
//!
//! Each post compares the PD of its memory with that of the QP. So a handle is the address of the
//! shared part, and two are compared without a load.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_pd`)

use crate::{
    deferred,
    objects::Object,
    prelude::*,
    refs::Kind, //
};
use kernel::{
    error::from_err_ptr,
    sync::ArcBorrow, //
};

/// The part that all handles of a protection domain share.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_pd>,
    pub(crate) dev: Device,
    _state: deferred::Deferred<State>,
}

// SAFETY: `struct ib_pd` may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: A shared reference gives access to the PD and its device, which may be used by several
// threads at once.
unsafe impl Sync for Inner {}

/// # Invariants
///
/// `raw` is an allocated PD.
struct State {
    raw: NonNull<bindings::ib_pd>,
    object: Object,
}

// SAFETY: A PD may be deallocated from any thread.
unsafe impl Send for State {}
// SAFETY: A PD may be used from any thread.
unsafe impl Sync for State {}

impl deferred::Teardown for State {
    fn object(&self) -> Option<&Object> {
        Some(&self.object)
    }

    fn teardown(&self, _cx: &Sleepable) -> deferred::Fate {
        // SAFETY: By the type invariant `raw` is an allocated PD. All objects made from it have a
        // reference to `Inner`, so they are gone.
        let ret = unsafe { bindings::ib_dealloc_pd_user(self.raw.as_ptr(), core::ptr::null_mut()) };
        deferred::Fate::of(fmt!("a PD"), ret)
    }
}

/// A protection domain, of QPs, MRs and buffers that can be used together.
///
/// A counted handle. The PD is deallocated, from a work item, when the last handle and all objects
/// made from it are gone.
///
/// # Invariants
///
/// The address is from [`Arc::into_raw`], and this owns the reference. It is the same for all
/// handles of a PD, and differs from those of other PDs.
pub struct Pd(NonNull<Inner>);

// SAFETY: It is a counted reference to an `Inner`, which is `Send` and `Sync`.
unsafe impl Send for Pd {}
// SAFETY: A shared handle gives access to `Inner`, which is `Sync`, and clones, which are `Send`.
unsafe impl Sync for Pd {}

/// The identity of a PD, its address. It does not keep the PD.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(usize);

impl Id {
    /// The identity of no PD.
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl Pd {
    /// Allocates a protection domain (`ib_alloc_pd`). Fails with `ENOMEM`, or the driver's error.
    #[inline(never)]
    pub fn alloc(dev: &Device, _cx: &Sleepable) -> Result<Self> {
        let reserved = deferred::Deferred::reserve()?;
        let mut object = dev.object(Kind::Pd);
        // SAFETY: The device is registered while `dev` lives, and the client's name lives longer
        // than the PD.
        let raw = from_err_ptr(unsafe {
            bindings::__ib_alloc_pd(dev.as_raw(), 0, dev.client().name.as_char_ptr())
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // SAFETY: The PD was just allocated; the number does not change.
        object.set_num(unsafe { raw.as_ref() }.res.id);
        // INVARIANT: The PD was just allocated.
        let state = reserved.fill(State { raw, object });
        let inner = Arc::new(
            Inner {
                raw,
                dev: dev.clone(),
                _state: state,
            },
            GFP_KERNEL,
        )?;
        // SAFETY: An address from `Arc::into_raw` is not null.
        // INVARIANT: This owns the reference of the new `Arc`.
        Ok(Self(unsafe {
            NonNull::new_unchecked(Arc::into_raw(inner).cast_mut())
        }))
    }

    fn inner(&self) -> &Inner {
        // SAFETY: By the type invariant this owns a reference, and an `Arc` gives shared access.
        unsafe { self.0.as_ref() }
    }

    #[inline]
    pub(crate) fn id(&self) -> Id {
        Id(self.0.addr().get())
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner().dev
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_pd {
        self.inner().raw.as_ptr()
    }

    /// Returns the key of all DMA-mapped local memory of this PD.
    pub(crate) fn local_dma_lkey(&self) -> u32 {
        // SAFETY: The PD is allocated while this lives; the key does not change.
        unsafe { (*self.as_raw()).local_dma_lkey }
    }
}

impl Clone for Pd {
    fn clone(&self) -> Self {
        // SAFETY: By the type invariant the address is from `Arc::into_raw`, and `self` keeps the
        // reference that is borrowed here.
        let inner = unsafe { ArcBorrow::from_raw(self.0.as_ptr()) };
        // INVARIANT: The address is the same, and the clone owns the new reference.
        core::mem::forget(Arc::from(inner));
        Self(self.0)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this owns a reference, which is not used again.
        drop(unsafe { Arc::from_raw(self.0.as_ptr()) });
    }
}

impl PartialEq for Pd {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
