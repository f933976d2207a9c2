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
        PostError,
        RecvWr,
        SendWr,
        Sge, //
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

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Says whether all entries are of the QP's PD, which also means of its device.
    #[inline]
    fn owns(&self, sges: &[Sge<'_>]) -> bool {
        sges.iter().all(|sge| sge.pd == self.pd)
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
        let wr = match wr(&owner) {
            Ok(wr) if self.owns(&wr.sges) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError { owner, error }),
        };
        let mut sges = wr.sges.map(Sge::to_raw);
        let SendWr {
            opcode,
            flags,
            imm_data,
            remote,
            ..
        } = wr;
        let cqe = owner.into_cqe();
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let ptr = raw.as_mut_ptr();
        // SAFETY: The fields are in bounds. A driver reads what follows `wr` of RDMA requests only.
        let wr = unsafe {
            (&raw mut (*ptr).wr).write(bindings::ib_send_wr {
                next: core::ptr::null_mut(),
                __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                    wr_cqe: ManuallyDrop::new(cqe),
                },
                sg_list: sges.as_mut_ptr(),
                num_sge: const { N as c_int },
                opcode,
                send_flags: flags,
                ex: bindings::ib_send_wr__bindgen_ty_2 {
                    imm_data: ManuallyDrop::new(imm_data),
                },
            });
            if let Some(remote) = remote {
                (*ptr).remote_addr = remote.addr;
                (*ptr).rkey = remote.rkey;
            }
            &raw const (*ptr).wr
        };
        // SAFETY: The entries are memory that the owner keeps, and the owner is the queue's until
        // `done`.
        unsafe { self.post_send_raw(wr, cqe) }
    }

    /// Posts a request that is ready, and takes the owner back if the driver refuses it.
    ///
    /// # Safety
    ///
    /// `wr` is a valid request without a successor, whose memory is kept by the owner that `cqe` is
    /// from.
    #[inline]
    pub(crate) unsafe fn post_send_raw<P, const ID: u64>(
        &self,
        wr: *const bindings::ib_send_wr,
        cqe: *mut bindings::ib_cqe,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let qp = self.raw.as_ptr();
        let mut bad = core::ptr::null();
        // SAFETY: By the type invariant and the caller's promise. Clients are only told of devices
        // that have all verbs (`kverbs_provider`), so the operation exists.
        let ret = unsafe { ((*(*qp).device).ops.post_send.unwrap_unchecked())(qp, wr, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        Err(PostError {
            // SAFETY: The only request was not posted, so nothing else will take its owner back.
            owner: unsafe { P::from_cqe(cqe) },
            error: Error::from_errno(ret),
        })
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
        let mut sges = wr.sges.map(|sge| sge.0.to_raw());
        let cqe = owner.into_cqe();
        let raw = bindings::ib_recv_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
                wr_cqe: ManuallyDrop::new(cqe),
            },
            sg_list: sges.as_mut_ptr(),
            num_sge: const { N as c_int },
        };
        let qp = self.raw.as_ptr();
        let mut bad = core::ptr::null();
        // SAFETY: As in `post_send_raw`; the entries are memory that the owner keeps.
        let ret = unsafe { ((*(*qp).device).ops.post_recv.unwrap_unchecked())(qp, &raw, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        Err(PostError {
            // SAFETY: The only request was not posted, so nothing else will take its owner back.
            owner: unsafe { P::from_cqe(cqe) },
            error: Error::from_errno(ret),
        })
    }
}
