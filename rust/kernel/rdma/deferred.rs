// SPDX-License-Identifier: GPL-2.0

//! Destruction in a work item.
//!
//! The last handle of a QP may be dropped in the QP's own completion handler, in a softirq. So a
//! drop only queues the object; a work item of this module, which may sleep, destroys it. A queued
//! object still has its [`Ref`](crate::refs::Ref), so removal and unload wait for it.

use crate::prelude::*;
use core::mem::ManuallyDrop;
use kernel::{
    fmt,
    sync::atomic,
    workqueue::{
        self,
        RawWorkItem, //
    }, //
};

/// A workqueue of unbound workers.
///
/// # Invariants
///
/// The pointer is a workqueue that is valid until this is dropped.
pub(crate) struct Workqueue(NonNull<bindings::workqueue_struct>);

// SAFETY: A workqueue may be used and destroyed from any thread.
unsafe impl Send for Workqueue {}
// SAFETY: A workqueue may be used by several threads at once: C locks it.
unsafe impl Sync for Workqueue {}

impl Workqueue {
    pub(crate) fn new(name: &CStr) -> Result<Self> {
        // SAFETY: The name is copied.
        let wq = unsafe { bindings::rdma_helper_alloc_workqueue(name.as_char_ptr()) };
        // INVARIANT: The workqueue was just allocated.
        Ok(Self(NonNull::new(wq).ok_or(ENOMEM)?))
    }

    pub(crate) fn get(&self) -> &workqueue::Queue {
        // SAFETY: By the type invariant the workqueue is valid while `self` is borrowed.
        unsafe { workqueue::Queue::from_raw(self.0.as_ptr()) }
    }
}

impl Drop for Workqueue {
    fn drop(&mut self) {
        // SAFETY: The workqueue is valid by the type invariant, and this waits for its work items.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// The address of the workqueue of [`Queue`].
///
/// # Invariants
///
/// Zero, or the address of a workqueue that is destroyed when the core module is unloaded.
static QUEUE: atomic::Atomic<usize> = atomic::Atomic::new(0);

/// The workqueue that destroys objects, part of the core module.
pub(crate) struct Queue(#[expect(dead_code)] Workqueue);

impl Queue {
    pub(crate) fn new() -> Result<Self> {
        let workqueue = Workqueue::new(c"rdma_rs")?;
        // INVARIANT: The workqueue was just allocated, and is the core module's.
        QUEUE.store(workqueue.0.as_ptr() as usize, atomic::Release);
        Ok(Self(workqueue))
    }

    /// Queues a work item, unless it is queued (`queue_work`). Not inlined, as each drop of a
    /// [`Deferred`] in a ULP calls it.
    ///
    /// # Safety
    ///
    /// `work` is valid, and stays so until it runs if this returns `true`.
    #[inline(never)]
    unsafe fn push(work: *mut bindings::work_struct) -> bool {
        let cpu = bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int;
        // SAFETY: The workqueue is there, as in `get`: the caller has an object of this crate. The
        // caller says that `work` is valid, and stays so while it is queued.
        unsafe { bindings::queue_work_on(cpu, QUEUE.load(atomic::Acquire) as *mut _, work) }
    }

    pub(crate) fn get() -> &'static workqueue::Queue {
        // SAFETY: The caller has objects of this crate. So the core module is initialised, and is
        // unloaded only after its users: the workqueue is there by the invariant of `QUEUE`.
        unsafe { workqueue::Queue::from_raw(QUEUE.load(atomic::Acquire) as *const _) }
    }
}

/// A value whose destruction sleeps.
pub(crate) trait Teardown: Send + 'static {
    /// Destroys the value. Called once, before it is dropped if this returns [`Fate::Gone`].
    fn teardown(&mut self, cx: &Sleepable) -> Fate;
}

/// The result of [`Teardown::teardown`].
#[derive(PartialEq, Eq)]
pub(crate) enum Fate {
    /// The value is destroyed: drop it.
    Gone,
    /// The value could not be proved to be out of use: never free it.
    Leak,
}

impl Fate {
    /// Returns the fate of an object by what C has returned that was to destroy it. A failure is
    /// reported.
    #[inline(never)]
    pub(crate) fn of(object: fmt::Arguments<'_>, ret: c_int) -> Self {
        if ret == 0 {
            return Self::Gone;
        }
        pr_err!("{object} could not be destroyed ({ret}); it is leaked\n");
        Self::Leak
    }
}

/// A value that is torn down by a work item when it is dropped.
///
/// # Invariants
///
/// The box is not taken out before the value is dropped or destroyed.
pub(crate) struct Deferred<T: Teardown>(ManuallyDrop<Pin<KBox<Item<T>>>>);

/// Memory for a [`Deferred`], allocated before its value is made.
pub(crate) struct Reserved<T: Teardown>(KBox<core::mem::MaybeUninit<Item<T>>>);

impl<T: Teardown> Reserved<T> {
    /// Wraps a value. Must be called from functions that are neither generic nor inlined, so that
    /// the work item's code is this module's: a ULP's code may be gone when it returns.
    pub(crate) fn fill(self, value: T) -> Deferred<T> {
        let Ok(item) = self.0.write_pin_init(pin_init!(Item {
            work <- kernel::new_work!("rdma::Deferred"),
            value: ManuallyDrop::new(value),
        }));
        // INVARIANT: The box was just filled.
        Deferred(ManuallyDrop::new(item))
    }
}

#[pin_data]
struct Item<T: Teardown> {
    #[pin]
    work: workqueue::Work<Item<T>>,
    value: ManuallyDrop<T>,
}

kernel::impl_has_work! {
    impl{T: Teardown} HasWork<Self> for Item<T> { self.work }
}

impl<T: Teardown> Item<T> {
    fn finish(self: Pin<KBox<Self>>, cx: &Sleepable) -> Fate {
        // SAFETY: The content of the box is not moved before it is dropped; `value`, which is
        // borrowed mutably below, is not pinned structurally.
        let mut item = unsafe { Pin::into_inner_unchecked(self) };
        let fate = item.value.teardown(cx);
        match fate {
            // SAFETY: The value is not used again: the box is freed right after this.
            Fate::Gone => unsafe { ManuallyDrop::drop(&mut item.value) },
            Fate::Leak => core::mem::forget(item),
        }
        fate
    }
}

impl<T: Teardown> workqueue::WorkItem for Item<T> {
    type Pointer = Pin<KBox<Self>>;

    fn run(this: Self::Pointer) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.finish(&cx);
    }
}

impl<T: Teardown> Deferred<T> {
    /// Allocates memory for a value, so that nothing fails once there is one.
    pub(crate) fn reserve() -> Result<Reserved<T>> {
        Ok(Reserved(KBox::new_uninit(GFP_KERNEL)?))
    }

    /// Tears the value down and waits for that.
    pub(crate) fn destroy(self, cx: &Sleepable) -> Fate {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: The box was not taken out by the type invariant; `this` is not used again.
        unsafe { ManuallyDrop::take(&mut this.0) }.finish(cx)
    }
}

impl<T: Teardown> core::ops::Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: Teardown> core::ops::DerefMut for Deferred<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: Nothing is moved out, and `value` is not pinned structurally.
        &mut unsafe { self.0.as_mut().get_unchecked_mut() }.value
    }
}

impl<T: Teardown> Drop for Deferred<T> {
    fn drop(&mut self) {
        // SAFETY: The box was not taken out by the type invariant, and `self` is not used again.
        let item = unsafe { ManuallyDrop::take(&mut self.0) };
        // SAFETY: `push` returns `false` only if the work item is queued already. An item is `Send`
        // and has no lifetime, as a `Teardown` value is and has none. `__enqueue` says that its
        // pointer is valid, and stays so while it is queued.
        unsafe { item.__enqueue(|work| Queue::push(work)) };
    }
}
