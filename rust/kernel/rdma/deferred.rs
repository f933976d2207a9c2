// SPDX-License-Identifier: GPL-2.0

//! Destruction that sleeps, away from whoever drops the last handle.
//!
//! The last handle of a QP may well be dropped in its own completion handler, in a softirq. So a
//! drop only queues the object; a work item of this module, which may sleep, destroys it. What is
//! queued still has its [`Ref`](crate::refs::Ref), so removal and unload wait for it.

use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    }, //
};
use core::{
    convert::Infallible,
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ops::{
        Deref,
        DerefMut, //
    },
    ptr::NonNull, //
};
use kernel::{
    impl_has_work,
    new_work,
    prelude::*,
    sync::atomic::{
        ordering::{
            Acquire,
            Release, //
        },
        Atomic, //
    },
    workqueue::{
        self,
        Work,
        WorkItem, //
    }, //
};

/// The queue that destroys, owned by the core module.
///
/// # Invariants
///
/// Zero, or the address of a workqueue that lives as long as this module's text can be reached by
/// its users.
static QUEUE: Atomic<usize> = Atomic::new(0);

/// A workqueue of unbound workers.
///
/// # Invariants
///
/// The pointer is a workqueue that is valid until this is dropped.
pub(crate) struct OwnedQueue(NonNull<bindings::workqueue_struct>);

// SAFETY: A workqueue may be used and destroyed from any thread.
unsafe impl Send for OwnedQueue {}
// SAFETY: A workqueue may be used by several threads at once: C locks it.
unsafe impl Sync for OwnedQueue {}

impl OwnedQueue {
    pub(crate) fn new(name: &CStr) -> Result<Self> {
        // SAFETY: The name is copied.
        let wq = unsafe { bindings::rdma_helper_alloc_workqueue(name.as_char_ptr()) };
        // INVARIANT: Just allocated.
        Ok(Self(NonNull::new(wq).ok_or(ENOMEM)?))
    }

    pub(crate) fn get(&self) -> &workqueue::Queue {
        // SAFETY: By the type invariant the workqueue is valid while `self` is borrowed.
        unsafe { workqueue::Queue::from_raw(self.0.as_ptr()) }
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        // SAFETY: The workqueue is valid by the type invariant, and is not used again. This waits
        // for the end of what runs.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// Owns the workqueue that destroys; part of the core module. Modules that use this one are gone
/// before it is dropped, and all their objects before them, so nothing queues any more then.
pub(crate) struct Queue {
    _queue: OwnedQueue,
}

impl Queue {
    pub(crate) fn new() -> Result<Self> {
        let queue = OwnedQueue::new(c"rdma_rs")?;
        // INVARIANT: Just allocated, destroyed only with this module.
        QUEUE.store(queue.0.as_ptr() as usize, Release);
        Ok(Self { _queue: queue })
    }

    pub(crate) fn get() -> &'static workqueue::Queue {
        // SAFETY: By the invariant of `QUEUE`: a caller has objects of this crate, so the module is
        // initialised and not being unloaded.
        unsafe { workqueue::Queue::from_raw(QUEUE.load(Acquire) as *const _) }
    }
}

/// Something whose destruction sleeps.
pub(crate) trait Teardown: Send + 'static {
    /// Destroys it. Called once; what the value owns is dropped after that, unless it says to leak
    /// it.
    fn teardown(&mut self, cx: &Sleepable) -> Fate;
}

/// What becomes of the value after its [`Teardown`].
#[derive(PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is destroyed: drop it.
    Gone,
    /// It could not be proved to be out of use: never free it.
    Leak,
}

/// A value that is torn down by a work item when it is dropped.
///
/// # Invariants
///
/// The box is there until the value is dropped or destroyed.
pub(crate) struct Deferred<T: Teardown>(ManuallyDrop<Pin<KBox<Item<T>>>>);

/// The place for a value that is to be wrapped.
pub(crate) struct Reserved<T: Teardown>(KBox<MaybeUninit<Item<T>>>);

impl<T: Teardown> Reserved<T> {
    /// Wraps a value.
    ///
    /// To be called from functions that are not generic and never inlined, so that the work item's
    /// code is this module's: a ULP's code may be gone when it returns.
    pub(crate) fn fill(self, value: T) -> Deferred<T> {
        let item = self.0.write_pin_init::<Infallible>(pin_init!(Item {
            work <- new_work!("rdma::Deferred"),
            value: ManuallyDrop::new(value),
        }));
        match item {
            // INVARIANT: The box is there.
            Ok(item) => Deferred(ManuallyDrop::new(item)),
            Err(never) => match never {},
        }
    }
}

#[pin_data]
struct Item<T: Teardown> {
    #[pin]
    work: Work<Item<T>>,
    value: ManuallyDrop<T>,
}

impl_has_work! {
    impl{T: Teardown} HasWork<Self> for Item<T> { self.work }
}

impl<T: Teardown> Item<T> {
    fn finish(self: Pin<KBox<Self>>, cx: &Sleepable) -> Fate {
        // SAFETY: What is in the box stays where it is until it is dropped; `value`, which is
        // borrowed mutably below, is not pinned structurally.
        let mut item = unsafe { Pin::into_inner_unchecked(self) };
        let fate = item.value.teardown(cx);
        match fate {
            // SAFETY: Dropped once: the box is freed right after this.
            Fate::Gone => unsafe { ManuallyDrop::drop(&mut item.value) },
            // The value stays where it is, for whoever still uses it.
            Fate::Leak => core::mem::forget(item),
        }
        fate
    }
}

impl<T: Teardown> WorkItem for Item<T> {
    type Pointer = Pin<KBox<Self>>;

    fn run(this: Self::Pointer) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.finish(&cx);
    }
}

impl<T: Teardown> Deferred<T> {
    /// Allocates the place for a value, so that once there is one nothing can fail.
    pub(crate) fn reserve() -> Result<Reserved<T>> {
        Ok(Reserved(KBox::new_uninit(GFP_KERNEL)?))
    }

    /// Tears the value down now and waits for the end of it.
    pub(crate) fn destroy(self, cx: &Sleepable) -> Fate {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: The box is there by the type invariant; `this` is not used again and is not
        // dropped.
        unsafe { ManuallyDrop::take(&mut this.0) }.finish(cx)
    }
}

impl<T: Teardown> Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: Teardown> DerefMut for Deferred<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: Nothing is moved out, and `value` is not pinned structurally.
        let item = unsafe { self.0.as_mut().get_unchecked_mut() };
        &mut item.value
    }
}

impl<T: Teardown> Drop for Deferred<T> {
    fn drop(&mut self) {
        // SAFETY: The box is there by the type invariant, and `self` is not used again.
        let item = unsafe { ManuallyDrop::take(&mut self.0) };
        Queue::get().enqueue(item);
    }
}
