// SPDX-License-Identifier: GPL-2.0

//! Waiting for what the MAD layer calls when nobody answers.

use super::handler::on_sent;
use crate::{
    bindings,
    context::Sleepable, //
};
use kernel::{
    error::from_err_ptr,
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

/// How long to wait for memory.
const NAP: Delta = Delta::from_millis(10);

/// Waits for the timeouts of a port that have begun: until the send handlers that were called
/// before have returned.
///
/// The MAD layer has one ordered workqueue a port, and calls the send handlers of all agents on it
/// when nobody has answered in time (`timeout_sends()` in core/mad.c). To unregister an agent is
/// all that flushes it, so one is registered that neither sends nor receives. That fails for want
/// of memory, or of numbers, which is waited for. A port that the MAD layer does not know
/// (`ENODEV`) has no agents: it opens ports when a device is added, and closes them after all
/// clients of this crate have let go of it.
///
/// Not to be called in a callback of a connection manager, which may be called by one of them.
///
/// # Safety
///
/// `dev` is registered, and stays so during the call.
pub(crate) unsafe fn flush_timeouts(dev: *mut bindings::ib_device, port: u32, _cx: &Sleepable) {
    let agent = loop {
        // SAFETY: The caller says that the device is registered. An agent without a request
        // receives nothing but replies, and this one sends nothing, so no handler is called.
        let agent = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev,
                port,
                bindings::ib_qp_type_IB_QPT_GSI,
                core::ptr::null_mut(),
                0,
                Some(on_sent),
                None,
                core::ptr::null_mut(),
                0,
            )
        });
        match agent {
            Ok(agent) => break agent,
            // The port has no MADs, or the MAD layer could not open it when the device was added:
            // so there are no timeouts.
            Err(EPROTONOSUPPORT | ENODEV) => return,
            Err(_) => fsleep(NAP),
        }
    };
    // SAFETY: Just registered. `unregister_mad_agent()` flushes the port's workqueue.
    unsafe { bindings::ib_unregister_mad_agent(agent) };
}
