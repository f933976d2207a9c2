// SPDX-License-Identifier: GPL-2.0

//! Timeouts of the messages of the connection managers, which are MADs.

use crate::prelude::*;
use core::ptr;
use kernel::{
    error,
    time, //
};

/// The time between two attempts to allocate, in milliseconds.
const RETRY_MS: i64 = 10;

/// The MAD layer wants a handler of each agent, and never calls this one.
extern "C" fn on_sent(_: *mut bindings::ib_mad_agent, _: *mut bindings::ib_mad_send_wc) {}

/// Waits for the timeouts of a port that have begun: for the send handlers that were called before.
///
/// The MAD layer has one ordered workqueue a port, on which it calls the send handlers of all
/// agents for requests that have timed out (`timeout_sends()` in core/mad.c). Only unregistering an
/// agent flushes it, so this registers one that neither sends nor receives, and retries while that
/// fails for want of memory or of agent numbers. The handler of a message of which the device says
/// that it was not sent is called by the port's CQ, which is not waited for: see the limits in
/// Documentation/safety.rst. A port that the MAD layer does not know (`ENODEV`) has no agents: it
/// is closed after all clients of this crate have released the device. Must not be called in a
/// callback of a connection manager, which may be called by such a timeout.
///
/// # Safety
///
/// `dev` is registered, and stays so during the call.
pub(crate) unsafe fn flush(dev: *mut bindings::ib_device, port: u32, _cx: &Sleepable) {
    let (gsi, no_request) = (bindings::ib_qp_type_IB_QPT_GSI, ptr::null_mut());
    let agent = loop {
        // SAFETY: The caller says that the device is registered. An agent without a request
        // receives nothing but replies, and this one sends nothing, so no handler is called.
        let agent = error::from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev,
                port,
                gsi,
                no_request,
                0,
                Some(on_sent),
                None,
                ptr::null_mut(),
                0,
            )
        });
        match agent {
            Ok(agent) => break agent,
            // The port has no MADs, or could not be opened when the device was added.
            Err(EPROTONOSUPPORT | ENODEV) => return,
            Err(_) => time::delay::fsleep(time::Delta::from_millis(RETRY_MS)),
        }
    };
    // SAFETY: The agent was just registered. `unregister_mad_agent()` flushes the port's workqueue.
    unsafe { bindings::ib_unregister_mad_agent(agent) };
}
