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
// SAFETY: As above, and it does not change.
unsafe impl Sync for Received {}

impl Received {
    /// # Safety
    ///
    /// `raw` was given to `agent`'s receive handler and now belongs to the caller.
    pub(super) unsafe fn new(
        agent: &bindings::ib_mad_agent,
        raw: NonNull<bindings::ib_mad_recv_wc>,
    ) -> Self {
        // INVARIANT: By the caller's promise; the DMA mapping has ended.
        Self {
            raw,
            dev: agent.device,
            port: agent.port_num.into(),
        }
    }

    /// Returns all of the MAD.
    pub fn bytes(&self) -> &[u8; MAD_LEN] {
        // SAFETY: By the type invariant. Buffers have at least this length, and are initialised by
        // their allocation.
        unsafe { &*self.raw.as_ref().recv_buf.__bindgen_anon_1.mad.cast() }
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
        // SAFETY: By the type invariant. The completion is stored beside the MAD for all QPs but 0,
        // which agents do not use.
        unsafe { &*self.raw.as_ref().wc }
    }

    pub(super) fn grh(&self) -> *const bindings::ib_grh {
        // SAFETY: By the type invariant.
        unsafe { self.raw.as_ref() }.recv_buf.grh
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // SAFETY: By the type invariant; this was the owner.
        unsafe { bindings::ib_free_recv_mad(self.raw.as_ptr()) };
    }
}
