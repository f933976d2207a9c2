// SPDX-License-Identifier: GPL-2.0

//! Rejections: why, and what was sent along.

use crate::bindings;
use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};

/// Why a connection request is rejected, as `enum ib_cm_rej_reason`. Can be printed
/// (`ibcm_reject_msg`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RejectReason(pub u32);

impl RejectReason {
    /// There is no QP left.
    pub const NO_QP: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_QP);
    /// There is no room for another connection.
    pub const NO_RESOURCES: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_NO_RESOURCES);
    /// An answer has not come in time.
    pub const TIMEOUT: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_TIMEOUT);
    /// The request is not supported.
    pub const UNSUPPORTED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_UNSUPPORTED);
    /// Nobody listens on the port, or the service id.
    pub const INVALID_SERVICE_ID: Self =
        Self(bindings::ib_cm_rej_reason_IB_CM_REJ_INVALID_SERVICE_ID);
    /// There is an older connection of this QP.
    pub const STALE_CONN: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_STALE_CONN);
    /// The reason is the ULP's own; the data that are sent along say it.
    pub const CONSUMER_DEFINED: Self = Self(bindings::ib_cm_rej_reason_IB_CM_REJ_CONSUMER_DEFINED);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = c_int::try_from(self.0).unwrap_or(0);
        // SAFETY: Any number will do; the string is static.
        let text = unsafe { CStr::from_char_ptr(bindings::ibcm_reject_msg(reason)) };
        fmt::Display::fmt(text, f)
    }
}

/// How a peer has rejected a connection request. Can be printed (`rdma_reject_msg`).
#[derive(Clone, Copy, Debug)]
pub struct Rejected<'a> {
    status: i32,
    message: &'static CStr,
    private_data: Option<&'a [u8]>,
}

impl<'a> Rejected<'a> {
    /// # Safety
    ///
    /// `id` is valid, has a device, and `raw` is its rejection, whose private data live as long as
    /// it.
    pub(super) unsafe fn from_raw(
        id: *mut bindings::rdma_cm_id,
        raw: &'a bindings::rdma_cm_event,
    ) -> Self {
        let mut len = 0;
        // SAFETY: The caller says that the id has a device, and that this is its rejection. The
        // message is one that is never freed.
        let (message, data) = unsafe {
            (
                CStr::from_char_ptr(bindings::rdma_reject_msg(id, raw.status)),
                bindings::rdma_consumer_reject_data(
                    id,
                    core::ptr::from_ref(raw).cast_mut(),
                    &raw mut len,
                ),
            )
        };
        let private_data = if data.is_null() {
            None
        } else {
            // SAFETY: Data and length are those of the event's private data, which the caller says
            // live as long as the event.
            Some(unsafe { core::slice::from_raw_parts(data.cast(), len.into()) })
        };
        Self {
            status: raw.status,
            message,
            private_data,
        }
    }

    /// Returns the reason, on InfiniBand and RoCE.
    pub fn reason(&self) -> Option<RejectReason> {
        self.status.try_into().ok().map(RejectReason)
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
