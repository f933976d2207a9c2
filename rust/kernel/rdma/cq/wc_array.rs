// SPDX-License-Identifier: GPL-2.0

//! Completions that were polled and not yet dispatched.

use crate::{
    cqe,
    prelude::*,
    wc, //
};
use core::mem;

/// An array of `N` completions, on the stack or in a struct of the caller's, which
/// [`Cq::poll`](crate::cq::Cq::poll) fills.
///
/// Completions that are left in it when it is dropped, or filled again, are dispatched.
///
/// # Invariants
///
/// The entries `next..len` are completions that `cq` gave, and whose owners were not taken back.
pub struct WcArray<const N: usize> {
    wcs: [mem::MaybeUninit<bindings::ib_wc>; N],
    next: usize,
    len: usize,
    cq: *mut bindings::ib_cq,
}

// SAFETY: Owners of requests are `Send`, and their handlers, which need no context, may run in any
// thread. The address of the CQ is only passed on.
unsafe impl<const N: usize> Send for WcArray<N> {}

impl<const N: usize> WcArray<N> {
    /// Returns an empty array. One of no length does not compile.
    #[inline]
    pub const fn new() -> Self {
        const { assert!(N > 0 && N <= 1 << 16, "an array has 1 to 65536 entries") };
        // INVARIANT: There are no entries.
        Self {
            wcs: [const { mem::MaybeUninit::uninit() }; N],
            next: 0,
            len: 0,
            cq: core::ptr::null_mut(),
        }
    }

    /// Returns the number of completions that were not taken.
    #[inline]
    pub fn len(&self) -> usize {
        self.len - self.next
    }

    /// Returns whether all completions were taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// Returns an iterator that takes the completions, one after the other. Those that it did not
    /// come to stay in the array.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{WcArray, Cq}};
    /// /// Counts the requests that have failed.
    /// fn failures(cq: &Cq<Direct>) -> Result<usize> {
    ///     let (mut array, mut failures) = (WcArray::<16>::new(), 0);
    ///     cq.poll(&mut array)?;
    ///     while !array.is_empty() {
    ///         failures += array.len();
    ///         failures -= array.completions().filter(|c| c.result().is_ok()).count();
    ///         cq.poll(&mut array)?;
    ///     }
    ///     Ok(failures)
    /// }
    /// ```
    #[inline]
    pub fn completions(&mut self) -> Completions<'_> {
        let wcs = self.wcs.get(self.next..self.len).unwrap_or(&[]);
        // INVARIANT: The entries leave the range; those that are left come back when this is
        // dropped.
        self.next = self.len;
        // INVARIANT: These are the last entries. By the type invariant `cq` gave them, and their
        // owners were not taken back; they have just left the range.
        Completions {
            wcs: wcs.iter(),
            cq: self.cq,
            next: &mut self.next,
        }
    }

    /// Dispatches the completions that are left.
    #[inline]
    pub(super) fn dispatch(&mut self) {
        if !self.is_empty() {
            self.dispatch_rest();
        }
    }

    #[inline(never)]
    fn dispatch_rest(&mut self) {
        self.completions().for_each(Completion::dispatch);
    }

    /// Returns the array of an empty array.
    #[inline]
    pub(super) fn wcs(&mut self) -> &mut [mem::MaybeUninit<bindings::ib_wc>; N] {
        &mut self.wcs
    }

    /// Makes the array one of `len` completions of `cq`.
    ///
    /// # Safety
    ///
    /// The array was empty, and `cq` has given its first `len` entries, at most `N`.
    #[inline]
    pub(super) unsafe fn fill(&mut self, cq: *mut bindings::ib_cq, len: usize) {
        // INVARIANT: `cq` has given these entries, as the caller promises.
        self.next = 0;
        self.len = len;
        self.cq = cq;
    }
}

impl<const N: usize> Default for WcArray<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Drop for WcArray<N> {
    #[inline]
    fn drop(&mut self) {
        self.dispatch();
    }
}

/// The completions of a [`WcArray`], in order.
///
/// # Invariants
///
/// `wcs` are the last entries of the array: completions that `cq` gave, and whose owners were not
/// taken back. `next` is that of the array, and its length.
pub struct Completions<'a> {
    wcs: core::slice::Iter<'a, mem::MaybeUninit<bindings::ib_wc>>,
    cq: *mut bindings::ib_cq,
    next: &'a mut usize,
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        let wc = self.wcs.next()?;
        // SAFETY: By the type invariant `cq` gave it, and its owner was not taken back. It is not
        // in `wcs` any more.
        Some(unsafe { Completion::new(self.cq, wc) })
    }
}

impl Drop for Completions<'_> {
    #[inline]
    fn drop(&mut self) {
        // INVARIANT: What was not taken is in the array again.
        *self.next = self.next.saturating_sub(self.wcs.len());
    }
}

/// A completion that was polled, with the owner of its request.
///
/// The owner can be [taken](Completion::take) where its type is known; otherwise its handler is
/// called by [`Completion::dispatch`], or when this is dropped.
///
/// A request that was posted without a callback, at the front of a chain, completes only when it
/// fails. It has no owner but the chain's, so it cannot be taken, and dispatching it does nothing.
///
/// # Invariants
///
/// `wc` is a completion that `cq` gave, and whose owner was not taken back.
pub struct Completion<'a> {
    pub(crate) wc: &'a Wc,
    cq: *mut bindings::ib_cq,
}

impl<'a> Completion<'a> {
    /// # Safety
    ///
    /// `cq` gave `wc`, whose owner was not taken back and is not taken back otherwise.
    #[inline]
    pub(super) unsafe fn new(
        cq: *mut bindings::ib_cq,
        wc: &'a mem::MaybeUninit<bindings::ib_wc>,
    ) -> Self {
        // INVARIANT: `cq` gave it, and its owner is taken back here only, as the caller promises.
        Self {
            // SAFETY: `cq` gave it, as the caller promises, so it is initialised; `Wc` is
            // transparent.
            wc: unsafe { &*wc.as_ptr().cast::<Wc>() },
            cq,
        }
    }

    /// Returns the request's result, as [`Wc::result`].
    #[inline]
    pub fn result(&self) -> core::result::Result<wc::Success<'a>, WcError> {
        self.wc.result()
    }

    /// Calls the handler of the request's owner, as a drop does.
    #[inline]
    pub fn dispatch(self) {
        drop(self);
    }

    /// Returns whether the owner is a `T` that was posted by its callback `ID`, but not with a
    /// local invalidation.
    #[inline]
    fn is<T: CqeHandler<ID>, const ID: u64>(&self) -> bool {
        let cqe = self.wc.cqe();
        if cqe.is_null() {
            wc::unlikely();
            return false;
        }
        // SAFETY: By the type invariant this is the callback of a completion whose owner was not
        // taken back.
        unsafe { cqe::is_of::<T, ID>(cqe) }
    }

    /// Takes the owner, if it is a `T` that was posted by its callback `ID`; its handler is not
    /// called.
    ///
    /// If `T` is generic and of another crate, a module may not recognise owners that another
    /// module has made. Gives the completion back if its owner is something else. For an example
    /// see [`Cq::process_with`].
    #[inline]
    pub fn take<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        if !self.is::<T, ID>() {
            wc::unlikely();
            return Err(self);
        }
        let this = mem::ManuallyDrop::new(self);
        // SAFETY: By the type invariant the owner was not taken back; it is a `T`'s, and `this` is
        // not dropped, so it is not taken again.
        Ok((unsafe { cqe::take::<T, ID>(this.wc.cqe()) }, this.wc))
    }
}

impl Drop for Completion<'_> {
    #[inline]
    fn drop(&mut self) {
        let cqe = self.wc.cqe();
        if cqe.is_null() {
            crate::wc::unlikely();
            return;
        }
        // SAFETY: By the type invariant `cq` gave the completion, and its owner was not taken back,
        // so the callback is there; `self` is gone after this. Owners that need more than `Atomic`
        // cannot be posted to a CQ that callers poll. The callbacks of this crate keep no reference
        // to the CQ, and those of drivers, which are their drains', keep it.
        unsafe {
            let done = (*cqe).done.unwrap_unchecked();
            done(self.cq, core::ptr::from_ref(self.wc).cast_mut().cast());
        }
    }
}
