// SPDX-License-Identifier: GPL-2.0

//! Requests of which only the last is signaled.

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
    qp::{
        chain::{
            Links,
            Refused,
            Slot, //
        },
        post::{
            no_signal,
            send_raw,
            signal,
            unnamed,
            Refusal, //
        },
        Chain,
        ChainError,
        Qp, //
    },
    wc::Wc,
    wr::SendWr, //
};
use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    num::NonZero,
    ops::Deref, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

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
        let made = unsafe { Links::make(&raw mut slots, &self.qp.target, &**owner, make) };
        let (links, shared) = made?;
        let reg_lock = shared.then(|| self.qp.reg_lock());
        let len = links.len();
        self.reads |= links.reads;
        // SAFETY: The QP is valid while it is borrowed. The owner is moved into a signaled request
        // that is posted later, or kept until the QP was drained.
        let (posted, result) = match unsafe { links.post(&self.qp.target, reg_lock, None) } {
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
        let made = unsafe { Links::make(&raw mut slots, &qp.target, &*owner, make) };
        let (mut links, shared) = match made {
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
        let reg_lock = shared.then(|| qp.reg_lock());
        let cqe = owner.into_cqe(crate::cqe::Sealed::new());
        // SAFETY: The QP is valid while it is borrowed, and the owner is the queue's until `done`.
        match unsafe { links.post(&qp.target, reg_lock, Some(cqe)) } {
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
                self.qp.inner.keep_until_drained::<P, P::Target>(owner);
            }
        }
    }
}

// The request is made once. A [`Batch`](super::Batch) makes each of its requests anew, as they may
// differ.

/// A request that was posted less often than it was to be.
struct Stopped<P> {
    /// Unless the request that is signaled may be in the queue.
    owner: Option<P>,
    posted: u32,
    error: Error,
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts a request `times` times, the last time signaled and with its owner.
    ///
    /// # Safety
    ///
    /// The owner's handler may run where sends of this QP complete. If something was posted before
    /// it was stopped, the owner is kept until the QP was drained.
    #[inline]
    unsafe fn try_times<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        times: NonZero<u32>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), Stopped<P>>
    where
        P: CqePointer<ID>,
        P::Target: Sized,
    {
        let (cqe, refusal, before) = {
            let mut raw = MaybeUninit::uninit();
            let mut sges = MaybeUninit::uninit();
            let written = wr(&owner).and_then(|wr| {
                let times = times.get();
                if times > self.sends || (times > 1 && !wr.is_repeatable()) {
                    return Err(EINVAL);
                }
                // SAFETY: There is room for the request and its entries.
                unsafe { wr.write(raw.as_mut_ptr(), sges.as_mut_ptr(), &self.target) }
            });
            if let Err(error) = written {
                return Err(Stopped {
                    owner: Some(owner),
                    posted: 0,
                    error,
                });
            }
            let wr: *mut bindings::ib_send_wr = raw.as_mut_ptr().cast();
            let cqe = owner.into_cqe(crate::cqe::Sealed::new());
            // How often it is still to be posted before the last time.
            let mut before = times.get().wrapping_sub(1);
            // SAFETY: The request was just written. Its owner was given up for `cqe`, and is there
            // until the last one completes or, if that is not posted, by the caller's promise.
            let ret = unsafe {
                (*wr).next = core::ptr::null_mut();
                no_signal(wr);
                loop {
                    if before == 0 {
                        signal(wr, cqe);
                        break send_raw(self.as_raw(), wr);
                    }
                    let ret = send_raw(self.as_raw(), wr);
                    if ret != 0 {
                        break ret;
                    }
                    before = before.wrapping_sub(1);
                }
            };
            if ret == 0 {
                return Ok(());
            }
            // SAFETY: `wr` is valid, and `ret` is what `send_raw` has just returned for it.
            (cqe, unsafe { Refusal::of_send(ret, wr) }, before)
        };
        let posted = times.get().wrapping_sub(1).wrapping_sub(before);
        // SAFETY: It is the callback of the owner, which only the last one has.
        Err(unsafe { Self::not_posted(cqe, refusal, posted, before == 0) })
    }

    /// Takes the owner back of a request that was posted `posted` times before it was refused.
    ///
    /// # Safety
    ///
    /// `cqe` is from the owner, and is the callback of the request that was refused if that is the
    /// `last` one; no other has it.
    #[cold]
    #[inline(never)]
    unsafe fn not_posted<P, const ID: u64>(
        cqe: *mut bindings::ib_cqe,
        refusal: Refusal,
        posted: u32,
        last: bool,
    ) -> Stopped<P>
    where
        P: CqePointer<ID>,
    {
        let error = refusal.error();
        // Without a word from the driver, take it for posted.
        let posted = posted.saturating_add(u32::from(!refusal.named));
        if last && !refusal.named {
            unnamed();
        }
        let owner = if !last || refusal.named {
            // SAFETY: The last one, which alone would give the owner back, was not posted.
            Some(unsafe { P::take_back(cqe) })
        } else {
            None
        };
        Stopped {
            owner,
            posted,
            error,
        }
    }

    /// Gives the owner back if nothing was posted, and otherwise keeps it until the QP was drained.
    #[cold]
    #[inline(never)]
    fn keep<P: Deref + Send + 'static>(&self, owner: Option<P>, posted: u32) -> Option<P> {
        if posted == 0 {
            return owner;
        }
        if let Some(owner) = owner {
            self.keep_until_drained::<P, P::Target>(owner);
        }
        None
    }

    #[inline]
    fn stopped<P: Deref + Send + 'static>(&self, stopped: Stopped<P>) -> ChainError<P> {
        ChainError {
            owner: self.keep(stopped.owner, stopped.posted),
            posted: stopped.posted as usize,
            error: stopped.error,
        }
    }

    /// Posts the same request `times` times (`ib_post_send`), moving its owner in.
    ///
    /// `wr` describes the request from what the owner has; each one is posted by itself. Only the
    /// last one is signaled: its completion says that those before it have completed too, and gives
    /// the owner to its handler.
    ///
    /// The queue has room again only when a signaled request completes: see [`Qp::batch`].
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`]; `EINVAL` also if `times` is more than the send queue was made for
    /// ([`Caps::send_wr`]), or more than one for a message that invalidates a key of the peer's,
    /// which is gone with the first. The driver may have posted some when it refuses one: see
    /// [`ChainError`].
    ///
    /// [`Caps::send_wr`]: crate::qp::Caps::send_wr
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # use core::num::NonZero;
    /// # #[derive(HasCqe)]
    /// # struct Knock { cqe: Cqe<Self>, buf: Buf<ToDevice> }
    /// # impl CqeHandler for Knock {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn knock(qp: &Qp<Softirq>, knock: Pin<KBox<Knock>>, times: NonZero<u32>) -> Result {
    ///     Ok(qp.post_times(knock, times, |k| Ok(SendWr::send([k.buf.whole()])))?)
    /// }
    /// ```
    #[inline]
    pub fn post_times<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        times: NonZero<u32>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), ChainError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: `S` provides what the handler needs. The owner is kept by `stopped`.
        unsafe { self.try_times(owner, times, wr) }.map_err(|e| self.stopped(e))
    }

    /// Posts the same request `times` times as [`Qp::post_times`], for an owner that has its QP:
    /// see [`Qp::repost_send`].
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_times`]. An owner that the QP keeps has it in turn: both are there until
    /// [`Qp::drain`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # use core::num::NonZero;
    /// # use kernel::sync::Arc;
    /// #[derive(HasCqe)]
    /// struct Burst {
    ///     cqe: Cqe<Self>,
    ///     buf: Buf<ToDevice>,
    ///     times: NonZero<u32>,
    ///     qp: Arc<Qp<Softirq>>,
    /// }
    ///
    /// impl CqeHandler for Burst {
    ///     type Pointer = Pin<KBox<Self>>;
    ///     type Needs = Atomic;
    ///
    ///     fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
    ///         if wc.result().is_ok() {
    ///             let times = this.times;
    ///             let posted = Qp::repost_times(this, wc, |b| &b.qp, times, |b| {
    ///                 Ok(SendWr::send([b.buf.whole()]))
    ///             });
    ///             if let Err(e) = posted {
    ///                 pr_err!("stopped after {}: {:?}\n", e.posted, e.error);
    ///             }
    ///         }
    ///     }
    /// }
    /// ```
    #[inline]
    pub fn repost_times<P, const ID: u64, const N: usize>(
        owner: P,
        wc: &Wc,
        qp: impl for<'a> FnOnce(&'a P::Target) -> &'a Arc<Self>,
        times: NonZero<u32>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), ChainError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let qp = qp(&owner);
        if qp.is_polled_at(wc) {
            // SAFETY: The owner keeps the QP by this reference. It comes back from the queue only
            // after the caller, a handler that borrows `wc`, has returned, as `is_polled_at` says;
            // or it was refused, and is below.
            let qp = ManuallyDrop::new(unsafe { Arc::from_raw(Arc::as_ptr(qp)) });
            // SAFETY: `S` provides what the handler needs. The owner is kept by `stopped`.
            let Err(stopped) = (unsafe { qp.try_times(owner, times, wr) }) else {
                return Ok(());
            };
            // Who drains the QP may drop an owner that it keeps, and its reference with it.
            return Err(Arc::clone(&qp).stopped(stopped));
        }
        Self::post_times_counted(qp.clone(), owner, times, wr)?;
        Ok(())
    }

    /// As [`Qp::post_times`], by a reference that the caller has. Not inlined, as in `repost_send`.
    #[inline(never)]
    fn post_times_counted<P, const ID: u64, const N: usize>(
        this: Arc<Self>,
        owner: P,
        times: NonZero<u32>,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), ChainError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        this.post_times(owner, times, wr)
    }
}
