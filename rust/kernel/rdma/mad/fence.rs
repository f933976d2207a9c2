// SPDX-License-Identifier: GPL-2.0

//! Waiting for what the MAD layer calls when nobody answers.

use super::handler::on_sent;
use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};

/// Waits, when it is dropped, for the timeouts of a port that have begun: until the send handlers
/// that were called before have returned. That cannot fail once it is reserved.
///
/// Not to be dropped in a callback of a connection manager, which may be called by one of them.
///
/// The MAD layer has one ordered workqueue a port, and calls the send handlers of all agents on it
/// when nobody has answered in time (`timeout_sends()` in core/mad.c). To unregister an agent is
/// all that flushes it, so this is one that neither sends nor receives.
///
/// # Invariants
///
/// The agent is registered, and its device is there until it is unregistered.
pub(crate) struct Fence(NonNull<bindings::ib_mad_agent>);

// SAFETY: An agent may be unregistered from any thread.
unsafe impl Send for Fence {}
// SAFETY: Nothing is done by reference.
unsafe impl Sync for Fence {}

impl Fence {
    /// Registers the agent. There is none where a port has no MADs, and so nothing to wait for.
    ///
    /// # Safety
    ///
    /// The device is registered, and stays so until the fence is dropped.
    pub(crate) unsafe fn reserve(dev: *mut bindings::ib_device, port: u32) -> Result<Option<Self>> {
        // SAFETY: The caller says that the device is registered. An agent without a request
        // receives nothing but replies, and this one sends nothing, so no handler is called.
        let raw = from_err_ptr(unsafe {
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
        match raw {
            // INVARIANT: Just registered, and the caller says that the device stays.
            Ok(raw) => Ok(NonNull::new(raw).map(Self)),
            Err(EPROTONOSUPPORT) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the agent is registered, and this is its only owner.
        // `unregister_mad_agent()` flushes the port's workqueue.
        unsafe { bindings::ib_unregister_mad_agent(self.0.as_ptr()) };
    }
}
