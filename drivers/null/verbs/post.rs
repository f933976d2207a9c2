// SPDX-License-Identifier: GPL-2.0

//! Posting work requests to queue pairs and shared receive queues.

use super::{
    mr::IbMr,
    srq::srq_parts, //
};
use crate::{
    device::{
        qp_parts,
        Shared, //
    },
    inject::Stall,
    machine::Machine,
    memory::{
        Registration,
        Sge, //
    },
    post::{
        Segment,
        SendWr, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma_bindings as bindings;

/// # Safety
///
/// `list` has `count` entries, which do not change while the reference is used.
unsafe fn entries<'a>(list: *mut bindings::ib_sge, count: c_int) -> &'a [Sge] {
    match usize::try_from(count) {
        // SAFETY: The caller promises that the list has `count` entries; `Sge` is laid out as in C.
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
pub(super) unsafe extern "C" fn post_send(
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
        let peeked = if machine.plan.peek {
            // SAFETY: This is a valid receive of the caller's list. If it has no entries, its own
            // list still has one, or is null: `NullDevice::peek` asks for that.
            unsafe { peek((*wr).sg_list, (*wr).num_sge) }
        } else {
            Ok(())
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
pub(super) unsafe extern "C" fn post_recv(
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
pub(super) unsafe extern "C" fn post_srq_recv(
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
