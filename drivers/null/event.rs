// SPDX-License-Identifier: GPL-2.0

//! Events.

use crate::{
    cq::Cq,
    device::Shared,
    machine::MAX_SRQ, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;
use rdma_bindings as bindings;

/// Raises an event of a QP.
///
/// # Safety
///
/// The QP is valid until this returns. Process context.
pub(crate) unsafe fn of_qp(qp: *mut bindings::ib_qp, event: bindings::ib_event_type) {
    // SAFETY: The caller says that the QP is valid; the core has set these before it was created.
    let (device, handler, context) =
        unsafe { ((*qp).device, (*qp).event_handler, (*qp).qp_context) };
    let mut event = bindings::ib_event {
        device,
        element: bindings::ib_event__bindgen_ty_1 {
            qp: ManuallyDrop::new(qp),
        },
        event,
    };
    if let Some(handler) = handler {
        // SAFETY: The core's handler, called in process context with an event of the QP and its
        // context.
        unsafe { handler(&raw mut event, context) };
    }
}

/// Raises an event of an SRQ.
///
/// # Safety
///
/// The SRQ is valid until this returns. Process context.
unsafe fn of_srq(srq: *mut bindings::ib_srq, event: bindings::ib_event_type) {
    // SAFETY: The caller says that the SRQ is valid; the core has set these before it was created.
    let (device, handler, context) =
        unsafe { ((*srq).device, (*srq).event_handler, (*srq).srq_context) };
    let mut event = bindings::ib_event {
        device,
        element: bindings::ib_event__bindgen_ty_1 {
            srq: ManuallyDrop::new(srq),
        },
        event,
    };
    if let Some(handler) = handler {
        // SAFETY: The consumer's handler, called in process context with an event of the SRQ and
        // its context.
        unsafe { handler(&raw mut event, context) };
    }
}

impl Shared {
    /// Raises an event of the QP with this number.
    pub(crate) fn raise_of_qp(&self, num: u32, event: u32) -> Result {
        // Nobody destroys a QP meanwhile.
        let _events = self.events.lock();
        let raw = {
            let machine = self.machine.lock();
            let qp = machine
                .find_qp(num)
                .and_then(|index| machine.qps.get(index));
            qp.ok_or(ENOENT)?.config.raw
        };
        // SAFETY: The QP is in its table, and is taken out with `events` locked before it is freed.
        unsafe { of_qp(raw.0.as_ptr(), event) };
        Ok(())
    }

    /// Raises an event of every SRQ.
    fn raise_of_srqs(&self, event: u32) {
        // Nobody destroys an SRQ meanwhile.
        let _events = self.events.lock();
        for index in 0..MAX_SRQ {
            let raw = self.machine.lock().srqs.get(index).map(|srq| srq.raw);
            if let Some(raw) = raw {
                // SAFETY: The SRQ is in its table, and is taken out with `events` locked before it
                // is freed.
                unsafe { of_srq(raw.0.as_ptr(), event) };
            }
        }
    }

    /// Raises an event of the device, of its port, or of all its CQs or SRQs.
    pub(crate) fn raise(&self, event: u32) -> Result {
        match event {
            bindings::ib_event_type_IB_EVENT_CQ_ERR => {
                self.machine.lock().cqs.iter().for_each(Cq::fail);
            }
            bindings::ib_event_type_IB_EVENT_SRQ_ERR
            | bindings::ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED => self.raise_of_srqs(event),
            _ => return self.dispatch(event),
        }
        Ok(())
    }

    fn dispatch(&self, event: u32) -> Result {
        // SAFETY: `Shared` has a reference to the device by its invariant.
        if !unsafe { bindings::rdma_helper_device_try_get(self.ib()) } {
            return Err(ENODEV);
        }
        let event = bindings::ib_event {
            device: self.ib(),
            element: bindings::ib_event__bindgen_ty_1 {
                port_num: ManuallyDrop::new(1),
            },
            event,
        };
        // SAFETY: The device is registered until the put of what `try_get` has taken.
        unsafe {
            bindings::ib_dispatch_event(&raw const event);
            bindings::ib_device_put(self.ib());
        }
        Ok(())
    }
}
