// SPDX-License-Identifier: GPL-2.0

//! A client's registration with the RDMA core, which its module owns.

use super::{
    handle::{
        Core,
        Entry, //
    },
    Client,
    DeviceData, //
};
use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    },
    device::{
        self,
        Device,
        Event, //
    },
    removal::Step, //
};
use core::ptr::NonNull;
use kernel::{
    error::{
        from_result,
        to_result, //
    },
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
        Arc, //
    }, //
};

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

        // SAFETY: `inner` is valid until `release` has closed its gate.
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
