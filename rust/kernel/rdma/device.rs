// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a ULP sees them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_device`)

mod attrs;
mod event;
mod gid;
mod netdev;
mod port;
mod protocol;

pub use attrs::{
    Capability,
    Firmware,
    NodeType, //
};
pub use event::Event;
pub use gid::{
    Gid,
    GidAttr,
    GidType,
    Gids,
    L2, //
};
pub use netdev::Netdev;
pub use port::{
    Port,
    PortAttr,
    PortState,
    Ports, //
};
pub use protocol::{
    LinkLayer,
    Protocols, //
};

use crate::{
    bindings,
    client::{
        Core,
        Owned,
        Slot, //
    },
    cm::bound::Bound,
    context::Sleepable,
    gate::{
        Gate,
        Hold,
        Kind, //
    },
    objects::{
        Listed,
        Owner, //
    },
    removal::{
        Progress,
        Removal,
        Step, //
    }, //
};
use core::ptr::NonNull;
use kernel::{
    fmt,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        Arc,
        ArcBorrow,
        Mutex, //
    },
    types::Opaque, //
};

/// What the crate keeps for one device of one client, from `add` to the end of `remove`.
///
/// # Invariants
///
/// - `raw` is a registered device until `gate` is closed and empty.
/// - `data` is a reference to the data of the client type that `owner` is the slot of.
#[pin_data]
pub(crate) struct Inner {
    #[pin]
    pub(crate) gate: Gate,
    pub(crate) raw: NonNull<bindings::ib_device>,
    pub(crate) client: NonNull<Core>,
    #[pin]
    pub(crate) bound: Bound,
    #[pin]
    pub(crate) removal: Removal,
    #[pin]
    progress: Progress,
    /// The slot of the client's type. Its address tells types apart, also those of several modules,
    /// where a `TypeId` is a hash of names that they may share.
    owner: &'static Slot,
    #[pin]
    data: Mutex<Option<RawData>>,
    #[pin]
    events: Opaque<bindings::ib_event_handler>,
}

/// The client's reference to a ULP's data, as [`Arc::into_raw`] gives it.
struct RawData(NonNull<c_void>);

// SAFETY: This is an `Arc` of what a ULP keeps for a device, which `DeviceData` says is `Send` and
// `Sync`.
unsafe impl Send for RawData {}

impl Inner {
    /// Never inlined: see [`Core`].
    #[inline(never)]
    pub(crate) fn new(
        raw: NonNull<bindings::ib_device>,
        client: &Core,
        owner: &'static Slot,
    ) -> Result<Pin<KBox<Self>>> {
        let name = client.name;
        let init = pin_init!(Self {
            gate <- Gate::new(),
            raw,
            client: NonNull::from(client),
            bound <- Bound::new(),
            removal <- Removal::new(),
            // SAFETY: The device is registered until the removal, whose progress this is, has
            // ended.
            progress <- unsafe { Progress::new(*raw, name) },
            owner,
            // INVARIANT: There are no data yet.
            data <- new_mutex!(None),
            events: Opaque::new(bindings::ib_event_handler {
                device: raw.as_ptr(),
                ..Default::default()
            }),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Has everybody who waits for something of the device know that it goes; nobody else waits
    /// from here on. Waits for nothing.
    #[inline(never)]
    pub(crate) fn close(&self) {
        self.removal.close();
        self.bound.close();
    }

    /// Ends what is there of the device that others than the ULP know, after [`Inner::close`].
    #[inline(never)]
    pub(crate) fn end_all(self: Pin<&Self>, cx: &Sleepable) {
        let progress = self.progress();
        progress.during(Step::Objects, &mut || self.removal.end_all(cx));
        progress.during(Step::Ids, &mut || self.bound.end_all(cx));
    }

    pub(crate) fn progress(self: Pin<&Self>) -> Pin<&Progress> {
        // SAFETY: The field is pinned structurally.
        unsafe { self.map_unchecked(|inner| &inner.progress) }
    }

    /// Says whether the client is a `C`. Each slot belongs to one type, see [`Owned`], and is a
    /// static variable, so no other has its address while the client's module is loaded.
    fn is_of<C: Owned>(&self) -> bool {
        core::ptr::eq(self.owner, C::slot())
    }

    /// Keeps what the ULP has made for the device.
    pub(crate) fn set_data<C: Owned>(&self, data: Arc<C::Data>) {
        if self.is_of::<C>() {
            // INVARIANT: The type was just checked.
            *self.data.lock() = NonNull::new(Arc::into_raw(data).cast_mut().cast()).map(RawData);
        }
    }

    /// Returns what the ULP `C` has made for the device, if it has the device.
    pub(crate) fn data<C: Owned>(&self) -> Option<Arc<C::Data>> {
        if !self.is_of::<C>() {
            return None;
        }
        let slot = self.data.lock();
        // SAFETY: By the type invariant the type is right, and the reference is there while the
        // lock is held.
        let data = unsafe { ArcBorrow::<C::Data>::from_raw(slot.as_ref()?.0.as_ptr().cast()) };
        Some(data.into())
    }

    /// Takes what the ULP `C` has made for the device.
    pub(crate) fn take_data<C: Owned>(&self) -> Option<Arc<C::Data>> {
        if !self.is_of::<C>() {
            return None;
        }
        let data = self.data.lock().take()?;
        // SAFETY: By the type invariant the type is right, and nobody else takes the reference.
        Some(unsafe { Arc::from_raw(data.0.as_ptr().cast()) })
    }
}

/// A handle of a device for one ULP: what `add` gets and what everything else is created from.
///
/// It is a counted reference. `remove` (so module unload too) waits until every handle and every
/// object made from it is gone; a leaked one stalls removal with a message, and is never used after
/// the device. Cloning is one atomic operation; posting and polling need no handle.
///
/// # Invariants
///
/// `inner` is valid while `hold` lives, and `hold` is a hold on its gate.
pub struct Device {
    inner: NonNull<Inner>,
    hold: Hold,
}

// SAFETY: `Inner` may be used from any thread, and a hold may be given back in any.
unsafe impl Send for Device {}
// SAFETY: `struct ib_device` may be used by several threads at once, and the rest of `Inner` is
// read-only, atomic or locked.
unsafe impl Sync for Device {}

impl Device {
    /// Makes a handle, unless the device is being removed from the client.
    ///
    /// # Safety
    ///
    /// `inner` must stay valid until its gate is closed.
    pub(crate) unsafe fn new(inner: NonNull<Inner>) -> Result<Self> {
        // SAFETY: The caller says that `inner`, and so its gate, stays valid until the gate is
        // closed.
        let hold = unsafe { inner.as_ref().gate.hold(Kind::Device) }?;
        // INVARIANT: Just taken.
        Ok(Self { inner, hold })
    }

    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: `inner` is valid by the type invariant, as `self` has the hold.
        unsafe { self.inner.as_ref() }
    }

    pub(crate) fn hold(&self, kind: Kind) -> Hold {
        self.hold.another(kind)
    }

    /// Takes a hold for an object that is to be listed.
    pub(crate) fn list(&self, kind: Kind) -> Result<Listed> {
        // SAFETY: `hold` is on the gate of `inner` by the type invariant, and so is another one.
        unsafe { Listed::new(self.hold(kind), Owner::Device(self.inner)) }
    }

    pub(crate) fn client(&self) -> &Core {
        // SAFETY: A client outlives its devices, and the hold keeps this device.
        unsafe { self.inner().client.as_ref() }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.inner().raw.as_ptr()
    }

    /// Returns the device's name, such as `rxe0`, as it is now: an administrator may change it.
    pub fn name(&self) -> Name {
        // SAFETY: The device is registered by the invariant of `Inner`.
        unsafe { Name::of(self.as_raw()) }
    }

    /// Returns what the ULP `C` keeps for the device (`ib_get_client_data`): between `add` and
    /// `remove`, and if the handle is one of this ULP's. `C` is what
    /// [`module_rdma_client!`](crate::module_rdma_client) has made a module of.
    ///
    /// Whoever keeps the reference keeps what is in the data, and so the device from going.
    pub fn data<C: Owned>(&self, _cx: &Sleepable) -> Option<Arc<C::Data>> {
        self.inner().data::<C>()
    }

    /// Returns the number of completion vectors, at least 1.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: The device is registered by the invariant of `Inner`; the field does not change
        // after that.
        let vectors = unsafe { (*self.as_raw()).num_comp_vectors };
        vectors.try_into().unwrap_or(1)
    }
}

impl Clone for Device {
    fn clone(&self) -> Self {
        // INVARIANT: The new hold is on the same gate.
        Self {
            inner: self.inner,
            hold: self.hold.another(Kind::Device),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.name(), f)
    }
}

/// Waits until nothing of the device is used any more, and frees what was kept for it. Never
/// inlined, so that the drop is this module's.
#[inline(never)]
pub(crate) fn wait_released(inner: Pin<KBox<Inner>>, cx: &Sleepable) {
    struct Who<'a>(&'a Inner);

    impl fmt::Display for Who<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            // SAFETY: The device is registered until `remove` returns, and its client outlives
            // that.
            let (name, client) = unsafe { (Name::of(self.0.raw.as_ptr()), self.0.client.as_ref()) };
            f.write_fmt(fmt!("{}: removal of {name}", client.name))
        }
    }

    inner.gate.close(&Who(&inner), cx);
}

/// A copy of a device's name.
#[derive(Clone, Copy)]
pub struct Name([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl Name {
    /// # Safety
    ///
    /// `dev` is a valid device.
    pub(crate) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        // SAFETY: `dev` is valid by the caller's promise; the helper copies a string that fits.
        unsafe { bindings::rdma_helper_device_name(dev, name.as_mut_ptr().cast(), name.len()) };
        Self(name)
    }
}

impl core::ops::Deref for Name {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}
