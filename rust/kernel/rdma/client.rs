// SPDX-License-Identifier: GPL-2.0

//! ULPs: what is told when devices come and go.
//!
//! A ULP implements [`Client`] and is made a module by
//! [`module_rdma_client!`](crate::module_rdma_client). The framework owns the registration, so no
//! code can leak it. When the module is unloaded, every device is removed from the ULP first: its
//! [`DeviceData`] lets go, connections that are still there are ended, and the removal waits until
//! no object of the device is left. Then the [`Client`] is dropped, and at last the unload waits
//! until what is left of listeners, ids and work items is gone.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_client`)

use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    },
    deferred::OwnedQueue,
    device::{
        self,
        Device, //
    },
    gate::{
        Gate,
        Hold,
        Kind, //
    },
};
use core::{
    marker::PhantomPinned,
    ptr::NonNull, //
};
use kernel::{
    alloc::Flags,
    error::{
        from_result,
        to_result, //
    },
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Release, //
            },
            Atomic, //
        },
        Mutex, //
    },
    types::Opaque, //
};

/// An upper-layer protocol, as `struct ib_client`.
pub trait Client: Sized + Send + Sync + 'static {
    /// What the ULP keeps for each device, if anything: `()`.
    type Data: DeviceData<Self>;

    /// Makes the ULP's state when the module is loaded, before any device is known.
    ///
    /// Keep a clone of `client` to create connection manager ids with.
    fn init(client: &ClientRef) -> impl PinInit<Self, Error>;

    /// Called once all devices that are present have been added. An error ends the loading of the
    /// module.
    ///
    /// Called in process context.
    fn ready(self: Pin<&Self>, _client: &ClientRef, _cx: &Sleepable) -> Result {
        Ok(())
    }
}

/// What a ULP keeps for one device, from the device's coming to its going.
pub trait DeviceData<C: Client>: Sized + Send + Sync + 'static {
    /// A device has come (`ib_client.add`). An error leaves the device unused; it is reported.
    ///
    /// Called in process context, with the RDMA core's device and client locks held: create PDs,
    /// CQs and the like here, but wait for no other device or connection.
    fn add(client: Pin<&C>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error>;

    /// The device goes (`ib_client.remove`): let go of everything that uses it.
    ///
    /// Called in process context. After this returns, `self` is dropped, and the removal waits
    /// until the last handle of the device is gone. New connections on the device are refused from
    /// before this call.
    fn remove(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _cx: &Sleepable) {}
}

impl<C: Client> DeviceData<C> for () {
    fn add(_client: Pin<&C>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<(), Error>(())
    }
}

/// A ULP's counted reference to its own registration; unloading the module waits for it.
///
/// # Invariants
///
/// `core` is valid while `hold` lives, and `hold` is a hold on its gate.
pub struct ClientRef {
    core: NonNull<Core>,
    hold: Hold,
}

// SAFETY: `Core` is `Sync`, and a hold only counts.
unsafe impl Send for ClientRef {}
// SAFETY: As above.
unsafe impl Sync for ClientRef {}

impl ClientRef {
    pub(crate) fn hold(&self, kind: Kind) -> Hold {
        self.hold.another(kind)
    }

    fn core(&self) -> &Core {
        // SAFETY: By the type invariant.
        unsafe { self.core.as_ref() }
    }

    /// Finds the client's handle of a device.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the client does not have the device, or is losing it.
    pub(crate) fn device(&self, raw: *mut bindings::ib_device) -> Result<Device> {
        for inner in self.core().devices.lock().iter() {
            // SAFETY: Entries of the list are valid while the list is locked.
            if unsafe { inner.0.as_ref() }.raw.as_ptr() == raw {
                // SAFETY: As above, and an entry is freed only after its gate was closed.
                return unsafe { Device::new(inner.0) };
            }
        }
        Err(ENODEV)
    }

    /// Returns a handle of the device that came first, if there is one.
    pub fn first_device(&self) -> Option<Device> {
        self.core().devices.lock().iter().find_map(|entry| {
            // SAFETY: Entries of the list are valid while the list is locked, and freed only after
            // their gate was closed.
            unsafe { Device::new(entry.0) }.ok()
        })
    }

    /// Returns the name of the client's module.
    pub fn name(&self) -> &'static CStr {
        self.core().name
    }

    /// Calls `f` from a work item, which may sleep and may go on for long. Unloading the module
    /// waits for its end.
    ///
    /// Any context that may allocate with `flags`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `f` is then dropped.
    pub fn spawn(&self, flags: Flags, f: impl FnOnce(&Sleepable) + Send + 'static) -> Result {
        let client = self.clone();
        let run = move || {
            // SAFETY: Work items run in process context.
            f(&unsafe { Sleepable::assume() });
            // The unload waits for the rest of this work item too: it destroys the queue.
            drop(client);
        };
        Ok(self.core().queue.get().try_spawn(flags, run)?)
    }
}

impl Clone for ClientRef {
    fn clone(&self) -> Self {
        // INVARIANT: The new hold is on the same gate.
        Self {
            core: self.core,
            hold: self.hold.another(Kind::Client),
        }
    }
}

/// An entry of [`Core::devices`].
struct Entry(NonNull<device::Inner>);

// SAFETY: `device::Inner` is `Send` and `Sync` in all its parts, and the pointer owns nothing.
unsafe impl Send for Entry {}

/// The part of a registration that does not depend on the ULP's type.
#[pin_data(PinnedDrop)]
pub(crate) struct Core {
    #[pin]
    raw: Opaque<bindings::ib_client>,
    #[pin]
    gate: Gate,
    #[pin]
    devices: Mutex<KVec<Entry>>,
    pub(crate) name: &'static CStr,
    /// For work items of the ULP. Dropped after the gate was closed; waits for the end of their
    /// code.
    queue: OwnedQueue,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: All parts may be used from any thread.
unsafe impl Send for Core {}
// SAFETY: As above.
unsafe impl Sync for Core {}

impl Core {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    fn new(raw: bindings::ib_client, name: &'static CStr) -> Result<Pin<KBox<Self>>> {
        let init = try_pin_init!(Self {
            raw: Opaque::new(raw),
            gate <- Gate::new(),
            devices <- new_mutex!(KVec::new()),
            name,
            queue: OwnedQueue::new(name)?,
            _pin: PhantomPinned,
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    fn handle(&self) -> Result<ClientRef> {
        // SAFETY: `self` is pinned, and dropping it closes the gate.
        let hold = unsafe { self.gate.hold(Kind::Client) }?;
        // INVARIANT: Just taken.
        Ok(ClientRef {
            core: NonNull::from(self),
            hold,
        })
    }
}

#[pinned_drop]
impl PinnedDrop for Core {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: A registration is dropped when its module is loaded in vain or unloaded, in
        // process context.
        let cx = unsafe { Sleepable::assume() };
        self.gate.close(&fmt!("{}: unload", self.name), &cx);
    }
}

/// Where a module's only registration is found.
///
/// # Invariants
///
/// The address is zero or that of a live [`Registration`] of the type that the slot belongs to; it
/// is not zero while the RDMA core may call the client.
#[doc(hidden)]
pub struct Slot {
    taken: Atomic<bool>,
    registration: Atomic<usize>,
}

impl Slot {
    /// Returns a slot for one registration, ever.
    #[expect(clippy::new_without_default)]
    pub const fn new() -> Self {
        // INVARIANT: The address is zero.
        Self {
            taken: Atomic::new(false),
            registration: Atomic::new(0),
        }
    }
}

/// A [`Client`] that a module owns. Implemented by [`crate::module_rdma_client`] alone.
///
/// # Safety
///
/// The slot is for this type only, and the first registration is owned by the module, so that it is
/// dropped before the module's text goes.
#[doc(hidden)]
pub unsafe trait Owned: Client {
    fn slot() -> &'static Slot;
}

/// A ULP's registration with the RDMA core, owned by its module.
#[doc(hidden)]
#[pin_data(PinnedDrop)]
pub struct Registration<T: Owned> {
    // Dropped in this order, after the client was unregistered.
    #[pin]
    state: T,
    core: Pin<KBox<Core>>,
}

/// What the RDMA core keeps for the client and one device.
struct PerDevice<T: Client> {
    data: Option<Pin<KBox<T::Data>>>,
    inner: Pin<KBox<device::Inner>>,
}

impl<T: Client> PerDevice<T> {
    fn entry(&self) -> NonNull<device::Inner> {
        NonNull::from(&*self.inner)
    }
}

impl<T: Owned> Registration<T> {
    /// Makes the ULP's state and registers it with the RDMA core.
    ///
    /// # Errors
    ///
    /// `EBUSY` for any but the first call, which is the module's own.
    pub fn new(name: &'static CStr) -> impl PinInit<Self, Error> {
        let raw = bindings::ib_client {
            name: name.as_char_ptr(),
            add: Some(Self::add),
            remove: Some(Self::remove),
            ..Default::default()
        };
        try_pin_init!(&this in Self {
            _: {
                if T::slot().taken.xchg(true, Full) {
                    return Err(EBUSY);
                }
            },
            core: Core::new(raw, name)?,
            state <- {
                // SAFETY: `core` is initialised.
                let core = unsafe { &(*this.as_ptr()).core };
                T::init(&core.handle()?)
            },
            _: {
                // SAFETY: All fields are initialised and pinned.
                unsafe { this.as_ref() }.register()?
            },
        })
    }

    fn state(&self) -> Pin<&T> {
        // SAFETY: A registration is pinned, and `state` structurally so.
        unsafe { Pin::new_unchecked(&self.state) }
    }

    fn register(&self) -> Result {
        let cx = Sleepable::current()?;
        let client = self.core.handle()?;
        // INVARIANT: This is the registration of the slot's type, and it lives until it is
        // unregistered.
        T::slot()
            .registration
            .store(core::ptr::from_ref(self) as usize, Release);
        // SAFETY: `raw` is initialised and pinned, and unregistered before it goes.
        to_result(unsafe { bindings::ib_register_client(self.core.raw.get()) })?;
        self.state()
            .ready(&client, &cx)
            .inspect_err(|_| self.unregister())
    }

    fn unregister(&self) {
        // SAFETY: Called once after a registration that succeeded.
        unsafe { bindings::ib_unregister_client(self.core.raw.get()) };
        // INVARIANT: The RDMA core does not call the client any more.
        T::slot().registration.store(0, Release);
    }

    /// `ib_client.add`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, for the registration in the slot.
    unsafe extern "C" fn add(dev: *mut bindings::ib_device) -> c_int {
        // SAFETY: The RDMA core calls a registered client; see the invariant of `Slot`.
        let this = unsafe { &*(T::slot().registration.load(Acquire) as *const Self) };
        from_result(|| {
            this.add_device(NonNull::new(dev).ok_or(EINVAL)?)
                .inspect_err(|e| {
                    // SAFETY: `dev` is valid in this callback.
                    let device = unsafe { device::Name::of(dev) };
                    pr_err!("{}: device {device} is not used: {e:?}\n", this.core.name)
                })?;
            Ok(0)
        })
    }

    fn add_device(&self, raw: NonNull<bindings::ib_device>) -> Result {
        // SAFETY: `add` is called in process context.
        let cx = unsafe { Sleepable::assume() };
        let inner = device::Inner::new(raw, &self.core)?;
        let mut per_device = KBox::new(PerDevice::<T> { data: None, inner }, GFP_KERNEL)?;
        let entry = per_device.entry();
        self.core.devices.lock().push(Entry(entry), GFP_KERNEL)?;

        // SAFETY: `inner` is valid until `release` has closed its gate.
        let added = unsafe { Device::new(entry) }
            .and_then(|dev| KBox::pin_init(T::Data::add(self.state(), &dev, &cx), GFP_KERNEL));
        match added {
            Ok(data) => {
                per_device.data = Some(data);
                let data = KBox::into_raw(per_device).cast();
                // SAFETY: Both are valid in `add`, which is where client data are set.
                unsafe { bindings::ib_set_client_data(raw.as_ptr(), self.core.raw.get(), data) };
                Ok(())
            }
            Err(e) => {
                self.release(per_device, &cx);
                Err(e)
            }
        }
    }

    /// Ends the use of a device: nobody finds it any more, and all that was made from it is gone.
    fn release(&self, mut per_device: KBox<PerDevice<T>>, cx: &Sleepable) {
        let entry = per_device.entry();
        self.core.devices.lock().retain(|other| other.0 != entry);
        if let Some(data) = per_device.data.take() {
            // SAFETY: `inner` is valid until its gate was closed, below.
            if let Ok(dev) = unsafe { Device::new(entry) } {
                data.as_ref().remove(self.state(), &dev, cx);
            }
        }
        per_device.inner.removal.tell_all(cx);
        per_device.inner.bound.end_all(cx);
        device::wait_released(&per_device.inner, cx);
    }

    /// `ib_client.remove`.
    ///
    /// # Safety
    ///
    /// As [`Self::add`], after it has succeeded.
    unsafe extern "C" fn remove(_dev: *mut bindings::ib_device, data: *mut c_void) {
        // SAFETY: The RDMA core calls a registered client; see the invariant of `Slot`.
        let this = unsafe { &*(T::slot().registration.load(Acquire) as *const Self) };
        // SAFETY: `remove` is called in process context.
        let cx = unsafe { Sleepable::assume() };
        // SAFETY: `remove` is called once after an `add` that succeeded and set this.
        let per_device = unsafe { KBox::from_raw(data.cast::<PerDevice<T>>()) };
        this.release(per_device, &cx);
    }
}

#[pinned_drop]
impl<T: Owned> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        self.unregister();
    }
}

/// Declares a kernel module that is an RDMA ULP.
///
/// Takes what `module!` takes; `type` implements [`Client`](crate::client::Client).
///
/// # Examples
///
/// ```
/// use rdma::prelude::*;
///
/// struct Ulp;
///
/// impl Client for Ulp {
///     type Data = ();
///
///     fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
///         Ok(Ulp)
///     }
/// }
///
/// rdma::module_rdma_client! {
///     type: Ulp,
///     name: "ulp",
///     authors: ["Author"],
///     description: "A ULP",
///     license: "GPL",
/// }
/// ```
#[macro_export]
macro_rules! module_rdma_client {
    (type: $type:ty, $($f:tt)*) => {
        // SAFETY: The slot is this type's own, and the first registration is the module's:
        // `module!` makes it before any other code of the module runs, and drops it when the module
        // is unloaded.
        unsafe impl $crate::client::Owned for $type {
            fn slot() -> &'static $crate::client::Slot {
                static SLOT: $crate::client::Slot = $crate::client::Slot::new();
                &SLOT
            }
        }

        #[::kernel::prelude::pin_data]
        struct RdmaClientModule {
            #[pin]
            _registration: $crate::client::Registration<$type>,
        }

        impl ::kernel::InPlaceModule for RdmaClientModule {
            fn init(
                _module: &'static ::kernel::ThisModule,
            ) -> impl ::pin_init::PinInit<Self, ::kernel::error::Error> {
                ::kernel::try_pin_init!(Self {
                    _registration <- $crate::client::Registration::new(
                        <Self as ::kernel::ModuleMetadata>::NAME,
                    ),
                }? ::kernel::error::Error)
            }
        }

        ::kernel::prelude::module! {
            type: RdmaClientModule,
            $($f)*
        }
    };
}
