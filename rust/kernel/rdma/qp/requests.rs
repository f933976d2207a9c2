// SPDX-License-Identifier: GPL-2.0

//! Arrays of requests that are used again.
//!
//! Most ULPs allocate their requests once, in an array. Here that is a [`Requests<T>`]: the
//! requests are side by side in memory, in the order in which they are used. [`Requests::take`]
//! returns a [`Taken<T>`], of which there is one at a time for each request, and which can own
//! a posted request as a `Pin<KBox<T>>` can. When the completion's handler drops it, that is one
//! store, and the request can be taken again.
//!
//! Each request belongs to a QP. When that is destroyed, its requests that the device has lost go
//! to their handlers, as flushed.
//!
//! # Examples
//!
//! ```
//! use rdma::prelude::*;
//!
//! #[derive(HasCqe)]
//! struct Request {
//!     cqe: Cqe<Self>,
//!     buf: Buf<ToDevice>,
//! }
//!
//! impl CqeHandler for Request {
//!     type Pointer = Taken<Self>;
//!     type Needs = context::Atomic;
//!
//!     fn done(this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
//!         if let Err(e) = wc.result() {
//!             pr_info!("{}\n", e.status);
//!         }
//!         drop(this); // It can be taken again.
//!     }
//! }
//!
//! /// Allocates 64 requests, of 4 KiB each.
//! fn alloc(qp: &Qp<Softirq>, pd: &Pd, cx: &Sleepable) -> Result<Requests<Request>> {
//!     Requests::new(qp, 64, |_| {
//!         Ok(Request {
//!             cqe: Cqe::new(),
//!             buf: Buf::alloc(pd, 4096, cx)?,
//!         })
//!     }, cx)
//! }
//!
//! /// Sends all requests that are idle, and returns their number.
//! fn send_all(qp: &Qp<Softirq>, requests: &mut Requests<Request>) -> Result<u32> {
//!     let mut sent = 0;
//!     for mut request in requests.idle() {
//!         request.buf.cpu().fill(0);
//!         qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
//!         sent += 1;
//!     }
//!     Ok(sent)
//! }
//! ```

use crate::{
    cqe::{
        self,
        Queue, //
    },
    deferred,
    device::Device,
    identity,
    objects,
    posted::{
        place,
        Callback,
        RequestArray,
        State, //
    },
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    qp_id::QpId,
    refs, //
};
use core::{
    cell::UnsafeCell,
    hint,
    ops, //
};
use kernel::{
    new_mutex,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex, //
    },
    time, //
};

/// The number of QPs in an entry: with debug assertions, the one that it belongs to.
const NAMED: usize = cfg!(debug_assertions) as usize;

/// A request, and what belongs to it. The request is first: its address is that of both.
#[repr(C)]
struct Entry<T> {
    value: UnsafeCell<T>,
    state: State,
    qp: [QpId; NAMED],
}

struct Array<T>(KVVec<Entry<T>>);

// SAFETY: The array owns its values, which are `Send`; the rest of an entry is.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: A shared array gives access to the states only.
unsafe impl<T: Send> Sync for Array<T> {}

impl<T: Send> RequestArray for Array<T> {
    fn entry(&self, index: usize) -> Option<(*mut c_void, &State)> {
        let entry = self.0.get(index)?;
        Some((entry.value.get().cast(), &entry.state))
    }
}

/// A request of an array: its address, and its state.
type Item<'a> = (*mut c_void, &'a State);

/// Returns the requests of an array.
pub(super) fn all(entries: &dyn RequestArray) -> impl Iterator<Item = Item<'_>> {
    (0..).map_while(|index| entries.entry(index))
}

/// Requests of an array, one behind the other, that belong to one QP.
///
/// # Invariants
///
/// While this is in the list of the QP, the array is valid.
struct Run {
    entries: NonNull<dyn RequestArray>,
    range: ops::Range<usize>,
}

// SAFETY: It gives the states of an array, which is `Sync`.
unsafe impl Send for Run {}

impl Run {
    fn entries(&self) -> impl Iterator<Item = Item<'_>> {
        // SAFETY: By the type invariant the array is valid.
        let entries = unsafe { self.entries.as_ref() };
        self.range.clone().filter_map(|index| entries.entry(index))
    }
}

/// Queues of a QP, by which requests are looked for that it has lost.
#[derive(Clone, Copy)]
pub(super) struct Queues {
    pub(super) qp: QpId,
    pub(super) send: bool,
    pub(super) recv: bool,
}

impl Queues {
    fn has(self, queue: Queue) -> bool {
        match queue {
            Queue::Send => self.send,
            Queue::Recv => self.recv,
        }
    }

    /// Returns whether one of these requests is posted to one of the queues.
    pub(super) fn have_any<'a>(self, mut of: impl Iterator<Item = Item<'a>>) -> bool {
        of.any(|(_, state)| state.is_posted(self.qp.get(), |queue| self.has(queue)))
    }

    /// Takes the first of these requests that is posted to one of the queues, and returns its
    /// callback.
    ///
    /// # Safety
    ///
    /// No completion comes for it, nothing is posted to the QP, and nobody else does this.
    pub(super) unsafe fn take_lost<'a>(
        self,
        mut of: impl Iterator<Item = Item<'a>>,
    ) -> Option<(*mut bindings::ib_cqe, Queue)> {
        of.find_map(|(request, state)| {
            let lost = state.take_lost(self.qp.get(), |queue| self.has(queue))?;
            Some(match lost {
                (Callback::At(offset), queue) => (request.wrapping_byte_add(offset).cast(), queue),
                (Callback::Elsewhere(callback), queue) => (callback, queue),
            })
        })
    }
}

/// The requests of a QP. An array takes its own out before it is freed.
#[pin_data]
pub(super) struct RequestList {
    #[pin]
    runs: Mutex<KVec<Run>>,
}

impl RequestList {
    pub(super) fn new() -> Result<Arc<Self>> {
        let list = pin_init!(Self {
            runs <- new_mutex!(KVec::new(), "rdma::Qp::requests"),
        });
        Arc::pin_init(list, GFP_KERNEL)
    }

    /// Returns whether a request is posted to one of these queues.
    pub(super) fn is_posted(&self, queues: Queues) -> bool {
        queues.have_any(self.runs.lock().iter().flat_map(Run::entries))
    }

    /// Gives `complete` the callback of each request that is posted to one of these queues.
    ///
    /// # Safety
    ///
    /// As [`Queues::take_lost`], for all of them.
    pub(super) unsafe fn take_lost(
        &self,
        queues: Queues,
        mut complete: impl FnMut(*mut bindings::ib_cqe, Queue),
    ) {
        let next = |from: &mut usize| {
            let runs = self.runs.lock();
            let entries = runs.iter().flat_map(Run::entries).skip(*from);
            // SAFETY: No completion comes for these requests, nothing is posted to the QP, and
            // nobody else takes them, as the caller promises.
            unsafe { queues.take_lost(entries.inspect(|_| *from += 1)) }
        };
        // The list is not locked while a handler runs, so arrays may leave it: it is looked through
        // again, until nothing is found from its beginning on.
        loop {
            let mut from = 0;
            let mut found = false;
            while let Some((callback, queue)) = next(&mut from) {
                complete(callback, queue);
                found = true;
            }
            if !found {
                return;
            }
        }
    }
}

/// An array that is being made, as far as it does not depend on the type of the requests.
struct Builder {
    parts: KVec<(QpId, Arc<RequestList>, ops::Range<usize>)>,
    device: Option<Device>,
}

impl Builder {
    fn new() -> Self {
        Self {
            parts: KVec::new(),
            device: None,
        }
    }

    /// Adds the next request, of this QP, whose type has its code at this address.
    fn add(&mut self, qp: &qp::Inner, code: usize) -> Result {
        let id = qp.target.qp_id;
        match self.parts.last_mut() {
            Some((last, _, range)) if *last == id => range.end += 1,
            last => {
                qp.context.head.module.check(code)?;
                let dev = qp.pd.device();
                if self.device.get_or_insert_with(|| dev.clone()) != dev {
                    return Err(EINVAL);
                }
                let first = last.map_or(0, |(_, _, range)| range.end);
                let list = qp.context.requests()?;
                self.parts.push((id, list, first..first + 1), GFP_KERNEL)?;
            }
        }
        Ok(())
    }

    fn finish(self, entries: KBox<dyn RequestArray>) -> Result<deferred::Deferred<ArrayInner>> {
        let reserved = deferred::Deferred::reserve()?;
        let object = self
            .device
            .ok_or(EINVAL)?
            .object(refs::ObjectKind::Requests);
        let mut lists = KVec::with_capacity(self.parts.len(), GFP_KERNEL)?;
        for (_, list, _) in &self.parts {
            lists.push_within_capacity(list.clone())?;
        }
        let inner = reserved.fill(ArrayInner {
            entries,
            lists,
            found_busy: Atomic::new(0),
            object,
        });
        for (_, list, range) in self.parts {
            let entries = NonNull::from(&*inner.entries);
            // INVARIANT: `ArrayInner::teardown` takes this out before the array is freed.
            list.runs.lock().push(Run { entries, range }, GFP_KERNEL)?;
        }
        Ok(inner)
    }
}

/// An array, which is freed when there is no handle of it and all requests are idle.
struct ArrayInner {
    // Dropped first, by code of the ULP, which may be gone when the object is dropped.
    entries: KBox<dyn RequestArray>,
    /// Those of the QPs, to some of which it may have been added.
    lists: KVec<Arc<RequestList>>,
    /// The number of times that requests were found in use when there was no handle.
    found_busy: Atomic<u32>,
    object: objects::Object,
}

impl deferred::Teardown for ArrayInner {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn quiesce(&self, waiter: deferred::Waiter, _cx: &Sleepable) -> Result {
        if all(&*self.entries).all(|(_, state)| state.is_idle()) {
            return Ok(());
        }
        if waiter == deferred::Waiter::WorkItem {
            // A request may be kept, or posted, for long.
            let turns = self.found_busy.fetch_add(1, Relaxed).min(5);
            time::delay::fsleep(time::Delta::from_millis(20 << turns));
        }
        Err(EBUSY)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        for list in &self.lists {
            let is_other = |run: &mut Run| !ptr::addr_eq(run.entries.as_ptr(), &*self.entries);
            list.runs.lock().retain(is_other);
        }
        Ok(())
    }
}

/// An array of requests that QPs use again and again.
///
/// If this is dropped, a work item checks now and then whether all requests are idle, and frees the
/// array when they are: keep the array while its requests are used.
///
/// # Invariants
///
/// The entries from `first` up to `end` are those of `_array`, one at least, and `next` is one of
/// them. Only this takes requests that are idle. Invariant in `T`: a [`Taken`] gives access to the
/// same value, so neither may become one of a supertype.
pub struct Requests<T> {
    first: NonNull<Entry<T>>,
    end: NonNull<Entry<T>>,
    next: NonNull<Entry<T>>,
    _array: deferred::Deferred<ArrayInner>,
    _invariant: PhantomData<fn(T) -> T>,
}

// SAFETY: It gives exclusive access to requests while they are not in flight.
unsafe impl<T: Send> Send for Requests<T> {}
// SAFETY: A shared one gives no access to the requests.
unsafe impl<T: Send> Sync for Requests<T> {}

impl<T: Send + 'static> Requests<T> {
    /// Allocates `count` requests of a QP, side by side; `init` returns request number 0, 1 and so
    /// on, or an initializer of it: a large one is not moved then.
    ///
    /// Fails with `ENOMEM`; with `EINVAL` if `count` is 0; with `EPERM` if the QP is another
    /// module's; or with the error of `init`.
    pub fn new<S: PollContext, R: PollContext, I: Init<T, Error>>(
        qp: &Qp<S, R>,
        count: usize,
        mut init: impl FnMut(usize) -> I,
        _cx: &Sleepable,
    ) -> Result<Self> {
        Self::build(count, |index| Ok((&*qp.inner, init(index))))
    }

    /// As [`Requests::new`], for several QPs of one device: `init` returns the QP of each request,
    /// too. Requests of one QP are best made one after the other.
    pub fn of_qps<'a, S: PollContext, R: PollContext>(
        count: usize,
        mut init: impl FnMut(usize) -> Result<(&'a Qp<S, R>, T)>,
        _cx: &Sleepable,
    ) -> Result<Self> {
        Self::build(count, |index| {
            init(index).map(|(qp, value)| (&*qp.inner, Ok::<_, Error>(value)))
        })
    }

    fn build<'a, I: Init<T, Error>>(
        count: usize,
        mut init: impl FnMut(usize) -> Result<(&'a qp::Inner, I)>,
    ) -> Result<Self> {
        let mut builder = Builder::new();
        let mut entries = KVVec::<Entry<T>>::with_capacity(count, GFP_KERNEL | __GFP_NOWARN)?;
        for index in 0..count {
            let (qp, value) = init(index)?;
            builder.add(qp, identity::address_of::<T>())?;
            let entry = entries.spare_capacity_mut().first_mut().ok_or(ENOMEM)?;
            let entry = entry.as_mut_ptr();
            // SAFETY: The entry is spare capacity, so it is valid for writes, and nothing has its
            // address. An `UnsafeCell` has the layout of its value. If the initializer fails, the
            // entry is not counted, so it is not dropped.
            unsafe { pin_init::raw_try_init((&raw mut (*entry).value).cast::<T>(), value)? };
            // SAFETY: As the entry is spare capacity, its other fields are valid for writes, too.
            unsafe {
                (&raw mut (*entry).state).write(State::new());
                (&raw mut (*entry).qp).write([qp.target.qp_id; NAMED]);
            }
            // SAFETY: All three fields of the entry behind the last one are initialised now.
            unsafe { entries.inc_len(1) };
        }
        let first = NonNull::from(&mut *entries).cast();
        let array = KBox::new(Array(entries), GFP_KERNEL)?;
        // INVARIANT: The array is of these entries, which `Builder::finish` fails without.
        Ok(Self {
            first,
            // SAFETY: The loop has initialised `count` entries in one allocation, of which this is
            // the end.
            end: unsafe { first.add(count) },
            next: first,
            _array: builder.finish(array)?,
            _invariant: PhantomData,
        })
    }
}

impl<T> Requests<T> {
    /// Returns the number of requests.
    #[inline]
    pub fn count(&self) -> usize {
        // SAFETY: By the type invariant both are of one array, and in this order.
        unsafe { self.end.offset_from(self.first) }.unsigned_abs()
    }

    /// Takes a request, if it is idle.
    ///
    /// # Safety
    ///
    /// `entry` is one of the array.
    #[inline]
    unsafe fn hold(&mut self, entry: NonNull<Entry<T>>) -> Option<Taken<T>> {
        // SAFETY: The entry is valid, as the caller promises; only its state is borrowed.
        let taken = unsafe { &(*entry.as_ptr()).state }.take();
        // INVARIANT: The request was idle, so there is no other `Taken`, and the array is not
        // freed before it is idle again.
        taken.then(|| Taken(entry, PhantomData))
    }

    /// Takes the request of this number; `None` if it is in flight, or if there are not so many.
    /// Any context.
    #[inline]
    pub fn take_at(&mut self, index: usize) -> Option<Taken<T>> {
        if index >= self.count() {
            return None;
        }
        // SAFETY: By the type invariant the array has so many entries.
        unsafe { self.hold(self.first.add(index)) }
    }

    /// Takes the next request that is idle, if there is one, from the one behind that which was
    /// taken last. Any context.
    #[inline]
    pub fn take(&mut self) -> Option<Taken<T>> {
        let from = self.next;
        // SAFETY: By the type invariant this is an entry.
        let request = unsafe { self.hold(from) };
        self.advance();
        match request {
            Some(request) => Some(request),
            None => self.take_other(from),
        }
    }

    /// Moves to the next request.
    #[inline]
    fn advance(&mut self) {
        // SAFETY: By the type invariant `next` is an entry, behind which there is one, or the end.
        let next = unsafe { self.next.add(1) };
        // INVARIANT: There is a first entry.
        self.next = if next == self.end { self.first } else { next };
    }

    /// Takes a request other than `from`, which is in flight.
    #[cold]
    fn take_other(&mut self, from: NonNull<Entry<T>>) -> Option<Taken<T>> {
        while self.next != from {
            // SAFETY: By the type invariant this is an entry.
            let request = unsafe { self.hold(self.next) };
            self.advance();
            if request.is_some() {
                return request;
            }
        }
        None
    }

    /// Takes all requests that are idle, in the order of their numbers, each when the iterator
    /// comes to it.
    #[inline]
    pub fn idle(&mut self) -> Idle<'_, T> {
        // INVARIANT: These are all entries of the array.
        Idle {
            last: self.first.as_ptr().wrapping_sub(1),
            end: self.end.as_ptr(),
            _requests: PhantomData,
        }
    }
}

/// The requests that are idle: see [`Requests::idle`].
///
/// # Invariants
///
/// The entries behind `last`, up to `end`, are of an array that is borrowed for `'a`; `end` is not
/// before them.
pub struct Idle<'a, T> {
    // Not the one that comes next, so that a loop needs no second address of it.
    last: *mut Entry<T>,
    end: *mut Entry<T>,
    _requests: PhantomData<&'a mut Requests<T>>,
}

impl<T> Iterator for Idle<'_, T> {
    type Item = Taken<T>;

    #[inline]
    fn next(&mut self) -> Option<Taken<T>> {
        loop {
            let entry = self.last.wrapping_add(1);
            if entry == self.end {
                return None;
            }
            self.last = entry;
            // SAFETY: By the type invariant the entry is valid; only its state is borrowed.
            if unsafe { &(*entry).state }.take() {
                // SAFETY: The address of an entry is not null. The compiler is told so before the
                // caller looks whether there is one.
                let entry = unsafe {
                    hint::assert_unchecked(!entry.is_null());
                    NonNull::new_unchecked(entry)
                };
                // INVARIANT: The request was idle, so there is no other `Taken`, and the array is
                // not freed before it is idle again.
                return Some(Taken(entry, PhantomData));
            }
        }
    }
}

/// Exclusive access to a request of [`Requests`], and the owner of a request that is posted.
/// Dropping it, in any context, makes the request idle.
///
/// It is posted to the QP that the request belongs to. In kernels with debug assertions another QP
/// refuses it with `EINVAL`; in others the end of that QP does not find the request if the device
/// loses it.
///
/// # Invariants
///
/// The entry is valid until it is idle, which it is not, and this is its only [`Taken`].
/// Invariant in `T`.
pub struct Taken<T>(NonNull<Entry<T>>, PhantomData<fn(T) -> T>);

// SAFETY: By the type invariant only this has access to the request, a `T`.
unsafe impl<T: Send> Send for Taken<T> {}
// SAFETY: A shared one gives shared access to the request only.
unsafe impl<T: Sync> Sync for Taken<T> {}

impl<T> Taken<T> {
    #[inline]
    fn state(&self) -> &State {
        // SAFETY: By the type invariant the entry is valid; only its state is borrowed.
        unsafe { &(*self.0.as_ptr()).state }
    }
}

impl<T> ops::Deref for Taken<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant the entry is valid, and there is no other `Taken`.
        unsafe { &*(*self.0.as_ptr()).value.get() }
    }
}

impl<T> ops::DerefMut for Taken<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: By the type invariant the entry is valid, and there is no other `Taken`.
        unsafe { &mut *(*self.0.as_ptr()).value.get() }
    }
}

impl<T> Drop for Taken<T> {
    #[inline]
    fn drop(&mut self) {
        self.state().put();
    }
}

// SAFETY: The entry stays in place, as it is not idle. There is no other `Taken`; the request is
// `Unpin`, so no other part of the kernel has its address.
unsafe impl<T, const ID: u64> cqe::CqePointer<ID> for Taken<T>
where
    T: cqe::CqeHandler<ID, Pointer = Self> + Send + Unpin + 'static,
{
    #[inline]
    fn into_ptr(self, _: cqe::Sealed) -> *mut T {
        // The request is the first field of the entry.
        ManuallyDrop::new(self).0.as_ptr().cast()
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut T) -> Self {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises: the address of an entry, which
        // is not null.
        // INVARIANT: `into_ptr` has consumed the only `Taken`.
        let this = Self(unsafe { NonNull::new_unchecked(ptr.cast()) }, PhantomData);
        this.state().hold();
        this
    }

    #[inline]
    fn may_post_to(&self, qp: QpId, _: cqe::Sealed) -> bool {
        // SAFETY: By the type invariant the entry is valid, and this field does not change.
        let named = unsafe { (*self.0.as_ptr()).qp };
        named.iter().all(|named| *named == qp)
    }

    #[inline]
    unsafe fn note_post(ptr: *mut T, qp: QpId, queue: Queue, callback: *mut bindings::ib_cqe) {
        let entry: *mut Entry<T> = ptr.cast();
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises: the address of an entry, which
        // is valid until the owner was taken back.
        unsafe { &(*entry).state }.post(qp.get(), queue, place(ptr, callback));
    }
}
