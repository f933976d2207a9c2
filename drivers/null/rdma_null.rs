// SPDX-License-Identifier: GPL-2.0

//! RDMA device for tests, with faults that can be injected.
//!
//! It has no hardware and no network: requests complete as soon as they are posted. Two QPs of one
//! device whose `dest_qp_num` name each other are connected, and transfer data by copying; requests
//! of a QP whose `dest_qp_num` names no QP only complete. Faults are [`Injection`]s, in the kernel
//! through [`NullDevice`], by hand through debugfs: see
//! Documentation/null-device.rst.
//!
//! The state of a device is a [`machine`](machine::Machine), under one lock, and safe code. The
//! operations that the RDMA core calls are in `verbs.rs`.

mod cm;
mod cq;
mod device;
mod inject;
mod irq;
mod iw_cm;
mod machine;
mod memory;
mod null_device;
mod post;
mod qp;
mod recv;
mod ring;
mod verbs;

pub use cm::REJECTED;
pub use inject::{
    Injection,
    Object, //
};
pub use null_device::NullDevice;

use kernel::{
    prelude::*,
    str::CStr,
    types::Opaque, //
};
use rdma_bindings as bindings;

module! {
    type: Module,
    name: "rdma_null",
    authors: ["rdma-rs authors"],
    description: "RDMA device for tests",
    license: "GPL",
    alias: ["rdma-link-null"],
}

/// The module: `rdma link add NAME type null netdev DEV`.
struct Module {
    links: Pin<KBox<Opaque<bindings::rdma_link_ops>>>,
    _root: kernel::debugfs::Dir,
}

// SAFETY: Link types may be registered and unregistered in different threads: their list is locked.
unsafe impl Send for Module {}
// SAFETY: Nothing can be done with a reference: both fields are private, and only dropped.
unsafe impl Sync for Module {}

impl kernel::Module for Module {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let links = bindings::rdma_link_ops {
            type_: c"null".as_char_ptr(),
            newlink: Some(newlink),
            ..Default::default()
        };
        let links = KBox::pin(Opaque::new(links), GFP_KERNEL)?;
        let root = kernel::debugfs::Dir::new(c"rdma_null");
        // SAFETY: This is the module's init, which does not fail any more.
        unsafe { null_device::init(root.clone()) };
        // SAFETY: The structure is pinned, and stays until `drop` unregisters it.
        unsafe { bindings::rdma_link_register(links.get()) };
        Ok(Self { links, _root: root })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: Registered by `init`, and unregistered only here.
        unsafe { bindings::rdma_link_unregister(self.links.get()) };
        null_device::exit();
    }
}

/// Converts a result into C's.
pub(crate) fn errno(result: Result) -> c_int {
    match result {
        Ok(()) => 0,
        Err(e) => e.to_errno(),
    }
}

/// `rdma link add`. The network device is not used.
///
/// # Safety
///
/// Called by the RDMA core with the name of the device.
unsafe extern "C" fn newlink(name: *const c_char, _netdev: *mut bindings::net_device) -> c_int {
    // SAFETY: The core gives a C string, which is valid during the call.
    let name = unsafe { CStr::from_char_ptr(name) };
    errno(null_device::register(name, null_device::Kind::Plain).map(drop))
}
