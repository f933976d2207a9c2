// SPDX-License-Identifier: GPL-2.0

//! Controllers, the places of their queues, and the operations that nvme-core calls.

use super::{
    setup::Setup,
    Entry,
    Failure,
    Options,
    Transport, //
};
use crate::bindings;
use core::{
    mem::ManuallyDrop,
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    device::Device,
    error::to_result,
    new_condvar,
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed, //
        },
        rcu,
        Arc,
        ArcBorrow,
        CondVar,
        Mutex,
        SpinLockIrq, //
    },
    types::Opaque, //
};
use rdma::{
    client::ModuleClient,
    context::{
        Context as _,
        Sleepable, //
    }, //
};

/// The number of queues of each type, in the order of `enum hctx_type`: default, read, poll.
pub(super) const TYPES: usize = bindings::hctx_type_HCTX_MAX_TYPES as usize;

/// The place of a queue, which is the `driver_data` of its hardware context.
///
/// # Invariants
///
/// This is null, or from [`Arc::into_raw`] of a queue: the reference is the slot's. It is dropped
/// only after this was set to null and an RCU grace period has passed, or with the slot.
pub(super) struct Slot<Q>(Atomic<*mut Q>);

impl<Q> Slot<Q> {
    fn new() -> Self {
        // INVARIANT: There is no queue.
        Self(Atomic::new(ptr::null_mut()))
    }

    /// Puts a queue in. Gives it back if there is one.
    pub(super) fn put(&self, queue: Arc<Q>) -> Result<(), Arc<Q>> {
        let raw = Arc::into_raw(queue);
        // INVARIANT: The reference is the slot's if it was empty.
        match self.0.cmpxchg(ptr::null_mut(), raw.cast_mut(), Full) {
            Ok(_) => Ok(()),
            // SAFETY: `raw` is from `into_raw`, and nothing else has the reference.
            Err(_) => Err(unsafe { Arc::from_raw(raw) }),
        }
    }

    /// Takes the queue out.
    ///
    /// # Safety
    ///
    /// The reference is dropped after an RCU grace period.
    pub(super) unsafe fn take(&self) -> Option<Arc<Q>> {
        // INVARIANT: The caller has the reference, for a grace period at least, as it promises.
        let raw = self.0.xchg(ptr::null_mut(), Full);
        // SAFETY: By the type invariant it is from `into_raw`, and was the slot's.
        (!raw.is_null()).then(|| unsafe { Arc::from_raw(raw) })
    }

    /// Takes this queue out, if it is in its place.
    ///
    /// # Safety
    ///
    /// The reference is dropped after an RCU grace period.
    unsafe fn take_this(&self, queue: &Arc<Q>) -> Option<Arc<Q>> {
        // INVARIANT: The caller has the reference, for a grace period at least, as it promises.
        let at = Arc::as_ptr(queue).cast_mut();
        let taken = self.0.cmpxchg(at, ptr::null_mut(), Full);
        // SAFETY: By the type invariant it is from `into_raw`, and was the slot's.
        taken.ok().map(|raw| unsafe { Arc::from_raw(raw) })
    }

    /// Returns the queue.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU read-side section, and does not use the queue after it.
    #[inline]
    pub(super) unsafe fn get<'a>(&self) -> Option<ArcBorrow<'a, Q>> {
        let raw = NonNull::new(self.0.load(Acquire))?;
        // SAFETY: By the type invariant this is from `Arc::into_raw` of a queue, a reference to
        // which is not dropped before the section ends. There are shared references to it only.
        Some(unsafe { ArcBorrow::from_raw(raw.as_ptr()) })
    }

    /// Returns a reference to the queue. Any context.
    pub(super) fn clone_queue(&self) -> Option<Arc<Q>> {
        let _guard = rcu::read_lock();
        // SAFETY: The guard keeps the section until the reference is counted.
        unsafe { self.get() }.map(Arc::from)
    }
}

impl<Q> Drop for Slot<Q> {
    fn drop(&mut self) {
        // SAFETY: The slot goes with its controller, which has no users left.
        drop(unsafe { self.take() });
    }
}

/// The way from a queue to its controller, which it does not keep: there is none once the
/// controller is freed.
#[pin_data]
pub(crate) struct Link<T: Transport> {
    /// `None` once the controller is being freed.
    #[pin]
    ctrl: SpinLockIrq<Option<ControllerPtr<T>>>,
}

/// # Invariants
///
/// While a [`Link`] has it and is locked, the controller is valid.
struct ControllerPtr<T: Transport>(NonNull<Controller<T>>);

// SAFETY: A controller may be used from any thread.
unsafe impl<T: Transport> Send for ControllerPtr<T> {}

impl<T: Transport> Link<T> {
    /// Calls `f` with the controller, if there is one. Any context.
    fn with<R>(&self, f: impl FnOnce(&Controller<T>) -> R) -> Option<R> {
        let ctrl = self.ctrl.lock();
        // SAFETY: By the invariant of `ControllerPtr` the controller is valid.
        ctrl.as_ref().map(|ctrl| f(unsafe { ctrl.0.as_ref() }))
    }

    /// Calls `f` with the character device, for messages, if there is a controller. Any context.
    pub(crate) fn with_device(&self, f: impl FnOnce(&Device)) {
        self.with(|ctrl| f(ctrl.device()));
    }

    /// Has [`Transport::error_recovery`] called if the controller is live; does nothing if it is
    /// being set up, reset or deleted: that code finds the error itself. Any context.
    pub(crate) fn error_recovery(&self) {
        self.with(|ctrl| {
            // To that state this does not sleep.
            //
            // SAFETY: The controller is valid. The work was initialised. It is cancelled after the
            // link was closed, and before the controller is freed.
            unsafe {
                if !bindings::nvme_change_ctrl_state(ctrl.raw(), State::Resetting as u32) {
                    return;
                }
                dev_warn!(ctrl.device(), "starting error recovery\n");
                let cpu = bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int;
                bindings::queue_work_on(cpu, bindings::nvme_reset_wq, ctrl.err_work.get());
            }
        });
    }

    /// Takes a queue that was stopped from its place, and returns whether it was there. It goes
    /// when nothing uses it, and with it the requests that its device has lost: a task that waits
    /// for one of them may hold the [`Setup`](super::Setup), by which it is taken otherwise.
    pub(crate) fn forget(&self, qid: u16, queue: &Arc<T::Queue>, _cx: &Sleepable) -> bool {
        let slot = |ctrl: &Controller<T>| {
            let slot = ctrl.slots.get(usize::from(qid))?;
            // SAFETY: The reference is dropped after the grace period below.
            unsafe { slot.take_this(queue) }
        };
        let Some(queue) = self.with(slot).flatten() else {
            return false;
        };
        // SAFETY: The token proves that the caller may sleep.
        unsafe { bindings::synchronize_rcu() };
        drop(queue);
        true
    }

    /// Passes an asynchronous event on, whose status and result are as they were sent. Any context.
    pub(crate) fn complete_async_event(&self, status: u16, result: u64) {
        let mut result = bindings::nvme_completion_nvme_result {
            u64_: ManuallyDrop::new(result),
        };
        self.with(|ctrl| {
            // SAFETY: The controller is valid, and the result as well. The work that this may queue
            // is cancelled after the link was closed, and before the controller is freed.
            unsafe { bindings::nvme_complete_async_event(ctrl.raw(), status, &raw mut result) }
        });
    }
}

/// The states of a controller that are the transport's (`enum nvme_ctrl_state`). Only nvme-core
/// begins to delete one.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    Live = bindings::nvme_ctrl_state_NVME_CTRL_LIVE,
    Resetting = bindings::nvme_ctrl_state_NVME_CTRL_RESETTING,
    Connecting = bindings::nvme_ctrl_state_NVME_CTRL_CONNECTING,
}

/// A controller (`struct nvme_ctrl`).
///
/// # Invariants
///
/// - `ctrl` was initialised by `nvme_init_ctrl`, but while this is being made, and the works as
///   well.
/// - There is a reference to the module until this is freed.
/// - `admin_set` and `io_set` are tag sets as [`Sets`] describes.
#[repr(C)]
#[pin_data]
pub(crate) struct Controller<T: Transport> {
    // First: nvme-core has its address.
    #[pin]
    ctrl: Opaque<bindings::nvme_ctrl>,
    #[pin]
    pub(super) admin_set: Opaque<bindings::blk_mq_tag_set>,
    #[pin]
    pub(super) io_set: Opaque<bindings::blk_mq_tag_set>,
    #[pin]
    err_work: Opaque<bindings::work_struct>,
    #[pin]
    reconnect_work: Opaque<bindings::delayed_work>,
    ops: bindings::nvme_ctrl_ops,
    /// The numbers of queues of each type, for `map_queues`.
    pub(super) io_queues: [Atomic<u32>; TYPES],
    /// The admin queue, and as many I/O queues as there may be.
    pub(super) slots: KVec<Slot<T::Queue>>,
    pub(super) link: Arc<Link<T>>,
    /// Namespaces may exist, and nvme-fabrics gets the controller: its options go with it, and it
    /// is deleted by nvme-core.
    pub(super) started: Atomic<bool>,
    #[pin]
    sets: Mutex<Sets<T>>,
    /// `nvme_start_ctrl` has returned.
    #[pin]
    start_ended: CondVar,
    #[pin]
    data: T,
}

// SAFETY: nvme-core locks what it changes in a `struct nvme_ctrl`, but for what [`Setup`] gives
// exclusive access to, and fields that are read and written at once. All else is `Send`.
unsafe impl<T: Transport> Send for Controller<T> {}
// SAFETY: nvme-core locks what it changes in a `struct nvme_ctrl`, but for what [`Setup`] gives
// exclusive access to, and fields that are read and written at once. All else is `Sync`.
unsafe impl<T: Transport> Sync for Controller<T> {}

/// What is set up of a controller.
///
/// # Invariants
///
/// - `admin` and `io` say whether the tag sets are allocated.
pub(super) struct Sets<T: Transport> {
    pub(super) admin: bool,
    pub(super) io: bool,
    /// No namespace can use the tag sets.
    pub(super) removable: bool,
    /// The controller is being deleted, or was not created: no tag set is allocated from then on.
    pub(super) dead: bool,
    /// The number of calls of `nvme_start_ctrl` that have not returned.
    pub(super) starting: u32,
    /// Queues that were taken from their places, until a grace period has passed.
    pub(super) taken: KVec<Option<Arc<T::Queue>>>,
    pub(super) state: T::State,
}

impl<T: Transport> Deref for Controller<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

impl<T: Transport> Controller<T> {
    /// Returns the operations that nvme-core calls.
    fn ops() -> bindings::nvme_ctrl_ops {
        bindings::nvme_ctrl_ops {
            name: T::name().as_char_ptr(),
            module: T::Client::module().as_ptr(),
            // No request has metadata, as there are no segments for them: nvme-core has the target
            // make and check protection information.
            flags: bindings::NVME_F_FABRICS | bindings::NVME_F_METADATA_SUPPORTED,
            reg_read32: Some(bindings::nvmf_reg_read32),
            reg_read64: Some(bindings::nvmf_reg_read64),
            reg_write32: Some(bindings::nvmf_reg_write32),
            subsystem_reset: Some(Self::subsystem_reset),
            free_ctrl: Some(Self::free_ctrl),
            submit_async_event: Some(Self::submit_async_event),
            delete_ctrl: Some(Self::delete_ctrl),
            stop_ctrl: Some(Self::stop_ctrl),
            get_address: Some(bindings::nvmf_get_address),
            get_virt_boundary: Some(bindings::nvme_helper_get_virt_boundary),
            ..Default::default()
        }
    }

    /// Allocates a controller (`nvme_init_ctrl`), which [`ControllerRef`] owns from then on.
    ///
    /// # Safety
    ///
    /// nvme-fabrics is calling `create_ctrl` of `T` with these.
    pub(super) unsafe fn alloc(
        dev: *mut bindings::device,
        opts: *mut bindings::nvmf_ctrl_options,
    ) -> Result<ControllerRef<T>> {
        // SAFETY: nvme-fabrics passes valid options, and is calling this, as the caller promises.
        let queues = unsafe {
            let opts = &*opts;
            let queues = [opts.nr_io_queues, opts.nr_write_queues, opts.nr_poll_queues];
            queues.iter().fold(1_u32, |sum, n| sum.saturating_add(*n))
        };
        let mut slots = KVec::with_capacity(queues as usize, GFP_KERNEL)?;
        let mut taken = KVec::with_capacity(queues as usize, GFP_KERNEL)?;
        for _ in 0..queues {
            slots.push_within_capacity(Slot::new())?;
            taken.push_within_capacity(None)?;
        }
        let link = pin_init!(Link {
            ctrl <- new_spinlock_irq!(None),
        });
        // SAFETY: nvme-fabrics passes valid options, which it does not free during the call.
        let given = unsafe { Options::from_raw(opts) };
        let data = T::new(&given);
        let init = try_pin_init!(Self {
            ctrl: Opaque::zeroed(),
            admin_set: Opaque::zeroed(),
            io_set: Opaque::zeroed(),
            err_work: Opaque::zeroed(),
            reconnect_work: Opaque::zeroed(),
            ops: Self::ops(),
            io_queues: [const { Atomic::new(0) }; TYPES],
            slots,
            link: Arc::pin_init(link, GFP_KERNEL)?,
            started: Atomic::new(false),
            sets <- new_mutex!(Sets {
                admin: false,
                io: false,
                removable: true,
                dead: false,
                starting: 0,
                taken,
                state: T::State::default(),
            }),
            start_ended <- new_condvar!(),
            data <- data,
        });
        let this = KBox::pin_init(init, GFP_KERNEL)?;
        // SAFETY: The controller is not moved: it goes back into a box only to be freed.
        let this = NonNull::from(KBox::leak(unsafe { Pin::into_inner_unchecked(this) }));
        // SAFETY: It was just made and leaked, and nothing else uses it yet. The works are those of
        // this type, and the device is nvme-fabrics'. The operations stay as long as the
        // controller.
        let ret = unsafe {
            let ctrl = this.as_ref();
            let raw = ctrl.raw();
            (*raw).opts = opts;
            (*raw).queue_count = queues;
            (*raw).sqsize = ((*opts).queue_size as u16).wrapping_sub(1);
            (*raw).kato = (*opts).kato;
            bindings::nvme_helper_init_works(
                &raw mut (*raw).reset_work,
                Some(Self::reset_work),
                ctrl.err_work.get(),
                Some(Self::err_work),
                ctrl.reconnect_work.get(),
                Some(Self::reconnect_work),
            );
            bindings::nvme_init_ctrl(raw, dev, &raw const ctrl.ops, 0)
        };
        if let Err(e) = to_result(ret) {
            // SAFETY: It was just leaked, and nothing has its address.
            drop(unsafe { KBox::from_raw(this.as_ptr()) });
            return Err(e);
        }
        // INVARIANT: The module is loaded, as nvme-fabrics has a reference during the call.
        //
        // SAFETY: The module is that of the driver whose `create_ctrl` is running, so it is loaded.
        unsafe { bindings::__module_get(T::Client::module().as_ptr()) };
        // SAFETY: `nvme_init_ctrl` has returned a reference, and `free_ctrl` frees the controller
        // when the last one is put.
        let ctrl = unsafe { this.as_ref() };
        // INVARIANT: It is valid until `free_ctrl` takes the address away.
        *ctrl.link.ctrl.lock() = Some(ControllerPtr(this));
        // INVARIANT: `nvme_init_ctrl` has returned a reference.
        Ok(ControllerRef(this))
    }

    pub(super) fn raw(&self) -> *mut bindings::nvme_ctrl {
        self.ctrl.get()
    }

    /// Returns the controller that nvme-core calls by this address.
    ///
    /// # Safety
    ///
    /// `raw` is of a `Controller<T>`, which stays during `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut bindings::nvme_ctrl) -> &'a Self {
        // SAFETY: The `struct nvme_ctrl` is its first field, as the caller promises.
        unsafe { &*raw.cast::<Self>() }
    }

    /// Returns the number of the queue in a slot.
    pub(super) fn qid(&self, slot: &Slot<T::Queue>) -> usize {
        let mut slots = self.slots.iter();
        slots.position(|it| ptr::eq(it, slot)).unwrap_or(0)
    }

    /// Returns the character device, for messages.
    pub(crate) fn device(&self) -> &Device {
        // SAFETY: `nvme_init_ctrl` has initialised it, and it stays as long as the controller.
        unsafe { Device::from_raw((*self.raw()).device) }
    }

    /// Returns a way to the controller.
    pub(crate) fn link(&self) -> &Arc<Link<T>> {
        &self.link
    }

    /// Returns the options that the user has given.
    pub(crate) fn opts(&self) -> Options<'_> {
        // SAFETY: The options stay as long as the controller, and were set when it was made.
        unsafe { Options::from_raw((*self.raw()).opts) }
    }

    /// Returns the state, none if it is new, or is being deleted. Any context.
    pub(crate) fn state(&self) -> Option<State> {
        // SAFETY: By the type invariant `nvme_init_ctrl` has initialised the controller.
        match unsafe { bindings::nvme_helper_ctrl_state(self.raw()) } {
            bindings::nvme_ctrl_state_NVME_CTRL_LIVE => Some(State::Live),
            bindings::nvme_ctrl_state_NVME_CTRL_RESETTING => Some(State::Resetting),
            bindings::nvme_ctrl_state_NVME_CTRL_CONNECTING => Some(State::Connecting),
            _ => None,
        }
    }

    /// Changes the state, if it may change so (`nvme_change_ctrl_state`).
    pub(crate) fn change_state(&self, state: State, _cx: &Sleepable) -> bool {
        // SAFETY: By the type invariant `nvme_init_ctrl` has initialised the controller. The token
        // proves that the caller may sleep.
        unsafe { bindings::nvme_change_ctrl_state(self.raw(), state as u32) }
    }

    /// Has [`Transport::reset`] called if the controller is live, which it is without this queue.
    /// Any context.
    pub(super) fn reset_without(&self, qid: usize) {
        // SAFETY: The controller is valid. To the state of a reset it changes without sleeping, and
        // not if it is being deleted, which waits for the work.
        if unsafe { bindings::nvme_reset_ctrl(self.raw()) } == 0 {
            dev_warn!(self.device(), "no queue {qid}, resetting\n");
        }
    }

    /// Begins to delete the controller (`nvme_delete_ctrl`), if it was ever started.
    pub(crate) fn delete(&self) {
        if self.started.load(Acquire) {
            // SAFETY: The controller is valid, and was created or is about to be, as it is never
            // given up once it was started. One that is being deleted is not deleted again.
            unsafe { bindings::nvme_delete_ctrl(self.raw()) };
        }
    }

    /// Has [`Transport::reconnect`] called after so many seconds, unless the controller is deleted
    /// meanwhile.
    pub(crate) fn reconnect_later(&self, seconds: u32) {
        self.link.with(|ctrl| {
            let jiffies = kernel::time::msecs_to_jiffies(seconds.saturating_mul(1000));
            // SAFETY: The work was initialised. It is cancelled after the link was closed, and
            // before the controller is freed.
            unsafe {
                let cpu = bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int;
                let work = ctrl.reconnect_work.get();
                bindings::queue_delayed_work_on(cpu, bindings::nvme_wq, work, jiffies)
            };
        });
    }

    /// Returns whether another attempt may be made after one that has failed so
    /// (`nvmf_should_reconnect`).
    pub(crate) fn should_reconnect(&self, failure: Option<Failure>) -> bool {
        let status = failure.map_or(0, Failure::code);
        // SAFETY: By the type invariant `nvme_init_ctrl` has initialised the controller. Its
        // options were set before that, and stay as long.
        unsafe { bindings::nvmf_should_reconnect(self.raw(), status) }
    }

    /// Counts an attempt to connect again; returns how many there were since the last success.
    pub(crate) fn count_reconnect(&self) -> u32 {
        // SAFETY: The controller is valid. The field is the transport's; it is written by work that
        // nvme-core does not do twice at a time.
        unsafe {
            let count = &raw mut (*self.raw()).nr_reconnects;
            let attempts = count.read_volatile().wrapping_add(1);
            count.write_volatile(attempts);
            attempts as u32
        }
    }

    /// The last attempt was successful.
    pub(crate) fn reconnected(&self) {
        // SAFETY: The controller is valid. The fields are the transport's, as in
        // `count_reconnect`.
        unsafe { bindings::nvme_helper_reconnected(self.raw()) };
    }

    /// Waits for the work that reports an asynchronous event to users, and asks for the next one if
    /// the controller is live.
    pub(crate) fn flush_async_event_work(&self, _cx: &Sleepable) {
        // SAFETY: By the type invariant `nvme_init_ctrl` has initialised the controller, and with
        // it the work. The token proves that the caller may sleep.
        unsafe { bindings::flush_work(&raw mut (*self.raw()).async_event_work) };
    }

    /// Ends what nvme-core does beside commands (`nvme_stop_ctrl`): before a reset, or where a new
    /// controller is given up.
    pub(crate) fn stop(&self, _cx: &Sleepable) {
        // SAFETY: By the type invariant `nvme_init_ctrl` has initialised the controller. The token
        // proves that the caller may sleep.
        unsafe { bindings::nvme_stop_ctrl(self.raw()) };
    }

    /// Waits for exclusive access to what is set up.
    pub(crate) fn setup<'a>(&'a self, _cx: &'a Sleepable) -> Setup<'a, T> {
        Setup::new(self, self.sets.lock())
    }

    /// A call of `nvme_start_ctrl` has returned.
    pub(super) fn start_ended(&self) {
        let mut sets = self.sets.lock();
        sets.starting = sets.starting.saturating_sub(1);
        drop(sets);
        self.start_ended.notify_all();
    }

    /// Closes the link, and ends the timer and the works, which nothing starts after that.
    ///
    /// # Safety
    ///
    /// The caller is none of the works, and may sleep. The queues are gone, and nvme-core has ended
    /// its own works.
    pub(super) unsafe fn close(&self) {
        // A queue that is called at this moment holds the lock.
        *self.link.ctrl.lock() = None;
        // SAFETY: Timer and works were initialised, and the caller may sleep, as it promises.
        unsafe {
            bindings::nvme_helper_mpath_stop(self.raw());
            bindings::cancel_work_sync(self.err_work.get());
            bindings::cancel_delayed_work_sync(self.reconnect_work.get());
            bindings::cancel_work_sync(&raw mut (*self.raw()).async_event_work);
            // A deletion waits for it. But `nvme_try_sched_reset` looks at the state before it
            // queues it, and the deletion may have begun between the two.
            bindings::cancel_work_sync(&raw mut (*self.raw()).reset_work);
        }
    }

    /// Frees the controller (`nvme_ctrl_ops.free_ctrl`).
    ///
    /// # Safety
    ///
    /// nvme-core is calling this for a `Controller<T>`, whose last reference is gone.
    unsafe extern "C" fn free_ctrl(raw: *mut bindings::nvme_ctrl) {
        // SAFETY: The controller is valid until the box is dropped below. nvme-core calls this
        // where it may sleep, as it has slept just before. The last reference is not put in a work
        // of the controller: who queues it, or nvme-core, which waits for it, has one.
        unsafe {
            let this = Self::from_raw(raw);
            this.close();
            if this.started.load(Relaxed) {
                bindings::nvmf_free_options((*raw).opts);
            }
            drop(KBox::from_raw(raw.cast::<Self>()));
            // This returns through code of the module, for which `Registration` waits.
            bindings::module_put(T::Client::module().as_ptr());
        }
    }

    /// Resets the subsystem, by a user (`nvme_ctrl_ops.subsystem_reset`).
    ///
    /// # Safety
    ///
    /// nvme-core is calling this for a `Controller<T>`, where it may sleep.
    unsafe extern "C" fn subsystem_reset(raw: *mut bindings::nvme_ctrl) -> c_int {
        // Where its command fails, as where the connection ends, `nvmf_subsystem_reset` leaves the
        // controller in the state of a reset that nobody makes, and in which no error recovery
        // begins. In any other state `nvme_try_sched_reset` does nothing.
        //
        // SAFETY: nvme-core passes a controller that `nvme_init_ctrl` has initialised with its
        // works, and has a reference to it during the call.
        unsafe {
            let ret = bindings::nvmf_subsystem_reset(raw);
            if ret != 0 {
                bindings::nvme_try_sched_reset(raw);
            }
            ret
        }
    }

    /// Sends a request for an asynchronous event (`nvme_ctrl_ops.submit_async_event`).
    ///
    /// # Safety
    ///
    /// nvme-core is calling this for a `Controller<T>`.
    unsafe extern "C" fn submit_async_event(raw: *mut bindings::nvme_ctrl) {
        // SAFETY: nvme-core passes a `Controller<T>`, as the caller promises, and has a reference
        // to it during the call.
        let this = unsafe { Self::from_raw(raw) };
        if let Some(admin) = this.slots.first().and_then(Slot::clone_queue) {
            T::submit_async_event(&admin);
        }
    }

    /// Ends the works of the transport (`nvme_ctrl_ops.stop_ctrl`).
    ///
    /// # Safety
    ///
    /// nvme-core is calling this for a `Controller<T>`.
    unsafe extern "C" fn stop_ctrl(raw: *mut bindings::nvme_ctrl) {
        // SAFETY: The controller is valid during the call, and the works were initialised.
        // nvme-core calls this where it may sleep, from a reset or a deletion.
        unsafe {
            let this = Self::from_raw(raw);
            bindings::flush_work(this.err_work.get());
            bindings::cancel_delayed_work_sync(this.reconnect_work.get());
        }
    }

    /// Tears the controller down (`nvme_ctrl_ops.delete_ctrl`).
    ///
    /// # Safety
    ///
    /// nvme-core is calling this for a `Controller<T>`, once, whose namespaces are gone.
    unsafe extern "C" fn delete_ctrl(raw: *mut bindings::nvme_ctrl) {
        // SAFETY: The controller is valid during the call, which is made where it may sleep.
        let (this, cx) = unsafe { (Self::from_raw(raw), Sleepable::assume()) };
        {
            let mut sets = this.sets.lock();
            sets.dead = true;
            // Its commands are answered, or fail.
            while sets.starting > 0 {
                this.start_ended.wait(&mut sets);
            }
            sets.removable = true;
        }
        T::delete(this, &cx);
        // Whatever the transport has left.
        this.setup(&cx).end(&cx);
        // SAFETY: nvme-core calls this in a work item of its own, after it has ended all others of
        // the controller, and the queues are gone.
        unsafe { this.close() };
        // SAFETY: The controller was created, so the module has a reference.
        if let Some(entry) = unsafe { Entry::<T>::get() } {
            entry.forget(this);
        }
    }

    /// # Safety
    ///
    /// Called for the work of a `Controller<T>`.
    unsafe extern "C" fn err_work(work: *mut bindings::work_struct) {
        let work: *mut Opaque<bindings::work_struct> = work.cast();
        // SAFETY: The work is a field of a controller, which stays until the work was cancelled.
        // Work items run where they may sleep.
        unsafe {
            let this = kernel::container_of!(work, Self, err_work);
            T::error_recovery(&*this, &Sleepable::assume());
        }
    }

    /// # Safety
    ///
    /// Called for the work of a `Controller<T>`.
    unsafe extern "C" fn reconnect_work(work: *mut bindings::work_struct) {
        // SAFETY: The work is the first field of a delayed one that is a field of a controller,
        // which stays until the work was cancelled. Work items run where they may sleep.
        unsafe {
            let work = kernel::container_of!(work, bindings::delayed_work, work);
            let work: *mut Opaque<bindings::delayed_work> = work.cast();
            let this = kernel::container_of!(work, Self, reconnect_work);
            T::reconnect(&*this, &Sleepable::assume());
        }
    }

    /// # Safety
    ///
    /// Called for the work of a `Controller<T>`.
    unsafe extern "C" fn reset_work(work: *mut bindings::work_struct) {
        // SAFETY: The work is a field of the `struct nvme_ctrl` of a controller, which nvme-core
        // keeps until it has ended. Work items run where they may sleep.
        unsafe {
            let raw = kernel::container_of!(work, bindings::nvme_ctrl, reset_work);
            let this = Self::from_raw(raw);
            let cx = Sleepable::assume();
            // One that is being created is set up by who does that, and has the lock from before it
            // is live until it is started.
            drop(this.setup(&cx));
            if this.started.load(Acquire) {
                T::reset(this, &cx);
            }
        }
    }
}

/// A counted reference to a controller, which is dropped where one may sleep.
///
/// # Invariants
///
/// The controller is valid, and this counts.
pub(super) struct ControllerRef<T: Transport>(NonNull<Controller<T>>);

// SAFETY: A controller may be used, and freed, in any thread.
unsafe impl<T: Transport> Send for ControllerRef<T> {}
// SAFETY: A controller may be used in any thread.
unsafe impl<T: Transport> Sync for ControllerRef<T> {}

impl<T: Transport> Deref for ControllerRef<T> {
    type Target = Controller<T>;

    fn deref(&self) -> &Controller<T> {
        // SAFETY: By the type invariant the controller is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<T: Transport> ControllerRef<T> {
    pub(super) fn new(ctrl: &Controller<T>) -> Self {
        // SAFETY: `ctrl` is borrowed, so it is not freed during the call.
        unsafe { bindings::nvme_helper_get_ctrl(ctrl.raw()) };
        // INVARIANT: Just counted.
        Self(ctrl.into())
    }
}

impl<T: Transport> Drop for ControllerRef<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this has a reference, which is not used after this.
        unsafe { bindings::nvme_helper_put_ctrl(self.raw()) };
    }
}
