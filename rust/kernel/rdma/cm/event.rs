// SPDX-License-Identifier: GPL-2.0

//! Events of the connection manager.

use crate::prelude::*;
use kernel::fmt;

/// An event of a connection, as `struct rdma_cm_event`. The events of resolving are not passed on:
/// the calls that start it wait for them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The connection is there (`RDMA_CM_EVENT_ESTABLISHED`).
    Established {
        /// The data that the peer sent along.
        private_data: &'a [u8],
    },
    /// The connection is gone (`RDMA_CM_EVENT_DISCONNECTED`). After the handler the crate answers
    /// the peer and moves the QP to the error state, so that what is posted comes back. The last
    /// event of an id.
    Disconnected,
    /// The peer does not want the connection (`RDMA_CM_EVENT_REJECTED`). The last event of an id.
    Rejected(Rejected<'a>),
    /// The connection could not be made (`RDMA_CM_EVENT_CONNECT_ERROR`, `..._UNREACHABLE`,
    /// `..._ADDR_ERROR`, `..._ROUTE_ERROR`). The last event of an id that was not established; one
    /// that was is being disconnected, as the peer's address has moved.
    Failed(Error),
    /// The device goes (`RDMA_CM_EVENT_DEVICE_REMOVAL`), or the module: after the handler the crate
    /// ends the connection, and the removal waits until its objects are gone. The last event of an
    /// id.
    DeviceRemoval,
    /// Any other event, by its C value.
    Other(u32),
}

impl<'a> Event<'a> {
    /// Returns whether this is the last event of its id, so that the connection is over.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Established { .. } | Self::Other(_))
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
                // SAFETY: The caller says so of the event and its private data.
                private_data: unsafe { private_data(raw) },
            },
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => {
                // SAFETY: The caller says that `raw` is an event of `id`, which has a device then.
                Self::Rejected(unsafe { Rejected::from_raw(id, raw) })
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR => Self::Failed(status(raw)),
            other => Self::Other(other),
        }
    }

    fn raw(&self) -> bindings::rdma_cm_event_type {
        match self {
            Self::Established { .. } => bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED,
            Self::Disconnected => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED,
            Self::Rejected(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED,
            Self::Failed(_) => bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR,
            Self::DeviceRemoval => bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL,
            Self::Other(raw) => *raw,
        }
    }
}

/// The event's name (`rdma_event_msg`), and why.
impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::rdma_event_msg(self.raw())) };
        fmt::Display::fmt(text, f)?;
        match self {
            Self::Rejected(rejected) => f.write_fmt(fmt!(": {rejected}")),
            Self::Failed(error) => f.write_fmt(fmt!(": {error:?}")),
            _ => Ok(()),
        }
    }
}

fn status(raw: &bindings::rdma_cm_event) -> Error {
    if raw.status < 0 {
        Error::from_errno(raw.status)
    } else {
        EHOSTUNREACH
    }
}

/// Returns the private data of an event.
///
/// # Safety
///
/// `raw` is an event of a connected service, and its private data live as long as it.
pub(super) unsafe fn private_data(raw: &bindings::rdma_cm_event) -> &[u8] {
    // SAFETY: The caller says that this is an event of a connected service, in which `conn` is the
    // member that is set, and that its private data live as long as it.
    unsafe {
        let conn = &*raw.param.conn;
        cm::data(conn.private_data, conn.private_data_len.into())
    }
}

/// The handler of the events of a connection.
pub trait Handler: Send + Sync + 'static {
    /// Handles an event. Events of one connection come one after the other, in process context. The
    /// handler is released after the last event, so that it may own the connection.
    fn event(&self, event: Event<'_>, cx: &Sleepable);
}

/// The reason of a rejection, as `enum ib_cm_rej_reason`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RejectReason(pub u32);

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
    /// The reason is the ULP's own; the data that are sent along say it.
    pub const CONSUMER_DEFINED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

/// A peer's rejection of a connection request. Can be printed (`rdma_reject_msg`).
///
/// # Examples
///
/// ```
/// # use rdma::{cm::RejectReason, prelude::*};
/// /// Returns whether it is worth to ask again.
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
    /// # Safety
    ///
    /// `id` is valid, has a device, and `raw` is its rejection, with its private data.
    unsafe fn from_raw(id: *mut bindings::rdma_cm_id, raw: &'a bindings::rdma_cm_event) -> Self {
        let mut len = 0;
        let event = core::ptr::from_ref(raw).cast_mut();
        // SAFETY: The caller says that the id has a device, and that this is its rejection, whose
        // private data live as long as it. The message is one that is never freed.
        let (message, private_data) = unsafe {
            let message = bindings::rdma_reject_msg(id, raw.status);
            let data = bindings::rdma_consumer_reject_data(id, event, &raw mut len);
            let sent = (!data.is_null()).then(|| cm::data(data, len.into()));
            (CStr::from_char_ptr(message), sent)
        };
        Self {
            reason: raw.status.try_into().ok().map(RejectReason),
            message,
            private_data,
        }
    }

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
