// SPDX-License-Identifier: GPL-2.0

//! What a device can do (`struct ib_device_attr`).
//!
//! All of it is fixed once a device is registered, and can be read in any context, but for what
//! asks for a token.

use super::Device;
use crate::{
    bindings,
    context::Sleepable, //
};
use kernel::str::CStr;

/// What a device can do beyond the obligatory (`enum ib_device_cap_flags`, `enum
/// ib_kernel_cap_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Fast registration, local invalidation and SEND with invalidate
    /// (`IB_DEVICE_MEM_MGT_EXTENSIONS`).
    MemMgtExtensions,
    /// Shared receive queues can be resized (`IB_DEVICE_SRQ_RESIZE`).
    SrqResize,
    /// Extended reliable connected service (`IB_DEVICE_XRC`).
    Xrc,
    /// The device says when a port becomes active (`IB_DEVICE_PORT_ACTIVE_EVENT`).
    PortActiveEvent,
    /// The device has a key for all local memory (`IBK_LOCAL_DMA_LKEY`).
    LocalDmaLkey,
    /// MRs may have gaps between their pages (`IBK_SG_GAPS_REG`).
    SgGaps,
    /// T10-PI by the device (`IBK_INTEGRITY_HANDOVER`).
    Integrity,
}

/// What a device is, as `enum rdma_node_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    /// A channel adapter of InfiniBand or RoCE (`RDMA_NODE_IB_CA`).
    Ca,
    /// An InfiniBand switch (`RDMA_NODE_IB_SWITCH`).
    Switch,
    /// An iWARP adapter (`RDMA_NODE_RNIC`).
    Rnic,
    /// Anything else, by its C value.
    Other(u8),
}

impl NodeType {
    pub(super) fn from_raw(raw: u8) -> Self {
        match raw.into() {
            bindings::RDMA_NODE_IB_CA => Self::Ca,
            bindings::RDMA_NODE_IB_SWITCH => Self::Switch,
            bindings::RDMA_NODE_RNIC => Self::Rnic,
            _ => Self::Other(raw),
        }
    }

    pub(crate) fn to_raw(self) -> u8 {
        match self {
            Self::Ca => bindings::RDMA_NODE_IB_CA as u8,
            Self::Switch => bindings::RDMA_NODE_IB_SWITCH as u8,
            Self::Rnic => bindings::RDMA_NODE_RNIC as u8,
            Self::Other(raw) => raw,
        }
    }
}

impl Device {
    pub(crate) fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: The device is registered by the invariant of `Inner`; its attributes do not
        // change after that.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// Returns the largest number of entries that a completion queue can have.
    pub fn max_cqe(&self) -> u32 {
        self.attrs().max_cqe
    }

    /// Returns the largest number of outstanding work requests of a queue.
    pub fn max_qp_wr(&self) -> u32 {
        self.attrs().max_qp_wr
    }

    /// Returns the largest number of entries of a send request (`max_send_sge`).
    pub fn max_send_sge(&self) -> u32 {
        self.attrs().max_send_sge
    }

    /// Returns the largest number of entries of a receive request (`max_recv_sge`).
    pub fn max_recv_sge(&self) -> u32 {
        self.attrs().max_recv_sge
    }

    /// Returns the largest number of entries of an RDMA READ (`max_sge_rd`).
    pub fn max_sge_rd(&self) -> u32 {
        self.attrs().max_sge_rd
    }

    /// Returns the number of entries above which an RDMA READ is better done by an MR, or zero
    /// (`max_sgl_rd`).
    pub fn max_sgl_rd(&self) -> u32 {
        self.attrs().max_sgl_rd
    }

    /// Returns how many RDMA READs and atomics of a peer a QP can answer at a time
    /// (`max_qp_rd_atom`), for
    /// [`ConnParam::responder_resources`](crate::cm::ConnParam::responder_resources).
    pub fn max_responder_resources(&self) -> u32 {
        self.attrs().max_qp_rd_atom
    }

    /// Returns how many RDMA READs and atomics a QP can have outstanding (`max_qp_init_rd_atom`),
    /// for [`ConnParam::initiator_depth`](crate::cm::ConnParam::initiator_depth).
    pub fn max_initiator_depth(&self) -> u32 {
        self.attrs().max_qp_init_rd_atom
    }

    /// Returns the largest number of MRs (`max_mr`).
    pub fn max_mr(&self) -> u32 {
        self.attrs().max_mr
    }

    /// Returns the size of the largest MR, in bytes (`max_mr_size`).
    pub fn max_mr_size(&self) -> u64 {
        self.attrs().max_mr_size
    }

    /// Returns the number of pages that a fast-registration MR can map.
    pub fn max_fast_reg_pages(&self) -> u32 {
        self.attrs().max_fast_reg_page_list_len
    }

    /// Returns the sizes of the pages that MRs can have, a bit for each power of two
    /// (`page_size_cap`).
    pub fn page_sizes(&self) -> u64 {
        self.attrs().page_size_cap
    }

    /// Returns the largest number of shared receive queues, zero if there are none (`max_srq`).
    pub fn max_srq(&self) -> u32 {
        self.attrs().max_srq
    }

    /// Returns the largest number of requests on a shared receive queue (`max_srq_wr`).
    pub fn max_srq_wr(&self) -> u32 {
        self.attrs().max_srq_wr
    }

    /// Returns the largest number of entries of a request on a shared receive queue
    /// (`max_srq_sge`).
    pub fn max_srq_sge(&self) -> u32 {
        self.attrs().max_srq_sge
    }

    /// Returns the vendor's number (`vendor_id`).
    pub fn vendor_id(&self) -> u32 {
        self.attrs().vendor_id
    }

    /// Returns the vendor's number of the device's model (`vendor_part_id`).
    pub fn vendor_part_id(&self) -> u32 {
        self.attrs().vendor_part_id
    }

    /// Returns the version of the hardware (`hw_ver`).
    pub fn hw_version(&self) -> u32 {
        self.attrs().hw_ver
    }

    /// Says whether the device can do something.
    pub fn has(&self, capability: Capability) -> bool {
        use bindings::{
            ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS as MEM_MGT_EXTENSIONS,
            ib_device_cap_flags_IB_DEVICE_PORT_ACTIVE_EVENT as PORT_ACTIVE_EVENT,
            ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE as SRQ_RESIZE,
            ib_device_cap_flags_IB_DEVICE_XRC as XRC,
            ib_kernel_cap_flags_IBK_INTEGRITY_HANDOVER as INTEGRITY,
            ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY as LOCAL_DMA_LKEY,
            ib_kernel_cap_flags_IBK_SG_GAPS_REG as SG_GAPS, //
        };

        let attrs = self.attrs();
        let device = |flag| attrs.device_cap_flags & flag as u64 != 0;
        let kernel = |flag: u32| attrs.kernel_cap_flags & u64::from(flag) != 0;
        match capability {
            Capability::MemMgtExtensions => device(MEM_MGT_EXTENSIONS),
            Capability::SrqResize => device(SRQ_RESIZE),
            Capability::Xrc => device(XRC),
            Capability::PortActiveEvent => device(PORT_ACTIVE_EVENT),
            Capability::LocalDmaLkey => kernel(LOCAL_DMA_LKEY),
            Capability::SgGaps => kernel(SG_GAPS),
            Capability::Integrity => kernel(INTEGRITY),
        }
    }

    /// Returns what the device is (`ib_device.node_type`).
    pub fn node_type(&self) -> NodeType {
        // SAFETY: The device is registered by the invariant of `Inner`; the field does not change
        // after that.
        NodeType::from_raw(unsafe { (*self.as_raw()).node_type })
    }

    /// Returns the version of the firmware, empty if there is none (`ib_get_device_fw_str`).
    /// Drivers may sleep to find it: usnic locks a mutex.
    pub fn firmware(&self, _cx: &Sleepable) -> Firmware {
        let mut version = Firmware([0; Firmware::LEN]);
        // SAFETY: The device is registered by the invariant of `Inner`; drivers write at most so
        // many bytes.
        unsafe { bindings::ib_get_device_fw_str(self.as_raw(), version.0.as_mut_ptr().cast()) };
        version
    }

    /// Says whether the current task's network namespace may use the device
    /// (`rdma_dev_access_netns`).
    pub fn is_accessible(&self, _cx: &Sleepable) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; the helper only compares.
        unsafe { bindings::rdma_helper_device_is_accessible(self.as_raw()) }
    }
}

/// A copy of the version of a device's firmware.
#[derive(Clone, Copy)]
pub struct Firmware([u8; Self::LEN]);

impl Firmware {
    const LEN: usize = bindings::IB_FW_VERSION_NAME_MAX as usize;
}

impl core::ops::Deref for Firmware {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}
