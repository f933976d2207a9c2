// SPDX-License-Identifier: GPL-2.0

//! The operations of a device, and what it says of itself.

use crate::{
    cq_ops,
    device::{
        self,
        Shared, //
    },
    machine::{
        MAX_CQ,
        MAX_MR,
        MAX_QP,
        MAX_SRQ, //
    },
    memory::MAX_PAGES,
    mr_ops,
    object_ops,
    post_ops,
    qp::{
        MAX_SGE,
        MAX_WR, //
    },
    qp_ops, //
};
use core::mem::{
    ManuallyDrop,
    MaybeUninit, //
};
use kernel::{
    prelude::*,
    ModuleMetadata, //
};
use rdma_bindings as bindings;

/// The most entries of a completion queue.
pub(crate) const MAX_CQE: u32 = 131_072;

const SUBNET_PREFIX: u64 = 0xfe80_0000_0000_0000;

/// A table of operations; shared and never changed.
pub(crate) struct Ops(pub(crate) bindings::ib_device_ops);

// SAFETY: The table is only read.
unsafe impl Sync for Ops {}

// SAFETY: Zero is no operation, no size and no flag.
const NONE: bindings::ib_device_ops = unsafe { MaybeUninit::zeroed().assume_init() };

pub(crate) static OPS: Ops = Ops(bindings::ib_device_ops {
    owner: <crate::Module as ModuleMetadata>::THIS_MODULE.as_ptr(),
    driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
    enable_driver: Some(device::enable),
    dealloc_driver: Some(device::dealloc),
    query_device: Some(query_device),
    query_port: Some(query_port),
    get_port_immutable: Some(port_immutable),
    query_gid: Some(query_gid),
    query_pkey: Some(query_pkey),
    alloc_pd: Some(object_ops::alloc_pd),
    dealloc_pd: Some(object_ops::dealloc_pd),
    create_ah: Some(object_ops::create_ah),
    destroy_ah: Some(object_ops::destroy_ah),
    create_srq: Some(object_ops::create_srq),
    modify_srq: Some(object_ops::modify_srq),
    query_srq: Some(object_ops::query_srq),
    destroy_srq: Some(object_ops::destroy_srq),
    create_cq: Some(cq_ops::create),
    pre_destroy_cq: Some(cq_ops::pre_destroy),
    destroy_cq: Some(cq_ops::destroy),
    poll_cq: Some(cq_ops::poll),
    req_notify_cq: Some(cq_ops::req_notify),
    modify_cq: Some(cq_ops::modify),
    create_qp: Some(qp_ops::create),
    modify_qp: Some(qp_ops::modify),
    query_qp: Some(qp_ops::query),
    destroy_qp: Some(qp_ops::destroy),
    post_send: Some(post_ops::post_send),
    post_recv: Some(post_ops::post_recv),
    post_srq_recv: Some(post_ops::post_srq_recv),
    get_dma_mr: Some(mr_ops::get_dma_mr),
    reg_user_mr: Some(mr_ops::reg_user_mr),
    alloc_mr: Some(mr_ops::alloc),
    map_mr_sg: Some(mr_ops::map),
    dereg_mr: Some(mr_ops::dereg),
    size_ib_pd: size_of::<bindings::ib_pd>(),
    size_ib_ah: size_of::<bindings::ib_ah>(),
    size_ib_srq: size_of::<object_ops::Srq>(),
    size_ib_cq: size_of::<cq_ops::Cq>(),
    size_ib_qp: size_of::<qp_ops::Qp>(),
    ..NONE
});

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
unsafe extern "C" fn query_device(
    dev: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let shared = unsafe { Shared::of(dev) };
    let (guid, vague) = (shared.guid, shared.machine.lock().vague);
    let is = bindings::ib_device_attr {
        max_mr_size: u64::from(MAX_PAGES) << 12,
        page_size_cap: 0xffff_f000,
        max_qp: MAX_QP as u32,
        max_qp_wr: MAX_WR,
        max_send_sge: MAX_SGE,
        max_recv_sge: MAX_SGE,
        max_sge_rd: if vague { 0 } else { MAX_SGE },
        max_cq: MAX_CQ as u32,
        max_cqe: MAX_CQE,
        max_mr: MAX_MR as u32,
        max_pd: 1 << 16,
        max_ah: 1 << 16,
        max_qp_rd_atom: 16,
        max_res_rd_atom: 16 * MAX_QP as u32,
        max_qp_init_rd_atom: 16,
        atomic_cap: bindings::ib_atomic_cap_IB_ATOMIC_HCA,
        max_srq: MAX_SRQ as u32,
        max_srq_wr: MAX_WR,
        max_srq_sge: MAX_SGE,
        max_fast_reg_page_list_len: if vague { 0 } else { MAX_PAGES },
        max_pkeys: 1,
        sys_image_guid: guid.to_be(),
        device_cap_flags: bindings::ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS as u64,
        kernel_cap_flags: u64::from(
            bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY
                | bindings::ib_kernel_cap_flags_IBK_ALLOW_USER_UNREG,
        ),
        ..Default::default()
    };
    // SAFETY: The core gives memory for the attributes.
    unsafe { attr.write(is) };
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
unsafe extern "C" fn query_port(
    _dev: *mut bindings::ib_device,
    _port: u32,
    attr: *mut bindings::ib_port_attr,
) -> c_int {
    let is = bindings::ib_port_attr {
        subnet_prefix: SUBNET_PREFIX,
        state: bindings::ib_port_state_IB_PORT_ACTIVE,
        max_mtu: bindings::ib_mtu_IB_MTU_4096,
        active_mtu: bindings::ib_mtu_IB_MTU_4096,
        phys_mtu: 4096,
        gid_tbl_len: 1,
        pkey_tbl_len: 1,
        max_msg_sz: 1 << 30,
        lid: 1,
        max_vl_num: 1,
        active_width: bindings::ib_port_width_IB_WIDTH_4X as u8,
        active_speed: bindings::ib_port_speed_IB_SPEED_EDR as u16,
        phys_state: bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_LINK_UP as u8,
        ..Default::default()
    };
    // SAFETY: The core gives memory for the attributes.
    unsafe { attr.write(is) };
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
unsafe extern "C" fn port_immutable(
    dev: *mut bindings::ib_device,
    _port: u32,
    immutable: *mut bindings::ib_port_immutable,
) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let iwarp = unsafe { Shared::of(dev) }.machine.lock().iwarp;
    // No connection manager and no MADs.
    let is = bindings::ib_port_immutable {
        pkey_tbl_len: 1,
        gid_tbl_len: 1,
        core_cap_flags: if iwarp {
            bindings::RDMA_CORE_CAP_PROT_IWARP
        } else {
            0
        },
        ..Default::default()
    };
    // SAFETY: The core gives memory for the attributes.
    unsafe { immutable.write(is) };
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
unsafe extern "C" fn query_gid(
    dev: *mut bindings::ib_device,
    _port: u32,
    index: c_int,
    gid: *mut bindings::ib_gid,
) -> c_int {
    if index != 0 {
        return EINVAL.to_errno();
    }
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let guid = unsafe { Shared::of(dev) }.guid;
    let global = bindings::ib_gid__bindgen_ty_1 {
        subnet_prefix: SUBNET_PREFIX.to_be(),
        interface_id: guid.to_be(),
    };
    // SAFETY: The core gives memory for the GID.
    unsafe { (&raw mut (*gid).global).write(ManuallyDrop::new(global)) };
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
unsafe extern "C" fn query_pkey(
    _dev: *mut bindings::ib_device,
    _port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    if index != 0 {
        return EINVAL.to_errno();
    }
    // SAFETY: The core gives memory for the key.
    unsafe { pkey.write(0xffff) };
    0
}

/// Turns a result into C's.
pub(crate) fn errno(result: Result) -> c_int {
    match result {
        Ok(()) => 0,
        Err(e) => e.to_errno(),
    }
}
