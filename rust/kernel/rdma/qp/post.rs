// SPDX-License-Identifier: GPL-2.0

//! Posting requests.

use super::Qp;
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
    wr::{
        end,
        sg_list,
        AtomicWr,
        PostError,
        RecvWr,
        SendWr, //
    }, //
};
use core::mem::{
    ManuallyDrop,
    MaybeUninit, //
};
use kernel::prelude::*;

/// Refuses a request with entries of another PD.
#[cold]
fn foreign<P>(owner: P) -> PostError<P> {
    PostError {
        owner,
        error: EINVAL,
    }
}

/// Takes the owner of a request back unless it was posted.
///
/// Callers have left the scope of what they have posted from: what ends there between the driver's
/// answer and this look at it would have the compiler test the result once more for the caller.
///
/// # Safety
///
/// `ret` is what posting it, as the only request, has returned, and `cqe` is from its owner.
#[inline]
pub(crate) unsafe fn posted<P, const ID: u64>(
    ret: c_int,
    cqe: *mut bindings::ib_cqe,
) -> Result<(), PostError<P>>
where
    P: CqePointer<ID>,
{
    if ret == 0 {
        return Ok(());
    }
    Err(PostError {
        // SAFETY: The only request was not posted, so nothing else will take its owner back.
        owner: unsafe { P::take_back(cqe) },
        error: Error::from_errno(ret),
    })
}

/// Posts a request to the send queue that is ready, and returns what the driver does.
///
/// # Safety
///
/// `qp` is valid. `wr` is a valid request without a successor, whose memory is kept until it has
/// completed.
#[inline]
pub(crate) unsafe fn send_raw(qp: *mut bindings::ib_qp, wr: *const bindings::ib_send_wr) -> c_int {
    let mut bad = MaybeUninit::uninit();
    // SAFETY: By the caller's promise. Clients are only told of devices that have all verbs
    // (`kverbs_provider`), so the operation exists.
    unsafe { ((*(*qp).device).ops.post_send.unwrap_unchecked())(qp, wr, bad.as_mut_ptr()) }
}

/// As [`send_raw`], to the receive queue.
///
/// # Safety
///
/// As there.
#[inline]
unsafe fn recv_raw(qp: *mut bindings::ib_qp, wr: *const bindings::ib_recv_wr) -> c_int {
    let mut bad = MaybeUninit::uninit();
    // SAFETY: As in `send_raw`.
    unsafe { ((*(*qp).device).ops.post_recv.unwrap_unchecked())(qp, wr, bad.as_mut_ptr()) }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts to the send queue what `write` writes, which is given the owner and room for the
    /// request and its entries.
    ///
    /// # Safety
    ///
    /// `W` begins with a `struct ib_send_wr`. Unless it fails, `write` writes a valid request, all
    /// but its callback and its successor, whose memory is kept by the owner. The owner's handler
    /// may run where sends of this QP complete.
    #[inline]
    pub(crate) unsafe fn post_written<P, W, const ID: u64, const N: usize>(
        &self,
        owner: P,
        write: impl FnOnce(&P::Target, *mut W, *mut [bindings::ib_sge; N]) -> Result,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let (cqe, ret) = {
            let mut raw = MaybeUninit::<W>::uninit();
            let mut sges = MaybeUninit::uninit();
            if let Err(error) = write(&owner, raw.as_mut_ptr(), sges.as_mut_ptr()) {
                return Err(PostError { owner, error });
            }
            let (wr, cqe) = (raw.as_mut_ptr().cast(), owner.into_cqe());
            // SAFETY: The request was just written. The owner is the queue's until `done`.
            let ret = unsafe {
                end(wr, cqe);
                send_raw(self.as_raw(), wr)
            };
            (cqe, ret)
        };
        // SAFETY: It was the only request, and its owner's callback.
        unsafe { posted(ret, cqe) }
    }

    /// Posts a request to the send queue (`ib_post_send`), moving its owner in.
    ///
    /// `wr` describes the request from what the owner has. After success the owner may already be
    /// in its handler.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// Gives the owner back with `EINVAL` if an entry is of another PD, or with the driver's error:
    /// `ENOMEM` when the queue is full.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # #[derive(HasCqe)]
    /// # struct Message { cqe: Cqe<Self>, sge: Buf<ToDevice> }
    /// # impl CqeHandler for Message {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn send(qp: &Qp<Softirq>, message: Pin<KBox<Message>>) -> Result {
    ///     Ok(qp.post_send(message, |m| Ok(SendWr::send([m.sge.sge(0..16)?])))?)
    /// }
    /// ```
    #[inline]
    pub fn post_send<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: An RDMA request begins as required, there is room for it, its entries are memory
        // that the owner keeps, and `S` provides what the handler needs.
        unsafe {
            self.post_written(owner, |owner, raw: *mut bindings::ib_rdma_wr, sges| {
                wr(owner)?.write(raw, sges, self.pd)
            })
        }
    }

    /// Posts an atomic operation (`ib_post_send`), moving its owner in.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`]; `EINVAL` also if the local memory is not eight bytes, or the remote
    /// address not aligned to eight.
    #[inline]
    pub fn post_atomic<P, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<AtomicWr<'a>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: As in `post_send`; an atomic request begins as required, too.
        unsafe {
            self.post_written(owner, |owner, raw: *mut bindings::ib_atomic_wr, sges| {
                wr(owner)?.write(raw, sges, self.pd)
            })
        }
    }

    /// Posts a request to the receive queue (`ib_post_recv`), moving its owner in.
    ///
    /// As [`Qp::post_send`].
    #[inline]
    pub fn post_recv<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        R: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let wr = match wr(&owner) {
            Ok(wr) if wr.sges.iter().all(|sge| sge.0.pd == self.pd) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError { owner, error }),
        };
        let (cqe, ret) = {
            let mut sges = wr.sges.map(|sge| sge.0.to_raw());
            let cqe = owner.into_cqe();
            let raw = bindings::ib_recv_wr {
                next: core::ptr::null_mut(),
                __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
                    wr_cqe: ManuallyDrop::new(cqe),
                },
                sg_list: sg_list(&raw mut sges),
                num_sge: const { N as c_int },
            };
            // SAFETY: As in `post_send`.
            (cqe, unsafe { recv_raw(self.as_raw(), &raw) })
        };
        // SAFETY: It was the only request, and its owner's callback.
        unsafe { posted(ret, cqe) }
    }
}
