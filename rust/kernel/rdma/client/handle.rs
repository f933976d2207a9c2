// SPDX-License-Identifier: GPL-2.0

//! The part of a client's registration that does not depend on the ULP's type, and handles of it.

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
    objects::{
        Listed,
        Owner, //
    }, //
};
use core::{
    marker::PhantomPinned,
    ptr::NonNull, //
};
use kernel::{
    alloc::Flags,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::Mutex,
    types::Opaque, //
};

/// A ULP's counted reference to its own registration; unloading the module waits for it.
///
/// # Invariants
///
/// `core` is valid while `hold` lives, and `hold` is a hold on its gate.
pub struct ClientRef {
    core: NonNull<Core>,
    hold: Hold,
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
        // INVARIANT: The new hold is on the same gate.
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
pub(super) struct Entry(pub(super) NonNull<device::Inner>);

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
    pub(super) raw: Opaque<bindings::ib_client>,
    #[pin]
    pub(crate) gate: Gate,
    #[pin]
    pub(super) devices: Mutex<KVec<Entry>>,
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
    pub(super) fn new(raw: bindings::ib_client, name: &'static CStr) -> Result<Pin<KBox<Self>>> {
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

    pub(super) fn handle(&self) -> Result<ClientRef> {
        // SAFETY: `self` is pinned by `Core::new`, and its drop closes the gate.
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
