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
//! operations that the RDMA core calls are in `verbs.rs` and, by object, in `verbs/`.

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
pub use null_device::{
    Kind,
    NullDevice, //
};

use device::Shared;
use kernel::{
    prelude::*,
    str::CStr,
    sync::Arc,
    types::Opaque, //
};
use rdma_bindings as bindings;

module! {
    type: Module,
    name: "rdma_null",
    authors: ["rdma-rs authors"],
    description: "RDMA device for tests",
    license: "GPL",
    alias: [
        "rdma-link-null",
        "rdma-link-null_drain",
        "rdma-link-null_iwarp",
        "rdma-link-null_cm",
        "rdma-link-null_vague",
        "rdma-link-null_erdma",
    ],
}

/// The type of link that makes devices of a kind (`struct rdma_link_ops`).
macro_rules! link {
    ($type:literal, $kind:ident) => {{
        /// # Safety
        ///
        /// Called by the RDMA core.
        unsafe extern "C" fn of_kind(
            name: *const c_char,
            netdev: *mut bindings::net_device,
        ) -> c_int {
            // SAFETY: The RDMA core is calling `newlink`, which this is.
            errno(unsafe { newlink(name, netdev, Kind::$kind) }.map(drop))
        }
        bindings::rdma_link_ops {
            type_: $type.as_char_ptr(),
            newlink: Some(of_kind),
            ..Default::default()
        }
    }};
}

/// The module: `rdma link add NAME type TYPE netdev DEV`.
struct Module {
    links: Pin<KBox<[Opaque<bindings::rdma_link_ops>; 6]>>,
    _root: kernel::debugfs::Dir,
}

// SAFETY: Link types may be registered and unregistered in different threads: their list is locked.
unsafe impl Send for Module {}
// SAFETY: Nothing can be done with a reference: both fields are private, and only dropped.
unsafe impl Sync for Module {}

impl kernel::Module for Module {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        // The aliases of the module have the same types.
        let links = [
            link!(c"null", Plain),
            link!(c"null_drain", OwnDrain),
            link!(c"null_iwarp", Iwarp),
            link!(c"null_cm", IwarpCm),
            link!(c"null_vague", Vague),
            link!(c"null_erdma", Erdma),
        ];
        let links = KBox::pin(links.map(Opaque::new), GFP_KERNEL)?;
        let root = kernel::debugfs::Dir::new(c"rdma_null");
        // SAFETY: This is the module's init, which cannot fail once this has succeeded.
        unsafe { null_device::init(root.clone())? };
        for link in &*links {
            // SAFETY: The structure is pinned, and stays until `drop` unregisters it.
            unsafe { bindings::rdma_link_register(link.get()) };
        }
        Ok(Self { links, _root: root })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for link in &*self.links {
            // SAFETY: Registered by `init`, and unregistered only here.
            unsafe { bindings::rdma_link_unregister(link.get()) };
        }
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

/// Makes a device of a kind (`rdma link add`). The network device is not used, so the loopback
/// interface is the only one for devices whose port is that interface's.
///
/// # Safety
///
/// The RDMA core is calling `newlink` with these.
unsafe fn newlink(
    name: *const c_char,
    netdev: *mut bindings::net_device,
    kind: Kind,
) -> Result<Arc<Shared>> {
    // SAFETY: The core gives a C string, which is valid during the call.
    let name = unsafe { CStr::from_char_ptr(name) };
    // SAFETY: The pointer is constant, and only compared.
    if kind.is_iwarp() && netdev != unsafe { bindings::init_net.loopback_dev } {
        pr_err!("{name}: its port can be that of lo only\n");
        return Err(EINVAL);
    }
    null_device::register(name, kind)
}
