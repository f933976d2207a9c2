// SPDX-License-Identifier: GPL-2.0

//! Completions of local invalidations.

use super::Completion;
use crate::{
    cqe::CqeHandler,
    mr,
    wc::{
        unlikely,
        Wc, //
    }, //
};
use core::mem::ManuallyDrop;

impl<'a> Completion<'a> {
    /// Takes the owner, if it is a `T` that was posted by its callback `ID` with a local
    /// invalidation ([`Qp::post_inv`](crate::qp::Qp::post_inv)); its handler is not called. If that
    /// was successful, the region is idle.
    ///
    /// [`Completion::take`] does not know these: an invalidation completes to a callback in its MR.
    ///
    /// Where `T` is generic and of another crate, a module may not recognise owners that another
    /// module has made.
    ///
    /// # Errors
    ///
    /// The completion, if it is another one.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cq::{Batch, Cq}, cqe::*, dma::*, mr::Region, wc::Wc};
    /// # #[derive(HasCqe)]
    /// # struct Io { cqe: Cqe<Self>, region: Region<Bidirectional> }
    /// # impl CqeHandler for Io {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// /// Drops what is idle again; other requests go to their handlers.
    /// fn reap(cq: &Cq<Direct>, batch: &mut Batch<16>) -> Result {
    ///     cq.poll(batch)?;
    ///     for completion in batch.completions() {
    ///         if let Ok((io, _wc)) = completion.take_inv::<Io, 0>() {
    ///             drop(io);
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// ```
    #[inline]
    pub fn take_inv<T: CqeHandler<ID>, const ID: u64>(
        self,
    ) -> core::result::Result<(T::Pointer, &'a Wc), Self> {
        let this = ManuallyDrop::new(self);
        if !this.wc.cqe().is_null() {
            // SAFETY: By the type invariant the owner was not taken back, and there is a callback.
            // If there is an owner, `this` is not dropped.
            if let Some(owner) = unsafe { mr::take_ended::<T, ID>(this.wc) } {
                return Ok((owner, this.wc));
            }
        }
        unlikely();
        Err(ManuallyDrop::into_inner(this))
    }
}
