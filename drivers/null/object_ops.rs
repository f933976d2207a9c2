// SPDX-License-Identifier: GPL-2.0

//! Operations of PDs, AHs and SRQs.

use crate::{
    device::Shared,
    inject::Object,
    ops::errno,
    qp::{
        MAX_SGE,
        MAX_WR, //
    },
    recv::{
        self,
        RecvQueue,
        SrqPtr, //
    }, //
};
use core::ptr::NonNull;
use kernel::prelude::*;
use rdma_bindings as bindings;

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn alloc_pd(
    pd: *mut bindings::ib_pd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is.
    let shared = unsafe { Shared::of((*pd).device) };
    errno(shared.machine.lock().creations.check(Object::Pd))
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn dealloc_pd(
    _pd: *mut bindings::ib_pd,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn create_ah(
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
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn destroy_ah(_ah: *mut bindings::ib_ah, _flags: u32) -> c_int {
    0
}

/// The device's SRQ.
#[repr(C)]
pub(crate) struct Srq {
    raw: bindings::ib_srq,
    pub(crate) index: usize,
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn create_srq(
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
        let new = recv::Srq {
            raw,
            queue,
            limit: 0,
        };
        let new = KBox::new(new, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        let index = machine.srqs.vacant()?;
        machine.srqs.put(index, new);
        Ok(index)
    };
    match create() {
        Ok(index) => {
            // SAFETY: The core has allocated the size that the device's operations ask for.
            unsafe { (*srq.cast::<Srq>()).index = index };
            0
        }
        Err(e) => e.to_errno(),
    }
}

/// # Safety
///
/// The RDMA core is calling an operation of `srq`, which was created, and the reference is not used
/// after that.
pub(crate) unsafe fn srq_parts<'a>(srq: *mut bindings::ib_srq) -> (&'a Shared, usize) {
    // SAFETY: The caller says that this is an operation of the SRQ, and so of its device.
    // `create_srq` has set the index.
    unsafe { (Shared::of((*srq).device), (*srq.cast::<Srq>()).index) }
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn modify_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
    mask: bindings::ib_srq_attr_mask,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: This is an operation of an SRQ that was created, and the attributes are valid.
    let ((shared, index), attr) = unsafe { (srq_parts(srq), &*attr) };
    if mask & bindings::ib_srq_attr_mask_IB_SRQ_MAX_WR != 0 {
        return EOPNOTSUPP.to_errno();
    }
    if let Some(srq) = shared.machine.lock().srqs.get_mut(index) {
        srq.limit = attr.srq_limit;
    }
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn query_srq(
    srq: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
) -> c_int {
    // SAFETY: This is an operation of an SRQ that was created.
    let (shared, index) = unsafe { srq_parts(srq) };
    if let Some(srq) = shared.machine.lock().srqs.get(index) {
        let is = bindings::ib_srq_attr {
            max_wr: srq.queue.capacity() as u32,
            max_sge: srq.queue.max_sge() as u32,
            srq_limit: srq.limit,
        };
        // SAFETY: The core gives memory for the attributes.
        unsafe { attr.write(is) };
    }
    0
}

/// # Safety
///
/// Called by the RDMA core, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn destroy_srq(
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
