// SPDX-License-Identifier: GPL-2.0

//! An RDMA device that does what a test tells it to.
//!
//! It has no hardware and no network: requests complete as soon as they are posted. Two QPs of one
//! device whose `dest_qp_num` name each other are connected, and transfer data by copying it; a QP
//! whose `dest_qp_num` names nobody sends into the void, at the cost of a completion alone. What is
//! to go wrong is told by [`Injection`]s, in the kernel through [`NullDevice`], by hand through
//! debugfs: see Documentation/null-device.rst.
//!
//! All state is that of one [`machine`](machine::Machine) for each device, under one lock, and safe
//! code; the operations that the RDMA core calls are the files that end in `_ops`.

mod api;
mod command;
mod cq;
mod cq_ops;
mod debugfs;
mod device;
mod event;
mod execute;
mod inject;
mod irq;
mod machine;
mod memory;
mod mr_ops;
mod object_ops;
mod ops;
mod post;
mod post_ops;
mod qp;
mod qp_ops;
mod recv;
mod ring;
mod void;

pub use api::NullDevice;
pub use inject::{
    Injection,
    Object, //
};

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
        let root = debugfs::root();
        // SAFETY: This is the module's init.
        unsafe { device::init(root.clone()) };
        let links = bindings::rdma_link_ops {
            type_: c"null".as_char_ptr(),
            newlink: Some(newlink),
            ..Default::default()
        };
        let links = KBox::pin(Opaque::new(links), GFP_KERNEL)?;
        // SAFETY: The structure is pinned, and stays until `drop` unregisters it.
        unsafe { bindings::rdma_link_register(links.get()) };
        Ok(Self { links, _root: root })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: Registered by `init`. No `newlink` runs after this.
        unsafe { bindings::rdma_link_unregister(self.links.get()) };
        device::exit();
    }
}

/// `rdma link add`. The network device is of no use here.
///
/// # Safety
///
/// Called by the RDMA core with the name of the device.
unsafe extern "C" fn newlink(name: *const c_char, _netdev: *mut bindings::net_device) -> c_int {
    // SAFETY: The core gives a C string, which is valid during the call.
    let name = unsafe { CStr::from_char_ptr(name) };
    ops::errno(device::register(name, device::Kind::Plain).map(drop))
}
