// SPDX-License-Identifier: GPL-2.0

//! The operations of completion queues.

use crate::{
    cq::Cq,
    device::Shared,
    errno,
    inject::{
        spin,
        Object, //
    },
    irq::{
        self,
        CqWork,
        Irq, //
    }, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The most entries of a completion queue.
pub(super) const MAX_CQE: u32 = 131_072;

/// The device's CQ.
#[repr(C)]
pub(super) struct IbCq {
    raw: bindings::ib_cq,
    work: CqWork,
    pub(super) index: usize,
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn create_cq(
    cq: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*cq).device), &*attr) };
    let create = || -> Result {
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
        // SAFETY: The core has allocated the size that the device's operations ask for.
        unsafe {
            (*cq.cast::<IbCq>()).index = index;
            (*cq).cqe = attr.cqe as c_int;
        }
        Ok(())
    };
    errno(create())
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
pub(super) unsafe extern "C" fn pre_destroy_cq(cq: *mut bindings::ib_cq) -> c_int {
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
pub(super) unsafe extern "C" fn destroy_cq(
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
pub(super) unsafe extern "C" fn poll_cq(
    cq: *mut bindings::ib_cq,
    entries: c_int,
    wc: *mut bindings::ib_wc,
) -> c_int {
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    let Ok(entries) = usize::try_from(entries) else {
        return EINVAL.to_errno();
    };
    // SAFETY: The consumer gives memory for `entries` completions.
    let room = unsafe { core::slice::from_raw_parts_mut(wc.cast(), entries) };
    shared.machine.lock().poll(index, room) as c_int
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn req_notify_cq(
    cq: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    // SAFETY: This is an operation of a CQ that was created.
    let (shared, index) = unsafe { cq_parts(cq) };
    let solicited = flags & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
        == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
    let report = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;
    // Without `IB_CQ_REPORT_MISSED_EVENTS` completions that have come must raise the interrupt.
    let longer = if report {
        shared.machine.lock().arms.next()
    } else {
        None
    };
    if let Some((us, honest)) = longer {
        spin(us);
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
pub(super) unsafe extern "C" fn modify_cq(
    _cq: *mut bindings::ib_cq,
    _count: u16,
    _period: u16,
) -> c_int {
    errno(Ok(()))
}
