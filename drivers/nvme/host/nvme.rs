// SPDX-License-Identifier: GPL-2.0

//! The host of NVMe over fabrics, as a transport sees it: nvme-core, nvme-fabrics and blk-mq.
//!
//! All unsafe code of the driver is in this module and those below it. A [`Transport`] is what
//! [`Registration`] registers with nvme-fabrics. It makes a [`Controller`] for each connection that
//! a user asks for, whose queues are set up and torn down by the holder of its [`Setup`]. blk-mq
//! gives each request to the queue of its hardware context as an [`Rq`], the right to end it, which
//! nothing else does.
//!
//! A controller has a reference to the module until it is freed. So the module is in use while
//! there is a controller, or a file by which a user may have the last reference to one: see
//! Documentation/nvme-host.rst.
//!
//! C headers: `drivers/nvme/host/nvme.h`, `drivers/nvme/host/fabrics.h`,
//! [`include/linux/blk-mq.h`](srctree/include/linux/blk-mq.h)

mod async_domain;
mod controller;
mod request;
mod setup;

pub(crate) use async_domain::try_for_each;
pub(crate) use controller::{
    Controller,
    Link,
    State, //
};
pub(crate) use request::{
    Payload,
    Reason,
    Refused,
    Rq, //
};
pub(crate) use setup::Setup;

use crate::bindings;
use controller::ControllerRef;
use core::{
    any::TypeId,
    marker::PhantomData,
    mem::ManuallyDrop,
    net::{
        SocketAddr,
        SocketAddrV6, //
    },
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    error::to_result,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Release, //
        },
        Arc,
        ArcBorrow,
        Mutex, //
    },
    types::Opaque, //
};
use rdma::{
    client::{
        is_going,
        ClientRef,
        ModuleClient, //
    },
    context::{
        Context as _,
        Sleepable, //
    }, //
};

/// Returns whether the transport is `rdma`, in place of nvme-rdma's: the parameter of the module.
pub(crate) fn replace() -> bool {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvme_helper_replace() }
}

/// Returns the number of SENDs of which one is signaled: the parameter of the module.
pub(crate) fn sig_limit() -> u32 {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvme_helper_sig_limit() }
}

/// Returns the size of the largest data of writes that are copied, zero for none: the parameter of
/// the module.
pub(crate) fn copied_data_size() -> u32 {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvme_helper_copied_data_size() }
}

/// A transport of NVMe over fabrics.
pub(crate) trait Transport: Sized + Send + Sync + 'static {
    /// The client whose module this is in.
    type Client: ModuleClient;

    /// A queue: a connection that commands are sent on.
    type Queue: Send + Sync + 'static;

    /// The state that only [`Setup`] gives access to.
    type State: Default + Send + Sync + Unpin;

    /// The commands that the transport takes beside those of all (`NVMF_OPT_*`).
    const ALLOWED_OPTS: u32;

    /// Returns a static variable that is for this type only.
    fn registered() -> &'static Registered;

    /// Returns the name by which users connect.
    fn name() -> &'static CStr;

    /// Makes the data of a controller, before anything is known of the target.
    fn new(opts: &Options<'_>) -> impl PinInit<Self, Error>;

    /// Sets up a new controller, up to [`Setup::start_ctrl`]; it is created if that was called.
    fn create(ctrl: &Controller<Self>, cx: &Sleepable) -> Result<(), Failure>;

    /// A queue has failed ([`Link::error_recovery`]): tears down all, and begins to reconnect.
    fn error_recovery(ctrl: &Controller<Self>, cx: &Sleepable);

    /// Makes an attempt to connect again ([`Controller::reconnect_later`]).
    fn reconnect(ctrl: &Controller<Self>, cx: &Sleepable);

    /// A user, or nvme-core, resets the controller.
    fn reset(ctrl: &Controller<Self>, cx: &Sleepable);

    /// The controller is deleted: no namespace is left. Drops all that is the device's.
    fn delete(ctrl: &Controller<Self>, cx: &Sleepable);

    /// Returns whether commands other than Connect may be sent.
    fn is_live(queue: &Self::Queue) -> bool;

    /// Sends a command. In an RCU read-side section, perhaps in a softirq.
    fn queue_rq(queue: ArcBorrow<'_, Self::Queue>, rq: Rq) -> Result<(), Refused>;

    /// Polls for replies (`blk_mq_ops.poll`); returns how many completions there were.
    fn poll(queue: &Self::Queue) -> u32;

    /// A request of a queue has timed out while the controller is not live: ends all of them.
    fn timed_out(queue: &Arc<Self::Queue>, cx: &Sleepable);

    /// Sends a request for an asynchronous event.
    fn submit_async_event(admin: &Self::Queue);
}

/// Why a step has failed, as C's functions say it: an error number, or a status of NVMe, which is
/// greater than zero.
#[derive(Clone, Copy)]
pub(crate) struct Failure(c_int);

impl Failure {
    fn check(ret: c_int) -> Result<(), Self> {
        match ret {
            0 => Ok(()),
            ret => Err(Self(ret)),
        }
    }

    /// Returns the number.
    pub(crate) fn code(self) -> i32 {
        self.0
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error.to_errno())
    }
}

/// The options that a user has given (`struct nvmf_ctrl_options`).
///
/// # Invariants
///
/// They are valid during `'a`. Once the controller is initialised, users change those that sysfs
/// has, among them `reconnect_delay` and `max_reconnects`.
pub(crate) struct Options<'a>(
    *const bindings::nvmf_ctrl_options,
    PhantomData<&'a bindings::nvmf_ctrl_options>,
);

impl<'a> Options<'a> {
    /// # Safety
    ///
    /// The options are valid during `'a`.
    unsafe fn from_raw(raw: *const bindings::nvmf_ctrl_options) -> Self {
        // INVARIANT: As the caller promises.
        Self(raw, PhantomData)
    }

    /// # Safety
    ///
    /// `text` is null or one of the options that do not change.
    #[inline(never)]
    unsafe fn text(&self, text: *const c_char) -> Option<&'a str> {
        let text = NonNull::new(text.cast_mut())?;
        // SAFETY: The option is a C string, and stays during `'a`.
        unsafe { CStr::from_char_ptr(text.as_ptr()) }.to_str().ok()
    }

    /// Parses an address, and a port if that is not null (`inet_pton_with_scope`).
    ///
    /// # Safety
    ///
    /// Each is null or one of the options that do not change.
    unsafe fn addr(addr: *const c_char, port: *const c_char) -> Result<SocketAddr> {
        if addr.is_null() {
            return Err(EINVAL);
        }
        let mut ip = [0; 16];
        let mut num = 0;
        let mut scope = 0;
        // SAFETY: The options are C strings, and stay during the call. There is room for what is
        // returned.
        let is_v6 = unsafe {
            let num = &raw mut num;
            let scope = &raw mut scope;
            bindings::nvme_helper_addr(addr, port, ip.as_mut_ptr(), num, scope)
        };
        to_result(is_v6)?;
        let [a, b, c, d, ..] = ip;
        Ok(match is_v6 {
            0 => SocketAddr::new([a, b, c, d].into(), num),
            _ => SocketAddrV6::new(ip.into(), num, 0, scope).into(),
        })
    }

    /// Returns the address of the target. Fails with `EINVAL`, and reports it, if there is none or
    /// it is malformed.
    pub(crate) fn traddr(&self) -> Result<SocketAddr> {
        // SAFETY: They are options, and do not change.
        unsafe {
            let addr = (*self.0).traddr;
            let port = (*self.0).trsvcid;
            Self::addr(addr, port).inspect_err(|_| {
                let addr = self.text(addr);
                let port = self.text(port);
                let addr = addr.unwrap_or("");
                let port = port.unwrap_or("");
                pr_err!("malformed address passed: {addr}:{port}\n");
            })
        }
    }

    /// Returns the address to connect from, if one was given. Fails with `EINVAL`, and reports it,
    /// if it is malformed.
    pub(crate) fn host_traddr(&self) -> Result<Option<SocketAddr>> {
        // SAFETY: It is one of the options, and does not change.
        unsafe {
            let addr = (*self.0).host_traddr;
            if addr.is_null() {
                return Ok(None);
            }
            let parsed = Self::addr(addr, ptr::null()).inspect_err(|_| {
                let addr = self.text(addr).unwrap_or("");
                pr_err!("malformed src address passed: {addr}\n");
            });
            parsed.map(Some)
        }
    }

    /// Returns the name of the subsystem.
    pub(crate) fn subsysnqn(&self) -> &'a str {
        // SAFETY: It is one of the options, and does not change.
        unsafe { self.text((*self.0).subsysnqn) }.unwrap_or("")
    }

    /// Returns the name of the host.
    pub(crate) fn hostnqn(&self) -> &'a str {
        // SAFETY: The options have a host, whose name ends with a zero and does not change.
        unsafe { self.text((&raw const (*(*self.0).host).nqn).cast()) }.unwrap_or("")
    }

    /// Returns the type of service, if one was given.
    pub(crate) fn tos(&self) -> Option<u8> {
        // SAFETY: By the type invariant the options are valid, and this one does not change.
        u8::try_from(unsafe { (*self.0).tos }).ok()
    }

    /// Returns the number of entries of an I/O queue.
    pub(crate) fn queue_size(&self) -> usize {
        // SAFETY: By the type invariant the options are valid, and this one does not change.
        unsafe { (*self.0).queue_size }
    }

    /// Returns whether there are to be queues that are polled.
    pub(crate) fn polls(&self) -> bool {
        // SAFETY: By the type invariant the options are valid, and this one does not change.
        unsafe { (*self.0).nr_poll_queues != 0 }
    }

    /// Returns the time between two attempts to connect, in seconds.
    pub(crate) fn reconnect_delay(&self) -> u32 {
        // SAFETY: By the type invariant the options are valid. A user may change it, so the read is
        // volatile.
        unsafe { (&raw const (*self.0).reconnect_delay).read_volatile() }
    }

    /// Returns the number of attempts to connect again, -1 for no end.
    pub(crate) fn max_reconnects(&self) -> i32 {
        // SAFETY: By the type invariant the options are valid. A user may change it, so the read is
        // volatile.
        unsafe { (&raw const (*self.0).max_reconnects).read_volatile() }
    }
}

/// The address of the [`Entry`] of a transport type; zero if it is not registered, and one while it
/// is being made.
pub(crate) struct Registered(Atomic<usize>);

const MAKING: usize = 1;

impl Registered {
    pub(crate) const fn new() -> Self {
        Self(Atomic::new(0))
    }
}

/// A transport that is registered with nvme-fabrics. It keeps the client: drop it in
/// [`Client::unload`](rdma::client::Client::unload). If it is forgotten, the module cannot be
/// unloaded. If it is dropped before that begins, its [`Entry`] is leaked.
///
/// # Invariants
///
/// The entry is from a box, and is registered. The client, which is that of the module that the
/// entry names, keeps the text of it until the entry is not registered.
pub(crate) struct Registration<T: Transport> {
    entry: NonNull<Entry<T>>,
    _client: ClientRef,
}

// SAFETY: Transports may be registered and unregistered in any thread: their list is locked.
unsafe impl<T: Transport> Send for Registration<T> {}
// SAFETY: nvme-fabrics locks the list that `ops` of the entry is in. All else of it is `Sync`.
unsafe impl<T: Transport> Sync for Registration<T> {}

/// What nvme-fabrics uses of a transport (`struct nvmf_transport_ops`) as long as it has a
/// reference to the module.
///
/// # Invariants
///
/// While there is a [`Registration`] of it, `ops` is in the list of nvme-fabrics, and `registered`,
/// which is that of no other entry, has the address of this.
#[pin_data]
#[repr(C)]
struct Entry<T: Transport> {
    id: TypeId,
    registered: &'static Registered,
    #[pin]
    ops: Opaque<bindings::nvmf_transport_ops>,
    /// Those that are not deleted.
    #[pin]
    controllers: Mutex<KVec<ControllerRef<T>>>,
}

impl<T: Transport> Registration<T> {
    /// Registers the transport. Fails with `EBUSY` if it is registered; `ENOMEM`. The last step of
    /// loading a module: controllers are made from here on.
    pub(crate) fn new(cx: &Sleepable) -> Result<Self> {
        let client = ClientRef::of::<T::Client>(cx)?;
        let ops = bindings::nvmf_transport_ops {
            module: T::Client::module().as_ptr(),
            name: T::name().as_char_ptr(),
            required_opts: bindings::NVMF_OPT_TRADDR as c_int,
            allowed_opts: T::ALLOWED_OPTS as c_int,
            create_ctrl: Some(Entry::<T>::create_ctrl),
            ..Default::default()
        };
        let registered = T::registered();
        let room = KBox::<Entry<T>>::new_uninit(GFP_KERNEL)?;
        registered.0.cmpxchg(0, MAKING, Full).map_err(|_| EBUSY)?;
        let init = pin_init!(Entry {
            id: TypeId::of::<T>(),
            registered,
            ops: Opaque::new(ops),
            controllers <- new_mutex!(KVec::new()),
        });
        let entry = room.write_pin_init(init).map_err(Error::from)?;
        // SAFETY: The entry is not moved: it goes back into a box only to be freed.
        let entry = KBox::leak(unsafe { Pin::into_inner_unchecked(entry) });
        registered.0.store(ptr::from_ref(entry).addr(), Release);
        // It cannot fail, as there is a `create_ctrl`.
        //
        // SAFETY: The structure stays where it is until `drop` has taken it out of the list, and
        // the module is being unloaded. If `drop` is never called, the client is never let go, for
        // which the unload waits. While nvme-fabrics uses the structure outside the lock of the
        // list, it has a reference to the module.
        unsafe { bindings::nvmf_register_transport(entry.ops.get()) };
        // INVARIANT: It was just registered, with the module of `T::Client`.
        Ok(Self {
            entry: entry.into(),
            _client: client,
        })
    }

    fn entry(&self) -> &Entry<T> {
        // SAFETY: By the type invariant the entry is valid, and it is only shared.
        unsafe { self.entry.as_ref() }
    }

    /// Deletes the controllers that `which` selects, and waits for that (`nvme_delete_ctrl`). One
    /// that is being created and was not started is left alone.
    pub(crate) fn delete(&self, which: impl Fn(&Controller<T>) -> bool, _cx: &Sleepable) {
        let controllers = self.entry().controllers.lock();
        for ctrl in controllers.iter().filter(|ctrl| which(ctrl)) {
            ctrl.delete();
        }
        drop(controllers);
        // SAFETY: nvme-core, which this module uses, has the work queue; the caller may sleep.
        unsafe { bindings::__flush_workqueue(bindings::nvme_delete_wq) };
    }
}

impl<T: Transport> Entry<T> {
    /// Returns the entry, if it is registered.
    ///
    /// # Safety
    ///
    /// The module has a reference, by a call of nvme-fabrics or a controller, during `'a`.
    unsafe fn get<'a>() -> Option<&'a Self> {
        let addr = T::registered().0.load(Acquire);
        if addr <= MAKING {
            return None;
        }
        let raw = addr as *const TypeId;
        // SAFETY: It is the address of an entry, of which the first field is its type, and which is
        // freed only when the module is being unloaded, so that it has no reference.
        unsafe { (*raw == TypeId::of::<T>()).then(|| &*raw.cast::<Self>()) }
    }

    /// Lists a controller.
    fn list(&self, ctrl: &Controller<T>) -> Result {
        let ctrl = ControllerRef::new(ctrl);
        Ok(self.controllers.lock().push(ctrl, GFP_KERNEL)?)
    }

    /// A controller is deleted, or was not created.
    fn forget(&self, ctrl: &Controller<T>) {
        let mut controllers = self.controllers.lock();
        let place = controllers
            .iter()
            .position(|it| ptr::eq(&raw const **it, ctrl));
        let gone = place.and_then(|place| controllers.remove(place).ok());
        drop(controllers);
        // Who deletes it has another reference.
        drop(gone);
    }

    /// Returns whether there is a controller of the same options (`nvmf_ip_options_match`).
    fn exists(&self, opts: *mut bindings::nvmf_ctrl_options) -> bool {
        let controllers = self.controllers.lock();
        let mut started = controllers.iter().filter(|it| it.started.load(Acquire));
        // SAFETY: The controllers are valid, and so are the options, which nvme-fabrics passes.
        started.any(|ctrl| unsafe { bindings::nvmf_ip_options_match(ctrl.raw(), opts) })
    }

    /// `nvmf_transport_ops.create_ctrl`.
    ///
    /// # Safety
    ///
    /// nvme-fabrics calls this.
    unsafe extern "C" fn create_ctrl(
        dev: *mut bindings::device,
        opts: *mut bindings::nvmf_ctrl_options,
    ) -> *mut bindings::nvme_ctrl {
        // SAFETY: As the caller promises; it is called for a write of a user, who may sleep.
        match unsafe { Self::create(dev, opts, &Sleepable::assume()) } {
            Ok(ctrl) => ctrl,
            // A status of NVMe is no error number.
            Err(Failure(code)) if code > 0 => EIO.to_ptr(),
            Err(Failure(code)) => Error::from_errno(code).to_ptr(),
        }
    }

    /// # Safety
    ///
    /// As for [`Self::create_ctrl`], which has the arguments from nvme-fabrics.
    unsafe fn create(
        dev: *mut bindings::device,
        opts: *mut bindings::nvmf_ctrl_options,
        cx: &Sleepable,
    ) -> Result<*mut bindings::nvme_ctrl, Failure> {
        // SAFETY: nvme-fabrics has a reference to the module during the call. The options are its
        // own until this returns, and not in use yet.
        let this = unsafe {
            if (*opts).mask & bindings::NVMF_OPT_TRSVCID == 0 {
                let port = c"4420".as_char_ptr();
                (*opts).trsvcid = bindings::kstrdup(port, bindings::GFP_KERNEL);
                if (*opts).trsvcid.is_null() {
                    return Err(ENOMEM.into());
                }
                (*opts).mask |= bindings::NVMF_OPT_TRSVCID;
            }
            Self::get().ok_or(ENODEV)?
        };
        // SAFETY: nvme-fabrics has passed the options, and frees them after this returns at the
        // earliest.
        if !unsafe { (*opts).duplicate_connect } && this.exists(opts) {
            return Err(EALREADY.into());
        }
        // SAFETY: These are what nvme-fabrics has passed.
        let ctrl = unsafe { Controller::<T>::alloc(dev, opts) }?;
        this.list(&ctrl)?;
        // SAFETY: The controller was just initialised.
        let added = Failure::check(unsafe { bindings::nvme_add_ctrl(ctrl.raw()) });
        let created = added.and_then(|()| {
            if !ctrl.change_state(State::Connecting, cx) {
                return Err(EINVAL.into());
            }
            // A user may have begun a reset before that, which does nothing yet. None begins while
            // the controller is connecting.
            //
            // SAFETY: The work was initialised; the caller may sleep.
            unsafe { bindings::flush_work(&raw mut (*ctrl.raw()).reset_work) };
            T::create(&ctrl, cx)
        });
        // From then on it can only be deleted.
        if !ctrl.started.load(Acquire) {
            // nvme-core may wait for a change of ANA states, or for the time of `fast_io_fail_tmo`.
            ctrl.stop(cx);
            ctrl.setup(cx).end(cx);
            // SAFETY: The caller may sleep, and is no work item. The queues are gone, and the works
            // of nvme-core were just ended: what queues them begins when the controller is live.
            unsafe { ctrl.close() };
            this.forget(&ctrl);
            if added.is_ok() {
                // SAFETY: The controller was added, and its queues are gone. This drops the
                // reference of `nvme_add_ctrl`.
                unsafe { bindings::nvme_uninit_ctrl(ctrl.raw()) };
            }
            return Err(created.err().unwrap_or(EINVAL.into()));
        }
        // The reference is that of nvme-fabrics' file.
        Ok(ManuallyDrop::new(ctrl).raw())
    }
}

impl<T: Transport> Drop for Registration<T> {
    fn drop(&mut self) {
        let entry = self.entry();
        // SAFETY: It is in the list by the invariants of both types.
        unsafe { bindings::nvmf_unregister_transport(entry.ops.get()) };
        entry.registered.0.store(0, Release);
        // A task may be between the end of `free_ctrl`, which has put the module, and its caller.
        //
        // SAFETY: Registrations are dropped in process context.
        unsafe { bindings::nvme_helper_synchronize_rcu_tasks() };
        // Before the module is unloaded, nvme-fabrics may be about to call `create_ctrl`.
        if is_going::<T::Client>() {
            // SAFETY: By the type invariant the entry is from a box. Nobody uses it, as the module
            // has no reference.
            drop(unsafe { KBox::from_raw(self.entry.as_ptr()) });
        }
    }
}
