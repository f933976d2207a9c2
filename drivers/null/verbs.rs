// SPDX-License-Identifier: GPL-2.0

//! The operations of `struct ib_device_ops`.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

mod cq;
mod mr;
pub(crate) mod post;
mod qp;
mod srq;

use crate::{
    device::{
        IbQp,
        Shared, //
    },
    errno,
    inject::Object,
    iw_cm,
    machine::{
        MAX_CQ,
        MAX_MR,
        MAX_SRQ, //
    },
    memory::MAX_PAGES,
    qp::{
        MAX_QP,
        MAX_SGE,
        MAX_WR, //
    }, //
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

const SUBNET_PREFIX: u64 = 0xfe80_0000_0000_0000;

/// A table of operations; shared and never changed.
pub(crate) struct Ops(pub(crate) bindings::ib_device_ops);

// SAFETY: Nothing changes the table: `ib_set_device_ops` copies what is in it.
unsafe impl Sync for Ops {}

// SAFETY: Zero is no operation, no size and no flag.
const NONE: bindings::ib_device_ops = unsafe { MaybeUninit::zeroed().assume_init() };

pub(crate) static OPS: Ops = Ops(bindings::ib_device_ops {
    owner: <crate::Module as ModuleMetadata>::THIS_MODULE.as_ptr(),
    driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
    enable_driver: Some(enable_driver),
    dealloc_driver: Some(dealloc_driver),
    query_device: Some(query_device),
    query_port: Some(query_port),
    get_port_immutable: Some(port_immutable),
    query_gid: Some(query_gid),
    query_pkey: Some(query_pkey),
    alloc_pd: Some(alloc_pd),
    dealloc_pd: Some(dealloc_pd),
    create_ah: Some(create_ah),
    destroy_ah: Some(destroy_ah),
    create_srq: Some(srq::create_srq),
    destroy_srq: Some(srq::destroy_srq),
    create_cq: Some(cq::create_cq),
    pre_destroy_cq: Some(cq::pre_destroy_cq),
    destroy_cq: Some(cq::destroy_cq),
    poll_cq: Some(cq::poll_cq),
    req_notify_cq: Some(cq::req_notify_cq),
    modify_cq: Some(cq::modify_cq),
    create_qp: Some(qp::create_qp),
    modify_qp: Some(qp::modify_qp),
    query_qp: Some(qp::query_qp),
    destroy_qp: Some(qp::destroy_qp),
    post_send: Some(post::post_send),
    post_recv: Some(post::post_recv),
    post_srq_recv: Some(post::post_srq_recv),
    get_dma_mr: Some(mr::get_dma_mr),
    reg_user_mr: Some(mr::reg_user_mr),
    alloc_mr: Some(mr::alloc_mr),
    map_mr_sg: Some(mr::map_mr_sg),
    dereg_mr: Some(mr::dereg_mr),
    iw_add_ref: Some(iw_cm::add_ref),
    iw_rem_ref: Some(iw_cm::rem_ref),
    iw_get_qp: Some(iw_cm::get_qp),
    iw_connect: Some(iw_cm::connect),
    iw_accept: Some(iw_cm::accept),
    iw_reject: Some(iw_cm::reject),
    iw_create_listen: Some(iw_cm::create_listen),
    iw_destroy_listen: Some(iw_cm::destroy_listen),
    size_ib_pd: size_of::<bindings::ib_pd>(),
    size_ib_ah: size_of::<bindings::ib_ah>(),
    size_ib_srq: size_of::<srq::IbSrq>(),
    size_ib_cq: size_of::<cq::IbCq>(),
    size_ib_qp: size_of::<IbQp>(),
    ..NONE
});

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn enable_driver(dev: *mut bindings::ib_device) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    unsafe { Shared::of(dev) }.enable();
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn dealloc_driver(dev: *mut bindings::ib_device) {
    // SAFETY: The RDMA core is calling this operation.
    unsafe { Shared::dealloc(dev) };
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn query_device(
    dev: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let shared = unsafe { Shared::of(dev) };
    let guid = shared.guid;
    let vague = shared.machine.lock().vague;
    let is = bindings::ib_device_attr {
        max_mr_size: u64::from(MAX_PAGES) << 12,
        page_size_cap: 0xffff_f000,
        max_qp: MAX_QP as u32,
        max_qp_wr: MAX_WR,
        max_send_sge: MAX_SGE,
        max_recv_sge: MAX_SGE,
        max_sge_rd: if vague { 0 } else { MAX_SGE },
        max_cq: MAX_CQ as u32,
        max_cqe: cq::MAX_CQE,
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
/// Called by the RDMA core, as `struct ib_device_ops` documents.
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
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn port_immutable(
    dev: *mut bindings::ib_device,
    _port: u32,
    immutable: *mut bindings::ib_port_immutable,
) -> c_int {
    // SAFETY: The RDMA core is calling an operation of `dev`.
    let machine = unsafe { Shared::of(dev) }.machine.lock();
    let is = bindings::ib_port_immutable {
        pkey_tbl_len: 1,
        gid_tbl_len: 1,
        // No MADs, and of the connection managers only that of iWARP.
        core_cap_flags: match (machine.iwarp, &machine.cm) {
            (_, Some(_)) => bindings::RDMA_CORE_CAP_PROT_IWARP | bindings::RDMA_CORE_CAP_IW_CM,
            (true, None) => bindings::RDMA_CORE_CAP_PROT_IWARP,
            (false, None) => 0,
        },
        ..Default::default()
    };
    // SAFETY: The core gives memory for the attributes.
    unsafe { immutable.write(is) };
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
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
/// Called by the RDMA core, as `struct ib_device_ops` documents.
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

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn alloc_pd(pd: *mut bindings::ib_pd, _udata: *mut bindings::ib_udata) -> c_int {
    // SAFETY: The core has set the device, whose operation this is.
    let shared = unsafe { Shared::of((*pd).device) };
    errno(shared.machine.lock().creations.check(Object::Pd))
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn dealloc_pd(
    _pd: *mut bindings::ib_pd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn create_ah(
    ah: *mut bindings::ib_ah,
    _attr: *mut bindings::rdma_ah_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is.
    let shared = unsafe { Shared::of((*ah).device) };
    errno(shared.machine.lock().creations.check(Object::Ah))
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn destroy_ah(_ah: *mut bindings::ib_ah, _flags: u32) -> c_int {
    0
}
