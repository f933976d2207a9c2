// SPDX-License-Identifier: GPL-2.0

//! The operations of `struct ib_device_ops` that `iw_cm` calls.
//!
//! C header: [`include/rdma/iw_cm.h`](srctree/include/rdma/iw_cm.h)

use crate::{
    cm::{
        Address,
        Cm,
        Conn,
        End,
        IwId,
        Listener,
        Param, //
    },
    device::{
        qp_parts,
        Shared, //
    },
    errno,
    inject::{
        spin,
        Object, //
    }, //
};
use core::ptr::{
    self,
    NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};
use rdma_bindings as bindings;

/// Ends the connection of a QP that is about to be destroyed, and waits until its last event was
/// given and `iw_cm` has put its references to the QP.
pub(crate) fn end(shared: &Shared, qp: usize) {
    let mut machine = shared.machine.lock();
    let Some(cm) = machine.cm.clone() else {
        return;
    };
    machine.disconnect(qp);
    if let Some(qp) = machine.qps.get_mut(qp) {
        // No call that has found it still connects it.
        qp.state = bindings::ib_qp_state_IB_QPS_ERR;
    }
    drop(machine);
    cm.wait_for_qp(qp);
    let mut machine = shared.machine.lock();
    while machine.qps.get(qp).is_some_and(|qp| qp.iw_refs != 0) {
        cm.gone.wait(&mut machine);
    }
}

/// Returns the device of an id, its connection manager, and the number of the id's connection.
///
/// # Safety
///
/// `iw_cm` is calling an operation of the device with `id`, and the reference is not used after
/// that.
unsafe fn id_parts<'a>(id: *mut bindings::iw_cm_id) -> Result<(&'a Shared, Arc<Cm>, usize)> {
    // SAFETY: The id is valid, as `iw_cm` calls this with it, and has set the device, whose
    // operation this is.
    let (shared, data) = unsafe { (Shared::of((*id).device), (*id).provider_data) };
    let cm = shared.machine.lock().cm.clone().ok_or(EOPNOTSUPP)?;
    Ok((shared, cm, data.addr()))
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn add_ref(qp: *mut bindings::ib_qp) {
    // SAFETY: This is an operation of a QP that was created: `get_qp` has returned it.
    let (shared, index) = unsafe { qp_parts(qp) };
    if let Some(qp) = shared.machine.lock().qps.get_mut(index) {
        qp.iw_refs += 1;
    }
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn rem_ref(qp: *mut bindings::ib_qp) {
    // SAFETY: This is an operation of a QP that was created, and is not destroyed before this has
    // put the reference: `end` waits for that.
    let (shared, index) = unsafe { qp_parts(qp) };
    let mut machine = shared.machine.lock();
    if let Some(qp) = machine.qps.get_mut(index) {
        qp.iw_refs -= 1;
    }
    if let Some(cm) = &machine.cm {
        cm.gone.notify_all();
    }
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn get_qp(
    dev: *mut bindings::ib_device,
    num: c_int,
) -> *mut bindings::ib_qp {
    // SAFETY: `iw_cm` is calling an operation of `dev`.
    let shared = unsafe { Shared::of(dev) };
    let found = {
        let mut machine = shared.machine.lock();
        let index = machine.find_qp(num as u32);
        let qp = index.and_then(|index| machine.qps.get_mut(index));
        qp.map(|qp| (qp.config.raw.0, core::mem::take(&mut qp.find)))
    };
    let Some((qp, us)) = found else {
        return ptr::null_mut();
    };
    // `iw_cm` has a spinlock locked.
    spin(us);
    qp.as_ptr()
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn connect(
    id: *mut bindings::iw_cm_id,
    param: *mut bindings::iw_cm_conn_param,
) -> c_int {
    let connect = || -> Result {
        // SAFETY: This is an operation of the id's device.
        let (shared, cm, _) = unsafe { id_parts(id) }?;
        // SAFETY: `iw_cm` gives valid parameters and a valid id, whose addresses are set.
        let (request, num, from, to) = unsafe {
            let request = Param::copy(param)?;
            let from = (*id).local_addr;
            let to = (*id).remote_addr;
            (request, (*param).qpn, Address(from), Address(to))
        };
        let addr = to.get().ok_or(EAFNOSUPPORT)?;
        let id = NonNull::new(id).ok_or(EINVAL)?;
        // SAFETY: The id is valid, as `iw_cm` calls this with it.
        let id = unsafe { IwId::get(id) };
        let mut conn = Conn::new(from, to, request)?;
        let mut machine = shared.machine.lock();
        machine.creations.check(Object::Connect)?;
        conn.active = End {
            id: Some(id),
            qp: Some(machine.connectable(num)?),
        };
        cm.connect(conn, addr)
    };
    errno(connect())
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn accept(
    id: *mut bindings::iw_cm_id,
    param: *mut bindings::iw_cm_conn_param,
) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let (shared, cm, num) = match unsafe { id_parts(id) } {
        Ok(parts) => parts,
        Err(e) => return e.to_errno(),
    };
    let accept = || -> Result {
        // SAFETY: `iw_cm` gives valid parameters.
        let (answer, qpn) = unsafe { (Param::copy(param)?, (*param).qpn) };
        // SAFETY: The id is valid, as `iw_cm` calls this with it.
        let id = unsafe { IwId::get(NonNull::new(id).ok_or(EINVAL)?) };
        let mut machine = shared.machine.lock();
        machine.creations.check(Object::Accept)?;
        let qp = machine.connectable(qpn)?;
        let passive = End {
            id: Some(id),
            qp: Some(qp),
        };
        // The handlers of the events wait for the lock of the machine.
        let (peer, is_there) = cm.accept(num, passive, answer)?;
        let peer_num = machine.qps.get(peer).map_or(0, |qp| qp.num);
        machine.connect_qp(qp, peer_num);
        machine.connect_qp(peer, qpn);
        if !is_there {
            machine.fail_qp(qp);
            machine.fail_qp(peer);
        }
        Ok(())
    };
    let accepted = accept();
    if accepted.is_err() {
        // This is the last call for the request.
        let _ = cm.reject(num, ECONNRESET, Param::default());
    }
    errno(accepted)
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn reject(
    id: *mut bindings::iw_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let (shared, cm, num) = match unsafe { id_parts(id) } {
        Ok(parts) => parts,
        Err(e) => return e.to_errno(),
    };
    let answer = || -> Result<Param> {
        shared.machine.lock().creations.check(Object::Reject)?;
        // SAFETY: `iw_cm` gives `len` bytes of private data.
        unsafe { Param::copy_data(data, len) }
    };
    errno(match answer() {
        Ok(answer) => cm.reject(num, ECONNREFUSED, answer),
        Err(e) => cm.reject(num, ECONNRESET, Param::default()).and(Err(e)),
    })
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn create_listen(
    id: *mut bindings::iw_cm_id,
    _backlog: c_int,
) -> c_int {
    let listen = || -> Result {
        // SAFETY: This is an operation of the id's device.
        let (shared, cm, _) = unsafe { id_parts(id) }?;
        shared.machine.lock().creations.check(Object::Listen)?;
        // SAFETY: The id is valid, as `iw_cm` calls this with it, and its address is set.
        let (addr, afonly) = unsafe { (Address((*id).local_addr), (*id).afonly()) };
        let addr = addr.get().ok_or(EAFNOSUPPORT)?;
        let listener = Listener {
            // SAFETY: The id is valid, as `iw_cm` calls this with it.
            id: unsafe { IwId::get(NonNull::new(id).ok_or(EINVAL)?) },
            addr,
            dual_stack: !afonly && addr.is_ipv6(),
        };
        cm.listen(listener)
    };
    errno(listen())
}

/// # Safety
///
/// Called by `iw_cm`, as `struct ib_device_ops` documents.
pub(crate) unsafe extern "C" fn destroy_listen(id: *mut bindings::iw_cm_id) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let cm = match unsafe { id_parts(id) } {
        Ok((_, cm, _)) => cm,
        Err(e) => return e.to_errno(),
    };
    cm.stop(id);
    0
}
