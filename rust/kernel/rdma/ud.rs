// SPDX-License-Identifier: GPL-2.0

//! Unreliable datagrams (`IB_QPT_UD`).
//!
//! A [`UdQp`] sends to the destination of an [`Ah`] and a QP number, and receives from all peers
//! that know its Q_Key. Datagrams may get lost. A received one has 40 bytes of header in front of
//! its payload: [`Datagram`] splits them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_ud_wr`)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    ah::{
        self,
        Ah, //
    },
    cq::Cq,
    cqe::{
        CqePointer,
        Runs, //
    },
    pd::Pd,
    prelude::internal::*,
    qp::{
        self,
        Caps,
        Qp, //
    },
    wc,
    wr::{
        self,
        PostError,
        RecvWr,
        SendWr, //
    }, //
};

/// The length of the header in front of each received datagram, in bytes.
pub const HEADER: usize = crate::ah::HEADER;

/// A QP for datagrams, whose queues complete in contexts `S` and `R`. It ends as a [`Qp`] does.
pub struct UdQp<S: PollContext, R: PollContext = S> {
    qp: Qp<S, R>,
}

impl<S: PollContext, R: PollContext> UdQp<S, R> {
    /// Creates a QP on a port of the device (`ib_create_qp`, `IB_QPT_UD`), which receives datagrams
    /// that are sent with `qkey`, and makes it ready to receive and to send (`ib_modify_qp`). It
    /// uses the first entry of the port's P_Key table. Fails with `EADDRNOTAVAIL` if the port has
    /// no GID yet, and `EOPNOTSUPP` on iWARP; otherwise as [`Qp::create_raw`].
    pub fn create(
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        port: u32,
        qkey: u32,
        cx: &Sleepable,
    ) -> Result<Self> {
        let init = qp::InitAttr::new(pd, send_cq, recv_cq, caps);
        let qp = init.create_ud(marker_ah(pd, port, cx)?, cx)?;
        qp.inner.start(port, qkey)?;
        Ok(Self { qp })
    }

    /// Returns the QP's number, which peers send to.
    pub fn num(&self) -> u32 {
        self.qp.num()
    }

    /// Ends sending and receiving, and waits for all requests that were posted, as [`Qp::drain`].
    pub fn drain(&self, cx: &Sleepable) -> Result {
        self.qp.drain(cx)
    }

    /// Drains and destroys the QP, and waits for that. A drop leaves that to a work item. Fails as
    /// [`Qp::destroy`].
    pub fn destroy(self, cx: &Sleepable) -> Result {
        self.qp.destroy(cx)
    }

    /// Posts a datagram (`ib_post_send`), moving in the owner of memory and address handle. Any
    /// context. Fails as [`Qp::post_send`]; with `EINVAL` if the address handle is of another PD.
    #[inline]
    pub fn post_send<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<UdWr<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        S: Runs<P, ID>,
    {
        // SAFETY: This is a QP for datagrams, and `S` provides what the handler needs.
        unsafe { self.qp.post_op(owner, wr) }
    }

    /// Posts a receive (`ib_post_recv`), moving its owner in. Its memory begins with the [`HEADER`]
    /// bytes before the payload. As [`Qp::post_recv`].
    #[inline]
    pub fn post_recv<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N, ID>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        R: Runs<P, ID>,
    {
        self.qp.post_recv(owner, wr)
    }
}

/// Creates the destination of the marker of a drain, which is flushed and never sent.
fn marker_ah(pd: &Pd, port: u32, cx: &Sleepable) -> Result<Ah> {
    let mut gids = pd.device().port(port).ok_or(EINVAL)?.gids();
    let own = gids.next().ok_or(EADDRNOTAVAIL)?;
    let mut attr = ah::Attr::new(port);
    attr.grh = Some(ah::Grh::new(own.gid(), own.index().try_into()?));
    Ah::create(pd, &attr, cx)
}

/// A datagram that was received into a buffer.
pub struct Datagram<'a> {
    wc: wc::Success<'a>,
    header: &'a [u8; HEADER],
    payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Splits a datagram that was received into `buf`, from its start, into header and payload.
    /// Fails with `EINVAL` if `wc` is not the completion of a receive, `EMSGSIZE` if `buf` is
    /// short.
    pub fn new(wc: wc::Success<'a>, buf: &'a [u8]) -> Result<Self> {
        if wc.opcode() != wc::Opcode::Recv {
            return Err(EINVAL);
        }
        let received = buf.get(..wc.byte_len()).ok_or(EMSGSIZE)?;
        let (header, payload) = received.split_first_chunk().ok_or(EMSGSIZE)?;
        Ok(Self {
            wc,
            header,
            payload,
        })
    }

    /// Returns the payload.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Returns the sender's address, for [`Ah::reply`](crate::ah::Ah::reply). `port` is the QP's.
    pub fn source(&self, port: u32) -> ah::Source {
        ah::Source::new(self.wc.raw(), self.header, port)
    }
}

/// A datagram to be sent, with `N` scatter/gather entries, as `struct ib_ud_wr`. All requests are
/// signaled: their owner comes back when they complete. The datagram may be lost.
pub type UdWr<'a, const N: usize = 1, const ID: u64 = 0> = SendWr<'a, N, UdOp, ID>;

/// The operation of a [`UdWr`].
pub struct UdOp {
    ah: NonNull<Ah>,
    qpn: u32,
    qkey: u32,
}

impl<'a, const N: usize> UdWr<'a, N> {
    /// A datagram to QP `qpn` at `ah`, which receives it if its Q_Key is `qkey` (`IB_WR_SEND`). It
    /// cannot be longer than the path's MTU.
    #[inline]
    pub fn new(sges: impl wr::Entries<wr::Sge<'a>, N>, ah: &'a Ah, qpn: u32, qkey: u32) -> Self {
        let op = UdOp {
            ah: NonNull::from(ah),
            qpn,
            qkey,
        };
        let sges = sges.into_list();
        Self { sges, op }
    }
}

impl wr::WrOp for UdOp {
    type Output = ();
    type Raw = bindings::ib_ud_wr;
    type Undo = ();

    #[inline]
    unsafe fn prepare<const N: usize>(
        &mut self,
        _sges: &[wr::Sge<'_>; N],
        target: &wr::PostTarget,
    ) -> Result<((), ())> {
        // SAFETY: The address handle lives until the request has completed, as the caller promises.
        if unsafe { self.ah.as_ref() }.pd != target.pd {
            return Err(EINVAL);
        }
        Ok(((), ()))
    }

    #[inline]
    unsafe fn write(self, to: *mut bindings::ib_ud_wr) {
        let opcode = bindings::ib_wr_opcode_IB_WR_SEND;
        let flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        // SAFETY: The caller promises that `to` is valid for writes, and the handle lives for the
        // request.
        unsafe {
            wr::write_header(to.cast(), opcode, flags, 0);
            (*to).ah = self.ah.as_ref().raw.as_ptr();
            (*to).header = ptr::null_mut();
            (*to).hlen = 0;
            (*to).mss = 0;
            (*to).remote_qpn = self.qpn;
            (*to).remote_qkey = self.qkey;
            (*to).pkey_index = 0;
            (*to).port_num = 0;
        }
    }
}
