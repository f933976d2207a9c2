// SPDX-License-Identifier: GPL-2.0

//! Events of connections, and their handlers.

use crate::{
    cm::private_data_at,
    code::HasCode,
    prelude::internal::*, //
};

/// An event of a connection, as `struct rdma_cm_event`. Those of resolving are not passed on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The connection is established (`RDMA_CM_EVENT_ESTABLISHED`).
    Established {
        /// The data that the peer sent along.
        private_data: &'a [u8],
    },
    /// The connection is gone (`RDMA_CM_EVENT_DISCONNECTED`). The last event of an id: the crate
    /// then answers the peer and moves the QP to the error state, which flushes what is posted.
    Disconnected,
    /// The peer does not want the connection (`RDMA_CM_EVENT_REJECTED`). The last event of an id.
    Rejected(Rejected<'a>),
    /// The connection could not be made (`RDMA_CM_EVENT_CONNECT_ERROR`, `..._UNREACHABLE`,
    /// `..._ADDR_ERROR`, `..._ROUTE_ERROR`). The last event of an id, unless it was established:
    /// the peer's address has moved, and it is being disconnected.
    Failed(Error),
    /// The device is being removed (`RDMA_CM_EVENT_DEVICE_REMOVAL`), or the module unloaded. The
    /// last event of an id: the crate then ends the connection, and the removal waits until its
    /// objects are gone.
    DeviceRemoval,
    /// The network interface of this end has another hardware address, as that of a bond after a
    /// failover (`RDMA_CM_EVENT_ADDR_CHANGE`). The connection still uses the old one: most ULPs
    /// disconnect.
    AddrChange,
    /// Any other event, by its C value.
    Other(u32),
}

impl<'a> Event<'a> {
    /// Returns whether this is the last event of its id, so that the connection is over.
    pub fn is_last(&self) -> bool {
        let goes_on = matches!(
            self,
            Self::Established { .. } | Self::AddrChange | Self::Other(_)
        );
        !goes_on
    }

    /// # Safety
    ///
    /// `raw` is an event of `id`, of a connected service, and its private data live as long as it.
    pub(super) unsafe fn from_raw(
        id: *mut bindings::rdma_cm_id,
        raw: &'a bindings::rdma_cm_event,
    ) -> Self {
        match raw.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => Self::Established {
                // SAFETY: The caller promises so of the event and its private data.
                private_data: unsafe { private_data(raw) },
            },
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => {
                let mut len = 0;
                let event = ptr::from_ref(raw).cast_mut();
                // SAFETY: The caller promises that this is an event of `id`, which has a device
                // then, and that the private data live as long as it. The message is never freed.
                let (message, private_data) = unsafe {
                    let message = bindings::rdma_reject_msg(id, raw.status);
                    let sent = bindings::rdma_consumer_reject_data(id, event, &raw mut len);
                    let sent = (!sent.is_null()).then(|| private_data_at(sent, len.into()));
                    (CStr::from_char_ptr(message), sent)
                };
                Self::Rejected(Rejected {
                    reason: raw.status.try_into().ok().map(RejectReason),
                    message,
                    private_data,
                })
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR => {
                Self::Failed(to_result(raw.status).err().unwrap_or(EHOSTUNREACH))
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE => Self::AddrChange,
            other => Self::Other(other),
        }
    }
}

/// The event's name (`rdma_event_msg`), and why.
impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = match self {
            Self::Established { .. } => bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED,
            Self::Disconnected => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED,
            Self::Rejected(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED,
            Self::Failed(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR,
            Self::DeviceRemoval => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL,
            Self::AddrChange => bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE,
            Self::Other(raw) => *raw,
        };
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::rdma_event_msg(raw)) };
        fmt::Display::fmt(text, f)?;
        match self {
            Self::Rejected(rejected) => f.write_fmt(fmt!(": {rejected}")),
            Self::Failed(error) => f.write_fmt(fmt!(": {error:?}")),
            _ => Ok(()),
        }
    }
}

/// Returns the private data of an event.
///
/// # Safety
///
/// `raw` is an event of a connected service, and its private data live as long as it.
pub(super) unsafe fn private_data(raw: &bindings::rdma_cm_event) -> &[u8] {
    // SAFETY: The caller promises that this is an event of a connected service, in which `conn` is
    // the member that is set, and that its private data live as long as it.
    unsafe {
        let conn = &*raw.param.conn;
        private_data_at(conn.private_data, conn.private_data_len.into())
    }
}

/// The handler of the events of a connection. Functions that take one fail with `EPERM` if the
/// client, or the device, of the connection is another module's.
pub trait Handler: HasCode + Send + Sync {
    /// Handles an event. Events of one connection come one after the other, in process context. The
    /// handler is released after the last event, so that it may own the connection. A work item
    /// that is started here gets a reference by `Arc::from(self)`.
    fn event(self: ArcBorrow<'_, Self>, event: Event<'_>, cx: &Sleepable);
}

/// The reason of a rejection, as `enum ib_cm_rej_reason`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RejectReason(pub u32);

/// The length of the private data of a rejection by the InfiniBand connection manager.
pub(crate) const REJ_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;

impl RejectReason {
    /// There is no QP left.
    pub const NO_QP: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_QP);
    /// There is no room for another connection.
    pub const NO_RESOURCES: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_RESOURCES);
    /// There is no listener on the port, or the service id.
    pub const INVALID_SERVICE_ID: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_SERVICE_ID);
    /// There is an older connection of this QP.
    pub const STALE_CONN: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_STALE_CONN);
    /// The reason is the ULP's own, and is in the private data.
    pub const CONSUMER_DEFINED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

/// A peer's rejection of a connection request. Can be printed (`rdma_reject_msg`).
///
/// # Examples
///
/// ```
/// # use rdma::{cm::RejectReason, prelude::*};
/// fn is_stale(rejected: &cm::Rejected<'_>) -> bool {
///     pr_info!("{rejected}, with {:?}\n", rejected.private_data());
///     rejected.reason() == Some(RejectReason::STALE_CONN)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rejected<'a> {
    reason: Option<RejectReason>,
    message: &'static CStr,
    private_data: Option<&'a [u8]>,
}

impl<'a> Rejected<'a> {
    /// Returns the rejection of an id of the InfiniBand connection manager.
    pub(crate) fn new(reason: RejectReason, private_data: &'a [u8]) -> Self {
        let raw = c_int::try_from(reason.0).unwrap_or(0);
        // SAFETY: Any number will do; the string is static.
        let message = unsafe { CStr::from_char_ptr(bindings::ibcm_reject_msg(raw)) };
        Self {
            reason: Some(reason),
            message,
            private_data: (reason == RejectReason::CONSUMER_DEFINED).then_some(private_data),
        }
    }

    /// Returns the reason, on InfiniBand and RoCE.
    pub fn reason(&self) -> Option<RejectReason> {
        self.reason
    }

    /// Returns what the peer's ULP sent along, if it was the peer's ULP that has rejected
    /// (`rdma_consumer_reject_data`). On InfiniBand and RoCE zeroes fill it up to 148 bytes.
    pub fn private_data(&self) -> Option<&'a [u8]> {
        self.private_data
    }
}

impl fmt::Display for Rejected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.message, f)
    }
}
