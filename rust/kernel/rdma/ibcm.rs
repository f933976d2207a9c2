// SPDX-License-Identifier: GPL-2.0

//! The InfiniBand connection manager: connections to a service id over a path, without IP
//! addresses.
//!
//! For ULPs that have an addressing of their own (SRP, IPoIB); all others are better off with
//! [`cm`](crate::cm), whose C side is built upon it. Works on RoCE too, where a [`Path`] is made of
//! two GIDs.
//!
//! The QP is one of [`Qp::create_raw`], in the reset state, or in the INIT state so that receives
//! can be posted before: [`Connection::connect`] and [`Request::accept`] take it to where it can
//! send, and let the peer access what is registered for it. A connection does not keep its QP, nor
//! the other way round: either may go first.
//!
//! An id is destroyed by a work item when its connection or listener is dropped, which may be in
//! its own handler.
//!
//! C header: [`include/rdma/ib_cm.h`](srctree/include/rdma/ib_cm.h)
//!
//! [`Qp::create_raw`]: crate::qp::Qp::create_raw

mod connection;
mod listener;

pub use connection::Connection;
pub use listener::{
    Accept,
    Listener,
    Request, //
};

use crate::{
    ah::Source,
    bindings,
    cm::{
        PrivateData,
        RejectReason, //
    },
    context::Sleepable,
    device::{
        Gid,
        GidAttr,
        GidType, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::{
    error::to_result,
    prelude::*, //
};

/// Parameters of a connection, as `struct ib_cm_req_param` and `struct ib_cm_rep_param`.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    /// Data for the peer along with the request or the answer; at most 92 bytes in a request, 196
    /// in an answer. The peer cannot tell how many they were: zeroes follow.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding at the peer. With 0 they wait for
    /// ever.
    pub initiator_depth: u8,
    /// The number of times that an unanswered packet is sent again, up to 7. rxe takes 7 for
    /// "always".
    pub retry_count: u8,
    /// The number of times that a message is sent again when the peer has posted no receive, up to
    /// 7, which means "always".
    pub rnr_retry_count: u8,
    /// The time that either side may take to answer the other one's request: 4.096 µs times two to
    /// the power of this, up to 31.
    pub response_timeout: u8,
    /// The number of times that a request of the connection manager is sent again, 1 to 15.
    pub max_cm_retries: u8,
}

impl Default for Param<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 6,
            response_timeout: 20,
            max_cm_retries: 15,
        }
    }
}

impl Param<'_> {
    /// Brings all values into the range of their fields.
    fn clamp(self) -> Self {
        Self {
            retry_count: self.retry_count.min(7),
            rnr_retry_count: self.rnr_retry_count.min(7),
            response_timeout: self.response_timeout.min(31),
            // Without a retry C does not wait at all when it destroys the id.
            max_cm_retries: self.max_cm_retries.clamp(1, 15),
            ..self
        }
    }
}

/// The path between two ports (`struct sa_path_rec`), from an entry of a GID table of this host.
pub struct Path<'a> {
    from: &'a GidAttr,
    raw: bindings::sa_path_rec,
}

impl<'a> Path<'a> {
    /// Finds the path from one GID to another. That asks the network for the way, which may take a
    /// second.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` if the GID is not of RoCE: elsewhere paths are known to the subnet
    /// administrator. `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` without a way; or the driver's
    /// error.
    pub fn new(from: &'a GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        // As the connection manager for IP addresses does.
        const PACKET_LIFE_TIME: u8 = 16;
        const ALL_PARTITIONS: u16 = 0xffff;

        let rec_type = match from.gid_type() {
            GidType::RoceV1 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V1,
            GidType::RoceV2 => bindings::sa_path_rec_type_SA_PATH_REC_TYPE_ROCE_V2,
            _ => return Err(EPROTONOSUPPORT),
        };
        let (dev, port) = (from.device(), from.port_num());
        let mtu = dev.port(port).ok_or(ENODEV)?.query(cx)?.active_mtu;
        let source = Source::synthetic(from, to)?;
        let mut attr = bindings::rdma_ah_attr::default();
        // SAFETY: The device is registered by the invariant of `device::Inner`, and has the port.
        // The header is that of the completion.
        to_result(unsafe {
            bindings::ib_init_ah_attr_from_wc(
                dev.as_raw(),
                port,
                source.wc(),
                source.header(),
                &raw mut attr,
            )
        })?;
        // SAFETY: The call has filled in an address for RoCE, which is released after this.
        let dmac = unsafe {
            bindings::rdma_destroy_ah_attr(&raw mut attr);
            attr.__bindgen_anon_1.roce.dmac
        };
        let equal = bindings::ib_sa_selector_IB_SA_EQ as u8;
        let raw_gid = |gid: Gid| bindings::ib_gid {
            raw: ManuallyDrop::new(gid.0),
        };
        let raw = bindings::sa_path_rec {
            rec_type,
            sgid: raw_gid(from.gid()),
            dgid: raw_gid(to),
            hop_limit: attr.grh.hop_limit,
            reversible: 1,
            pkey: ALL_PARTITIONS.to_be(),
            mtu_selector: equal,
            // `enum ib_mtu` is 1 for 256 bytes.
            mtu: (mtu / 128).checked_ilog2().ok_or(EINVAL)?.try_into()?,
            rate_selector: equal,
            rate: bindings::ib_rate_IB_RATE_PORT_CURRENT as u8,
            packet_life_time_selector: equal,
            packet_life_time: PACKET_LIFE_TIME,
            __bindgen_anon_1: bindings::sa_path_rec__bindgen_ty_1 {
                roce: ManuallyDrop::new(bindings::sa_path_rec_roce {
                    route_resolved: true,
                    dmac,
                }),
            },
            ..Default::default()
        };
        Ok(Self { from, raw })
    }

    /// Returns where the path begins.
    pub fn from(&self) -> &GidAttr {
        self.from
    }

    fn to_raw(&self) -> bindings::sa_path_rec {
        // SAFETY: The record is plain data.
        unsafe { core::ptr::read(&raw const self.raw) }
    }
}

/// The answer of a peer.
#[derive(Clone, Copy)]
pub struct Answer {
    /// The data that it sent along, 196 bytes.
    pub private_data: PrivateData,
    /// RDMA READs and atomics that the peer wants to have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that it lets this side have outstanding.
    pub initiator_depth: u8,
}

impl Answer {
    /// Has nothing sent along.
    fn none() -> Self {
        Self {
            private_data: PrivateData::new(&[]),
            responder_resources: 0,
            initiator_depth: 0,
        }
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The peer did not want it.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What it sent along, 148 bytes; nothing, if there was no memory for it.
        private_data: KVec<u8>,
    },
    /// It could not be made.
    Failed(Error),
}

impl From<Error> for ConnectError {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

impl From<ConnectError> for Error {
    fn from(e: ConnectError) -> Self {
        match e {
            ConnectError::Rejected { .. } => ECONNREFUSED,
            ConnectError::Failed(e) => e,
        }
    }
}

/// An event of a connection, as `struct ib_cm_event`.
///
/// Events that [`Connection::connect`](Connection::connect) waits for are not passed on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer knows that its request was accepted (`IB_CM_RTU_RECEIVED`), or
    /// [`Connection::established`](Connection::established) has said so
    /// (`IB_CM_USER_ESTABLISHED`).
    Established,
    /// The connection has ended: the peer asked for that, and was answered (`IB_CM_DREQ_RECEIVED`),
    /// or it has answered, or not, to [`Connection::disconnect`](Connection::disconnect)
    /// (`IB_CM_DREP_RECEIVED`, `IB_CM_DREQ_ERROR`). The QP does not know: see
    /// [`Qp::drain`](crate::qp::Qp::drain). The last event.
    Disconnected,
    /// The peer has not confirmed the connection in time (`IB_CM_REP_ERROR`), or has rejected it
    /// after all (`IB_CM_REJ_RECEIVED`). The last event.
    Failed,
    /// The device goes, or the module: after the handler the crate asks the peer to disconnect, and
    /// the removal waits until the connection is dropped. The last event.
    DeviceRemoval,
}

/// The handler of the events of a connection.
pub trait Handler: Send + Sync + 'static {
    /// Handles an event. Events of one connection come one after the other, in process context;
    /// others wait for this to return.
    ///
    /// The handler is released after the last event, so that it may own the connection.
    fn event(&self, event: Event, cx: &Sleepable);
}
