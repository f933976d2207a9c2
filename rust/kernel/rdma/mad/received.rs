// SPDX-License-Identifier: GPL-2.0

//! MADs that were received.

use super::{
    Class,
    Header,
    Method,
    MAD_LEN, //
};
use crate::bindings;
use core::ptr::NonNull;

/// A MAD that was received: a reply, or somebody's request.
///
/// Keeps neither agent nor device.
///
/// # Invariants
///
/// `raw` is a MAD that the MAD layer gave away, of a port of a device that was at `dev` then. It is
/// complete: nobody writes it any more.
pub struct Received {
    raw: NonNull<bindings::ib_mad_recv_wc>,
    dev: *const bindings::ib_device,
    port: u32,
}

// SAFETY: The MAD is plain memory that this owns; the device is only compared.
unsafe impl Send for Received {}
// SAFETY: The MAD does not change by the type invariant; the device is only compared.
unsafe impl Sync for Received {}

impl Received {
    /// # Safety
    ///
    /// `raw` was given to `agent`'s receive handler and now belongs to the caller.
    pub(super) unsafe fn new(
        agent: &bindings::ib_mad_agent,
        raw: NonNull<bindings::ib_mad_recv_wc>,
    ) -> Self {
        // INVARIANT: The caller says that this is its MAD; the DMA mapping has ended.
        Self {
            raw,
            dev: agent.device,
            port: agent.port_num.into(),
        }
    }

    fn raw(&self) -> &bindings::ib_mad_recv_wc {
        // SAFETY: `raw` is a MAD that this owns by the type invariant, and nobody writes it.
        unsafe { self.raw.as_ref() }
    }

    /// Returns all of the MAD.
    pub fn bytes(&self) -> &[u8; MAD_LEN] {
        // SAFETY: The buffer of a MAD has at least this length, was initialised by its allocation,
        // and is not written any more by the type invariant.
        unsafe { &*self.raw().recv_buf.__bindgen_anon_1.mad.cast() }
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        // SAFETY: The header's alignment is 1, it may have any bytes, and is shorter than a MAD.
        unsafe { &*self.bytes().as_ptr().cast() }
    }

    /// Returns the header's method.
    pub fn method(&self) -> Method {
        Method(self.header().method)
    }

    /// Returns the header's status: 0 for success.
    pub fn status(&self) -> u16 {
        self.header().status.get()
    }

    /// Returns what comes after the header of the MAD's class, up to its end: it does not say how
    /// long it is. Nothing of it can be trusted.
    pub fn payload(&self) -> &[u8] {
        let at = Class::new(self.header().mgmt_class, 0).payload_at();
        self.bytes().get(at..).unwrap_or(&[])
    }

    /// Returns the number of the QP that sent this.
    pub fn src_qp(&self) -> u32 {
        self.wc().src_qp
    }

    pub(super) fn is_from(&self, dev: *const bindings::ib_device, port: u32) -> bool {
        self.dev == dev && self.port == port
    }

    pub(super) fn wc(&self) -> &bindings::ib_wc {
        // SAFETY: The completion is stored beside the MAD, but for one of QP 0, whose classes
        // `Agent::register` refuses.
        unsafe { &*self.raw().wc }
    }

    pub(super) fn grh(&self) -> *const bindings::ib_grh {
        self.raw().recv_buf.grh
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // SAFETY: The MAD is this value's by the type invariant, and is not used again.
        unsafe { bindings::ib_free_recv_mad(self.raw.as_ptr()) };
    }
}
