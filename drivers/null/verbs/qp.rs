// SPDX-License-Identifier: GPL-2.0

//! The operations of queue pairs but for posting.

use super::{
    cq::IbCq,
    srq::IbSrq, //
};
use crate::{
    cq::QpPtr,
    device::{
        qp_parts,
        raise_qp_event,
        IbQp,
        Shared, //
    },
    errno,
    inject::Object,
    iw_cm,
    qp::{
        check_caps,
        Config,
        Qp, //
    },
    recv::RecvQueue, //
};
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma_bindings as bindings;

/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn create_qp(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_init_attr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the device, whose operation this is, and gives valid attributes.
    let (shared, attr) = unsafe { (Shared::of((*qp).device), &*attr) };
    let create = || -> Result {
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
        let num = machine.add_qp(index, new);
        drop(machine);
        // SAFETY: The core has allocated the size that the device's operations ask for.
        unsafe {
            (*qp.cast::<IbQp>()).index = index;
            (*qp).qp_num = num;
        }
        shared.add_files(num);
        Ok(())
    };
    errno(create())
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
pub(super) unsafe extern "C" fn modify_qp(
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
pub(super) unsafe extern "C" fn query_qp(
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
pub(super) unsafe extern "C" fn destroy_qp(
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
