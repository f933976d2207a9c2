// SPDX-License-Identifier: GPL-2.0

//! Timeouts of the messages of the connection managers, which are MADs.

use crate::{
    device::Device,
    prelude::internal::*, //
};
use kernel::{
    sync,
    time, //
};

/// The send handler that the MAD layer requires of each agent. Never called.
extern "C" fn on_sent(_: *mut bindings::ib_mad_agent, _: *mut bindings::ib_mad_send_wc) {}

/// The flushes of a port that have begun, and that have ended, at most one less.
struct Flushes {
    begun: u64,
    ended: u64,
}

/// The wait for the timeouts of a port, which all that wait at the same time share.
#[pin_data]
pub(crate) struct TimeoutFlush {
    #[pin]
    flushes: sync::Mutex<Flushes>,
    #[pin]
    ended: sync::CondVar,
}

impl TimeoutFlush {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            flushes <- kernel::new_mutex!(Flushes { begun: 0, ended: 0 }),
            ended <- kernel::new_condvar!(),
        })
    }

    /// Waits for the timeouts that have begun: for the send handlers that were called before. Not
    /// in a callback of a connection manager, which may be called by such a timeout.
    ///
    /// A flush that has begun before this call may have passed them by. One that begins after it
    /// serves all callers until then.
    pub(crate) fn wait(&self, device: &Device, port: u32, cx: &Sleepable) {
        let mut flushes = self.flushes.lock();
        let needed = flushes.begun.wrapping_add(1);
        while flushes.ended < needed {
            if flushes.begun != flushes.ended {
                self.ended.wait(&mut flushes);
                continue;
            }
            flushes.begun = flushes.begun.wrapping_add(1);
            drop(flushes);
            flush(device, port, cx);
            flushes = self.flushes.lock();
            flushes.ended = flushes.begun;
            self.ended.notify_all();
        }
    }
}

/// Flushes the workqueue of a port.
///
/// The MAD layer calls the send handlers of all agents of a port for requests that have timed out
/// on one ordered workqueue (`timeout_sends()` in core/mad.c). Only unregistering an agent flushes
/// it, so this registers one that neither sends nor receives, and retries while there is no memory
/// or no agent number. It does not wait for the port's CQ, whose handler calls the send handlers of
/// messages that were not sent: see the limits in Documentation/safety.rst.
fn flush(device: &Device, port: u32, _cx: &Sleepable) {
    let gsi = bindings::ib_qp_type_IB_QPT_GSI;
    let no_request = ptr::null_mut();
    let agent = loop {
        // SAFETY: The device is registered by the invariant of `device::Inner`. The MAD layer
        // passes nothing to an agent without a receive handler (`find_mad_agent()` in core/mad.c),
        // and this one sends nothing, so no handler is called.
        let agent = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                device.as_raw(),
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
            // The port has no MADs, or is not open: it is closed after all clients of this crate
            // have released the device.
            Err(EPROTONOSUPPORT | ENODEV) => return,
            Err(_) => time::delay::fsleep(time::Delta::from_millis(10)),
        }
    };
    // SAFETY: The agent was just registered. `unregister_mad_agent()` flushes the port's workqueue.
    unsafe { bindings::ib_unregister_mad_agent(agent) };
}

/// Waits for the timeouts of a port of the device, as [`TimeoutFlush::wait`].
pub(crate) fn flush_timeouts(device: &Device, port: u32, cx: &Sleepable) {
    if let Some(flush) = device.inner().flushes.get(port as usize) {
        flush.wait(device, port, cx);
    }
}
