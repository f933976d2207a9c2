// SPDX-License-Identifier: GPL-2.0

//! The operations of memory regions.

use crate::{
    device::Shared,
    errno,
    inject::Object,
    memory::{
        key_of,
        Mr,
        MAX_PAGES, //
    }, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The device's MR.
#[repr(C)]
pub(super) struct IbMr {
    raw: bindings::ib_mr,
    pub(super) index: usize,
}

fn err_ptr<T>(e: Error) -> *mut T {
    e.to_errno() as isize as *mut T
}

/// Not supported: peers have no key of all memory, and local memory has `local_dma_lkey`.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn get_dma_mr(
    _pd: *mut bindings::ib_pd,
    _access: c_int,
) -> *mut bindings::ib_mr {
    err_ptr(EOPNOTSUPP)
}

/// Not supported: the device has no userspace.
///
/// # Safety
///
/// Called by the RDMA core, as `struct ib_device_ops` documents.
pub(super) unsafe extern "C" fn reg_user_mr(
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
pub(super) unsafe extern "C" fn alloc_mr(
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
pub(super) unsafe extern "C" fn map_mr_sg(
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
    // SAFETY: The consumer gives a list of `entries` entries, and an offset or null.
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
pub(super) unsafe extern "C" fn dereg_mr(
    mr: *mut bindings::ib_mr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
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
