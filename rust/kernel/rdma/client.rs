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
        Device,
        Event, //
    },
    objects::{
        Listed,
        Owner, //
    },
    refs::{
        Kind, //
        Ref,
        Refs,
    },
    removal::Step, //
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
        Arc,
        Mutex, //
    },
    types::Opaque, //
};

/// The crates that the macros mean, under names that a ULP cannot take over.
#[doc(hidden)]
pub mod crates {
    pub use ::{
        core,
        kernel,
        pin_init, //
    };
}

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
    /// Called in process context. Before this call, everybody who waits for a CQ, a MAD or a
    /// connection of the device gets `ENODEV`, and from then on nobody waits and new connections
    /// are refused. After it returns, MAD agents and connections end, the client lets go of `self`,
    /// and the removal waits until the last handle of the device is gone.
    fn remove(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _cx: &Sleepable) {}

    /// Something happened to the device or one of its ports (`ib_register_event_handler`).
    ///
    /// Called in process context, after `add` has returned and never once `remove` has been called;
    /// removal waits for the end of the call, in which waits for the device fail by then. Other
    /// events of the device wait too, and with [`Event::GidChange`] all updates of the port's GIDs,
    /// whose mutex is held: leave what takes long to [`ClientRef::spawn`].
    fn event(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _event: Event, _cx: &Sleepable) {}
}

impl<C: Client> DeviceData<C> for () {
    fn add(_client: Pin<&C>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<(), Error>(())
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
/// Each call returns the same slot, which is for this type only, and the first registration is
/// owned by the module, so that it is dropped before the module's text goes.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "no module owns the client `{Self}`",
    note = "`rdma::module_rdma_client!` makes a module of it"
)]
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
        let registered = to_result(unsafe { bindings::ib_register_client(self.core.raw.get()) });
        registered.inspect_err(|_| {
            // INVARIANT: What has failed was undone: the RDMA core does not call the client any
            // more.
            T::slot().registration.store(0, Release);
        })?;
        self.state()
            .ready(&client, &cx)
            .inspect_err(|_| self.unregister())
    }

    fn unregister(&self) {
        // SAFETY: The client is registered. This is called once: when `ready` has failed, after
        // which there is no drop, or by the drop.
        unsafe { bindings::ib_unregister_client(self.core.raw.get()) };
        // INVARIANT: The RDMA core does not call the client any more.
        T::slot().registration.store(0, Release);
    }

    /// Returns the registration in the slot.
    ///
    /// # Safety
    ///
    /// The RDMA core is calling the client, and the reference is not used after that call.
    unsafe fn called<'a>() -> &'a Self {
        // SAFETY: By the invariant of `Slot` this is the address of a live registration of this
        // type: the RDMA core may call the client, as it does.
        unsafe { &*(T::slot().registration.load(Acquire) as *const Self) }
    }

    /// `ib_client.add`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, for the registration in the slot.
    unsafe extern "C" fn add(dev: *mut bindings::ib_device) -> c_int {
        // SAFETY: The RDMA core is calling the client.
        let this = unsafe { Self::called() };
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
        let inner = device::Inner::new(raw, &self.core, T::slot())?;
        let entry = NonNull::from(&*inner);
        // INVARIANT: `release` takes the entry out before it closes the gate and frees `inner`.
        let listed = self.core.devices.lock().push(Entry(entry), GFP_KERNEL);
        if let Err(e) = listed {
            device::wait_released(inner, &cx);
            return Err(e.into());
        }

        // SAFETY: `inner` is valid until `release` has closed its refs.
        let added = unsafe { Device::new(entry) }
            .and_then(|dev| Arc::pin_init(T::Data::add(self.state(), &dev, &cx), GFP_KERNEL));
        match added {
            Ok(data) => {
                inner.set_data::<T>(data);
                // SAFETY: Both are valid in `add`, which is where client data are set.
                unsafe {
                    bindings::ib_set_client_data(
                        raw.as_ptr(),
                        self.core.raw.get(),
                        entry.as_ptr().cast(),
                    )
                };
                // SAFETY: `remove` ends it, and what is pinned does not move until then.
                unsafe { inner.watch(Self::event) };
                // SAFETY: What is in the box stays where it is: `remove` pins it again.
                let _ = KBox::into_raw(unsafe { Pin::into_inner_unchecked(inner) });
                Ok(())
            }
            Err(e) => {
                self.release(inner, false, &cx);
                Err(e)
            }
        }
    }

    /// Ends the use of a device: nobody finds it any more, and all that was made from it is gone.
    /// `watched` says that its events come to [`Self::event`].
    fn release(&self, inner: Pin<KBox<device::Inner>>, watched: bool, cx: &Sleepable) {
        let entry = NonNull::from(&*inner);
        self.core.devices.lock().retain(|other| other.0 != entry);
        // Before anything here waits: what it waits for may itself wait for the device.
        inner.close();
        if watched {
            // SAFETY: `add_device` has begun it, and this is the only end of the device. This waits
            // for a call that has begun.
            unsafe { inner.as_ref().unwatch() };
        }
        let progress = inner.as_ref().progress();
        let mut data = inner.take_data::<T>();
        // SAFETY: `inner` is valid until its gate was closed, below.
        if let (Some(data), Ok(dev)) = (&data, unsafe { Device::new(entry) }) {
            progress.during(Step::Remove, &mut || {
                pinned(data).remove(self.state(), &dev, cx);
            });
        }
        inner.as_ref().end_all(cx);
        // Now, as files that are part of it go only once nobody waits in them.
        progress.during(Step::Data, &mut || drop(data.take()));
        device::wait_released(inner, cx);
    }

    /// `ib_client.remove`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, once, for the registration in the slot and a device for which
    /// [`Self::add`] has succeeded, with the client data that this has set.
    unsafe extern "C" fn remove(_dev: *mut bindings::ib_device, data: *mut c_void) {
        // SAFETY: The RDMA core is calling the client.
        let this = unsafe { Self::called() };
        // SAFETY: `remove` is called in process context.
        let cx = unsafe { Sleepable::assume() };
        // SAFETY: The caller says that `data` is what `add` has set, a pinned box that it has left
        // to this call.
        let inner = unsafe { Pin::new_unchecked(KBox::from_raw(data.cast::<device::Inner>())) };
        this.release(inner, true, &cx);
    }

    /// `ib_event_handler.handler`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, between `add` and `remove` of a device of the registration in the
    /// slot, with the device's event handler.
    unsafe extern "C" fn event(
        handler: *mut bindings::ib_event_handler,
        event: *mut bindings::ib_event,
    ) {
        // SAFETY: The RDMA core is calling the client, which has the event's device.
        let this = unsafe { Self::called() };
        // SAFETY: `handler` is the one that `Inner::watch` has registered in `add`, and the event
        // is valid during the call.
        let (inner, event) =
            unsafe { (device::Inner::of_handler(handler), Event::from_raw(&*event)) };
        // SAFETY: `inner` is valid: `release` waits for the end of this call in `unwatch`, and
        // closes the gate after that.
        let (dev, inner) = unsafe { (Device::new(inner), inner.as_ref()) };
        // SAFETY: Events of devices come from a work item; those of a GID table from whoever
        // changes it, which may sleep and has the table's mutex.
        let cx = unsafe { Sleepable::assume() };
        if let (Ok(dev), Some(data)) = (dev, inner.data::<T>()) {
            pinned(&data).event(this.state(), &dev, event, &cx);
        }
    }
}

fn pinned<T>(data: &Arc<T>) -> Pin<&T> {
    // SAFETY: What is in an `Arc` does not move.
    unsafe { Pin::new_unchecked(data) }
}

#[pinned_drop]
impl<T: Owned> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        self.unregister();
    }
}

/// A ULP's counted reference to its own registration; unloading the module waits for it.
///
/// # Invariants
///
/// `core` is valid while `hold` lives, and `hold` is a hold on its refs.
pub struct ClientRef {
    core: NonNull<Core>,
    hold: Ref,
}

// SAFETY: `Core` is `Sync`, and a hold may be given back in any thread.
unsafe impl Send for ClientRef {}
// SAFETY: What a reference gives access to is a `Core`, which is `Sync`, and the counts of a hold.
unsafe impl Sync for ClientRef {}

impl ClientRef {
    /// Takes a hold for an object that is to be listed.
    pub(crate) fn list(&self, kind: Kind) -> Result<Listed> {
        // SAFETY: `hold` is on the gate of `core` by the type invariant, and so is another one.
        unsafe { Listed::new(self.hold.another(kind), Owner::Client(self.core)) }
    }

    fn core(&self) -> &Core {
        // SAFETY: `core` is valid by the type invariant, as `self` has the hold.
        unsafe { self.core.as_ref() }
    }

    /// Returns a handle of the device that came first, if there is one.
    pub fn first_device(&self, _cx: &Sleepable) -> Option<Device> {
        let devices = self.core().devices.lock();
        devices.iter().find_map(|entry| entry.device().ok())
    }

    /// Returns a handle of the device with this name, if there is one.
    pub fn device_by_name(&self, name: &CStr, _cx: &Sleepable) -> Option<Device> {
        self.core().devices.lock().iter().find_map(|entry| {
            let dev = entry.device().ok()?;
            (*dev.name() == *name).then_some(dev)
        })
    }

    /// Returns a handle of the device that has a network interface, by the interface's name in the
    /// initial network namespace (`ib_device_get_by_netdev`).
    pub fn device_of_netdev(&self, name: &CStr, _cx: &Sleepable) -> Option<Device> {
        // SAFETY: The name is a C string.
        let raw = unsafe { bindings::rdma_helper_device_by_netdev(name.as_char_ptr()) };
        let raw = NonNull::new(raw)?;
        let dev = self.core().device(raw.as_ptr());
        // SAFETY: The helper has taken this reference.
        unsafe { bindings::ib_device_put(raw.as_ptr()) };
        dev.ok()
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
        self.spawn_job(flags, KBox::new(Once(Some(f)), flags)?)
    }

    /// Never inlined, so that all modules give the work item's lock one name, as lockdep wants it.
    #[inline(never)]
    fn spawn_job(&self, flags: Flags, mut job: KBox<dyn Job>) -> Result {
        let client = self.clone();
        let run = move || {
            // SAFETY: Work items run in process context.
            job.run(&unsafe { Sleepable::assume() });
            drop(job);
            // The unload waits for the rest of this work item too: it destroys the queue.
            drop(client);
        };
        Ok(self.core().queue.get().try_spawn(flags, run)?)
    }
}

/// What [`ClientRef::spawn`] runs.
trait Job: Send {
    fn run(&mut self, cx: &Sleepable);
}

struct Once<F>(Option<F>);

impl<F: FnOnce(&Sleepable) + Send> Job for Once<F> {
    fn run(&mut self, cx: &Sleepable) {
        if let Some(f) = self.0.take() {
            f(cx);
        }
    }
}

impl Clone for ClientRef {
    fn clone(&self) -> Self {
        // INVARIANT: The new hold is on the same refs.
        Self {
            core: self.core,
            hold: self.hold.another(Kind::Client),
        }
    }
}

/// An entry of [`Core::devices`].
///
/// # Invariants
///
/// The pointer is valid while this is in the list, and what it points to is freed only after its
/// gate was closed.
struct Entry(NonNull<device::Inner>);

// SAFETY: `device::Inner` is `Send` and `Sync` in all its parts, and the pointer owns nothing.
unsafe impl Send for Entry {}

impl Entry {
    fn inner(&self) -> &device::Inner {
        // SAFETY: The pointer is valid by the type invariant: `self` is borrowed from the list.
        unsafe { self.0.as_ref() }
    }

    /// Returns a handle of the device, unless it is being removed from the client.
    fn device(&self) -> Result<Device> {
        // SAFETY: By the type invariant the pointer is valid until the gate of what it points to
        // was closed.
        unsafe { Device::new(self.0) }
    }
}

/// The part of a registration that does not depend on the ULP's type.
#[pin_data(PinnedDrop)]
pub(crate) struct Core {
    #[pin]
    raw: Opaque<bindings::ib_client>,
    #[pin]
    pub(crate) refs: Refs,
    #[pin]
    devices: Mutex<KVec<Entry>>,
    pub(crate) name: &'static CStr,
    /// For work items of the ULP. Dropped after the gate was closed; waits for the end of their
    /// code.
    queue: OwnedQueue,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: A `struct ib_client` may be registered and unregistered in different threads; all else is
// `Send`.
unsafe impl Send for Core {}
// SAFETY: What changes in a `struct ib_client` is the RDMA core's, which locks it; all else is
// `Sync`.
unsafe impl Sync for Core {}

impl Core {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    fn new(raw: bindings::ib_client, name: &'static CStr) -> Result<Pin<KBox<Self>>> {
        let init = try_pin_init!(Self {
            raw: Opaque::new(raw),
            refs <- Refs::new(),
            devices <- new_mutex!(KVec::new()),
            name,
            queue: OwnedQueue::new(name)?,
            _pin: PhantomPinned,
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Finds the client's handle of a device.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the client does not have the device, or is losing it.
    pub(crate) fn device(&self, raw: *mut bindings::ib_device) -> Result<Device> {
        let devices = self.devices.lock();
        let entry = devices
            .iter()
            .find(|entry| entry.inner().raw.as_ptr() == raw);
        entry.ok_or(ENODEV)?.device()
    }

    fn handle(&self) -> Result<ClientRef> {
        // SAFETY: `self` is pinned by `Core::new`, and its drop closes the refs.
        let hold = unsafe { self.refs.try_get(Kind::Client) }?;
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
        self.refs.kill_and_wait(&fmt!("{}: unload", self.name), &cx);
    }
}

/// Declares a kernel module that is an RDMA ULP.
///
/// Takes what `module!` takes; `type` implements [`Client`](Client).
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
        mod rdma_client_paths {
            $crate::own_path!(core);
            $crate::own_path!(kernel);
            $crate::own_path!(pin_init);
        }

        // SAFETY: The slot is this type's own, and the first registration is the module's:
        // `module!` makes it before any other code of the module runs, and drops it when the module
        // is unloaded.
        unsafe impl $crate::client::Owned for $type {
            fn slot() -> &'static $crate::client::Slot {
                static SLOT: $crate::client::Slot = $crate::client::Slot::new();
                &SLOT
            }
        }

        #[$crate::client::crates::kernel::prelude::pin_data]
        struct RdmaClientModule {
            #[pin]
            _registration: $crate::client::Registration<$type>,
        }

        impl $crate::client::crates::kernel::InPlaceModule for RdmaClientModule {
            fn init(
                _module: &'static $crate::client::crates::kernel::ThisModule,
            ) -> impl $crate::client::crates::pin_init::PinInit<
                Self,
                $crate::client::crates::kernel::error::Error,
            > {
                $crate::client::crates::kernel::try_pin_init!(Self {
                    _registration <- $crate::client::Registration::new(
                        <Self as $crate::client::crates::kernel::ModuleMetadata>::NAME,
                    ),
                }? $crate::client::crates::kernel::error::Error)
            }
        }

        $crate::build_info!();

        $crate::client::crates::kernel::prelude::module! {
            type: RdmaClientModule,
            $($f)*
        }
    };
}

/// Refuses a path such as `::kernel` that a ULP has taken over (`extern crate self as kernel`):
/// `module!` and others expand to such paths, and what they mean decides who owns the registration.
///
/// A name that two glob imports bring is an error where it is used, unless both are one thing.
#[doc(hidden)]
#[macro_export]
macro_rules! own_path {
    ($name:ident) => {
        mod $name {
            mod theirs {
                pub(super) use ::$name;
            }
            mod ours {
                pub(super) use $crate::client::crates::$name;
            }
            #[allow(unused_imports)]
            use self::$name as _;
            #[allow(unused_imports)]
            use ours::*;
            #[allow(unused_imports)]
            use theirs::*;
        }
    };
}
