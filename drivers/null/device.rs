// SPDX-License-Identifier: GPL-2.0

//! Devices: from `ib_alloc_device` to the end of `ib_unregister_device`.

use crate::{
    cq::VECTORS,
    debugfs,
    machine::Machine,
    memory::LOCAL_KEY,
    ops, //
};
use core::ptr::NonNull;
use kernel::{
    debugfs::Dir,
    error::to_result,
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    str::{
        CStr,
        CString, //
    },
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        ArcBorrow,
        Mutex,
        SpinLockIrq, //
    }, //
};
use rdma_bindings as bindings;

/// The device as C knows it.
#[repr(C)]
pub(crate) struct Ib {
    raw: bindings::ib_device,
    /// A reference to a [`Shared`], from before the registration to `dealloc_driver`; or null.
    shared: *const Shared,
}

/// What the C device, its handles and its files share.
///
/// # Invariants
///
/// `ib` is the `raw` of an [`Ib`], of which this has a reference.
#[pin_data(PinnedDrop)]
pub(crate) struct Shared {
    ib: NonNull<bindings::ib_device>,
    pub(crate) name: CString,
    #[pin]
    pub(crate) machine: SpinLockIrq<Machine>,
    /// Held while a handler of events is called, and to destroy a QP or an SRQ.
    #[pin]
    pub(crate) events: Mutex<()>,
    #[pin]
    files: Mutex<Option<debugfs::Files>>,
    pub(crate) guid: u64,
    gone: Atomic<bool>,
}

// SAFETY: A reference to a `struct ib_device` may be put in any thread, and the rest is `Send`.
unsafe impl Send for Shared {}
// SAFETY: A `struct ib_device` may be used by several threads at once, and the rest is `Sync`.
unsafe impl Sync for Shared {}

#[pinned_drop]
impl PinnedDrop for Shared {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: `ib` is valid, with a reference that this gives back, by the type invariant.
        unsafe { bindings::put_device(device_of(self.ib)) };
    }
}

/// # Safety
///
/// `ib` is a valid device.
unsafe fn device_of(ib: NonNull<bindings::ib_device>) -> *mut bindings::device {
    // SAFETY: The caller says that the device is valid; `dev` is the first member of the union.
    unsafe { (&raw mut (*ib.as_ptr()).__bindgen_anon_1).cast() }
}

impl Shared {
    pub(crate) fn ib(&self) -> *mut bindings::ib_device {
        self.ib.as_ptr()
    }

    /// Returns the state of a device that has operations.
    ///
    /// # Safety
    ///
    /// The RDMA core is calling an operation of `dev`, other than `dealloc_driver`, and the
    /// reference is not used after that.
    pub(crate) unsafe fn of<'a>(dev: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: The caller says that this is an operation. `register` sets the pointer before
        // there can be one, and `dealloc` clears it after the last.
        unsafe { &*(*dev.cast::<Ib>()).shared }
    }

    /// Makes the folder of a QP.
    pub(crate) fn add_files(&self, num: u32) {
        if let Some(files) = &mut *self.files.lock() {
            // As always with debugfs, what cannot be made is missing.
            let _ = files.add_qp(&self.reference(), num);
        }
    }

    fn reference(&self) -> Arc<Self> {
        // SAFETY: All of these are in an `Arc`: see `register`. `self` proves that one is alive.
        unsafe { ArcBorrow::from_raw(core::ptr::from_ref(self)) }.into()
    }

    pub(crate) fn remove_files(&self, num: u32) {
        let gone = match &mut *self.files.lock() {
            Some(files) => files.remove_qp(num),
            None => None,
        };
        drop(gone);
    }
}

/// # Safety
///
/// Called by the RDMA core, or a consumer, with a QP.
unsafe extern "C" fn no_drain(_qp: *mut bindings::ib_qp) {}

/// The devices of the module.
struct Devices {
    all: KVec<Arc<Shared>>,
    /// The folder of their folders.
    root: Option<Dir>,
}

kernel::sync::global_lock! {
    // SAFETY: The module's init initialises it, before anything else of the module runs.
    unsafe(uninit) static DEVICES: Mutex<Devices> = Devices { all: KVec::new(), root: None };
}

/// # Safety
///
/// Called once, first of all.
pub(crate) unsafe fn init(root: Dir) {
    // SAFETY: The caller calls this once, before anything else uses it.
    unsafe { DEVICES.init() };
    DEVICES.lock().root = Some(root);
}

/// Removes all devices and waits for the end of removals that others have begun. No device can be
/// made any more.
pub(crate) fn exit() {
    let devices = core::mem::replace(
        &mut *DEVICES.lock(),
        Devices {
            all: KVec::new(),
            root: None,
        },
    );
    devices.all.iter().for_each(|shared| unregister(shared));
}

/// Takes a device from its clients and ends it; waits for that, also if others have begun.
pub(crate) fn unregister(shared: &Shared) {
    // SAFETY: `Shared` has a reference to the device by its invariant. That it may be called
    // several times is what the lock in it is for; the first call does it, and the others wait.
    unsafe { bindings::ib_unregister_device(shared.ib()) };
}

/// What else a device is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    /// Of a driver that brings a drain of its own, which does nothing.
    OwnDrain,
    /// Of iWARP.
    Iwarp,
    /// Of a driver that does not say how much one request can have.
    Vague,
}

/// Makes a device and registers it. Clients have been told of it when this returns.
pub(crate) fn register(name: &CStr, kind: Kind) -> Result<Arc<Shared>> {
    // Machines are large, so they are not built on the stack.
    let mut machine = Machine::new()?;
    machine.iwarp = kind == Kind::Iwarp;
    machine.vague = kind == Kind::Vague;
    // SAFETY: The size is that of the structure that begins with the device.
    let ib = unsafe { bindings::_ib_alloc_device(size_of::<Ib>(), &raw mut bindings::init_net) };
    let ib = NonNull::new(ib).ok_or(ENOMEM)?;
    // SAFETY: Just allocated; this reference is for `Shared`.
    unsafe { bindings::get_device(device_of(ib)) };
    // SAFETY: Called once, where there is no `Shared`: both references, to which `ib` has come
    // since its allocation, are to be given back here.
    let put = |_: &Error| unsafe {
        bindings::put_device(device_of(ib));
        bindings::ib_dealloc_device(ib.as_ptr());
    };
    let name = CString::try_from(name)
        .map_err(Error::from)
        .inspect_err(put)?;
    // Locally administered, as a number of the vendor would be.
    static GUIDS: Atomic<u64> = Atomic::new(0x0200_00ff_fe00_0001);
    let guid = GUIDS.fetch_add(1, Relaxed);
    // INVARIANT: Just allocated and referenced.
    let init = pin_init!(Shared {
        ib,
        name,
        machine <- new_spinlock_irq!(machine),
        events <- new_mutex!(()),
        files <- new_mutex!(None),
        guid,
        gone: Atomic::new(false),
    });
    let shared = Arc::pin_init(init, GFP_KERNEL).inspect_err(put)?;

    // SAFETY: The device is the first member of an `Ib`, and nobody else knows it yet.
    unsafe {
        let raw = ib.as_ptr();
        (*raw.cast::<Ib>()).shared = Arc::into_raw(shared.clone());
        (*raw).node_type = bindings::RDMA_NODE_IB_CA as u8;
        (*raw).phys_port_cnt = 1;
        (*raw).num_comp_vectors = VECTORS;
        (*raw).local_dma_lkey = LOCAL_KEY;
        (*raw).node_guid = guid.to_be();
        bindings::ib_set_device_ops(raw, &raw const ops::OPS.0);
        if kind == Kind::OwnDrain {
            (*raw).ops.drain_sq = Some(no_drain);
            (*raw).ops.drain_rq = Some(no_drain);
        }
    }
    forget_gone();
    let kept = DEVICES.lock().all.push(shared.clone(), GFP_KERNEL);
    let netdev = |()| match kind {
        // The core asks the interface for the state of such ports.
        //
        // SAFETY: The device is not registered yet, and has the port. The loopback interface lives
        // as long as the kernel does, and the core takes a reference.
        Kind::Iwarp => to_result(unsafe {
            bindings::ib_device_set_netdev(ib.as_ptr(), bindings::init_net.loopback_dev, 1)
        }),
        Kind::Plain | Kind::OwnDrain | Kind::Vague => Ok(()),
    };
    let kept = kept.map_err(Error::from).and_then(netdev);
    let registered = kept.and_then(|()| {
        // SAFETY: The device is complete. There is no DMA device, so addresses are the kernel's.
        to_result(unsafe {
            bindings::ib_register_device(
                ib.as_ptr(),
                shared.name.as_char_ptr(),
                core::ptr::null_mut(),
            )
        })
    });
    if let Err(e) = registered {
        // SAFETY: Not registered. This calls `dealloc_driver`.
        unsafe { bindings::ib_dealloc_device(ib.as_ptr()) };
        forget_gone();
        return Err(e);
    }
    Ok(shared)
}

/// Forgets devices that are gone, once their last operation has returned.
fn forget_gone() {
    loop {
        let gone = {
            let mut devices = DEVICES.lock();
            let index = devices.all.iter().position(|it| it.gone.load(Acquire));
            index.and_then(|index| devices.all.remove(index).ok())
        };
        match gone {
            Some(shared) => unregister(&shared),
            None => return,
        }
    }
}

/// `enable_driver`: the device is registered, under a name that no other has, but has no clients
/// yet.
///
/// # Safety
///
/// Called by the RDMA core, once.
pub(crate) unsafe extern "C" fn enable(dev: *mut bindings::ib_device) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let shared = unsafe { Shared::of(dev) }.reference();
    if let Some(root) = &DEVICES.lock().root {
        *shared.files.lock() = Some(debugfs::Files::new(root, &shared));
    }
    0
}

/// `dealloc_driver`: the last operation.
///
/// # Safety
///
/// Called by the RDMA core, once.
pub(crate) unsafe extern "C" fn dealloc(dev: *mut bindings::ib_device) {
    let ib = dev.cast::<Ib>();
    // SAFETY: The device is valid, and nothing uses it at the same time.
    let shared = unsafe { core::mem::replace(&mut (*ib).shared, core::ptr::null()) };
    if !shared.is_null() {
        // SAFETY: This is the reference that `register` has left there, and it was taken out.
        let shared = unsafe { Arc::from_raw(shared) };
        let files = shared.files.lock().take();
        // Waits until nobody uses them.
        drop(files);
        shared.gone.store(true, Release);
    }
}
