// SPDX-License-Identifier: GPL-2.0

//! Clients: the registration of a ULP.
//!
//! A ULP implements [`Client`] and is made a module by
//! [`module_rdma_client!`](crate::module_rdma_client). At its unload every device is removed from
//! it, see [`DeviceData::remove`], and it drops the rest in [`Client::unload`]. The unload
//! waits until no listener, id, work item or [`ClientRef`] is left, and then drops the [`Client`].
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_client`)

use crate::{
    code,
    deferred::Workqueue,
    device::{
        self,
        Device,
        Event, //
    },
    objects::{
        self,
        Object, //
    },
    prelude::internal::*,
    refs,
    removal::Step, //
};
use core::net::IpAddr;
use kernel::{
    container_of,
    sync::{
        self,
        atomic, //
    },
    types::{
        ForeignOwnable,
        Opaque, //
    },
    workqueue, //
};

/// The crates that the macros use, under names that a ULP cannot take over.
#[doc(hidden)]
pub mod crates {
    pub use ::{
        core,
        kernel,
        pin_init, //
    };
}

/// An upper-layer protocol, as `struct ib_client`.
///
/// It stays until the last [`ClientRef`] is gone: what others call until then, such as a subsystem
/// that frees an object of the ULP when a user closes a file, may use what it has. So it must not
/// keep a [`ClientRef`] itself, or what has one, beyond [`Client::unload`]. Code that needs one
/// takes it by [`ClientRef::of`].
///
/// # Examples
///
/// ```
/// use core::net::Ipv4Addr;
/// use kernel::{new_mutex, sync::Mutex};
/// use rdma::prelude::*;
///
/// /// Listens while it is loaded.
/// #[pin_data]
/// struct Ulp {
///     #[pin]
///     listener: Mutex<Option<cm::Listener>>,
/// }
///
/// impl Client for Ulp {
///     type Data = ();
///
///     fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
///         try_pin_init!(Self {
///             listener <- new_mutex!(None),
///         })
///     }
///
///     fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
///         let addr = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7199);
///         let refuse = |request: cm::Request<'_>, cx: &Sleepable| {
///             request.into_id(cx)?.reject(b"full", cx)
///         };
///         let accept = Arc::new(refuse, GFP_KERNEL)?;
///         let listener = cm::Listener::new(client, addr, 16, accept, cx)?;
///         *self.listener.lock() = Some(listener);
///         Ok(())
///     }
///
///     /// A listener has a [`ClientRef`].
///     fn unload(self: Pin<&Self>, _cx: &Sleepable) {
///         let listener = self.listener.lock().take();
///         drop(listener);
///     }
/// }
/// ```
pub trait Client: Sized + Send + Sync + 'static {
    /// The ULP's data for each device, `()` if it has none.
    type Data: DeviceData<Self>;

    /// Makes the ULP's state when the module is loaded, before any device is known.
    fn init(client: &ClientRef) -> impl PinInit<Self, Error>;

    /// Called when all devices that are present were added. An error ends the loading of the
    /// module, which C would free at once: it is freed when nothing else has a reference to it.
    fn ready(self: Pin<&Self>, _client: &ClientRef, _cx: &Sleepable) -> Result {
        Ok(())
    }

    /// Drops all that keeps the client: listeners, ids, clones of the [`ClientRef`], and files and
    /// registrations by which others make more of them. The last method that is called: at the
    /// unload when all devices were removed, and if loading fails after [`Client::init`]. The
    /// unload then waits, and the client is dropped after that.
    fn unload(self: Pin<&Self>, _cx: &Sleepable) {}
}

/// The data of a ULP for one device, from `add` to `remove`, as in the example of
/// [`module_rdma_client!`](crate::module_rdma_client).
pub trait DeviceData<C: Client>: Sized + Send + Sync + 'static {
    /// Adds a device (`ib_client.add`). An error leaves the device unused; it is reported.
    ///
    /// Called in process context, with the RDMA core's device and client locks held: it must not
    /// wait for another device or a connection.
    fn add(client: Pin<&C>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error>;

    /// Removes a device (`ib_client.remove`): drop all handles of it here.
    ///
    /// Called in process context. All threads that wait for a CQ, a MAD or a connection of the
    /// device have got `ENODEV`, none waits, and new connections are refused. After it
    /// returns, MAD agents and connections are ended, the client drops its reference to `self`, and
    /// the removal waits until the last handle of the device is gone.
    fn remove(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _cx: &Sleepable) {}

    /// Handles an event of the device or one of its ports (`ib_register_event_handler`).
    ///
    /// Called in process context, perhaps for several events at the same time, between `add` and
    /// `remove`, which waits for the end of the call. With [`device::Event::GidChange`] the mutex
    /// of the port's GIDs is held, and on a bonded port perhaps the rtnl lock, which
    /// [`device::Port::query`] takes on many devices: query ports in a job of
    /// [`ClientRef::spawn`].
    /// Once the removal has begun, waits for the device fail here.
    fn event(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _event: Event, _cx: &Sleepable) {}
}

impl<C: Client> DeviceData<C> for () {
    fn add(_client: Pin<&C>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<(), Error>(())
    }
}

kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any client.
    unsafe(uninit) static CORES: Mutex<()> = ();
}

/// Initialises the lock of [`Singleton::core`].
///
/// # Safety
///
/// Called once, when the module is loaded.
pub(crate) unsafe fn init() {
    // SAFETY: The caller calls this once, when the module is loaded.
    unsafe { CORES.init() };
}

/// The addresses of a module's only registration, ever, and of its part that is not generic, each
/// zero if there is none.
///
/// # Invariants
///
/// - While the RDMA core may call the client, `registration` is the address of a live
///   [`Registration`] of the client type that this is for.
/// - While `CORES` is locked, `core` is zero or the address of a [`Core`] of [`Core::new`], which
///   is not dropped meanwhile.
#[doc(hidden)]
pub struct Singleton {
    registration: atomic::Atomic<usize>,
    core: atomic::Atomic<usize>,
}

impl Singleton {
    #[expect(clippy::new_without_default)]
    pub const fn new() -> Self {
        // INVARIANT: No client of the type is registered yet.
        Self {
            registration: atomic::Atomic::new(0),
            core: atomic::Atomic::new(0),
        }
    }

    /// Returns a handle of the client, if there is one. Not generic, so that it is not in each ULP.
    fn client(&self) -> Result<ClientRef> {
        let _cores = CORES.lock();
        let core = self.core.load(atomic::Relaxed) as *const Core;
        // SAFETY: `CORES` is locked, so this is null or a core by the type invariant.
        unsafe { core.as_ref() }.ok_or(ENODEV)?.handle()
    }
}

/// A [`Client`] that a module owns. Implemented by [`crate::module_rdma_client`] alone.
///
/// # Safety
///
/// Each call returns the same variable, which is for this type only, and the module, which owns the
/// first registration, so that this is dropped before the module's text goes.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "no module owns the client `{Self}`",
    note = "`rdma::module_rdma_client!` makes a module of it"
)]
pub unsafe trait ModuleClient: Client {
    fn singleton() -> &'static Singleton;
    fn module() -> &'static ThisModule;
}

/// Returns whether the module of a client is being unloaded, which begins when nothing has a
/// reference to it. Until then another subsystem may use what the ULP has registered there, also
/// where the loading of the module fails, for which this returns `false`.
///
/// # Examples
///
/// ```
/// # use rdma::{client::{is_going, ModuleClient}, prelude::*};
/// /// Frees what a subsystem has the address of, and uses with a reference to the module.
/// fn free<C: ModuleClient, T>(registered: KBox<T>) {
///     if is_going::<C>() {
///         drop(registered)
///     } else {
///         core::mem::forget(registered)
///     }
/// }
/// ```
pub fn is_going<C: ModuleClient>() -> bool {
    // SAFETY: A module is loaded while its code runs.
    let module = unsafe { code::Module::new(C::module()) };
    module.state() == Some(bindings::module_state_MODULE_STATE_GOING)
}

/// A ULP's registration with the RDMA core, owned by its module.
#[doc(hidden)]
#[pin_data(PinnedDrop)]
pub struct Registration<T: ModuleClient> {
    // Dropped after the client was unregistered, and `end` has waited.
    #[pin]
    state: T,
    core: Pin<KBox<Core>>,
}

impl<T: ModuleClient> Registration<T> {
    /// Makes the ULP's state and registers it with the RDMA core, once; `EBUSY` after that.
    pub fn new(name: &'static CStr) -> impl PinInit<Self, Error> {
        try_pin_init!(&this in Self {
            _: {
                let singleton = &T::singleton().registration;
                // INVARIANT: This registration alone has set the address, so it alone registers the
                // client, and unregisters it before it goes.
                let set = singleton.cmpxchg(0, this.addr().get(), atomic::Full);
                set.map_err(|_| EBUSY)?;
            },
            core: {
                // SAFETY: The module owns the registration, whose drop waits for all objects of the
                // client.
                let module = unsafe { code::Module::new(T::module()) };
                Core::new(name, T::singleton(), module, Self::add, Self::remove, Self::event)?
            },
            state <- {
                // SAFETY: Fields are initialised in the order of this list, so `core` is.
                let core = unsafe { &(*this.as_ptr()).core };
                T::init(&core.handle()?)
            },
            _: {
                // SAFETY: All fields are initialised: this is the last of the list. They are pinned
                // from the beginning.
                unsafe { this.as_ref() }.register()?
            },
        })
    }

    fn state(&self) -> Pin<&T> {
        // SAFETY: A registration is pinned, and `state` structurally so.
        unsafe { Pin::new_unchecked(&self.state) }
    }

    fn register(&self) -> Result {
        // SAFETY: The address of this registration was just set, so it is the first one, which by
        // the contract of `ModuleClient` the module owns: it is made when the module is loaded, in
        // process context.
        let cx = unsafe { Sleepable::assume() };
        // The registration is not dropped after an error, but its fields are.
        self.try_register(&cx).inspect_err(|_| self.end(&cx))
    }

    fn try_register(&self, cx: &Sleepable) -> Result {
        let client = self.core.handle()?;
        // SAFETY: `raw` is initialised and pinned, and unregistered before it goes. The singleton
        // has the address of this registration, of whose type the callbacks are.
        to_result(unsafe { bindings::ib_register_client(self.core.raw.get()) })?;
        let ready = self.state().ready(&client, cx);
        // SAFETY: The client was just registered, and is unregistered here only, as it is not
        // dropped after an error.
        ready.inspect_err(|_| unsafe { bindings::ib_unregister_client(self.core.raw.get()) })
    }

    /// Unloads the client, which is not registered, and waits until nothing keeps it.
    fn end(&self, cx: &Sleepable) {
        self.state().unload(cx);
        self.core.end(cx);
    }

    /// Returns the registration.
    ///
    /// # Safety
    ///
    /// The RDMA core is calling the client, and the reference is not used after that call.
    unsafe fn called<'a>() -> &'a Self {
        // SAFETY: By the invariant of `Singleton` this is the address of a live registration of
        // this type, as the RDMA core is calling the client.
        unsafe { &*(T::singleton().registration.load(atomic::Acquire) as *const Self) }
    }

    /// `ib_client.add`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core.
    unsafe extern "C" fn add(dev: *mut bindings::ib_device) -> c_int {
        // SAFETY: The RDMA core is calling the client.
        let this = unsafe { Self::called() };
        // SAFETY: `add` is being called for this device.
        let added = unsafe { this.core.add(dev, &|dev, cx| this.add_data(dev, cx)) };
        added.map_or_else(Error::to_errno, |()| 0)
    }

    /// Sets the ULP's data of a device. Not inlined, as the closure is compiled into a ULP twice.
    #[inline(never)]
    fn add_data(&self, dev: &Device, cx: &Sleepable) -> Result {
        let data = Arc::pin_init(T::Data::add(self.state(), dev, cx), GFP_KERNEL)?;
        dev.inner().set_data::<T>(data);
        Ok(())
    }

    /// `ib_client.remove`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, once for a device that [`Self::add`] has added, with its data.
    unsafe extern "C" fn remove(_dev: *mut bindings::ib_device, data: *mut c_void) {
        // SAFETY: The RDMA core is calling the client.
        let this = unsafe { Self::called() };
        // SAFETY: `remove` is called in process context.
        let cx = unsafe { Sleepable::assume() };
        // SAFETY: The caller promises that `data` are what `add` has set, from `into_foreign`.
        let inner = unsafe { Pin::<KBox<device::Inner>>::from_foreign(data) };
        // SAFETY: `Core::add` has registered the handler, and this is called once for the device.
        let dev = unsafe { this.core.begin_remove(inner.as_ref()) };
        let mut data = inner.get_data::<T>(Option::take);
        if let (Ok(dev), Some(data)) = (dev, &data) {
            inner.as_ref().during(Step::Remove, &mut || {
                pinned(data).remove(this.state(), &dev, &cx);
            });
        }
        // SAFETY: `begin_remove` has closed the device.
        unsafe { this.core.release(inner, &mut || drop(data.take()), &cx) };
    }

    /// `ib_event_handler.handler`.
    ///
    /// # Safety
    ///
    /// Called by the RDMA core, between `add` and `remove` of the handler's device.
    unsafe extern "C" fn event(
        handler: *mut bindings::ib_event_handler,
        event: *mut bindings::ib_event,
    ) {
        // SAFETY: The RDMA core is calling the client, which has the event's device.
        let this = unsafe { Self::called() };
        let handler: *mut Opaque<bindings::ib_event_handler> = handler.cast();
        // SAFETY: The handler is that of an `Inner`, as `Core::add` has registered it; the event is
        // valid meanwhile.
        let (inner, event) = unsafe {
            let inner = container_of!(handler, device::Inner, events);
            (NonNull::new_unchecked(inner), Event::from_raw(&*event))
        };
        // SAFETY: `inner` is valid: its refs are killed after `begin_remove` has waited for this.
        let dev = unsafe { Device::new(inner) };
        // SAFETY: Events of devices come from a work item, those of a GID table from the thread
        // that changes it, which may sleep and holds the table's mutex.
        let cx = unsafe { Sleepable::assume() };
        let Ok(dev) = dev else { return };
        if let Some(data) = dev.data::<T>(&cx) {
            pinned(&data).event(this.state(), &dev, event, &cx);
        }
    }
}

fn pinned<T>(data: &Arc<T>) -> Pin<&T> {
    // SAFETY: The content of an `Arc` does not move.
    unsafe { Pin::new_unchecked(data) }
}

#[pinned_drop]
impl<T: ModuleClient> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: `register` has succeeded where a registration is dropped, which happens once.
        unsafe { bindings::ib_unregister_client(self.core.raw.get()) };
        // SAFETY: A registration is dropped when the module is unloaded, in process context.
        self.end(&unsafe { Sleepable::assume() });
    }
}

/// A ULP's counted reference to its own registration; unloading the module waits for it.
pub struct ClientRef(refs::Ref<Core>);

impl ClientRef {
    /// Returns a handle of the ULP `C`, for code that is passed no object of the ULP, such as a
    /// KUnit case.
    ///
    /// # Errors
    ///
    /// `ENODEV` before [`Client::init`] is called, and after [`Client::unload`] has returned.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{client::ModuleClient, device::Device, prelude::*};
    /// /// Returns how the ULP sees a device that a test has made.
    /// fn device<C: ModuleClient>(name: &CStr, cx: &Sleepable) -> Result<Device> {
    ///     ClientRef::of::<C>(cx)?.device_by_name(name, cx).ok_or(ENODEV)
    /// }
    /// ```
    pub fn of<C: ModuleClient>(_cx: &Sleepable) -> Result<Self> {
        C::singleton().client()
    }

    /// Returns an object of the client, with a reference, which is yet to be listed.
    pub(crate) fn object(&self, kind: refs::ObjectKind) -> Object {
        Object::new(self.0.get(kind))
    }

    /// Returns a handle of a device. Fails with `ENODEV` if it is not the client's.
    pub(crate) fn device(&self, raw: *mut bindings::ib_device) -> Result<Device> {
        self.find_device(|dev| dev.as_raw() == raw).ok_or(ENODEV)
    }

    fn find_device(&self, is_it: impl Fn(&Device) -> bool) -> Option<Device> {
        let devices = self.0.devices.lock();
        devices.iter().find(|dev| is_it(dev)).cloned()
    }

    /// Returns a handle of the first device that has an IP address ([`Device::ip_addr`]), in the
    /// order in which they were added, and the address.
    ///
    /// # Errors
    ///
    /// `ENODEV`, and a message in the kernel log, if no device has one.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// fn connect(client: &ClientRef, port: u16, cx: &Sleepable) -> Result<(Pd, cm::Id)> {
    ///     let (dev, ip) = client.first_device_with_addr(cx)?;
    ///     let id = cm::Id::resolve(client, SocketAddr::new(ip, port), 1000, cx)?;
    ///     Ok((Pd::alloc(&dev, cx)?, id))
    /// }
    /// ```
    pub fn first_device_with_addr(&self, _cx: &Sleepable) -> Result<(Device, IpAddr)> {
        let devices = self.0.devices.lock();
        let found = devices
            .iter()
            .find_map(|dev| dev.ip_addr().map(|ip| (dev.clone(), ip)));
        found.ok_or(ENODEV).inspect_err(|_| match devices.len() {
            0 => pr_err!("{}: there is no RDMA device\n", self.name()),
            n => pr_err!(
                "{}: none of {n} RDMA device(s) has an IP address\n",
                self.name()
            ),
        })
    }

    /// Returns a handle of the device with this name, if there is one.
    pub fn device_by_name(&self, name: &CStr, _cx: &Sleepable) -> Option<Device> {
        self.find_device(|dev| *dev.name() == *name)
    }

    /// Returns a handle of the device that has a network interface, by its name in the initial
    /// namespace (`ib_device_get_by_netdev`).
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{device::Device, prelude::*};
    /// fn usable(client: &ClientRef, name: &CStr, cx: &Sleepable) -> Option<Device> {
    ///     let dev = client.device_of_netdev(name, cx)?;
    ///     let attrs = dev.attrs();
    ///     (dev.is_accessible(cx) && attrs.mem_mgt_extensions).then_some(dev)
    /// }
    /// ```
    pub fn device_of_netdev(&self, name: &CStr, _cx: &Sleepable) -> Option<Device> {
        // SAFETY: The name is a string that lives during the call, which only compares it.
        let raw = unsafe { bindings::rdma_helper_device_by_netdev(name.as_char_ptr()) };
        let raw = NonNull::new(raw)?.as_ptr();
        let dev = self.device(raw).ok();
        // SAFETY: The helper has taken a reference, and `raw` is not used after this.
        unsafe { bindings::ib_device_put(raw) };
        dev
    }

    /// Returns the name of the client's module.
    pub fn name(&self) -> &'static CStr {
        self.0.name
    }

    /// Calls `f` from a work item, which may sleep for long. Unloading waits for its end. Any
    /// context that may allocate with `flags`. Fails with `ENOMEM`, or with `EPERM` if this is
    /// another module's client; `f` is then dropped.
    pub fn spawn<F: FnOnce(&Sleepable) + Send + 'static>(
        &self,
        flags: kernel::alloc::Flags,
        f: F,
    ) -> Result {
        self.0.module.check_type::<F>()?;
        let mut f = Some(f);
        let job = move |cx: &Sleepable| {
            if let Some(f) = f.take() {
                f(cx);
            }
        };
        self.spawn_job(flags, KBox::new(job, flags)?)
    }

    /// Queues a work item of the ULP's (`queue_work`), which may sleep for long. Unloading waits
    /// for its end. Any context; allocates nothing, so that the end of a connection can be such a
    /// work item. Fails with `EBUSY` if it is queued already, or with `EPERM` if this is another
    /// module's client.
    ///
    /// # Examples
    ///
    /// ```
    /// use kernel::workqueue::{self, impl_has_work};
    /// use rdma::{prelude::*, session};
    ///
    /// #[pin_data]
    /// struct Conn {
    ///     id: cm::Id,
    ///     qp: Qp<Softirq>,
    ///     #[pin]
    ///     end: workqueue::Work<Self>,
    /// }
    ///
    /// impl_has_work! {
    ///     impl HasWork<Self> for Conn { self.end }
    /// }
    ///
    /// impl workqueue::WorkItem for Conn {
    ///     type Pointer = Arc<Self>;
    ///
    ///     fn run(this: Arc<Self>) {
    ///         let ended = Sleepable::current().and_then(|cx| {
    ///             this.id.release_handler(&cx);
    ///             session::end(&this.id, &this.qp, &cx)
    ///         });
    ///         if let Err(e) = ended {
    ///             pr_err!("QP {} was not drained: {e:?}\n", this.qp.num());
    ///         }
    ///     }
    /// }
    ///
    /// /// The last event of a connection has come.
    /// fn disconnected(client: &ClientRef, conn: Arc<Conn>) -> Result {
    ///     client.enqueue(conn)
    /// }
    /// ```
    pub fn enqueue<T, const ID: u64>(&self, item: Arc<T>) -> Result
    where
        T: workqueue::WorkItem<ID, Pointer = Arc<T>> + workqueue::HasWork<T, ID>,
        T: Send + Sync + 'static,
    {
        self.0.module.check_type::<T>()?;
        self.0.workqueue.get().enqueue(item).map_err(|_| EBUSY)
    }

    /// Returns the module of the ULP.
    pub(crate) fn module(&self) -> code::Module {
        self.0.module
    }

    /// Never inlined, so that all modules give the work item's lock one name, as lockdep wants it.
    #[inline(never)]
    fn spawn_job(
        &self,
        flags: kernel::alloc::Flags,
        mut job: KBox<dyn FnMut(&Sleepable) + Send>,
    ) -> Result {
        let client = self.clone();
        let run = move || {
            // SAFETY: Work items run in process context.
            job(&unsafe { Sleepable::assume() });
            drop(job);
            // The unload waits for the rest of this work item too: it destroys the workqueue.
            drop(client);
        };
        Ok(self.0.workqueue.get().try_spawn(flags, run)?)
    }
}

impl Clone for ClientRef {
    fn clone(&self) -> Self {
        Self(self.0.get(refs::ObjectKind::Client))
    }
}

/// The part of a registration that is not generic.
#[pin_data(PinnedDrop)]
pub(crate) struct Core {
    #[pin]
    raw: Opaque<bindings::ib_client>,
    #[pin]
    refs: refs::Refs,
    /// A handle of each device, until its removal begins.
    #[pin]
    devices: sync::Mutex<KVec<Device>>,
    pub(crate) name: &'static CStr,
    /// Its address tells client types apart.
    pub(crate) singleton: &'static Singleton,
    pub(crate) module: code::Module,
    pub(crate) event: device::EventHandler,
    /// For work items of the ULP.
    workqueue: Workqueue,
}

// SAFETY: Any thread may register and unregister a `struct ib_client`; all else is `Send`.
unsafe impl Send for Core {}
// SAFETY: The RDMA core locks what it changes in a `struct ib_client`; all else is `Sync`.
unsafe impl Sync for Core {}

impl Core {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    fn new(
        name: &'static CStr,
        singleton: &'static Singleton,
        module: code::Module,
        add: unsafe extern "C" fn(*mut bindings::ib_device) -> c_int,
        remove: unsafe extern "C" fn(*mut bindings::ib_device, *mut c_void),
        event: device::EventHandler,
    ) -> Result<Pin<KBox<Self>>> {
        let raw = bindings::ib_client {
            name: name.as_char_ptr(),
            add: Some(add),
            remove: Some(remove),
            ..Default::default()
        };
        let init = try_pin_init!(Self {
            raw: Opaque::new(raw),
            refs <- refs::Refs::new(),
            devices <- kernel::new_mutex!(KVec::new()),
            name,
            singleton,
            module,
            event,
            workqueue: Workqueue::new(name)?,
        });
        let core = KBox::pin_init(init, GFP_KERNEL)?;
        let _cores = CORES.lock();
        // INVARIANT: The drop of the core sets zero with `CORES` locked. There is no other core, as
        // there is one registration.
        let addr = core::ptr::from_ref(&*core) as usize;
        singleton.core.store(addr, atomic::Relaxed);
        Ok(core)
    }

    /// Adds a device (`ib_client.add`), by `add_data`. Not generic, so that it is not in each ULP.
    ///
    /// # Safety
    ///
    /// `add` of this client is being called for the device.
    unsafe fn add(
        &self,
        raw: *mut bindings::ib_device,
        add_data: &dyn Fn(&Device, &Sleepable) -> Result,
    ) -> Result {
        // SAFETY: `add` is called in process context.
        let cx = unsafe { Sleepable::assume() };
        let failed = |e: &Error| {
            // SAFETY: The device is valid in this callback.
            let device = unsafe { device::Name::of(raw) };
            pr_err!("{}: device {device} is not used: {e:?}\n", self.name);
        };
        let inner = NonNull::new(raw).ok_or(EINVAL)?;
        // SAFETY: The RDMA core calls `add` for devices that are registered. The client is dropped
        // only after it was unregistered, which removes each device.
        let inner = unsafe { device::Inner::new(inner, self) }.inspect_err(failed)?;
        // SAFETY: `inner` is valid until `release` has killed its refs and waited for them.
        let added = unsafe { Device::new(NonNull::from(&*inner)) }.and_then(|dev| {
            self.devices.lock().push(dev.clone(), GFP_KERNEL)?;
            add_data(&dev, &cx)
        });
        if let Err(e) = added {
            failed(&e);
            self.close(&inner);
            // SAFETY: `close` was called above.
            unsafe { self.release(inner, &mut || {}, &cx) };
            return Err(e);
        }
        // SAFETY: `Inner::new` has made the handler, which `begin_remove` unregisters; `inner` is
        // pinned until then.
        unsafe { bindings::ib_register_event_handler(inner.events.get()) };
        let data = inner.into_foreign();
        // SAFETY: Both are valid in `add`, which is where client data are set.
        unsafe { bindings::ib_set_client_data(raw, self.raw.get(), data) };
        Ok(())
    }

    /// No handle of the device can be taken from the client, and no thread waits for it.
    fn close(&self, inner: &device::Inner) {
        let mut devices = self.devices.lock();
        devices.retain(|dev| !core::ptr::eq(dev.inner(), inner));
        drop(devices);
        inner.removal.close();
    }

    /// Begins to remove a device: no more events come. The handle that this returns is to
    /// be dropped before [`Core::release`] is called.
    ///
    /// # Safety
    ///
    /// The caller may sleep. [`Core::add`] has succeeded for the device. Called once for it.
    unsafe fn begin_remove(&self, inner: Pin<&device::Inner>) -> Result<Device> {
        // Before anything here waits, as that may itself wait for the device.
        self.close(&inner);
        inner.during(Step::Event, &mut || {
            // SAFETY: `add` has registered the handler, this is called once, and the caller may
            // sleep, as it promises. It waits for a call of the handler that has begun.
            unsafe { bindings::ib_unregister_event_handler(inner.events.get()) };
        });
        // SAFETY: `inner` is valid until `release` has killed its refs and waited for them.
        unsafe { Device::new(NonNull::from(inner.get_ref())) }
    }

    /// Ends all objects of a device, drops the ULP's data, and waits until nothing references it.
    ///
    /// # Safety
    ///
    /// [`Core::close`] was called for the device.
    unsafe fn release(
        &self,
        inner: Pin<KBox<device::Inner>>,
        drop_data: &mut dyn FnMut(),
        cx: &Sleepable,
    ) {
        let device = inner.as_ref();
        device.during(Step::Objects, &mut || device.removal.end_all(cx));
        // Not before that: files that the data have go only once no thread waits there.
        device.during(Step::Data, drop_data);
        let client = self.name;
        let name = inner.name();
        objects::kill_and_wait(&*inner, &fmt!("{client}: removal of {name}"), cx);
    }

    /// Waits until nothing keeps the client, and until its work items have ended. Does that once.
    fn end(&self, cx: &Sleepable) {
        {
            let _cores = CORES.lock();
            // INVARIANT: From here on there is no core.
            if self.singleton.core.xchg(0, atomic::Relaxed) == 0 {
                return;
            }
        }
        objects::kill_and_wait(self, &fmt!("{}: unload", self.name), cx);
        self.workqueue.flush(cx);
    }

    fn handle(&self) -> Result<ClientRef> {
        // SAFETY: `self` is pinned by `Core::new`, and is not dropped before `end` has killed the
        // refs and waited for them.
        unsafe { refs::Ref::try_get(NonNull::from(self), refs::ObjectKind::Client) }.map(ClientRef)
    }
}

impl refs::Owner for Core {
    fn refs(&self) -> &refs::Refs {
        &self.refs
    }

    fn queue(&self) -> &workqueue::Queue {
        self.workqueue.get()
    }
}

impl fmt::Display for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.name, f)
    }
}

#[pinned_drop]
impl PinnedDrop for Core {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: A registration is dropped when the loading of its module has failed, or when the
        // module is unloaded, in process context.
        let cx = unsafe { Sleepable::assume() };
        self.end(&cx);
        // The client's state, dropped before, has taken out what it had registered elsewhere.
        self.module.wait_for_users(self.name, &cx);
    }
}

/// Declares a module that is an RDMA ULP, as `module!` does; `type` implements [`Client`].
///
/// # Examples
///
/// ```
/// use rdma::{device::{Device, Event}, prelude::*};
///
/// struct Ulp;
///
/// /// What the connections of a device share.
/// struct PerDevice {
///     pd: Pd,
/// }
///
/// impl DeviceData<Ulp> for PerDevice {
///     fn add(_ulp: Pin<&Ulp>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
///         Pd::alloc(dev, cx).map(|pd| Self { pd })
///     }
///
///     fn remove(self: Pin<&Self>, _ulp: Pin<&Ulp>, dev: &Device, _cx: &Sleepable) {
///         pr_info!("{dev}: no more connections are made\n");
///     }
///
///     fn event(self: Pin<&Self>, _ulp: Pin<&Ulp>, dev: &Device, event: Event, _cx: &Sleepable) {
///         pr_info!("{dev}: {event}\n");
///     }
/// }
///
/// fn pd_of(dev: &Device, cx: &Sleepable) -> Result<Pd> {
///     Ok(dev.data::<Ulp>(cx).ok_or(ENODEV)?.pd.clone())
/// }
///
/// impl Client for Ulp {
///     type Data = PerDevice;
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

        // SAFETY: The static variable is for this type only. `module!` makes the first registration
        // before any other code of this module runs, and drops it at the unload.
        unsafe impl $crate::client::ModuleClient for $type {
            fn singleton() -> &'static $crate::client::Singleton {
                static SINGLETON: $crate::client::Singleton = $crate::client::Singleton::new();
                &SINGLETON
            }

            fn module() -> &'static $crate::client::crates::kernel::ThisModule {
                $crate::client::crates::kernel::module::this_module::<RdmaClientModule>()
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
/// `module!` and other macros expand to such paths, so they decide what owns the registration. A
/// name that two glob imports bring is an error where it is used, unless both are the same item.
#[doc(hidden)]
#[macro_export]
macro_rules! own_path {
    ($name:ident) => {
        #[allow(unused_imports)]
        mod $name {
            mod theirs {
                pub(super) use ::$name;
            }
            mod ours {
                pub(super) use $crate::client::crates::$name;
            }
            use self::$name as _;
            use ours::*;
            use theirs::*;
        }
    };
}
