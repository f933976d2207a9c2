// SPDX-License-Identifier: GPL-2.0

//! Address handles.

use super::{
    Attr,
    Source, //
};
use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Reserved,
        Teardown, //
    },
    device::{
        Gid,
        GidAttr,
        Name, //
    },
    pd::{
        self,
        Pd, //
    },
    way, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};

/// Destroys an address handle (`rdma_destroy_ah`).
///
/// # Safety
///
/// `raw` is a valid address handle, whose device is there, and nothing uses it any more.
pub(crate) unsafe fn destroy(raw: NonNull<bindings::ib_ah>, _cx: &Sleepable) -> Fate {
    let flags = bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE;
    // SAFETY: The handle is valid, its device is there and nothing uses it any more, as the caller
    // promises.
    let (device, ret) = unsafe {
        (
            Name::of(raw.as_ref().device),
            bindings::rdma_destroy_ah_user(raw.as_ptr(), flags, core::ptr::null_mut()),
        )
    };
    if ret != 0 {
        pr_err!("{device}: an address handle could not be destroyed ({ret}); it is leaked\n");
        return Fate::Leak;
    }
    Fate::Gone
}

/// # Invariants
///
/// `raw` is an address handle of `_pd`.
struct State {
    raw: NonNull<bindings::ib_ah>,
    _pd: Pd,
}

// SAFETY: An address handle may be destroyed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant `raw` is an address handle of `_pd`, which keeps the
        // device. A request that uses the handle has borrowed it from its owner, which has come
        // back.
        unsafe { destroy(self.raw, cx) }
    }
}

/// An address handle: where a datagram goes.
///
/// A request borrows it from its owner, so it stays as long as the request is posted: keep it in
/// the owner, or an `Arc` of it if several requests share it. It may be dropped in any context and
/// is destroyed by a work item: some drivers (rxe) take a lock for it that must not be taken in a
/// softirq.
///
/// # Invariants
///
/// `raw` is the address handle of `_state`, and `pd` is its PD.
pub struct Ah {
    raw: NonNull<bindings::ib_ah>,
    pd: pd::Id,
    _state: Deferred<State>,
}

// SAFETY: An address handle does not change, and may be used and destroyed from any thread.
unsafe impl Send for Ah {}
// SAFETY: A shared one gives the address of the handle, which does not change and may be used from
// any thread.
unsafe impl Sync for Ah {}

impl Ah {
    fn new(pd: &Pd, raw: *mut bindings::ib_ah, place: Reserved<State>) -> Result<Self> {
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: The caller has created it for this PD.
        let state = place.fill(State {
            raw,
            _pd: pd.clone(),
        });
        Ok(Self {
            raw,
            pd: pd.id(),
            _state: state,
        })
    }

    /// Creates the handle of an address (`rdma_create_ah`).
    ///
    /// # Errors
    ///
    /// `EINVAL` if the attributes are not right for the port; `ENODATA` if the port's GID that they
    /// name is not in use; `ENOMEM`, or the driver's error.
    #[inline(never)]
    pub fn create(pd: &Pd, attr: &Attr, _cx: &Sleepable) -> Result<Self> {
        let mut attr = attr.to_raw(pd.device())?;
        let place = Deferred::reserve()?;
        let flags = bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE;
        // SAFETY: The PD is alive. The core takes a reference of its own to the GID.
        let raw = unsafe { bindings::rdma_create_ah(pd.as_raw(), &raw mut attr, flags) };
        Self::new(pd, raw, place)
    }

    /// Creates the handle of the GID `to` on RoCE, as seen from the GID `from`. That asks the
    /// network for the way, which may take a second.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` if `from` is not of RoCE: elsewhere a GID is not enough of an address;
    /// `EINVAL` if it is of another device; `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` without a
    /// way; or the driver's error.
    pub fn resolve(pd: &Pd, from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        if from.device() != pd.device() {
            return Err(EINVAL);
        }
        let datagram = way::Datagram::new(from, to)?;
        // SAFETY: Completion and header belong together.
        unsafe { Self::sender(pd, &datagram.wc, datagram.header(), from.port_num(), cx) }
    }

    /// Creates the handle of whoever sent a datagram (`ib_init_ah_attr_from_wc`,
    /// `ib_create_ah_from_wc`). On RoCE that asks the network for the way, which may take a second.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the GID that the datagram was sent to is not there any more; `EHOSTUNREACH`,
    /// `ENETUNREACH` or `ETIMEDOUT` without a way; or the driver's error.
    pub fn reply(pd: &Pd, source: &Source, cx: &Sleepable) -> Result<Self> {
        let (wc, port) = (source.to_wc(), source.port());
        // SAFETY: Completion and header belong together.
        unsafe { Self::sender(pd, &wc, source.header(), port, cx) }
    }

    /// # Safety
    ///
    /// `header` is the header that `wc` says was received.
    #[inline(never)]
    unsafe fn sender(
        pd: &Pd,
        wc: &bindings::ib_wc,
        header: *const bindings::ib_grh,
        port: u32,
        _cx: &Sleepable,
    ) -> Result<Self> {
        if pd.device().port(port).is_none() {
            return Err(EINVAL);
        }
        let place = Deferred::reserve()?;
        // SAFETY: The PD is alive, its device has the port, and `header` is what `wc` says was
        // received, as the caller promises.
        let raw = unsafe { bindings::ib_create_ah_from_wc(pd.as_raw(), wc, header, port) };
        Self::new(pd, raw, place)
    }

    #[inline]
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.raw.as_ptr()
    }

    /// Says whether the handle is of this PD.
    #[inline]
    pub(crate) fn is_of(&self, pd: pd::Id) -> bool {
        self.pd == pd
    }
}
