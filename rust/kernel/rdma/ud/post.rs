// SPDX-License-Identifier: GPL-2.0

//! Posting datagrams.

use super::UdQp;
use crate::{
    ah::Ah,
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    qp::post::{
        foreign,
        posted,
        send_raw, //
    },
    wr::{
        PostError,
        RecvWr,
        Sge, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;

/// A datagram to be sent, with `N` scatter/gather entries, as `struct ib_ud_wr`.
///
/// All requests are signaled: their owner comes back when they complete. That says nothing about
/// whether the datagram arrives.
pub struct UdWr<'a, const N: usize = 1> {
    sges: [Sge<'a>; N],
    ah: &'a Ah,
    qpn: u32,
    qkey: u32,
    opcode: bindings::ib_wr_opcode,
    flags: bindings::ib_send_flags,
    imm_data: u32,
}

impl<'a, const N: usize> UdWr<'a, N> {
    /// A datagram to QP `qpn` at `ah`, which receives it if its Q_Key is `qkey` (`IB_WR_SEND`).
    ///
    /// It cannot be longer than the path's MTU.
    #[inline]
    pub fn send(sges: [Sge<'a>; N], ah: &'a Ah, qpn: u32, qkey: u32) -> Self {
        Self {
            sges,
            ah,
            qpn,
            qkey,
            opcode: bindings::ib_wr_opcode_IB_WR_SEND,
            flags: bindings::ib_send_flags_IB_SEND_SIGNALED,
            imm_data: 0,
        }
    }

    /// Adds immediate data, in host byte order (`IB_WR_SEND_WITH_IMM`).
    #[inline]
    pub fn with_imm(mut self, imm_data: u32) -> Self {
        self.opcode = bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM;
        self.imm_data = imm_data.to_be();
        self
    }

    /// Asks the peer for an event when the datagram arrives (`IB_SEND_SOLICITED`).
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.flags |= bindings::ib_send_flags_IB_SEND_SOLICITED;
        self
    }
}

impl<S: PollContext, R: PollContext> UdQp<S, R> {
    /// Posts a datagram (`ib_post_send`), moving its owner in, which has the memory and the address
    /// handle.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`](crate::qp::Qp::post_send); `EINVAL` also if the address handle is of
    /// another PD.
    #[inline]
    pub fn post_send<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<UdWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let pd = self.qp.pd;
        let wr = match wr(&owner) {
            Ok(wr) if wr.ah.is_of(pd) && wr.sges.iter().all(|sge| sge.pd == pd) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError { owner, error }),
        };
        let (cqe, ret) = {
            let mut sges = wr.sges.map(Sge::to_raw);
            let (ah, remote_qpn, remote_qkey) = (wr.ah.as_raw(), wr.qpn, wr.qkey);
            let (opcode, flags, imm_data) = (wr.opcode, wr.flags, wr.imm_data);
            let cqe = owner.into_cqe();
            let raw = bindings::ib_ud_wr {
                wr: bindings::ib_send_wr {
                    next: core::ptr::null_mut(),
                    __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                        wr_cqe: ManuallyDrop::new(cqe),
                    },
                    sg_list: sges.as_mut_ptr(),
                    num_sge: const { N as c_int },
                    opcode,
                    send_flags: flags as c_int,
                    ex: bindings::ib_send_wr__bindgen_ty_2 {
                        imm_data: ManuallyDrop::new(imm_data),
                    },
                },
                ah,
                header: core::ptr::null_mut(),
                hlen: 0,
                mss: 0,
                remote_qpn,
                remote_qkey,
                pkey_index: 0,
                port_num: 0,
            };
            // SAFETY: The entries are memory that the owner keeps, as is the address handle, and the
            // owner is the queue's until `done`.
            (cqe, unsafe { send_raw(self.qp.as_raw(), &raw.wr) })
        };
        // SAFETY: It was the only request, and its owner's callback.
        unsafe { posted(ret, cqe) }
    }

    /// Posts a receive (`ib_post_recv`), moving its owner in. There has to be room for [`HEADER`]
    /// bytes before the payload.
    ///
    /// As [`Qp::post_recv`](crate::qp::Qp::post_recv).
    ///
    /// [`HEADER`]: super::HEADER
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
        self.qp.post_recv(owner, wr)
    }
}
