// SPDX-License-Identifier: GPL-2.0

//! Completions that were polled and not dispatched.

use crate::{
    bindings,
    cqe::{
        self,
        CqeHandler, //
    },
    wc::{
        Success,
        Wc,
        WcError, //
    }, //
};
use core::mem::{
    ManuallyDrop,
    MaybeUninit, //
};

/// Room for `N` completions, on the stack or in a struct of the caller's: what
/// [`Cq::poll`](crate::cq::Cq::poll) fills.
///
/// What is still in it when it is dropped, or filled again, goes to its handler.
///
/// # Invariants
///
/// The entries `next..len` are completions that `cq` gave, and whose owners were not taken back.
pub struct Batch<const N: usize> {
    wcs: [MaybeUninit<bindings::ib_wc>; N],
    next: usize,
    len: usize,
    cq: *mut bindings::ib_cq,
}

// SAFETY: Owners of requests are `Send`, and their handlers, which need no context, may run in any
// thread. The address of the CQ is only passed on.
unsafe impl<const N: usize> Send for Batch<N> {}

impl<const N: usize> Batch<N> {
    /// Returns an empty batch. One without room does not compile.
    #[inline]
    pub const fn new() -> Self {
        const { assert!(N > 0 && N <= 1 << 16, "a batch has room for something") };
        // INVARIANT: There are no entries.
        Self {
            wcs: [const { MaybeUninit::uninit() }; N],
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

    /// Says whether all completions were taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// Passes over requests that were posted without a callback, at the front of a chain. They
    /// complete only when they fail, and their owner is the chain's.
    #[inline]
    pub(super) fn skip(&mut self) {
        while self.peek().is_some_and(|wc| wc.cqe().is_null()) {
            self.next += 1;
        }
    }

    #[inline]
    fn peek(&self) -> Option<&Wc> {
        let wc = self.wcs.get(self.next..self.len)?.first()?;
        // SAFETY: By the type invariant the entry is initialised; `Wc` is transparent.
        Some(unsafe { &*wc.as_ptr().cast::<Wc>() })
    }

    /// Takes the next completion.
    #[inline]
    #[expect(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Completion<'_>> {
        self.skip();
        let wc = core::ptr::from_ref(self.peek()?);
        // INVARIANT: The entry leaves the range, whatever becomes of the completion.
        self.next += 1;
        // INVARIANT: By the type invariant of the batch.
        Some(Completion {
            // SAFETY: The entry stays as it is while `self` is borrowed.
            wc: unsafe { &*wc },
            cq: self.cq,
        })
    }

    /// Dispatches what is left.
    #[inline]
    pub fn dispatch(&mut self) {
        while let Some(completion) = self.next() {
            drop(completion);
        }
    }

    /// Returns the room of an empty batch.
    #[inline]
    pub(super) fn room(&mut self) -> &mut [MaybeUninit<bindings::ib_wc>; N] {
        &mut self.wcs
    }

    /// Says what the room has been filled with.
    ///
    /// # Safety
    ///
    /// The batch was empty, and `cq` has given its first `len` entries, at most `N`.
    #[inline]
    pub(super) unsafe fn fill(&mut self, cq: *mut bindings::ib_cq, len: usize) {
        // INVARIANT: By the caller's promise.
        self.next = 0;
        self.len = len;
        self.cq = cq;
    }
}

impl<const N: usize> Default for Batch<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Drop for Batch<N> {
    #[inline]
    fn drop(&mut self) {
        self.dispatch();
    }
}

/// A completion that was polled, with the owner of its request.
///
/// Whoever knows the owner's type can [take](Completion::take) it; otherwise the owner's handler
/// gets it when this is dropped.
///
/// # Invariants
///
/// `wc` is a completion that `cq` gave, and whose owner was not taken back.
pub struct Completion<'a> {
    wc: &'a Wc,
    cq: *mut bindings::ib_cq,
}

impl<'a> Completion<'a> {
    /// Returns the request's result, as [`Wc::result`].
    #[inline]
    pub fn result(&self) -> core::result::Result<Success<'a>, WcError> {
        self.wc.result()
    }

    /// Says whether the owner is a `T` that was posted by its callback `ID`.
    #[inline]
    pub fn is<T: CqeHandler<ID>, const ID: u64>(&self) -> bool {
        // SAFETY: By the type invariant.
        unsafe { cqe::is_of::<T, ID>(self.wc.cqe()) }
    }

    /// Takes the owner, if it is a `T` that was posted by its callback `ID`; its handler is not
    /// called.
    ///
    /// Where `T` is generic and of another crate, a module may not recognise owners that another
    /// module has made.
    ///
    /// # Errors
    ///
    /// The completion, if its owner is something else.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{Batch, Cq}, cqe::*, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Request { cqe: Cqe<Self> }
    /// # impl CqeHandler for Request {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn collect(cq: &Cq<Direct>, requests: &mut KVec<Pin<KBox<Request>>>) -> Result {
    ///     let mut batch = Batch::<16>::new();
    ///     while cq.poll(&mut batch)? != 0 {
    ///         while let Some(completion) = batch.next() {
    ///             match completion.take::<Request, 0>() {
    ///                 Ok((request, _wc)) => requests.push(request, GFP_KERNEL)?,
    ///                 Err(other) => drop(other), // To its handler.
    ///             }
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// ```
    #[inline]
    pub fn take<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        if !self.is::<T, ID>() {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: The owner is a `T`'s, and `this` is not dropped, so it is not taken again.
        Ok((unsafe { cqe::take::<T, ID>(this.wc.cqe()) }, this.wc))
    }
}

impl Drop for Completion<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: By the type invariant; `self` is gone after this.
        unsafe { dispatch(self.cq, self.wc) };
    }
}

/// Calls the callback of a completion, as the RDMA core does.
///
/// # Safety
///
/// `cq` gave `wc`, whose owner was not taken back and is not taken back again. It has a callback,
/// and the caller's context provides what the owners posted to the CQ need.
#[inline]
pub(super) unsafe fn dispatch(cq: *mut bindings::ib_cq, wc: &Wc) {
    // SAFETY: By the caller's promise. The callbacks of this crate do not look at the CQ, and those
    // of drivers, which are their drains', keep it.
    unsafe {
        if let Some(done) = (*wc.cqe()).done {
            done(cq, core::ptr::from_ref(wc).cast_mut().cast());
        }
    }
}
