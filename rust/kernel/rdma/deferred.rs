// SPDX-License-Identifier: GPL-2.0

//! Destruction in a work item.
//!
//! The last handle of a QP may be dropped in the QP's own completion handler, in a softirq. So a
//! drop only queues the object; a work item of this module, which may sleep, destroys it. A queued
//! object still has its reference to the device, so removal and unload wait for it.
//!
//! A QP may be in use for long, as a handler of its CQ may sleep. The work item does not wait for
//! it in one go, which would keep a worker from other objects, but queues it again.
//!
//! Destroying an object may wait for handlers of the ULP, and a workqueue runs a limited number of
//! work items at a time. So each device of each client has a workqueue of its own, and each client
//! has one for what is on no device. That of the core module is for the messages of the connection
//! managers, for connections that are given up, and for MAD agents whose device goes.
//!
//! A connection may have hundreds of MRs, whose end waits for nothing. Those of a device that are
//! dropped before the work item of the first of them runs are a batch, which that destroys.
//!
//! Value, count, work item and place in the list of objects are one allocation.

mod batch;

use crate::{
    objects::Object,
    prelude::internal::*,
    published::Published, //
};
use batch::{
    Batched,
    Next, //
};
use core::{
    convert::Infallible,
    mem::forget, //
};
use kernel::{
    sync,
    workqueue, //
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
        // SAFETY: The name is a string that lives during the call, which copies it.
        let wq = unsafe { bindings::rdma_helper_alloc_workqueue(name.as_char_ptr()) };
        // INVARIANT: The workqueue was just allocated.
        Ok(Self(NonNull::new(wq).ok_or(ENOMEM)?))
    }

    pub(crate) fn get(&self) -> &workqueue::Queue {
        // SAFETY: By the type invariant the workqueue is valid while `self` is borrowed.
        unsafe { workqueue::Queue::from_raw(self.0.as_ptr()) }
    }

    /// Waits for all work items that were queued before (`flush_workqueue`).
    pub(crate) fn flush(&self, _cx: &Sleepable) {
        // SAFETY: By the type invariant the workqueue is valid.
        unsafe { bindings::__flush_workqueue(self.0.as_ptr()) };
    }
}

impl Drop for Workqueue {
    fn drop(&mut self) {
        // SAFETY: The workqueue is valid by the type invariant, and this waits for its work items.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// The workqueue of [`CoreWorkqueue`].
static QUEUE: Published<workqueue::Queue> = Published::new();

/// The workqueue of the core module: of messages of the connection managers, of connections that
/// are given up, and of MAD agents whose device goes.
pub(crate) struct CoreWorkqueue(#[expect(dead_code)] Workqueue);

impl CoreWorkqueue {
    pub(crate) fn new() -> Result<Self> {
        let workqueue = Workqueue::new(c"rdma_rs")?;
        // SAFETY: The workqueue is the core module's, and is destroyed when that is unloaded.
        unsafe { QUEUE.set(workqueue.get()) };
        Ok(Self(workqueue))
    }

    pub(crate) fn get() -> &'static workqueue::Queue {
        // SAFETY: The caller has objects of this crate, so the core module is initialised, and has
        // set this.
        unsafe { QUEUE.get().unwrap_unchecked() }
    }
}

/// Values that were dropped, of any types, and that the work item of the first of them tears down.
pub(crate) struct Dropped(batch::Batch<Member>);

impl Dropped {
    pub(crate) fn new() -> Self {
        Self(batch::Batch::new())
    }
}

/// The part of an item by which it is in a batch.
///
/// # Invariants
///
/// `end` is [`Item::end`] of the type of the item that has this.
struct Member {
    next: Next<Member>,
    end: unsafe fn(*mut Member, &Sleepable),
}

impl Batched for Member {
    fn next(&self) -> &Next<Self> {
        &self.next
    }
}

/// A value whose destruction sleeps.
pub(crate) trait Teardown: Sized + Send + Sync + 'static {
    /// Returns the part by which the value is listed, if it is.
    fn object(&self) -> Option<&Object>;

    /// Returns the workqueue that tears the value down. A value that has a reference to a device
    /// or a client may return the workqueue of that.
    fn queue(&self) -> &workqueue::Queue {
        self.object()
            .map_or_else(|| CoreWorkqueue::get(), Object::queue)
    }

    /// Returns the batch that the value is torn down with, for a type of which there may be
    /// hundreds, and whose end waits for nothing. The value has a reference to what the batch is
    /// part of. Once the value is dropped, this returns the same each time.
    fn batch(&self) -> Option<&Dropped> {
        None
    }

    /// Waits until the value is out of use, as long as the [`Waiter`] may. If this fails, it is
    /// called again by the work item, until it succeeds.
    fn quiesce(&self, _waiter: Waiter, _cx: &Sleepable) -> Result {
        Ok(())
    }

    /// Destroys the value. Called once, after [`Teardown::quiesce`] has succeeded, and before the
    /// value is dropped. Fails with `EIO` if C could not destroy it: the value is leaked, and was
    /// reported.
    fn teardown(&self, cx: &Sleepable) -> Result;
}

/// The thread that waits until a value is out of use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// A caller of [`Deferred::destroy`].
    Caller,
    /// The work item, which waits for a moment only, as other objects wait for it.
    WorkItem,
}

/// Returns the result of a C function that destroys an object. If that has failed, reports that the
/// object is leaked, and fails with `EIO`.
#[inline(never)]
pub(crate) fn destroyed(object: fmt::Arguments<'_>, ret: c_int) -> Result {
    if ret == 0 {
        return Ok(());
    }
    pr_err!("{object} could not be destroyed ({ret}); it is leaked\n");
    Err(EIO)
}

/// A counted handle of a value that is torn down by a work item when the last one is dropped.
///
/// # Invariants
///
/// The address is from [`Arc::into_raw`], and this owns the reference.
pub(crate) struct Deferred<T: Teardown>(NonNull<Item<T>>);

// SAFETY: It is a counted reference to an item, which is `Send` and `Sync`, as the value is.
unsafe impl<T: Teardown> Send for Deferred<T> {}
// SAFETY: A shared handle gives shared access to the value, which is `Sync`, and clones.
unsafe impl<T: Teardown> Sync for Deferred<T> {}

/// Memory for a [`Deferred`], allocated before its value is made.
pub(crate) struct Reserved<T: Teardown>(sync::UniqueArc<MaybeUninit<Item<T>>>);

impl<T: Teardown> Reserved<T> {
    /// Wraps a value, and lists it. Must be called from functions that are neither generic nor
    /// inlined, so that the work item's code is this module's: a ULP's code may be gone when it
    /// returns.
    pub(crate) fn fill(self, value: T) -> Deferred<T> {
        let Ok(item) = self.init(value);
        item
    }

    /// As [`Reserved::fill`], with a value that is made in its place.
    pub(crate) fn init<E: From<Infallible>>(
        self,
        value: impl PinInit<T, E>,
    ) -> Result<Deferred<T>, E> {
        let item = self.0.pin_init_with(pin_init!(Item {
            value <- value,
            work <- kernel::new_work!("rdma::Deferred"),
            // INVARIANT: It is of this type.
            member: Member {
                next: Next::new(),
                end: Item::<T>::end,
            },
        }? E))?;
        if let Some(object) = item.value.object() {
            // SAFETY: The object is in the item, or in a pinned `Arc` of the item, and neither
            // gives exclusive access to it. It is dropped before the memory is freed, or that is
            // never freed.
            unsafe { Pin::new_unchecked(object) }.list();
        }
        // SAFETY: An address from `Arc::into_raw` is not null.
        // INVARIANT: This owns the reference of the new `Arc`.
        Ok(Deferred(unsafe {
            NonNull::new_unchecked(Arc::into_raw(item.into()).cast_mut())
        }))
    }
}

/// A value is dropped only after its teardown: handles hand the item on when the last one goes.
#[pin_data]
#[repr(C)]
struct Item<T: Teardown> {
    #[pin]
    value: T,
    #[pin]
    work: workqueue::Work<Item<T>>,
    member: Member,
}

/// The offset of a value that is aligned to eight in the memory of an `Arc`, as that of an item is:
/// behind the count of references.
pub(crate) const VALUE_AT: usize = 8;

kernel::impl_has_work! {
    impl{T: Teardown} HasWork<Self> for Item<T> { self.work }
}

impl<T: Teardown> Item<T> {
    /// Queues an item that nothing else refers to.
    #[cold]
    #[inline(never)]
    fn enqueue(item: Pin<sync::UniqueArc<Self>>) {
        let queue = ptr::from_ref(item.value.queue());
        // SAFETY: The workqueue is the core module's, or that of a device or a client to which the
        // value has a reference. The owner destroys it after that was put, so after the work item
        // has begun; what `queue_work()` does then, it does in an RCU read-side section, and
        // `destroy_workqueue()` frees the workqueue after a grace period.
        let queue = unsafe { &*queue };
        let item = Arc::from(item);
        if let Some(Dropped(batch)) = item.value.batch() {
            // SAFETY: The item is valid, and nothing else refers to it, so it is in no batch. It is
            // not used after this unless it is the first: its own work item, which is queued below,
            // takes the batch, and no other does.
            if !unsafe { batch.add(Self::member(&item)) } {
                return forget(item);
            }
        }
        // It is not queued: a queued item has a reference. So this does not fail, and no code is
        // made that would drop a value here, before its teardown.
        let _ = queue.enqueue(item).map_err(forget);
    }

    /// Returns the part by which an item is in a batch, as a part of all of it.
    fn member(item: &Arc<Self>) -> *mut Member {
        // SAFETY: The item is valid.
        unsafe { (&raw const (*Arc::as_ptr(item)).member).cast_mut() }
    }

    /// Ends an item that was taken out of a batch, in its work item.
    ///
    /// # Safety
    ///
    /// This is the part of an item of this type, which was added with its reference.
    unsafe fn end(member: *mut Member, cx: &Sleepable) {
        // SAFETY: As the caller promises, this is the part of such an item, whose reference is
        // taken back here.
        let item = unsafe { Arc::from_raw(kernel::container_of!(member, Self, member)) };
        Self::end_last(item, cx);
    }

    /// Ends an item, with its last reference, in a work item.
    fn end_last(item: Arc<Self>, cx: &Sleepable) {
        if let Some(item) = Arc::into_unique_or_drop(item) {
            // A failure was reported, or the item is queued again.
            let _ = Self::finish(item, Waiter::WorkItem, cx);
        }
    }

    fn finish(item: Pin<sync::UniqueArc<Self>>, waiter: Waiter, cx: &Sleepable) -> Result {
        if let Err(e) = item.value.quiesce(waiter, cx) {
            Self::enqueue(item);
            return Err(e);
        }
        let torn_down = item.value.teardown(cx);
        if torn_down.is_err() {
            forget(item);
        }
        torn_down
    }
}

impl<T: Teardown> workqueue::WorkItem for Item<T> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        if let Some(Dropped(batch)) = this.value.batch() {
            let own = Self::member(&this);
            // This one is the last of its batch: it was the first that was added, and queued.
            for other in batch.take().filter(|it| !ptr::eq(*it, own)) {
                // SAFETY: `enqueue` has added it with its reference, and it was taken out once. By
                // the invariant of `Member` the function is that of its item.
                unsafe { ((*other).end)(other, &cx) };
            }
        }
        Self::end_last(this, &cx);
    }
}

impl<T: Teardown> Deferred<T> {
    /// Allocates memory for a value, so that nothing fails once there is one.
    pub(crate) fn reserve() -> Result<Reserved<T>> {
        Ok(Reserved(sync::UniqueArc::new_uninit(GFP_KERNEL)?))
    }

    /// Tears the value down and waits for that. Fails with `EBUSY` if there is another handle; with
    /// `EIO` if the value is leaked; or as [`Teardown::quiesce`], and a work item goes on.
    pub(crate) fn destroy(self, cx: &Sleepable) -> Result {
        // SAFETY: By the type invariant this owns a reference, which is not used again.
        let item = unsafe { Arc::from_raw(ManuallyDrop::new(self).0.as_ptr()) };
        let item = Arc::into_unique_or_drop(item).ok_or(EBUSY)?;
        Item::finish(item, Waiter::Caller, cx)
    }

    /// Returns the address of the item, which is the same for all handles of a value.
    #[inline]
    pub(crate) fn addr(&self) -> usize {
        self.0.addr().get()
    }
}

/// Handles of one value are equal.
impl<T: Teardown> PartialEq for Deferred<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T: Teardown> Clone for Deferred<T> {
    fn clone(&self) -> Self {
        // SAFETY: By the type invariant the address is from `Arc::into_raw`, and `self` keeps the
        // reference that is borrowed here.
        let item = unsafe { sync::ArcBorrow::from_raw(self.0.as_ptr()) };
        // INVARIANT: The address is the same, and the clone owns the new reference.
        forget(Arc::from(item));
        Self(self.0)
    }
}

impl<T: Teardown> core::ops::Deref for Deferred<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant this owns a reference to the item.
        unsafe { &self.0.as_ref().value }
    }
}

impl<T: Teardown> Drop for Deferred<T> {
    /// Drops the reference; the last one goes to the work item. Not inlined, so that it is compiled
    /// with the core, for each type, and not in each ULP.
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: By the type invariant this owns a reference, which is not used again.
        let item = unsafe { Arc::from_raw(self.0.as_ptr()) };
        if let Some(item) = Arc::into_unique_or_drop(item) {
            Item::enqueue(item);
        }
    }
}
