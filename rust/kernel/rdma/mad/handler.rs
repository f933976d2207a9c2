// SPDX-License-Identifier: GPL-2.0

//! What the MAD layer calls.
//!
//! It does so in process context: from the work item of its CQ, from its timeouts, or from whoever
//! unregisters the agent. Only spinlocks are taken here, and only wake-ups done.

use super::{
    queue::Queue,
    received::Received,
    request::Request, //
};
use crate::bindings;
use core::ptr::NonNull;

/// The context of an agent: where its unsolicited MADs go.
///
/// # Safety
///
/// `agent` is one of [`Agent::register`](super::Agent::register).
unsafe fn queue<'a>(agent: *mut bindings::ib_mad_agent) -> &'a Queue {
    // SAFETY: By the invariant of `Registered` the context of such an agent is a queue that
    // outlives it.
    unsafe { &*(*agent).context.cast::<Queue>() }
}

/// A MAD has come: the reply to `buf`, or an unsolicited one.
///
/// # Safety
///
/// Called by the MAD layer for an agent of this crate.
pub(super) unsafe extern "C" fn on_recv(
    agent: *mut bindings::ib_mad_agent,
    buf: *mut bindings::ib_mad_send_buf,
    mad: *mut bindings::ib_mad_recv_wc,
) {
    let Some(mad) = NonNull::new(mad) else {
        return;
    };
    // SAFETY: The agent is alive while its handler runs, and the MAD is the handler's.
    let mad = unsafe { Received::new(&*agent, mad) };
    if buf.is_null() {
        // SAFETY: The agent is one of `Agent::register`: no other agent of this crate has a receive
        // handler.
        unsafe { queue(agent) }.push(mad);
        return;
    }
    // SAFETY: The MAD layer calls the send handler, which takes the context back, after this.
    unsafe { &*(*buf).context[0].cast::<Request>() }.replied(mad);
}

/// The MAD layer is done with a MAD that was sent: it was sent and there is no reply to wait for,
/// the reply has come, it has timed out, or it was given up.
///
/// # Safety
///
/// Called by the MAD layer for an agent of this crate, once for each buffer that was posted.
pub(super) unsafe extern "C" fn on_sent(
    _agent: *mut bindings::ib_mad_agent,
    wc: *mut bindings::ib_mad_send_wc,
) {
    // SAFETY: Both are valid during this call, which is the only one for the buffer.
    unsafe { Request::take((*wc).send_buf).complete((*wc).status) };
}
