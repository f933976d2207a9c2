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
    pd,
    wr::{
        fill,
        sg_list,
        PostError,
        RecvWr,
        Sge, //
    }, //
};
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

    /// Checks that a request is for a QP of this PD, and forgets how long its memory and its
    /// address handle live.
    ///
    /// # Safety
    ///
    /// They live as long as what is returned.
    #[inline]
    unsafe fn check(self, pd: pd::Id) -> Result<UdWr<'static, N>> {
        if !self.ah.is_of(pd) || self.sges.iter().any(|sge| sge.pd != pd) {
            return Err(EINVAL);
        }
        // SAFETY: The caller keeps the memory for as long as what is returned.
        let sges = self.sges.map(|sge| unsafe { sge.erase() });
        Ok(UdWr {
            sges,
            // SAFETY: The caller keeps the address handle for as long as what is returned.
            ah: unsafe { &*core::ptr::from_ref(self.ah) },
            ..self
        })
    }

    /// Writes the C request and its entries, all but the callback and the successor.
    ///
    /// # Safety
    ///
    /// `to` and `sges` are valid for writes, and the address handle is there.
    #[inline]
    unsafe fn put(self, to: *mut bindings::ib_ud_wr, sges: *mut [bindings::ib_sge; N]) {
        let n = const { N as c_int };
        // SAFETY: `to` and `sges` are valid for writes, and the address handle is there, as the
        // caller promises.
        unsafe {
            sges.write(self.sges.map(Sge::to_raw));
            fill(
                &raw mut (*to).wr,
                self.opcode,
                self.flags,
                self.imm_data,
                sg_list(sges),
                n,
            );
            (*to).ah = self.ah.as_raw();
            (*to).header = core::ptr::null_mut();
            (*to).hlen = 0;
            (*to).mss = 0;
            (*to).remote_qpn = self.qpn;
            (*to).remote_qkey = self.qkey;
            (*to).pkey_index = 0;
            (*to).port_num = 0;
        }
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
        // SAFETY: A datagram begins as required, there is room for it, its entries are memory that
        // the owner keeps, as is the address handle, and `S` provides what the handler needs.
        unsafe {
            self.qp.post_written(
                owner,
                |owner| wr(owner)?.check(self.qp.place.pd),
                |wr, raw: *mut bindings::ib_ud_wr, sges| wr.put(raw, sges),
            )
        }
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
