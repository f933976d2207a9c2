// SPDX-License-Identifier: GPL-2.0

//! The operations of shared receive queues.

use crate::{
    device::Shared,
    errno,
    inject::Object,
    qp::{
        MAX_SGE,
        MAX_WR, //
    },
    recv::{
        RecvQueue,
        Srq,
        SrqPtr, //
    }, //
};
use core::ptr::NonNull;
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The device's SRQ.
#[repr(C)]
pub(super) struct IbSrq {
    raw: bindings::ib_srq,
    pub(super) index: usize,
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn create_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*srq).device), &mut *attr) };
    let create = || -> Result {
        shared.machine.lock().creations.check(Object::Srq)?;
        let is_basic = attr.srq_type == bindings::ib_srq_type_IB_SRQT_BASIC;
        let max_wr = attr.attr.max_wr;
        let max_sge = attr.attr.max_sge;
        if !is_basic || max_wr == 0 || max_wr > MAX_WR || max_sge > MAX_SGE {
            return Err(EINVAL);
        }
        let queue = RecvQueue::new(max_wr as usize, max_sge as usize)?;
        let raw = SrqPtr(NonNull::new(srq).ok_or(EINVAL)?);
        let new = KBox::new(Srq { raw, queue }, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        let index = machine.srqs.vacant()?;
        machine.srqs.put(index, new);
        // SAFETY: The core has allocated the size that the device's operations ask for.
        unsafe { (*srq.cast::<IbSrq>()).index = index };
        Ok(())
    };
    errno(create())
}

/// # Safety
///
/// The RDMA core is calling an operation of `srq`, which was created, and the reference is not used
/// after that.
pub(super) unsafe fn srq_parts<'a>(srq: *mut bindings::ib_srq) -> (&'a Shared, usize) {
    // SAFETY: The caller promises that this is an operation of the SRQ, and so of its device.
    // `create_srq` has set the index.
    unsafe { (Shared::of((*srq).device), (*srq.cast::<IbSrq>()).index) }
}

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn destroy_srq(
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
