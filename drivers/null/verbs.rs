// SPDX-License-Identifier: GPL-2.0

//! The operations of `struct ib_device_ops`.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

use crate::{
    cq::{
        Cq,
        QpPtr, //
    },
    device::{
        qp_parts,
        raise_qp_event,
        IbQp,
        Shared, //
    },
    errno,
    inject::{
        Object,
        Stall, //
    },
    irq::{
        self,
        CqWork,
        Irq, //
    },
    iw_cm,
    machine::{
        Machine,
        MAX_CQ,
        MAX_MR,
        MAX_SRQ, //
    },
    memory::{
        key_of,
        Mr,
        Registration,
        Sge,
        MAX_PAGES, //
    },
    post::{
        Segment,
        SendWr, //
    },
    qp::{
        check_caps,
        Config,
        Qp,
        MAX_QP,
        MAX_SGE,
        MAX_WR, //
    },
    recv::{
        RecvQueue,
        Srq,
        SrqPtr, //
    }, //
};
use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    },
    ModuleMetadata, //
};
use rdma_bindings as bindings;

/// The most entries of a completion queue.
pub(crate) const MAX_CQE: u32 = 131_072;

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
    create_srq: Some(create_srq),
    destroy_srq: Some(destroy_srq),
    create_cq: Some(create_cq),
    pre_destroy_cq: Some(pre_destroy_cq),
    destroy_cq: Some(destroy_cq),
    poll_cq: Some(poll_cq),
    req_notify_cq: Some(req_notify_cq),
    modify_cq: Some(modify_cq),
    create_qp: Some(create_qp),
    modify_qp: Some(modify_qp),
    query_qp: Some(query_qp),
    destroy_qp: Some(destroy_qp),
    post_send: Some(post_send),
    post_recv: Some(post_recv),
    post_srq_recv: Some(post_srq_recv),
    get_dma_mr: Some(get_dma_mr),
    reg_user_mr: Some(reg_user_mr),
    alloc_mr: Some(alloc_mr),
    map_mr_sg: Some(map_mr_sg),
    dereg_mr: Some(dereg_mr),
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
    size_ib_srq: size_of::<IbSrq>(),
    size_ib_cq: size_of::<IbCq>(),
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

/// The device's SRQ.
#[repr(C)]
struct IbSrq {
    raw: bindings::ib_srq,
    index: usize,
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn create_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*srq).device), &mut *attr) };
    let create = || -> Result<usize> {
        shared.machine.lock().creations.check(Object::Srq)?;
        let is_basic = attr.srq_type == bindings::ib_srq_type_IB_SRQT_BASIC;
        let (max_wr, max_sge) = (attr.attr.max_wr, attr.attr.max_sge);
        if !is_basic || max_wr == 0 || max_wr > MAX_WR || max_sge > MAX_SGE {
            return Err(EINVAL);
        }
        let queue = RecvQueue::new(max_wr as usize, max_sge as usize)?;
        let raw = SrqPtr(NonNull::new(srq).ok_or(EINVAL)?);
        let new = Srq { raw, queue };
        let new = KBox::new(new, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        let index = machine.srqs.vacant()?;
        machine.srqs.put(index, new);
        Ok(index)
    };
    match create() {
        Ok(index) => {
            // SAFETY: The core has allocated the size that the device's operations ask for.
            unsafe { (*srq.cast::<IbSrq>()).index = index };
            0
        }
        Err(e) => e.to_errno(),
    }
}

/// # Safety
///
/// The RDMA core is calling an operation of `srq`, which was created, and the reference is not used
/// after that.
unsafe fn srq_parts<'a>(srq: *mut bindings::ib_srq) -> (&'a Shared, usize) {
    // SAFETY: The caller promises that this is an operation of the SRQ, and so of its device.
    // `create_srq` has set the index.
    unsafe { (Shared::of((*srq).device), (*srq.cast::<IbSrq>()).index) }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn destroy_srq(
    srq: *mut bindings::ib_srq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: This is an operation of an SRQ that was created.
    let (shared, index) = unsafe { srq_parts(srq) };
    // No event handler of the SRQ runs from here on.
    let _events = shared.events.lock();
    let gone = shared.machine.lock().srqs.take(index);
    drop(gone);
    0
}

/// The device's CQ.
#[repr(C)]
struct IbCq {
    raw: bindings::ib_cq,
    work: CqWork,
    index: usize,
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn create_cq(
    cq: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*cq).device), &*attr) };
    let create = || -> Result<usize> {
        shared.machine.lock().creations.check(Object::Cq)?;
        if attr.cqe == 0 || attr.cqe > MAX_CQE {
            return Err(EINVAL);
        }
        // SAFETY: The core has allocated this structure, which stays until `destroy_cq`.
        // `pre_destroy_cq` cancels the work.
        let irq = unsafe { Irq::new(&raw mut (*cq.cast::<IbCq>()).work, cq) }?;
        let new = KBox::new(Cq::new(attr.cqe as usize, irq)?, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        let index = machine.cqs.vacant()?;
        machine.cqs.put(index, new);
        Ok(index)
    };
    match create() {
        Ok(index) => {
            // SAFETY: The core has allocated the size that the device's operations ask for.
            unsafe {
                (*cq.cast::<IbCq>()).index = index;
                (*cq).cqe = attr.cqe as c_int;
            }
            0
        }
        Err(e) => e.to_errno(),
    }
}

/// # Safety
///
/// The RDMA core, or a consumer, is calling an operation of `cq`, which was created, and the
/// reference is not used after that.
unsafe fn cq_parts<'a>(cq: *mut bindings::ib_cq) -> (&'a Shared, usize) {
    // SAFETY: The caller promises that this is an operation of the CQ, and so of its device.
    // `create_cq` has set the index.
    unsafe { (Shared::of((*cq).device), (*cq.cast::<IbCq>()).index) }
}

/// Ends the calls of handlers, so that the core can cancel the work that they have queued.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn pre_destroy_cq(cq: *mut bindings::ib_cq) -> c_int {
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    if let Some(cq) = shared.machine.lock().cqs.get_mut(index) {
        cq.kill();
    }
    // SAFETY: `create_cq` has initialised the work, and a CQ that was killed does not queue it.
    unsafe { irq::stop(&raw mut (*cq.cast::<IbCq>()).work) };
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn destroy_cq(
    cq: *mut bindings::ib_cq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // If the creation of a CQ fails late, the core calls only this operation.
    // SAFETY: The core destroys the CQ, as when it calls that operation, which may be called twice.
    unsafe { pre_destroy_cq(cq) };
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    let gone = shared.machine.lock().cqs.take(index);
    drop(gone);
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn poll_cq(
    cq: *mut bindings::ib_cq,
    entries: c_int,
    wc: *mut bindings::ib_wc,
) -> c_int {
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    let Ok(entries) = usize::try_from(entries) else {
        return EINVAL.to_errno();
    };
    // SAFETY: The consumer gives memory for so many completions.
    let room = unsafe { core::slice::from_raw_parts_mut(wc.cast(), entries) };
    shared.machine.lock().poll(index, room) as c_int
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn req_notify_cq(
    cq: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    let solicited = flags & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
        == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
    let report = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;
    // Without `IB_CQ_REPORT_MISSED_EVENTS` completions that have come must raise the interrupt.
    let longer = match report {
        true => shared.machine.lock().arms.next(),
        false => None,
    };
    if let Some((us, honest)) = longer {
        let start = Instant::<Monotonic>::now();
        while start.elapsed().as_micros_ceil() < i64::from(us) {
            core::hint::spin_loop();
        }
        // The CQ may be gone by now, if its user has not waited for this.
        if !honest {
            return 1;
        }
    }
    let mut machine = shared.machine.lock();
    let some = machine
        .cqs
        .get_mut(index)
        .is_some_and(|cq| cq.arm(solicited));
    (some && report).into()
}

/// Moderation, which has no effect.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn modify_cq(_cq: *mut bindings::ib_cq, _count: u16, _period: u16) -> c_int {
    errno(Ok(()))
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn create_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*qp).device), &*attr) };
    let create = || -> Result<(usize, u32)> {
        shared.machine.lock().creations.check(Object::Qp)?;
        check_caps(&attr.cap)?;
        if !matches!(
            attr.qp_type,
            bindings::ib_qp_type_IB_QPT_RC
                | bindings::ib_qp_type_IB_QPT_UC
                | bindings::ib_qp_type_IB_QPT_UD
        ) {
            return Err(EOPNOTSUPP);
        }
        if attr.send_cq.is_null() || attr.recv_cq.is_null() {
            return Err(EINVAL);
        }
        let srq = NonNull::new(attr.srq);
        // SAFETY: CQs and SRQ are of this device: the core's consumers promise that.
        let config = unsafe {
            Config {
                raw: QpPtr(NonNull::new(qp).ok_or(EINVAL)?),
                kind: attr.qp_type,
                send_cq: (*attr.send_cq.cast::<IbCq>()).index,
                recv_cq: (*attr.recv_cq.cast::<IbCq>()).index,
                srq: srq.map(|srq| (*srq.as_ptr().cast::<IbSrq>()).index),
                signal_all: attr.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
                max_send_wr: attr.cap.max_send_wr,
                max_send_sge: attr.cap.max_send_sge as usize,
            }
        };
        let recvs = match srq {
            Some(_) => RecvQueue::new(0, 0)?,
            None => RecvQueue::new(
                attr.cap.max_recv_wr as usize,
                attr.cap.max_recv_sge as usize,
            )?,
        };
        let new = KBox::new(Qp::new(config, recvs)?, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        let index = machine.qps.vacant()?;
        Ok((index, machine.add_qp(index, new)))
    };
    let (index, num) = match create() {
        Ok(created) => created,
        Err(e) => return e.to_errno(),
    };
    // SAFETY: The core has allocated the size that the device's operations ask for.
    unsafe {
        (*qp.cast::<IbQp>()).index = index;
        (*qp).qp_num = num;
    }
    shared.add_files(num);
    0
}

/// Begins a change of a QP: reports another one that has not ended, and waits as long as was
/// injected.
fn begin_change(shared: &Shared, index: usize, num: u32) {
    let begun = {
        let mut machine = shared.machine.lock();
        machine.qps.get_mut(index).map(|qp| {
            let changes = &mut qp.changes;
            if changes.running != 0 {
                changes.overlaps += 1;
                pr_err!("QP {num} is modified by two at once\n");
            }
            changes.running += 1;
            (changes.dwell, changes.overlaps)
        })
    };
    let Some((us, overlaps)) = begun else { return };
    let start = Instant::<Monotonic>::now();
    while start.elapsed().as_micros_ceil() < i64::from(us) {
        let machine = shared.machine.lock();
        let changes = machine.qps.get(index).map(|qp| &qp.changes);
        if changes.is_none_or(|it| (it.dwell, it.overlaps) != (us, overlaps)) {
            return;
        }
        drop(machine);
        fsleep(Delta::from_micros(100));
    }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn modify_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: This is an operation of a QP that was created, and the attributes are valid.
    let ((shared, index), attr) = unsafe { (qp_parts(qp), &*attr) };
    // SAFETY: The QP was created; its number does not change.
    begin_change(shared, index, unsafe { (*qp).qp_num });
    let (modified, last) = {
        let mut machine = shared.machine.lock();
        let modified = machine.modify_qp(index, attr, mask as u32);
        if let Some(qp) = machine.qps.get_mut(index) {
            qp.changes.running -= 1;
            qp.changes.dwell = 0;
        }
        let last = machine
            .qps
            .get(index)
            .is_some_and(|qp| qp.has_failed() && qp.config.srq.is_some());
        (modified, last)
    };
    if modified.is_ok() && last {
        // SAFETY: The core keeps the QP while it calls an operation of it, and may sleep.
        unsafe { raise_qp_event(qp, bindings::ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED) };
    }
    errno(modified)
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn query_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    _mask: c_int,
    init: *mut bindings::ib_qp_init_attr,
) -> c_int {
    // SAFETY: This is an operation of a QP that was created, and the core gives memory for the
    // attributes.
    let ((shared, index), attr, init) = unsafe { (qp_parts(qp), &mut *attr, &mut *init) };
    let machine = shared.machine.lock();
    let Some(qp) = machine.qps.get(index) else {
        return EINVAL.to_errno();
    };
    qp.query(attr);
    attr.cap = bindings::ib_qp_cap {
        max_send_wr: qp.config.max_send_wr,
        max_recv_wr: qp.recvs.capacity() as u32,
        max_send_sge: qp.config.max_send_sge as u32,
        max_recv_sge: qp.recvs.max_sge() as u32,
        ..Default::default()
    };
    init.cap = bindings::ib_qp_cap { ..attr.cap };
    init.qp_type = qp.config.kind;
    init.sq_sig_type = if qp.config.signal_all {
        bindings::ib_sig_type_IB_SIGNAL_ALL_WR
    } else {
        bindings::ib_sig_type_IB_SIGNAL_REQ_WR
    };
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn destroy_qp(
    qp: *mut bindings::ib_qp,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: This is an operation of a QP that was created.
    let ((shared, index), num) = unsafe { (qp_parts(qp), (*qp).qp_num) };
    shared.remove_files(num);
    iw_cm::end(shared, index);
    // No event handler of the QP runs from here on.
    let _events = shared.events.lock();
    let gone = shared.machine.lock().remove_qp(index);
    drop(gone);
    0
}

/// # Safety
///
/// The list has so many entries, which do not change while the reference is used.
unsafe fn entries<'a>(list: *mut bindings::ib_sge, count: c_int) -> &'a [Sge] {
    match usize::try_from(count) {
        // SAFETY: The caller promises that the list has so many entries; `Sge` is laid out as in C.
        Ok(count) if count != 0 => unsafe { core::slice::from_raw_parts(list.cast(), count) },
        _ => &[],
    }
}

/// Reads the first entry of a request with none, as some drivers do. Fails with `EFAULT` if it is
/// not zero.
///
/// # Safety
///
/// If there is a list, there is memory for one entry.
#[cold]
unsafe fn peek(list: *const bindings::ib_sge, count: c_int) -> Result {
    if count != 0 || list.is_null() {
        return Ok(());
    }
    // SAFETY: The caller promises that a list has memory for an entry, and there is one.
    let sge = unsafe { list.read() };
    match (sge.addr, sge.length, sge.lkey) {
        (0, 0, 0) => Ok(()),
        _ => Err(EFAULT),
    }
}

/// Returns the fields of a request beyond `struct ib_send_wr`.
///
/// # Safety
///
/// `wr` is a valid request of a QP of that type.
#[inline]
unsafe fn segment(wr: *const bindings::ib_send_wr, is_ud: bool) -> Segment {
    // SAFETY: The caller promises that the request is valid: it is in the structure of its
    // opcode, or of the type of its QP, and an MR that it registers is one of this device.
    unsafe {
        match (*wr).opcode {
            _ if is_ud => {
                let ud = &*wr.cast::<bindings::ib_ud_wr>();
                Segment::Datagram {
                    num: ud.remote_qpn,
                    qkey: ud.remote_qkey,
                }
            }
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE
            | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
            | bindings::ib_wr_opcode_IB_WR_RDMA_READ
            | bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV => {
                let rdma = wr.cast::<bindings::ib_rdma_wr>();
                Segment::Remote {
                    addr: (*rdma).remote_addr,
                    key: (*rdma).rkey,
                }
            }
            bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP
            | bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = &*wr.cast::<bindings::ib_atomic_wr>();
                Segment::Atomic {
                    addr: atomic.remote_addr,
                    key: atomic.rkey,
                    compare_add: atomic.compare_add,
                    swap: atomic.swap,
                }
            }
            bindings::ib_wr_opcode_IB_WR_REG_MR => {
                let reg = &*wr.cast::<bindings::ib_reg_wr>();
                let mr = &*reg.mr;
                Segment::Register {
                    index: (*reg.mr.cast::<IbMr>()).index,
                    registration: Registration {
                        key: reg.key,
                        access: reg.access as u32,
                        iova: mr.iova,
                        length: mr.length,
                        page_size: mr.page_size,
                    },
                }
            }
            _ => Segment::None,
        }
    }
}

/// Waits until another thread posts to a QP, or for this number of microseconds.
#[cold]
fn wait_for_another(shared: &Shared, index: usize, us: u32) {
    let start = Instant::<Monotonic>::now();
    loop {
        let late = start.elapsed().as_micros_ceil() > i64::from(us);
        let mut machine = shared.machine.lock();
        match machine.qps.get_mut(index) {
            Some(qp) if qp.stall == Stall::Waiting && late => qp.stall = Stall::No,
            Some(qp) if qp.stall == Stall::Waiting => {}
            _ => return,
        }
        drop(machine);
        core::hint::spin_loop();
    }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn post_send(
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: This is an operation of a QP that was created.
    let (shared, index) = unsafe { qp_parts(qp) };
    let mut machine = shared.machine.lock();
    let Some((us, late)) = machine.stall(index) else {
        // SAFETY: The consumer posts a list of valid requests, and the core gives memory for
        // `bad`.
        return unsafe { post_sends(&mut machine, (qp, index), wr, bad) };
    };
    if !late {
        drop(machine);
        wait_for_another(shared, index, us);
        machine = shared.machine.lock();
    }
    // SAFETY: The consumer posts a list of valid requests, and the core gives memory for `bad`.
    let ret = unsafe { post_sends(&mut machine, (qp, index), wr, bad) };
    if late {
        drop(machine);
        wait_for_another(shared, index, us);
    }
    ret
}

/// As [`post_send`], but names the first request of the list if there was no room for all.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn post_send_as_erdma(
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: This is called with what the operation is called with.
    let ret = unsafe { post_send(qp, wr, bad) };
    if ret == ENOMEM.to_errno() {
        // SAFETY: The core gives memory for `bad`.
        unsafe { bad.write(wr) };
    }
    ret
}

/// Posts a list of requests to a send queue.
///
/// # Safety
///
/// `qp` is a QP whose operation this is, `wr` a list of valid requests of it, and `bad` memory for
/// the first that was not posted.
#[inline]
unsafe fn post_sends(
    machine: &mut Machine,
    (qp, index): (*mut bindings::ib_qp, usize),
    mut wr: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    while !wr.is_null() {
        // SAFETY: `wr` is not null, so it is a valid request of the caller's list.
        if !machine.post_void(index, unsafe { &*wr }) {
            // SAFETY: The caller promises that this is a valid request of the QP.
            if let Err(e) = unsafe { post_one(machine, qp, wr) } {
                if !machine.was_mute(index) {
                    // SAFETY: The caller gives memory for the first that was not posted.
                    unsafe { bad.write(wr) };
                }
                return e.to_errno();
            }
            if let Err(e) = machine.lapses(index) {
                return e.to_errno();
            }
        }
        // SAFETY: The caller's list stays as it is until this returns.
        wr = unsafe { (*wr).next };
    }
    0
}

/// Posts a request that [`Machine::post_void`] is not for.
///
/// # Safety
///
/// `qp` is a QP whose operation this is, and `wr` a valid request of it.
#[inline(never)]
unsafe fn post_one(
    machine: &mut Machine,
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
) -> Result {
    if machine.plan.peek {
        // SAFETY: The caller promises that the request is valid. If it has no entries, its list
        // still has one, or is null: `NullDevice::peek` asks for that.
        unsafe { peek((*wr).sg_list, (*wr).num_sge) }?;
    }
    // SAFETY: The caller promises that this is a valid request, with `num_sge` entries, in
    // an operation of its QP. Both members of each union are as wide.
    let (index, request) = unsafe {
        let is_ud = (*qp).qp_type == bindings::ib_qp_type_IB_QPT_UD;
        let request = SendWr {
            wr_id: *(*wr).__bindgen_anon_1.wr_id,
            opcode: (*wr).opcode,
            flags: (*wr).send_flags,
            ex: *(*wr).ex.invalidate_rkey,
            sges: entries((*wr).sg_list, (*wr).num_sge),
            segment: segment(wr, is_ud),
        };
        (qp_parts(qp).1, request)
    };
    machine.post_send(index, &request)
}

/// Posts a list of receives, each with `post`, which `machine` gives access to.
///
/// # Safety
///
/// `wr` is a list of valid receives, and `bad` is memory for the first that was not posted.
unsafe fn post_recvs(
    machine: &mut Machine,
    mut wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
    mut post: impl FnMut(&mut Machine, u64, &[Sge]) -> Result,
    lapses: impl Fn(&mut Machine) -> Result,
) -> c_int {
    while !wr.is_null() {
        // SAFETY: `wr` is not null, so it is a valid receive of the caller's list, with
        // `num_sge` entries. Both members of the union are as wide.
        let (wr_id, sges, next) = unsafe {
            (
                *(*wr).__bindgen_anon_1.wr_id,
                entries((*wr).sg_list, (*wr).num_sge),
                (*wr).next,
            )
        };
        let peeked = match machine.plan.peek {
            // SAFETY: This is a valid receive of the caller's list. If it has no entries, its own
            // list still has one, or is null: `NullDevice::peek` asks for that.
            true => unsafe { peek((*wr).sg_list, (*wr).num_sge) },
            false => Ok(()),
        };
        if let Err(e) = peeked.and_then(|()| post(machine, wr_id, sges)) {
            // SAFETY: The caller gives memory for the first that was not posted.
            unsafe { bad.write(wr) };
            return e.to_errno();
        }
        if let Err(e) = lapses(machine) {
            return e.to_errno();
        }
        wr = next;
    }
    0
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn post_recv(
    qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: This is an operation of a QP that was created.
    let (shared, index) = unsafe { qp_parts(qp) };
    let mut machine = shared.machine.lock();
    // SAFETY: The consumer posts a list of valid receives, and the core gives memory for `bad`.
    unsafe {
        post_recvs(
            &mut machine,
            wr,
            bad,
            |machine, wr_id, sges| machine.post_recv(index, wr_id, sges),
            |machine| machine.lapses(index),
        )
    }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn post_srq_recv(
    srq: *mut bindings::ib_srq,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: This is an operation of an SRQ that was created.
    let (shared, index) = unsafe { srq_parts(srq) };
    let mut machine = shared.machine.lock();
    let post = |machine: &mut Machine, wr_id: u64, sges: &[Sge]| {
        machine.plan.refuses()?;
        let srq = machine.srqs.get_mut(index).ok_or(EINVAL)?;
        srq.queue.post(wr_id, sges)
    };
    // SAFETY: The consumer posts a list of valid receives, and the core gives memory for `bad`.
    unsafe { post_recvs(&mut machine, wr, bad, post, |machine| machine.plan.lapses()) }
}

/// The device's MR.
#[repr(C)]
struct IbMr {
    raw: bindings::ib_mr,
    index: usize,
}

fn err_ptr<T>(e: Error) -> *mut T {
    e.to_errno() as isize as *mut T
}

/// Not supported: peers have no key of all memory, and local memory has `local_dma_lkey`.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn get_dma_mr(_pd: *mut bindings::ib_pd, _access: c_int) -> *mut bindings::ib_mr {
    err_ptr(EOPNOTSUPP)
}

/// Not supported: the device has no userspace.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn reg_user_mr(
    _pd: *mut bindings::ib_pd,
    _start: u64,
    _length: u64,
    _virt_addr: u64,
    _access: c_int,
    _dmah: *mut bindings::ib_dmah,
    _udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    err_ptr(EOPNOTSUPP)
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn alloc_mr(
    pd: *mut bindings::ib_pd,
    kind: bindings::ib_mr_type,
    pages: u32,
) -> *mut bindings::ib_mr {
    // SAFETY: The PD was allocated, and is one of the device whose operation this is.
    let shared = unsafe { Shared::of((*pd).device) };
    let alloc = || -> Result<*mut bindings::ib_mr> {
        shared.machine.lock().creations.check(Object::Mr)?;
        if kind != bindings::ib_mr_type_IB_MR_TYPE_MEM_REG || pages == 0 || pages > MAX_PAGES {
            return Err(EINVAL);
        }
        let state = KBox::new(Mr::new(pages)?, GFP_KERNEL)?;
        let mut mr = KBox::new(
            IbMr {
                raw: Default::default(),
                index: 0,
            },
            GFP_KERNEL,
        )?;
        let mut machine = shared.machine.lock();
        mr.index = machine.mrs.vacant()?;
        mr.raw.lkey = key_of(mr.index)?;
        mr.raw.rkey = mr.raw.lkey;
        machine.mrs.put(mr.index, state);
        Ok(KBox::into_raw(mr).cast())
    };
    alloc().unwrap_or_else(err_ptr)
}

/// # Safety
///
/// The RDMA core is calling an operation of `mr`, which `alloc_mr` has made, and the reference is
/// not used after that.
unsafe fn mr_parts<'a>(mr: *mut bindings::ib_mr) -> (&'a Shared, usize) {
    // SAFETY: The caller promises that this is an operation of the MR, and so of its device.
    // `alloc_mr` has set the index.
    unsafe { (Shared::of((*mr).device), (*mr.cast::<IbMr>()).index) }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn map_mr_sg(
    mr: *mut bindings::ib_mr,
    sg: *mut bindings::scatterlist,
    entries: c_int,
    offset: *mut c_uint,
) -> c_int {
    // SAFETY: This is an operation of an MR that `alloc_mr` has made.
    let (shared, index) = unsafe { mr_parts(mr) };
    if let Some(mr) = shared.machine.lock().mrs.get_mut(index) {
        mr.unmap();
    }
    // SAFETY: The consumer gives a list of so many entries, and an offset or null.
    unsafe { bindings::ib_sg_to_pages(mr, sg, entries, offset, Some(set_page)) }
}

/// # Safety
///
/// Called by `ib_sg_to_pages`, which `map_mr_sg` calls, with the MR.
unsafe extern "C" fn set_page(mr: *mut bindings::ib_mr, addr: u64) -> c_int {
    // SAFETY: This is called in `map_mr_sg`, an operation of the MR.
    let (shared, index) = unsafe { mr_parts(mr) };
    let mut machine = shared.machine.lock();
    errno(
        machine
            .mrs
            .get_mut(index)
            .ok_or(EINVAL)
            .and_then(|mr| mr.set_page(addr)),
    )
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
unsafe extern "C" fn dereg_mr(mr: *mut bindings::ib_mr, _udata: *mut bindings::ib_udata) -> c_int {
    // SAFETY: This is an operation of an MR that `alloc_mr` has made.
    let (shared, index) = unsafe { mr_parts(mr) };
    let mut machine = shared.machine.lock();
    if let Err(e) = machine.deregs.check() {
        return e.to_errno();
    }
    let gone = machine.mrs.take(index);
    drop(machine);
    drop(gone);
    // SAFETY: `alloc_mr` has made this box, and the core does not use the MR after this.
    drop(unsafe { KBox::from_raw(mr.cast::<IbMr>()) });
    0
}
