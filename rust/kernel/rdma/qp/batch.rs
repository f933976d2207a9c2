// SPDX-License-Identifier: GPL-2.0

//! Requests of which only the last is signaled.

use super::{
    chain::{
        Chain,
        ChainError,
        Links,
        Refused, //
    },
    link::Slot,
    Qp, //
};
use crate::{
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    mr::Private, //
};
use kernel::prelude::*;

/// Requests of one owner that are posted one after the other, with a signaled one at the end.
///
/// If it is dropped before [`Batch::finish`], and something was posted, the QP keeps the owner
/// until a drain has proved that it is out of use.
///
/// # Invariants
///
/// The owner is there until it is posted or lost.
pub struct Batch<'q, S, R, P, const ID: u64 = 0>
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
{
    qp: &'q Qp<S, R>,
    owner: Option<P>,
    posted: usize,
    /// Whether an RDMA READ may be among what was posted.
    reads: bool,
}

/// A batch that could not be finished.
pub struct BatchError<'q, S, R, P, const ID: u64 = 0>
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
{
    /// The batch, to try again or to drop.
    pub batch: Batch<'q, S, R, P, ID>,
    /// Why the first request that was not posted was refused.
    pub error: Error,
}

impl<S, R, P, const ID: u64> From<BatchError<'_, S, R, P, ID>> for Error
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
{
    fn from(e: BatchError<'_, S, R, P, ID>) -> Self {
        e.error
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Begins a batch of requests of one owner. Nothing is posted yet.
    ///
    /// The queue has room again only when a signaled request completes, so do not fill it with
    /// requests that are not.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::*, wc::Wc, wr::*};
    /// # #[derive(HasCqe)]
    /// # struct Log { cqe: Cqe<Self>, record: Buf<ToDevice>, index: Buf<ToDevice> }
    /// # impl CqeHandler for Log {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn append(qp: &Qp<Softirq>, log: Pin<KBox<Log>>, to: [Remote; 2]) -> Result {
    ///     let mut batch = qp.batch(log);
    ///     batch.post(|log, chain: &mut Chain<'_, 1>| {
    ///         chain.push(SendWr::rdma_write([log.record.whole()], to[0]))
    ///     })?;
    ///     Ok(batch.finish(|log, chain: &mut Chain<'_, 1>| {
    ///         chain.push(SendWr::rdma_write([log.index.whole()], to[1]))
    ///     })?)
    /// }
    /// ```
    #[inline]
    pub fn batch<P, const ID: u64>(&self, owner: P) -> Batch<'_, S, R, P, ID>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // INVARIANT: The owner is there.
        Batch {
            qp: self,
            owner: Some(owner),
            posted: 0,
            reads: false,
        }
    }
}

impl<'q, S, R, P, const ID: u64> Batch<'q, S, R, P, ID>
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
    P::Target: Sized,
{
    /// Returns the number of requests that were posted.
    #[inline]
    pub fn posted(&self) -> usize {
        self.posted
    }

    /// Returns the owner, if nothing was posted. Otherwise the QP keeps it.
    pub fn into_owner(mut self) -> Option<P> {
        if self.posted == 0 {
            self.owner.take()
        } else {
            None
        }
    }

    /// Posts requests that are not signaled, in one call.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_chain`]; [`Batch::posted`] says how many were posted all the same.
    #[inline]
    pub fn post<const LINKS: usize, const SGES: usize>(
        &mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result {
        let owner = self.owner.as_ref().ok_or(EIO)?;
        let mut slots = [const { Slot::new() }; LINKS];
        // SAFETY: The slots outlive the links, and the QP is valid while it is borrowed.
        let (links, in_turn) = unsafe {
            Links::make(
                &raw mut slots,
                &self.qp.place,
                &**owner,
                Private::of(owner),
                make,
            )
        }?;
        let turn = in_turn.then(|| self.qp.turn());
        let len = links.len();
        self.reads |= links.reads;
        // SAFETY: The QP is valid while it is borrowed. The owner is moved into a signaled request
        // that is posted later, or kept until the QP was drained.
        let (posted, result) = match unsafe { links.post(&self.qp.place, turn, None) } {
            Ok(()) => (len, Ok(())),
            Err(refused) => {
                // SAFETY: The owner, which is borrowed, keeps what the links are made of.
                let (error, posted) = unsafe { refused.take_back() };
                // Without a word from the driver, take all for posted.
                (posted.unwrap_or(len), Err(error))
            }
        };
        self.posted = self.posted.saturating_add(posted);
        result
    }

    /// Posts the last requests, the very last signaled, and moves the owner in.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_chain`]. The batch comes back: it can be finished again.
    #[inline]
    pub fn finish<const LINKS: usize, const SGES: usize>(
        mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), BatchError<'q, S, R, P, ID>> {
        let (qp, posted, reads) = (self.qp, self.posted, self.reads);
        // What is left has no owner, so nothing ends with it, which the compiler would not see.
        let owner = self.owner.take();
        core::mem::forget(self);
        let batch = |owner, reads| Batch {
            qp,
            owner,
            posted,
            reads,
        };
        let Some(owner) = owner else {
            return Err(BatchError {
                batch: batch(None, reads),
                error: EIO,
            });
        };
        let mut slots = [const { Slot::new() }; LINKS];
        // SAFETY: The slots outlive the links, as the QP does.
        let made = unsafe {
            Links::make(
                &raw mut slots,
                &qp.place,
                &*owner,
                Private::of(&owner),
                make,
            )
        };
        let (mut links, in_turn) = match made {
            Ok(made) => made,
            Err(error) => {
                return Err(BatchError {
                    batch: batch(Some(owner), reads),
                    error,
                })
            }
        };
        links.reads |= reads;
        let reads = links.reads;
        let turn = in_turn.then(|| qp.turn());
        let cqe = owner.into_cqe(crate::cqe::Sealed::new());
        // SAFETY: The QP is valid while it is borrowed, and the owner is the queue's until `done`.
        match unsafe { links.post(&qp.place, turn, Some(cqe)) } {
            Ok(()) => Ok(()),
            // SAFETY: The signaled request was posted last, and with this callback.
            Err(refused) => Err(unsafe { batch(None, reads).refused(refused, cqe) }),
        }
    }

    /// Finds out what was posted of the last requests, and takes the owner back.
    ///
    /// # Safety
    ///
    /// The driver has refused requests that were made of what the owner has; the last of them was
    /// to complete to `cqe`, which is the owner's.
    #[cold]
    #[inline(never)]
    unsafe fn refused<const LINKS: usize, const SGES: usize>(
        mut self,
        refused: Refused<'_, LINKS, SGES>,
        cqe: *mut bindings::ib_cqe,
    ) -> BatchError<'q, S, R, P, ID> {
        // SAFETY: The owner that was given up is there unless all is posted, when nothing is marked
        // that has to be taken back.
        let (error, posted) = unsafe { refused.take_back() };
        match posted {
            Some(n) => {
                self.posted = self.posted.saturating_add(n);
                // SAFETY: The signaled request was not posted, so nothing else will take its owner
                // back.
                self.owner = Some(unsafe { P::take_back(cqe) });
            }
            None => pr_err!("a driver did not say which request it refused: the owner is leaked\n"),
        }
        BatchError { batch: self, error }
    }
}

impl<S, R, P, const ID: u64> BatchError<'_, S, R, P, ID>
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
    P::Target: Sized,
{
    /// Gives the batch up.
    #[cold]
    #[inline(never)]
    pub(super) fn into_chain(self) -> ChainError<P> {
        let posted = self.batch.posted();
        ChainError {
            owner: self.batch.into_owner(),
            posted,
            error: self.error,
        }
    }
}

impl<S, R, P, const ID: u64> Drop for Batch<'_, S, R, P, ID>
where
    S: PollContext,
    R: PollContext,
    P: CqePointer<ID>,
{
    #[inline]
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            if self.posted > 0 {
                self.qp.inner.park::<P, P::Target>(owner);
            }
        }
    }
}
