// SPDX-License-Identifier: GPL-2.0

//! Requests that are allocated once and used again.
//!
//! Most ULPs allocate their requests once, in an array or with the tags of blk-mq. Here each is a
//! [`Reusable<T>`]. [`Reusable::start`] returns an [`InFlight<T>`], of which there is one at a
//! time, and which can own a posted request as a `Pin<KBox<T>>` can. When the completion's handler
//! drops it, the request can be started again. Until then the `Reusable` gives no access.
//!
//! # Examples
//!
//! ```
//! use rdma::{reuse::{Reusable, InFlight}, prelude::*};
//!
//! #[derive(HasCqe)]
//! struct Request {
//!     cqe: Cqe<Self>,
//!     buf: Buf<ToDevice>,
//! }
//!
//! impl CqeHandler for Request {
//!     type Pointer = InFlight<Self>;
//!     type Needs = context::Atomic;
//!
//!     fn done(this: InFlight<Self>, wc: &Wc, _cx: &context::Atomic) {
//!         if let Err(e) = wc.result() {
//!             pr_info!("{}\n", e.status);
//!         }
//!         drop(this); // It can be started again.
//!     }
//! }
//!
//! /// Sends all requests that are not in flight, and returns their number.
//! fn send_all(qp: &Qp<Softirq>, requests: &mut [Reusable<Request>]) -> Result<u32> {
//!     let mut sent = 0;
//!     for request in requests.iter_mut().filter_map(Reusable::get) {
//!         request.buf.cpu().fill(0);
//!     }
//!     for request in requests.iter_mut().filter_map(Reusable::start) {
//!         qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
//!         sent += 1;
//!     }
//!     Ok(sent)
//! }
//! ```

use crate::{
    cqe,
    prelude::internal::*,
    sync::Users, //
};
use core::ops;
use kernel::alloc::Flags;

/// A request, and the number of its handles. The request is first: its address is that of both.
#[repr(C)]
struct Entry<T> {
    value: T,
    handles: Users,
}

/// A handle of an entry, which is freed with the last one.
///
/// # Invariants
///
/// - The entry is valid, from `KBox::leak`, and counts this handle.
/// - This is invariant in `T`: two handles give access to one value, so neither may become a handle
///   of a supertype, through which a value could be written that the other one must not read.
struct Handle<T>(NonNull<Entry<T>>, PhantomData<fn(T) -> T>);

impl<T> Handle<T> {
    /// # Safety
    ///
    /// The entry is valid, from `KBox::leak`, and counts this handle.
    #[inline]
    unsafe fn new(entry: NonNull<Entry<T>>) -> Self {
        // INVARIANT: As the caller promises.
        Self(entry, PhantomData)
    }
}

impl<T> Handle<T> {
    #[inline]
    fn count(&self) -> &Users {
        // SAFETY: By the type invariant the entry is valid; only its count is borrowed.
        unsafe { &(*self.0.as_ptr()).handles }
    }
}

impl<T> Drop for Handle<T> {
    #[inline]
    fn drop(&mut self) {
        if self.count().put() {
            // SAFETY: This was the last handle to the entry.
            unsafe { free(self.0) };
        }
    }
}

/// # Safety
///
/// No handle of the entry is left.
#[cold]
#[inline(never)]
unsafe fn free<T>(entry: NonNull<Entry<T>>) {
    // SAFETY: The entry is from `KBox::leak`, and there is no handle that could use it.
    drop(unsafe { KBox::from_raw(entry.as_ptr()) });
}

/// A request that can be [started](Reusable::start) again when it has completed.
///
/// If this is dropped while the request is in flight, dropping the [`InFlight`] frees the request.
///
/// # Invariants
///
/// There is one other handle of the entry at most, an [`InFlight`]. Invariant in `T`.
pub struct Reusable<T>(Handle<T>);

// SAFETY: It gives exclusive access to its request while that is not in flight.
unsafe impl<T: Send> Send for Reusable<T> {}
// SAFETY: A shared one gives no access to the request.
unsafe impl<T: Send> Sync for Reusable<T> {}

impl<T> Reusable<T> {
    /// Allocates a request. Fails with `ENOMEM`; the value is dropped.
    pub fn new(value: T, flags: Flags) -> Result<Self> {
        let entry = KBox::new_uninit(flags)?;
        let handles = Users::new();
        let entry = entry.write(Entry { handles, value });
        // SAFETY: The entry was just leaked, and counts one handle, which is this.
        let handle = unsafe { Handle::new(NonNull::from(KBox::leak(entry))) };
        // INVARIANT: There is no other handle.
        Ok(Self(handle))
    }

    /// Returns the request to be posted; `None` if it is in flight. Any context.
    #[inline]
    pub fn start(&mut self) -> Option<InFlight<T>> {
        self.get()?;
        self.0.count().get_second();
        // SAFETY: The entry is that of `self`, and now counts a second handle.
        let handle = unsafe { Handle::new(self.0 .0) };
        // INVARIANT: `get` has seen that there was no other handle.
        Some(InFlight(handle))
    }

    /// Returns access to the request; `None` if it is in flight. Any context.
    #[inline]
    pub fn get(&mut self) -> Option<&mut T> {
        if !self.0.count().is_one() {
            return None;
        }
        // SAFETY: By the type invariant there is no `InFlight`, and only `start`, which borrows
        // `self` mutably, makes one.
        Some(unsafe { &mut (*self.0 .0.as_ptr()).value })
    }
}

/// A [`Reusable`] request that is in flight: exclusive access to it, and the owner of a request
/// that is posted. Dropping it, in any context, makes the request idle.
///
/// # Invariants
///
/// There is no other [`InFlight`] of the entry. Invariant in `T`.
pub struct InFlight<T>(Handle<T>);

// SAFETY: It is exclusive access to its request.
unsafe impl<T: Send> Send for InFlight<T> {}
// SAFETY: A shared one gives shared access to the request only.
unsafe impl<T: Sync> Sync for InFlight<T> {}

impl<T> ops::Deref for InFlight<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant the entry is valid and there is no other `InFlight`, and
        // `Reusable` gives no access meanwhile.
        unsafe { &(*self.0 .0.as_ptr()).value }
    }
}

impl<T> ops::DerefMut for InFlight<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: By the type invariant the entry is valid and there is no other `InFlight`, and
        // `Reusable` gives no access meanwhile.
        unsafe { &mut (*self.0 .0.as_ptr()).value }
    }
}

// SAFETY: The entry stays in place while the handle that was given up counts. Until then there is
// no other `InFlight`, and `Reusable` gives no access; the request is `Unpin`, so no other part of
// the kernel has its address.
unsafe impl<T, const ID: u64> cqe::CqePointer<ID> for InFlight<T>
where
    T: cqe::CqeHandler<ID, Pointer = Self> + Send + Unpin + 'static,
{
    #[inline]
    fn into_ptr(self, _: cqe::Sealed) -> *mut T {
        // The request is the first field of the entry.
        ManuallyDrop::new(self).0 .0.as_ptr().cast()
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut T) -> Self {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises: the address of an entry, which
        // is not null, and which still counts the handle that was given up.
        // INVARIANT: `into_ptr` has consumed the only `InFlight`.
        Self(unsafe { Handle::new(NonNull::new_unchecked(ptr.cast())) })
    }
}
