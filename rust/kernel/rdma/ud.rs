// SPDX-License-Identifier: GPL-2.0

//! Datagrams.
//!
//! A [`UdQp`] sends to whoever an [`Ah`] and a QP number name, and receives from everybody who
//! knows its Q_Key. Datagrams may get lost. A received one comes with 40 bytes of header in front:
//! [`Datagram`] takes them apart.
//!
//! # Examples
//!
//! ```
//! use rdma::{ah::Ah, context::*, cqe::*, device::Gid, dma::*, ud::{UdQp, UdWr}, wc::Wc};
//!
//! #[derive(HasCqe)]
//! struct Question {
//!     cqe: Cqe<Self>,
//!     buf: Buf<ToDevice>,
//!     to: Ah,
//! }
//!
//! impl CqeHandler for Question {
//!     type Pointer = Pin<KBox<Self>>;
//!     type Needs = Atomic;
//!
//!     fn done(this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {
//!         drop(this);
//!     }
//! }
//!
//! fn ask(qp: &UdQp<Softirq>, question: Pin<KBox<Question>>, qpn: u32, qkey: u32) -> Result {
//!     Ok(qp.post_send(question, |q| {
//!         Ok(UdWr::send([q.buf.whole()], &q.to, qpn, qkey))
//!     })?)
//! }
//! ```
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_ud_wr`)

mod datagram;
pub(crate) mod group;
mod post;

pub use datagram::Datagram;
pub use post::UdWr;

use crate::{
    ah::{
        Ah,
        Attr,
        Grh, //
    },
    bindings,
    context::{
        CorePolled,
        PollContext,
        Provides,
        Sleepable, //
    },
    cq::Cq,
    device::Gid,
    pd::Pd,
    qp::{
        Caps,
        Init,
        Qp, //
    },
    srq::{
        Receive,
        Srq, //
    }, //
};
use group::Groups;
use kernel::{
    prelude::*, //
};

/// The number that a datagram to a multicast group is sent to.
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// The length of the header in front of each received datagram, in bytes: a receive has to have
/// room for it, before the payload.
pub const HEADER: usize = crate::ah::HEADER;

/// What the QP of datagrams needs at its end, beyond other QPs.
pub(crate) struct Extra {
    /// An address for the marker of the drain. The marker is flushed and never sent.
    pub(crate) nowhere: Ah,
    pub(crate) groups: Pin<KBox<Groups>>,
}

impl Extra {
    #[inline(never)]
    fn new(pd: &Pd, port: u32, cx: &Sleepable) -> Result<Self> {
        let gid = {
            let port = pd.device().port(port).ok_or(EINVAL)?;
            let gid = port.gids().next().ok_or(EADDRNOTAVAIL)?;
            (gid.gid(), gid.index())
        };
        let attr = Attr::new(port).grh(Grh::new(gid.0, gid.1.try_into()?));
        Ok(Self {
            nowhere: Ah::create(pd, &attr, cx)?,
            groups: KBox::pin_init(Groups::new(), GFP_KERNEL)?,
        })
    }
}

/// A QP for datagrams, whose queues complete in contexts `S` and `R`.
///
/// It ends as a [`Qp`] does, and leaves its multicast groups before.
pub struct UdQp<S: PollContext, R: PollContext = S> {
    qp: Qp<S, R>,
    port: u32,
}

impl<S: PollContext, R: PollContext> UdQp<S, R> {
    /// Creates a QP on a port of the device (`ib_create_qp`, `IB_QPT_UD`), which receives datagrams
    /// that are sent with `qkey`, and makes it ready to receive and to send (`ib_modify_qp`). It
    /// uses the first entry of the port's P_Key table.
    ///
    /// # Errors
    ///
    /// `EADDRNOTAVAIL` if the port has no GID yet; `EOPNOTSUPP` on iWARP; otherwise as
    /// [`Qp::create_raw`].
    pub fn create(
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        port: u32,
        qkey: u32,
        cx: &Sleepable,
    ) -> Result<Self> {
        Self::new(pd, Init::new(pd, send_cq, recv_cq, caps), port, qkey, cx)
    }

    fn new(pd: &Pd, init: Init<'_, S, R>, port: u32, qkey: u32, cx: &Sleepable) -> Result<Self> {
        let extra = Extra::new(pd, port, cx)?;
        let qp = init.create_ud(extra, cx)?;
        start(&qp, port, qkey)?;
        Ok(Self { qp, port })
    }

    /// Returns the QP's number, which peers send to.
    pub fn num(&self) -> u32 {
        self.qp.num()
    }

    /// Returns the number of the port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Receives what is sent to a multicast group, too (`ib_attach_mcast`), until the QP's end or
    /// [`UdQp::detach`]. `lid` is the group's LID on InfiniBand, where the subnet's administration
    /// has to be asked to join it first; on RoCE it does not matter.
    ///
    /// Such datagrams have to be sent with the QP's Q_Key, too. Any thread that may sleep.
    ///
    /// # Errors
    ///
    /// `EEXIST` if the QP is in the group; `EINVAL` if the GID is not that of a group; `EOPNOTSUPP`
    /// if the device has none; `ENOMEM`, or the driver's error.
    pub fn attach(&self, group: Gid, lid: u16, cx: &Sleepable) -> Result {
        // SAFETY: The QP is alive, and leaves its groups at its end.
        unsafe { self.groups()?.attach(self.qp.as_raw(), group, lid, cx) }
    }

    /// Leaves a multicast group (`ib_detach_mcast`).
    ///
    /// # Errors
    ///
    /// `ENOENT` if the QP is not in the group, or the driver's error.
    pub fn detach(&self, group: Gid, cx: &Sleepable) -> Result {
        // SAFETY: The QP is alive.
        unsafe { self.groups()?.detach(self.qp.as_raw(), group, cx) }
    }

    fn groups(&self) -> Result<&Groups> {
        let extra = self.qp.inner.ud.as_ref().ok_or(EINVAL)?;
        Ok(&extra.groups)
    }

    /// Ends receiving and sending and waits until every request that was posted has completed. See
    /// [`Qp::drain`].
    ///
    /// # Errors
    ///
    /// As [`Qp::drain`].
    pub fn drain(&self, cx: &Sleepable) -> Result {
        self.qp.drain(cx)
    }

    /// Drains and destroys the QP and waits for that, where dropping it leaves it to a work item.
    ///
    /// # Errors
    ///
    /// As [`Qp::destroy`].
    pub fn destroy(self, cx: &Sleepable) -> Result {
        self.qp.destroy(cx)
    }
}

impl<C: CorePolled> UdQp<C> {
    /// Creates a QP that takes its receives from an SRQ; see [`Init::on_srq`].
    ///
    /// # Errors
    ///
    /// As [`UdQp::create`].
    pub fn create_on_srq<T: Receive<N>, const N: usize>(
        pd: &Pd,
        cq: &Cq<C>,
        srq: &Srq<T, N>,
        caps: &Caps,
        port: u32,
        qkey: u32,
        cx: &Sleepable,
    ) -> Result<Self>
    where
        C: Provides<T::Needs>,
    {
        Self::new(pd, Init::on_srq(pd, cq, srq, caps), port, qkey, cx)
    }
}

/// Takes a new QP to the state in which it sends and receives.
fn start<S: PollContext, R: PollContext>(qp: &Qp<S, R>, port: u32, qkey: u32) -> Result {
    const STATE: bindings::ib_qp_attr_mask = bindings::ib_qp_attr_mask_IB_QP_STATE;
    const INIT: bindings::ib_qp_attr_mask = STATE
        | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
        | bindings::ib_qp_attr_mask_IB_QP_PORT
        | bindings::ib_qp_attr_mask_IB_QP_QKEY;
    const RTS: bindings::ib_qp_attr_mask = STATE | bindings::ib_qp_attr_mask_IB_QP_SQ_PSN;

    let modifier = qp.inner.modifier();
    for (state, mask) in [
        (bindings::ib_qp_state_IB_QPS_INIT, INIT),
        (bindings::ib_qp_state_IB_QPS_RTR, STATE),
        (bindings::ib_qp_state_IB_QPS_RTS, RTS),
    ] {
        let mut attr = bindings::ib_qp_attr {
            qp_state: state,
            port_num: port,
            qkey,
            ..Default::default()
        };
        // SAFETY: The attributes are complete for this mask.
        unsafe { modifier.modify(&mut attr, mask) }?;
    }
    Ok(())
}
