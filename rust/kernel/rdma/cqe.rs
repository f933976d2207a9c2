// SPDX-License-Identifier: GPL-2.0

//! Completion callbacks.
//!
//! A request is posted by moving its owner into the queue: a [`CqePointer`] to a `T` that embeds a
//! [`Cqe`]. When the request completes, [`CqeHandler::done`] gets the owner back, once. Until then
//! the memory that the device uses cannot be freed nor, unless the owner is an `Arc<T>`, accessed.
//!
//! The C core calls `wc->wr_cqe->done(cq, wc)`. Here `done` is a function made for `T` that does
//! `container_of` and calls the handler, so a [`Cqe`] is the eight bytes of `struct ib_cqe`.
//!
//! # Examples
//!
//! ```
//! use rdma::{context::Atomic, cqe::{Cqe, CqeHandler, HasCqe}, dma::{Buf, FromDevice}, wc::Wc};
//!
//! #[derive(HasCqe)]
//! struct Recv {
//!     cqe: Cqe<Self>,
//!     buf: Buf<FromDevice>,
//! }
//!
//! impl CqeHandler for Recv {
//!     type Pointer = Pin<KBox<Self>>;
//!     type Needs = Atomic;
//!
//!     fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
//!         match wc.result() {
//!             Ok(wc) => pr_info!("received {} bytes\n", wc.byte_len()),
//!             Err(e) => pr_info!("{}\n", e.status),
//!         }
//!         drop(this);
//!     }
//! }
//! ```
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cqe`)

#[doc(hidden)]
pub use core::mem::offset_of;
pub use rdma_macros::HasCqe;

use crate::{
    debug,
    identity,
    noted,
    prelude::internal::*,
    qp_id::QpId,
    trace,
    wc::{
        self,
        Wc, //
    }, //
};

/// A completion callback embedded in `T`, as `struct ib_cqe`. A type with several requests in
/// flight at once has several of these, told apart by `ID`.
///
/// # Invariants
///
/// - `inner.done` is the function `done::<T, ID>` or, since `ignore()` was called, one that does
///   nothing.
/// - This is invariant in `T`, and so is each type that embeds one in its parameters: an owner of a
///   request, and a handle of such owners, never becomes one of a supertype, with another handler.
#[repr(transparent)]
pub struct Cqe<T, const ID: u64 = 0> {
    inner: bindings::ib_cqe,
    _owner: PhantomData<fn(T) -> T>,
}

impl<T: CqeHandler<ID>, const ID: u64> Cqe<T, ID> {
    /// Creates a callback that gives a `T` to its handler.
    #[inline]
    pub const fn new() -> Self {
        // INVARIANT: The callback is that of `T` and `ID`.
        Self {
            inner: bindings::ib_cqe {
                done: Some(done::<T, ID>),
            },
            _owner: PhantomData,
        }
    }
}

impl<T: CqeHandler<ID>, const ID: u64> Default for Cqe<T, ID> {
    fn default() -> Self {
        Self::new()
    }
}

/// The place of the [`Cqe<T, ID>`] in a `T`. Only [`cqe_field!`](crate::cqe_field) makes one.
///
/// # Invariants
///
/// A `Cqe<T, ID>`, aligned, is at `offset` of a `T`.
#[doc(hidden)]
pub struct Field<T, const ID: u64> {
    offset: usize,
    _owner: PhantomData<fn(T) -> T>,
}

impl<T, const ID: u64> Field<T, ID> {
    /// The type of `get`, which is never called, is the check that the field is a `Cqe<T, ID>`.
    ///
    /// # Safety
    ///
    /// `get` returns the address of the field at `offset`, which is aligned.
    #[doc(hidden)]
    pub const unsafe fn new(offset: usize, _get: unsafe fn(*mut T) -> *mut Cqe<T, ID>) -> Self {
        // INVARIANT: The field is at `offset`, as the caller promises, and a `Cqe<T, ID>` by the
        // type of `get`.
        Self {
            offset,
            _owner: PhantomData,
        }
    }
}

/// Returns the [`Field`] of `Self` with this name. The proof is here, and not in the expansion of
/// the derive macro, where `::rdma` may be another crate of that name.
#[doc(hidden)]
#[macro_export]
macro_rules! cqe_field {
    ($field:ident) => {{
        // A reference to the field of a packed struct is an error. So is one to a field of what
        // `Self` derefs to, in `offset_of!`.
        let _ = |this: &Self| {
            let _ = &this.$field;
        };
        // SAFETY: The closure is never called; only its type is used.
        let get = |this: *mut Self| unsafe { &raw mut (*this).$field };
        // SAFETY: Both are of the field of this name of `Self`, which is not packed.
        unsafe { $crate::cqe::Field::<Self, _>::new($crate::cqe::offset_of!(Self, $field), get) }
    }};
}

/// A type that embeds a [`Cqe<Self, ID>`]. Derive it: `#[derive(HasCqe)]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` embeds no such `Cqe<Self>`",
    label = "a request's owner embeds its callback",
    note = "give it a field of type `Cqe<Self>`, or `Cqe<Self, ID>`, and `#[derive(HasCqe)]`"
)]
pub trait HasCqe<const ID: u64 = 0>: Sized {
    /// The field. A value of this type is the proof that it exists.
    #[doc(hidden)]
    const FIELD: Field<Self, ID>;
}

/// Returns the offset of a type's callback in it, in bytes.
#[inline(always)]
pub(crate) const fn offset<T: HasCqe<ID>, const ID: u64>() -> usize {
    T::FIELD.offset
}

#[doc(hidden)]
pub use crate::qp_id::Queue;

/// An argument of methods that only this crate can call, in traits that ULPs can name.
#[doc(hidden)]
pub struct Sealed(pub(crate) ());

/// A pointer that can own a posted request: `Pin<KBox<T>>` for exclusive owners,
/// [`Taken<T>`](crate::qp::Taken) for those that are used again, [`Slot<T>`](crate::srq::Slot) for
/// the slots of an SRQ, `Arc<T>` for shared ones.
///
/// Exclusive owners are `Unpin`: the address of a pinned object, such as a lock, a work item or a
/// file in debugfs, may be known elsewhere. It goes into an `Arc`, or into a box of its own.
///
/// # Safety
///
/// The address that `into_ptr` returns is that of the `T`, which stays there, unmodified but
/// through interior mutability, until `from_ptr` gets that address back. The other methods are as
/// provided.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` cannot own a request",
    label = "not an owner",
    note = "a request is owned by a `Pin<KBox<T>>`, a `Taken<T>` or a `Slot<T>`, with a",
    note = "`T: Send + Unpin`, or by an `Arc<T>` with a `T: Send + Sync`; `T` has a `CqeHandler`"
)]
pub unsafe trait CqePointer<const ID: u64>:
    core::ops::Deref<Target: CqeHandler<ID, Pointer = Self>> + Sized + Send + 'static
{
    /// Whether posts of the owner are noted, where posts are, as nothing else knows of it.
    #[doc(hidden)]
    const NOTED: bool = false;

    /// Gives up the owner for the address of what it points to.
    #[doc(hidden)]
    fn into_ptr(self, _: Sealed) -> *mut Self::Target;

    /// Takes the owner back.
    ///
    /// # Safety
    ///
    /// `ptr` comes from `into_ptr` of the same type, and each one is taken back once.
    #[doc(hidden)]
    unsafe fn from_ptr(ptr: *mut Self::Target) -> Self;

    /// Returns whether requests of the owner may be posted to this QP. Kernels without debug
    /// assertions do not check.
    #[doc(hidden)]
    #[inline]
    fn may_post_to(&self, qp: QpId, _: Sealed) -> bool {
        let _ = qp;
        true
    }

    /// Notes that a request of the owner is about to be posted to a queue of this QP, with this
    /// callback.
    ///
    /// # Safety
    ///
    /// `ptr` comes from `into_ptr`, and was not taken back.
    #[doc(hidden)]
    #[inline]
    unsafe fn note_post(
        ptr: *mut Self::Target,
        qp: QpId,
        queue: Queue,
        callback: *mut bindings::ib_cqe,
    ) {
        let _ = (ptr, qp, queue, callback);
    }

    /// Gives up the owner for the address of its callback.
    #[doc(hidden)]
    #[inline]
    fn into_cqe(self, sealed: Sealed) -> *mut bindings::ib_cqe {
        let ptr = self.into_ptr(sealed);
        // SAFETY: By the contract of the trait there is a `Target` at `ptr`, and the callback is a
        // field of that.
        let cqe = unsafe { ptr.byte_add(offset::<Self::Target, ID>()) }.cast();
        debug::activate(cqe, core::any::type_name::<Self::Target>());
        cqe
    }

    /// Takes the owner back.
    ///
    /// # Safety
    ///
    /// `cqe` comes from `into_cqe` of the same type, and each one is taken back once.
    #[doc(hidden)]
    #[inline]
    unsafe fn from_cqe(cqe: *mut bindings::ib_cqe) -> Self {
        // SAFETY: `cqe` is from `into_cqe` and taken back once, as the caller promises. So it is an
        // address from `into_ptr`, plus this offset.
        unsafe { Self::from_ptr(cqe.byte_sub(offset::<Self::Target, ID>()).cast()) }
    }

    /// As [`CqePointer::note_post`], for the address of the owner's callback.
    ///
    /// # Safety
    ///
    /// `cqe` comes from `into_cqe` of the same type, and was not taken back.
    #[doc(hidden)]
    #[inline]
    unsafe fn note_cqe(
        cqe: *mut bindings::ib_cqe,
        qp: QpId,
        queue: Queue,
        callback: *mut bindings::ib_cqe,
    ) {
        // SAFETY: `cqe` is from `into_cqe` and was not taken back, as the caller promises. So it is
        // an address from `into_ptr`, plus this offset.
        unsafe {
            let ptr = cqe.byte_sub(offset::<Self::Target, ID>()).cast();
            Self::note_post(ptr, qp, queue, callback);
        }
    }

    /// As [`CqePointer::from_cqe`], of a request that was not posted.
    ///
    /// # Safety
    ///
    /// `cqe` comes from `into_cqe` of the same type, and each one is taken back once.
    #[doc(hidden)]
    #[inline]
    unsafe fn take_back(cqe: *mut bindings::ib_cqe) -> Self {
        debug::deactivate(cqe);
        // SAFETY: `cqe` comes from `into_cqe` of this type and is taken back once, as the caller
        // promises.
        unsafe { Self::from_cqe(cqe) }
    }
}

/// A handler of completions of requests that a `Self` owns.
pub trait CqeHandler<const ID: u64 = 0>: HasCqe<ID> {
    /// The pointer that owns a posted request.
    type Pointer: CqePointer<ID, Target = Self>;

    /// The context that the handler needs: [`Atomic`] or [`Sleepable`], or
    /// [`QpContext`](crate::qp::QpContext) of one of them. The request can be posted only where the
    /// completion queue provides it.
    ///
    /// [`Atomic`]: crate::context::Atomic
    type Needs: Context;

    /// Takes the owner of a completed request back (`ib_cqe.done`). Handlers of one completion
    /// queue run one after the other, but for three kinds, which may run beside others: those of
    /// completions in a [`WcArray`], of [shared](crate::cq::Cq::pool_get) queues, and of
    /// [transfers](crate::rw), [`Requests`](crate::qp::Requests) and owners whose posts are noted
    /// (`note_posts=1`) that the device has lost, which the end of their QP completes.
    ///
    /// [`WcArray`]: crate::cq::WcArray
    fn done(this: Self::Pointer, wc: &Wc, cx: &Self::Needs);
}

/// A [`PollContext`] that provides what the handler `ID` of an owner of type `P` needs, so that
/// requests of such owners can be posted where they complete in it.
pub trait Runs<P, const ID: u64 = 0>: Provides<<P::Target as CqeHandler<ID>>::Needs>
where
    P: CqePointer<ID>,
{
}

impl<C, P, const ID: u64> Runs<P, ID> for C
where
    C: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    P: CqePointer<ID>,
{
}

/// The `done` callback of every `Cqe<T, ID>`.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, once for each request that was posted with a
/// `Cqe<T, ID>`.
unsafe extern "C" fn done<T: CqeHandler<ID>, const ID: u64>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // `is_of` tells owners apart by this function's address.
    identity::keep_distinct::<Cqe<T::Pointer, ID>>();
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    if !debug::deactivate(wc.cqe()) {
        return debug::report(core::any::type_name::<T>());
    }
    // SAFETY: The request was posted with the address from `into_cqe`, and completes once, by the
    // driver's contract. `cq` and `wc` are those of the call.
    unsafe { call_handler::<T, ID>(wc.cqe(), cq, wc) };
}

/// Takes the owner of a completed request back and calls its handler.
///
/// # Safety
///
/// `cqe` comes from `into_cqe` of a `T::Pointer`, for its callback `ID`, and is taken back once.
/// `wc` is the completion of the request, and `cq` what its `done` callback was called with.
#[inline(always)]
pub(crate) unsafe fn call_handler<T: CqeHandler<ID>, const ID: u64>(
    cqe: *mut bindings::ib_cqe,
    cq: *mut bindings::ib_cq,
    wc: &Wc,
) {
    // SAFETY: `cqe` comes from `into_cqe` of this type and is taken back once, as the caller
    // promises.
    let owner = unsafe { T::Pointer::from_cqe(cqe) };
    // SAFETY: Posting checked that the completion queue is polled in a context that provides this
    // one (`Runs`). `cq` is the CQ, or null if a caller has polled the completion.
    let cx = unsafe { T::Needs::of_completion(cq, wc) };
    T::done(owner, wc, &cx);
}

/// Makes a callback, that of a [`Cqe`], ignore the completions that are polled from here on: these
/// do not give the owner back.
///
/// # Safety
///
/// The callback is valid, and in an [`UnsafeCell`](core::cell::UnsafeCell) if there may be
/// references to its owner.
pub(crate) unsafe fn ignore(cqe: *mut bindings::ib_cqe) {
    // INVARIANT: `ignored` does nothing.
    //
    // SAFETY: The callback is valid, and may be written, as the caller promises. Should a poller
    // read it at this moment, or another call write it, that is one word.
    unsafe { (&raw mut (*cqe).done).write_volatile(Some(noted::ignored)) };
}

/// Returns whether completions of a callback are [ignored](ignore).
///
/// # Safety
///
/// The callback is valid.
pub(crate) unsafe fn is_ignored(cqe: *const bindings::ib_cqe) -> bool {
    let ignored: unsafe extern "C" fn(_, _) = noted::ignored;
    // SAFETY: The callback is valid, as the caller promises.
    unsafe { (*cqe).done }.is_some_and(|done| ptr::fn_addr_eq(done, ignored))
}

/// Returns `true` if a request was posted with a `Cqe<T, ID>`.
///
/// A `false` proves nothing: see [`identity`].
///
/// # Safety
///
/// `cqe` is that of a request that has completed and whose owner was not taken back.
#[inline]
pub(crate) unsafe fn is_of<T: CqeHandler<ID>, const ID: u64>(cqe: *mut bindings::ib_cqe) -> bool {
    let ours: unsafe extern "C" fn(_, _) = done::<T, ID>;
    // SAFETY: The owner was not taken back, as the caller promises, so the callback in it is valid.
    match unsafe { (*cqe).done } {
        Some(theirs) if ptr::fn_addr_eq(theirs, ours) => debug::is_active(cqe),
        _ => {
            wc::unlikely();
            false
        }
    }
}

// SAFETY: A pinned box has exclusive access to its content, which is `Unpin`, and keeps it in
// place.
unsafe impl<T, const ID: u64> CqePointer<ID> for Pin<KBox<T>>
where
    T: CqeHandler<ID, Pointer = Self> + Send + Unpin + 'static,
{
    const NOTED: bool = true;

    #[inline]
    fn into_ptr(self, _: Sealed) -> *mut T {
        // SAFETY: The content is not moved: it goes back into a pinned box.
        KBox::into_raw(unsafe { Pin::into_inner_unchecked(self) })
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut T) -> Self {
        // SAFETY: `ptr` is the content of a pinned box that was given up, and is taken back once,
        // as the caller promises.
        unsafe { Pin::new_unchecked(KBox::from_raw(ptr)) }
    }
}

// SAFETY: The content of an `Arc` stays in place while the reference that was given up counts.
unsafe impl<T, const ID: u64> CqePointer<ID> for Arc<T>
where
    T: CqeHandler<ID, Pointer = Self> + Send + Sync + 'static,
{
    const NOTED: bool = true;

    #[inline]
    fn into_ptr(self, _: Sealed) -> *mut T {
        Arc::into_raw(self).cast_mut()
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut T) -> Self {
        // SAFETY: `ptr` is from `Arc::into_raw`, for a reference that was given up and is taken
        // back once, as the caller promises.
        unsafe { Arc::from_raw(ptr) }
    }
}
