// SPDX-License-Identifier: GPL-2.0

//! Connection requests, and how they are answered.

use super::{
    callback::{
        on_event,
        private_data,
        RawId,
        REQ_LEN, //
    },
    connection::{
        establish,
        number,
        starting_psn,
        Place, //
    },
    Connection,
    Handler,
    Param, //
};
use crate::{
    bindings,
    cm::RejectReason,
    context::{
        PollContext,
        Sleepable, //
    },
    device::Device,
    qp::{
        self,
        Qp, //
    }, //
};
use core::cell::Cell;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// A connection request that waits for an answer.
///
/// # Invariants
///
/// `event` is the connection request of `id`, and this is the callback that tells it.
pub struct Request<'a> {
    pub(super) id: RawId,
    pub(super) event: &'a bindings::ib_cm_event,
    pub(super) device: &'a Device,
    pub(super) taken: &'a Cell<bool>,
}

impl Request<'_> {
    /// Returns what the peer sent along, 92 bytes.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: By the type invariant this is the event of a request, whose private data have
        // this length.
        unsafe { private_data(self.event, REQ_LEN) }
    }

    /// Returns what the peer asks for, which the connection manager has made the view of the
    /// recipient.
    fn param(&self) -> &bindings::ib_cm_req_event_param {
        // SAFETY: By the type invariant this is the event of a request, which has this member set.
        unsafe { &self.event.param.req_rcvd }
    }

    /// Returns the number of the port that the request came through.
    pub fn port_num(&self) -> u32 {
        self.param().port.into()
    }

    /// Returns how many RDMA READs and atomics the peer wants to have outstanding here.
    pub fn responder_resources(&self) -> u8 {
        self.param().responder_resources
    }

    /// Returns how many RDMA READs and atomics the peer lets this side have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.param().initiator_depth
    }

    /// Takes the QP to RTS and accepts the connection (`ib_send_cm_rep`). The peer may send from
    /// here on.
    ///
    /// `handler` is told of everything that happens to the connection.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the QP is of another device, or in use already, or with too much private data;
    /// `ENODEV` if the device goes; `ENOMEM`; or the connection manager's or driver's error.
    /// The request is then rejected.
    pub fn accept<S: PollContext, R: PollContext>(
        self,
        qp: &Qp<S, R>,
        handler: Arc<dyn Handler>,
        param: &Param<'_>,
        _cx: &Sleepable,
    ) -> Result<Connection> {
        self.accept_inner(&qp.inner, handler, &param.clamp())
    }

    #[inline(never)]
    fn accept_inner(
        self,
        qp: &qp::inner::Inner,
        handler: Arc<dyn Handler>,
        param: &Param<'_>,
    ) -> Result<Connection> {
        if *qp.pd.device() != *self.device {
            return Err(EINVAL);
        }
        let mut rep = bindings::ib_cm_rep_param {
            qp_num: number(qp),
            starting_psn: starting_psn(qp),
            private_data: param.private_data.as_ptr().cast(),
            private_data_len: param.private_data.len().try_into()?,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: 1,
            rnr_retry_count: param.rnr_retry_count,
            ..Default::default()
        };
        let place = Place::new(self.device, self.port_num(), handler, false)?;
        let raw = self.id.as_ptr();
        // SAFETY: The id is alive by the invariant of `RawId`. By that of the request this is its
        // callback, and no other one runs before this has returned.
        unsafe {
            (*raw).context = Arc::as_ptr(&place.shared).cast_mut().cast();
            (*raw).cm_handler = Some(on_event);
        }
        // The id is ours: a work item will destroy it, never this callback's return.
        self.taken.set(true);
        let shared = place.shared.clone();
        // SAFETY: What is taken is not destroyed by the callback's return; callback and context
        // were set above.
        let accepted = unsafe { place.fill(self.id) }.and_then(|connection| {
            establish(qp, self.id)?;
            // SAFETY: The id is alive by the invariant of `RawId`. The parameters are copied by the
            // call.
            to_result(unsafe { bindings::ib_send_cm_rep(raw, &raw mut rep) })?;
            Ok(connection)
        });
        accepted.inspect_err(|_| shared.release_handler())
    }

    /// Rejects the connection (`ib_send_cm_rej`).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data, or the connection manager's error. The
    /// request is rejected all the same.
    pub fn reject(self, reason: RejectReason, private_data: &[u8], _cx: &Sleepable) -> Result {
        let len = private_data.len().try_into()?;
        // SAFETY: The id is alive by the invariant of `RawId`, and the data are copied by the call.
        to_result(unsafe {
            bindings::ib_send_cm_rej(
                self.id.as_ptr(),
                reason.0,
                core::ptr::null_mut(),
                0,
                private_data.as_ptr().cast(),
                len,
            )
        })
    }
}
