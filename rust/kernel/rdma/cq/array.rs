// SPDX-License-Identifier: GPL-2.0

//! Arrays of completions that callers poll into.

use crate::{
    cqe::{
        self,
        CqeHandler,
        CqePointer, //
    },
    debug,
    prelude::internal::*,
    wc::{
        self,
        Wc,
        WcError, //
    }, //
};

/// An array of `N` completions, at most 64, which [`Cq::poll`](super::Cq::poll) fills. Those that
/// are left in it when it is dropped, or filled again, are dispatched.
///
/// # Invariants
///
/// The entries `next..len` are completions that a CQ gave, which may have been destroyed since, and
/// whose owners were not taken back.
pub struct WcArray<const N: usize> {
    pub(super) wcs: [MaybeUninit<bindings::ib_wc>; N],
    pub(super) next: usize,
    pub(super) len: usize,
}

// SAFETY: Owners of requests are `Send`, and their handlers, which need no context, may run in any
// thread.
unsafe impl<const N: usize> Send for WcArray<N> {}

impl<const N: usize> WcArray<N> {
    /// Returns an empty array. One of another length than 1 to 64 does not compile: it is made on
    /// the stack, where each entry takes 64 bytes.
    #[inline]
    pub const fn new() -> Self {
        const {
            assert!(
                N > 0 && N <= 64,
                "an array has 1 to 64 entries, on the stack"
            )
        };
        // INVARIANT: There are no entries.
        Self {
            wcs: [const { MaybeUninit::uninit() }; N],
            next: 0,
            len: 0,
        }
    }

    /// Returns an iterator that takes the completions. Those that it has not reached stay in the
    /// array.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{WcArray, Cq}};
    /// /// Counts the requests that have failed.
    /// fn failures(cq: &Cq<Direct>) -> Result<usize> {
    ///     let mut array = WcArray::<16>::new();
    ///     let mut failures = 0;
    ///     while cq.poll(&mut array)? != 0 {
    ///         failures += array.completions().filter(|c| c.result().is_err()).count();
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
        // INVARIANT: These are the last entries. By the type invariant a CQ gave them, and their
        // owners were not taken back; they have just left the range.
        Completions {
            wcs: wcs.iter(),
            next: &mut self.next,
        }
    }

    /// Dispatches the completions that are left.
    #[inline]
    pub(super) fn dispatch(&mut self) {
        if self.next != self.len {
            self.dispatch_rest();
        }
    }

    fn dispatch_rest(&mut self) {
        self.completions().for_each(Completion::dispatch);
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
/// `wcs` are the last entries of the array: completions that a CQ gave, and whose owners were not
/// taken back. `next` is that of the array, and its length.
pub struct Completions<'a> {
    wcs: core::slice::Iter<'a, MaybeUninit<bindings::ib_wc>>,
    next: &'a mut usize,
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        let wc = self.wcs.next()?;
        // SAFETY: By the type invariant a CQ gave it, and its owner was not taken back. It is no
        // longer in `wcs`.
        Some(unsafe { Completion::new(wc) })
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
/// called by [`Completion::dispatch`], or when this is dropped. A request at the front of a chain
/// completes only when it fails; it has no owner that could be taken.
///
/// # Invariants
///
/// `wc` is a completion that a CQ which callers poll gave, and whose owner was not taken back. The
/// CQ may have been destroyed, if this comes from a [`WcArray`].
pub struct Completion<'a> {
    pub(crate) wc: &'a Wc,
}

impl<'a> Completion<'a> {
    /// # Safety
    ///
    /// A CQ that callers poll gave `wc`, whose owner was not taken back and is not taken back
    /// otherwise.
    #[inline]
    pub(super) unsafe fn new(wc: &'a MaybeUninit<bindings::ib_wc>) -> Self {
        // INVARIANT: A CQ gave it, and its owner is taken back here only, as the caller promises.
        Self {
            // SAFETY: A CQ gave it, as the caller promises, so it is initialised; `Wc` is
            // transparent.
            wc: unsafe { &*wc.as_ptr().cast::<Wc>() },
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

    /// Takes the owner, if it is a `T` that was posted by its callback `ID`, for which no handler
    /// is called; otherwise gives the completion back. If `T` is generic and of another crate, a
    /// module may not recognise owners of another module.
    /// Documentation/cq.rst has an example.
    #[inline]
    pub fn take<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let cqe = self.wc.cqe();
        // SAFETY: By the type invariant the owner was not taken back, so its callback is valid.
        if cqe.is_null() || !unsafe { cqe::is_of::<T, ID>(cqe) } {
            wc::unlikely();
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        debug::deactivate(cqe);
        // SAFETY: The callback is that of `T`, so the address is from `into_cqe` of its pointer.
        // `this` is not dropped, so the owner is taken back once.
        Ok((unsafe { T::Pointer::from_cqe(cqe) }, this.wc))
    }
}

impl Drop for Completion<'_> {
    #[inline]
    fn drop(&mut self) {
        let cqe = self.wc.cqe();
        if cqe.is_null() {
            wc::unlikely();
            return;
        }
        // The CQ may have been destroyed, so it is not passed. The callbacks of this crate know
        // that (`trace::completion`). C's on such a CQ are those of drains, of the core and of
        // mlx4, mlx5 and hns, which look at the completion's `wr_cqe` alone.
        //
        // SAFETY: By the type invariant a CQ gave the completion, and its owner was not taken back,
        // so the callback is valid; `self` is gone after this. Owners that need more than `Atomic`
        // cannot be posted to a CQ that callers poll. The completion is only read.
        unsafe {
            let done = (*cqe).done.unwrap_unchecked();
            done(ptr::null_mut(), ptr::from_ref(self.wc).cast_mut().cast());
        }
    }
}
