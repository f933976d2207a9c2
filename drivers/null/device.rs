// SPDX-License-Identifier: GPL-2.0

//! Devices: their state, their events and their files in debugfs.

use crate::{
    cq::Cq,
    inject::{
        Arms,
        Failures,
        Injection,
        Plan,
        Scope,
        Stall, //
    },
    machine::{
        Machine,
        MAX_SRQ, //
    },
    qp::{
        self,
        MAX_QP, //
    }, //
};
use core::{
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    debugfs::{
        Dir,
        File,
        Reader,
        Writer, //
    },
    fmt,
    impl_has_work,
    new_mutex,
    new_spinlock_irq,
    new_work,
    prelude::*,
    str::{
        CStr,
        CString, //
    },
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        ArcBorrow,
        Mutex,
        SpinLockIrq, //
    },
    uaccess::UserSliceReader,
    workqueue::{
        self,
        Work,
        WorkItem, //
    }, //
};
use rdma_bindings as bindings;

/// The device's `struct ib_device`.
#[repr(C)]
struct IbDevice {
    raw: bindings::ib_device,
    /// A reference to a [`Shared`] from [`Shared::new`] to `dealloc_driver`, null otherwise.
    shared: *const Shared,
}

/// The state that the C device, its handles and its files share.
///
/// # Invariants
///
/// `ib` is the `raw` of an [`IbDevice`]; this has a reference of it.
#[pin_data(PinnedDrop)]
pub(crate) struct Shared {
    ib: NonNull<bindings::ib_device>,
    pub(crate) name: CString,
    #[pin]
    pub(crate) machine: SpinLockIrq<Machine>,
    /// Held while an event handler of a QP or an SRQ is called, and to destroy one.
    #[pin]
    pub(crate) events: Mutex<()>,
    #[pin]
    files: Mutex<Option<Files>>,
    /// The folder that `files` are made in.
    root: Option<Dir>,
    pub(crate) guid: u64,
    /// `true` once `removal` was queued.
    removed: Atomic<bool>,
    #[pin]
    removal: Work<Shared>,
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
    // SAFETY: The caller promises that the device is valid; `dev` is the first member of the union.
    unsafe { (&raw mut (*ib.as_ptr()).__bindgen_anon_1).cast() }
}

impl Shared {
    /// Allocates a device, without operations, and its state. `root` is the folder for its files.
    ///
    /// The caller registers it, or gives the device back by `ib_dealloc_device`.
    pub(crate) fn new(name: &CStr, machine: Machine, root: Option<Dir>) -> Result<Arc<Self>> {
        // SAFETY: The size is that of the structure that begins with the device.
        let ib = unsafe {
            bindings::_ib_alloc_device(size_of::<IbDevice>(), &raw mut bindings::init_net)
        };
        let ib = NonNull::new(ib).ok_or(ENOMEM)?;
        // SAFETY: Just allocated; this reference is for `Shared`.
        unsafe { bindings::get_device(device_of(ib)) };
        // SAFETY: Called at most once, where there is no `Shared`: `ib` has the reference of its
        // allocation and the one that was just taken.
        let put = |_: &Error| unsafe {
            bindings::put_device(device_of(ib));
            bindings::ib_dealloc_device(ib.as_ptr());
        };
        let name = CString::try_from(name)
            .map_err(Error::from)
            .inspect_err(put)?;
        // A locally administered address, as those of vendors are not ours to give.
        static GUIDS: Atomic<u64> = Atomic::new(0x0200_00ff_fe00_0001);
        // INVARIANT: Just allocated and referenced.
        let init = pin_init!(Shared {
            ib,
            name,
            machine <- new_spinlock_irq!(machine),
            events <- new_mutex!(()),
            files <- new_mutex!(None),
            root,
            guid: GUIDS.fetch_add(1, Relaxed),
            removed: Atomic::new(false),
            removal <- new_work!("rdma_null::Shared::removal"),
            gone: Atomic::new(false),
        });
        let shared = Arc::pin_init(init, GFP_KERNEL).inspect_err(put)?;
        // SAFETY: The device is the first member of an `IbDevice`, and there is no other reference
        // to it outside of this function.
        unsafe { (*ib.as_ptr().cast::<IbDevice>()).shared = Arc::into_raw(shared.clone()) };
        Ok(shared)
    }

    pub(crate) fn ib(&self) -> *mut bindings::ib_device {
        self.ib.as_ptr()
    }

    /// Returns the `struct device` of the C device.
    pub(crate) fn dev(&self) -> *mut bindings::device {
        // SAFETY: `ib` is valid by the type invariant.
        unsafe { device_of(self.ib) }
    }

    /// Returns the state of a device that has operations.
    ///
    /// # Safety
    ///
    /// The RDMA core is calling an operation of `dev`, other than `dealloc_driver`, and the
    /// reference is not used after that.
    pub(crate) unsafe fn of<'a>(dev: *mut bindings::ib_device) -> &'a Self {
        // SAFETY: The caller promises that this is an operation. `new` sets the pointer before the
        // device has operations, and `Shared::dealloc` clears it after the last.
        unsafe { &*(*dev.cast::<IbDevice>()).shared }
    }

    /// Makes the folder of a QP.
    pub(crate) fn add_files(&self, num: u32) {
        if let Some(files) = &mut *self.files.lock() {
            // Files that cannot be made are missing, as usual in debugfs.
            let _ = files.add_qp(&self.reference(), num);
        }
    }

    fn reference(&self) -> Arc<Self> {
        // SAFETY: `new` has made this in an `Arc`, and makes no others. `self` keeps it alive.
        unsafe { ArcBorrow::from_raw(core::ptr::from_ref(self)) }.into()
    }

    pub(crate) fn remove_files(&self, num: u32) {
        let gone = match &mut *self.files.lock() {
            Some(files) => files.remove_qp(num),
            None => None,
        };
        drop(gone);
    }

    /// Unregisters the device from the RDMA core and waits until its clients have released it, also
    /// if another thread has begun to.
    pub(crate) fn unregister(&self) {
        // SAFETY: `ib` is valid by the type invariant. The function may be called several times:
        // the first call unregisters the device, and the others wait for it under its lock.
        unsafe { bindings::ib_unregister_device(self.ib()) };
    }

    /// Waits until the work items of a removal that was begun, and of the connection manager, have
    /// returned, so that the module may go. The device is unregistered.
    pub(crate) fn flush_work(&self) {
        let cm = self.machine.lock().cm.clone();
        if let Some(cm) = cm {
            cm.flush();
        }
        // SAFETY: The work item is initialised, and there is a reference to it. This is not called
        // by itself.
        unsafe { bindings::flush_work(Work::raw_get(&raw const self.removal)) };
    }

    /// Unregisters the device from a work item.
    ///
    /// # Errors
    ///
    /// `EALREADY` if that was begun before.
    pub(crate) fn begin_removal(&self) -> Result {
        if self.removed.xchg(true, Full) {
            return Err(EALREADY);
        }
        // It is queued once only, so this cannot fail.
        let _ = workqueue::system_long().enqueue(self.reference());
        Ok(())
    }

    /// Returns whether a removal was begun by [`Shared::begin_removal`].
    pub(crate) fn is_being_removed(&self) -> bool {
        self.removed.load(Acquire)
    }

    /// Makes the device's files: it has a name that no other device has, and no clients yet.
    pub(crate) fn enable(&self) {
        if let Some(root) = &self.root {
            *self.files.lock() = Some(Files::new(root, &self.reference()));
        }
    }

    /// Returns whether the last operation of the device was called.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Acquire)
    }

    /// Drops the reference that the C device has.
    ///
    /// # Safety
    ///
    /// The RDMA core is calling `dealloc_driver` of `dev`, which is the last operation.
    pub(crate) unsafe fn dealloc(dev: *mut bindings::ib_device) {
        let ib = dev.cast::<IbDevice>();
        // SAFETY: The device is valid, and nothing uses it at the same time, as this is in its last
        // operation.
        let shared = unsafe { core::mem::replace(&mut (*ib).shared, core::ptr::null()) };
        if !shared.is_null() {
            // SAFETY: This is the reference that `new` has left there, and it was taken out.
            let shared = unsafe { Arc::from_raw(shared) };
            let files = shared.files.lock().take();
            // This waits until the files are not in use.
            drop(files);
            shared.gone.store(true, Release);
        }
    }
}

impl_has_work! {
    impl HasWork<Self> for Shared { self.removal }
}

impl WorkItem for Shared {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.unregister();
    }
}

/// The device's QP.
#[repr(C)]
pub(crate) struct IbQp {
    raw: bindings::ib_qp,
    pub(crate) index: usize,
}

/// # Safety
///
/// The RDMA core, or a consumer, is calling an operation of `qp`, which was created, and the
/// reference is not used after that.
pub(crate) unsafe fn qp_parts<'a>(qp: *mut bindings::ib_qp) -> (&'a Shared, usize) {
    // SAFETY: The caller promises that this is an operation of the QP, and so of its device.
    // `create_qp` has set the index.
    unsafe { (Shared::of((*qp).device), (*qp.cast::<IbQp>()).index) }
}

impl Shared {
    pub(crate) fn inject(&self, qp: Option<u32>, injection: Injection) -> Result {
        let Some(num) = qp else {
            return self.inject_any(injection);
        };
        if let Injection::Event { event } = injection {
            return self.raise_of_qp(num, event);
        }
        let mut machine = self.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        if matches!(injection.scope(), Scope::Device | Scope::Cm) {
            return Err(EINVAL);
        }
        match injection {
            Injection::Connect { peer } => machine.connect_qp(index, peer),
            Injection::Fail => machine.fail_qp(index),
            Injection::Release { count, reversed } => machine.release(index, count, reversed),
            _ => {}
        }
        if let Some(qp) = machine.qps.get_mut(index) {
            match injection {
                Injection::Stall { us, late } => qp.stall = Stall::Next { us, late },
                Injection::Dwell { us } => qp.changes.dwell = us,
                Injection::Find { us } => qp.find = us,
                _ => qp.plan.set(injection),
            }
        }
        Ok(())
    }

    /// As [`NullDevice::calm`](crate::NullDevice::calm).
    pub(crate) fn calm(&self) {
        let mut machine = self.machine.lock();
        (machine.plan, machine.deregs) = (Plan::default(), Failures::default());
        for index in 0..MAX_QP {
            if let Some(qp) = machine.qps.get_mut(index) {
                qp.plan = Plan::default();
            }
            machine.release(index, u32::MAX, false);
        }
    }

    fn inject_any(&self, injection: Injection) -> Result {
        if let Injection::Event { event } = injection {
            return self.raise(event);
        }
        let mut machine = self.machine.lock();
        match injection.scope() {
            Scope::Qp => return Err(EINVAL),
            Scope::Cm => {
                machine.cm.as_ref().ok_or(EINVAL)?.inject(injection);
                return Ok(());
            }
            Scope::Qps | Scope::Device => {}
        }
        match injection {
            Injection::Create {
                object,
                after,
                errno,
            } => machine.creations.set(object, after, errno),
            Injection::Dereg { errno, count } => machine.deregs = Failures { errno, count },
            Injection::Eager { on } => machine.eager = on,
            Injection::Arm { us, count, honest } => machine.arms = Arms { us, count, honest },
            Injection::Release { count, reversed } => {
                (0..MAX_QP).for_each(|index| machine.release(index, count, reversed));
                machine.plan.set(injection);
            }
            _ => machine.plan.set(injection),
        }
        Ok(())
    }
}

macro_rules! raise_event {
    ($raise:ident, $object:ident: $type:ident, $context:ident) => {
        /// Raises an event of an object, by the handler that its user or the core has set.
        ///
        /// # Safety
        ///
        /// The object is valid until this returns. Process context.
        pub(crate) unsafe fn $raise(object: *mut bindings::$type, event: bindings::ib_event_type) {
            // SAFETY: The caller promises that the object is valid; the core has set these before
            // it was created.
            let (device, handler, context) = unsafe {
                (
                    (*object).device,
                    (*object).event_handler,
                    (*object).$context,
                )
            };
            let mut event = bindings::ib_event {
                device,
                element: bindings::ib_event__bindgen_ty_1 {
                    $object: ManuallyDrop::new(object),
                },
                event,
            };
            if let Some(handler) = handler {
                // SAFETY: The handler is called in process context, with an event of the object
                // and its context.
                unsafe { handler(&raw mut event, context) };
            }
        }
    };
}

raise_event!(raise_qp_event, qp: ib_qp, qp_context);
raise_event!(raise_srq_event, srq: ib_srq, srq_context);

impl Shared {
    /// Raises an event of the QP with this number.
    pub(crate) fn raise_of_qp(&self, num: u32, event: u32) -> Result {
        // No QP is destroyed while this is held.
        let _events = self.events.lock();
        let raw = {
            let machine = self.machine.lock();
            let qp = machine
                .find_qp(num)
                .and_then(|index| machine.qps.get(index));
            qp.ok_or(ENOENT)?.config.raw
        };
        // SAFETY: The QP is in its table, and is taken out with `events` locked before it is freed.
        unsafe { raise_qp_event(raw.0.as_ptr(), event) };
        Ok(())
    }

    /// Raises an event of every SRQ.
    fn raise_of_srqs(&self, event: u32) {
        // No SRQ is destroyed while this is held.
        let _events = self.events.lock();
        for index in 0..MAX_SRQ {
            let raw = self.machine.lock().srqs.get(index).map(|srq| srq.raw);
            if let Some(raw) = raw {
                // SAFETY: The SRQ is in its table, and is taken out with `events` locked before it
                // is freed.
                unsafe { raise_srq_event(raw.0.as_ptr(), event) };
            }
        }
    }

    /// Raises an event of the device, of its port, or of all its CQs or SRQs.
    pub(crate) fn raise(&self, event: u32) -> Result {
        match event {
            bindings::ib_event_type_IB_EVENT_CQ_ERR => {
                self.machine.lock().cqs.iter().for_each(Cq::fail);
            }
            bindings::ib_event_type_IB_EVENT_SRQ_ERR => self.raise_of_srqs(event),
            _ => return self.dispatch(event),
        }
        Ok(())
    }

    fn dispatch(&self, event: u32) -> Result {
        // SAFETY: `Shared` has a reference to the device by its invariant.
        if !unsafe { bindings::rdma_helper_device_try_get(self.ib()) } {
            return Err(ENODEV);
        }
        let event = bindings::ib_event {
            device: self.ib(),
            element: bindings::ib_event__bindgen_ty_1 {
                port_num: ManuallyDrop::new(1),
            },
            event,
        };
        // SAFETY: The device is registered until the put of what `try_get` has taken.
        unsafe {
            bindings::ib_dispatch_event(&raw const event);
            bindings::ib_device_put(self.ib());
        }
        Ok(())
    }
}

/// The device or QP that a file belongs to.
struct Subject {
    shared: Arc<Shared>,
    qp: Option<u32>,
}

/// The file `inject`.
struct Inject(Subject);

/// The file `state`.
struct State(Subject);

/// The file `remove`.
struct Remove(Arc<Shared>);

impl Reader for Inject {
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        let mut buf = [0; 64];
        let line = buf.get_mut(..reader.len()).ok_or(EINVAL)?;
        reader.read_slice(line)?;
        let line = core::str::from_utf8(line).map_err(|_| EINVAL)?;
        let done = (line.parse()).and_then(|what| self.0.shared.inject(self.0.qp, what));
        done.inspect_err(|e| pr_err!("inject: {:?}: {e:?}\n", line.trim_end()))
    }
}

impl Reader for Remove {
    /// Removes the device from a work item: the removal waits for the end of this call.
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        reader.skip(reader.len())?;
        self.0.begin_removal()
    }
}

impl Writer for State {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.0.shared.machine.lock();
        let Some(num) = self.0.qp else {
            let numbers = [
                ("cqs", machine.cqs.iter().count()),
                ("qps", machine.qps.iter().count()),
                ("srqs", machine.srqs.iter().count()),
                ("mrs", machine.mrs.iter().count()),
                (
                    "completions",
                    machine.cqs.iter().map(|cq| cq.len()).sum::<usize>(),
                ),
                ("eager", machine.eager.into()),
            ];
            return numbers
                .iter()
                .try_for_each(|(name, number)| writeln!(f, "{name} {number}"));
        };
        let Some(qp) = machine
            .find_qp(num)
            .and_then(|index| machine.qps.get(index))
        else {
            return Ok(());
        };
        writeln!(f, "state {}", qp.state)?;
        writeln!(f, "peer {}", qp.attr.dest_qp_num)?;
        writeln!(f, "sends {}", qp.sends)?;
        writeln!(f, "receives {}", qp.recvs.used())?;
        writeln!(f, "held {}", qp.held.len())
    }
}

/// The folder of a QP.
struct QpFiles {
    num: u32,
    _inject: Pin<KBox<File<Inject>>>,
    _state: Pin<KBox<File<State>>>,
}

/// The folder of a device.
pub(crate) struct Files {
    dir: Dir,
    /// By the index of the QP.
    qps: KVVec<Option<QpFiles>>,
    _inject: Option<Pin<KBox<File<Inject>>>>,
    _state: Option<Pin<KBox<File<State>>>>,
    _remove: Option<Pin<KBox<File<Remove>>>>,
}

fn inject(dir: &Dir, shared: &Arc<Shared>, qp: Option<u32>) -> Result<Pin<KBox<File<Inject>>>> {
    let shared = shared.clone();
    let file = dir.write_only_file(c"inject", Inject(Subject { shared, qp }));
    KBox::pin_init(file, GFP_KERNEL)
}

fn state(dir: &Dir, shared: &Arc<Shared>, qp: Option<u32>) -> Result<Pin<KBox<File<State>>>> {
    let shared = shared.clone();
    let file = dir.read_only_file(c"state", State(Subject { shared, qp }));
    KBox::pin_init(file, GFP_KERNEL)
}

impl Files {
    /// Makes the folder of a device. Files that cannot be made are missing, as usual in debugfs.
    pub(crate) fn new(root: &Dir, shared: &Arc<Shared>) -> Self {
        let dir = root.subdir(&shared.name);
        let remove = Remove(shared.clone());
        Self {
            _inject: inject(&dir, shared, None).ok(),
            _state: state(&dir, shared, None).ok(),
            _remove: KBox::pin_init(dir.write_only_file(c"remove", remove), GFP_KERNEL).ok(),
            qps: KVVec::new(),
            dir,
        }
    }

    /// Makes the folder of a QP.
    pub(crate) fn add_qp(&mut self, shared: &Arc<Shared>, num: u32) -> Result {
        let name = CString::try_from_fmt(fmt!("{num}"))?;
        let dir = self.dir.subdir(&name);
        let files = QpFiles {
            num,
            _inject: inject(&dir, shared, Some(num))?,
            _state: state(&dir, shared, Some(num))?,
        };
        let index = qp::index_of(num);
        while self.qps.len() <= index {
            self.qps.push(None, GFP_KERNEL)?;
        }
        if let Some(slot) = self.qps.get_mut(index) {
            *slot = Some(files);
        }
        Ok(())
    }

    /// Takes the folder of a QP out, to be dropped.
    pub(crate) fn remove_qp(&mut self, num: u32) -> Option<impl Sized> {
        let slot = self.qps.get_mut(qp::index_of(num))?;
        slot.take_if(|files| files.num == num)
    }
}
