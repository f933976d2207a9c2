// SPDX-License-Identifier: GPL-2.0

//! The same request several times, of which only the last is signaled.
//!
//! The request is made once. A [`Batch`](super::Batch) makes each of its requests anew, as they may
//! differ.

use super::{
    chain::ChainError,
    post::{
        send_raw,
        unnamed,
        Refusal, //
    },
    signal::{
        no_signal,
        signal, //
    },
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
                unsafe { wr.write(raw.as_mut_ptr(), sges.as_mut_ptr(), &self.place) }
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
            self.park::<P, P::Target>(owner);
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
    /// [`Caps::send_wr`]: super::Caps::send_wr
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
