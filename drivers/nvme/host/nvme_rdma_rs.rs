// SPDX-License-Identifier: GPL-2.0

//! NVMe over RDMA, the host.
//!
//! The module registers the transport `rdma_rs` with nvme-fabrics, beside nvme-rdma's `rdma`. There
//! are no controllers yet: `nvme connect -t rdma_rs` is refused, with a message.

#[path = "../bindings.rs"]
mod bindings;

use kernel::{
    error::to_result,
    prelude::*,
    str::CStr,
    types::Opaque, //
};

module! {
    type: Module,
    name: "nvme_rdma_rs",
    authors: ["rdma-rs authors"],
    description: "NVMe over RDMA in Rust, the host",
    license: "GPL",
}

rdma::build_info!();

struct Module {
    _transport: Transport,
}

impl kernel::Module for Module {
    fn init(module: &'static ThisModule) -> Result<Self> {
        // The last step: what fails after it would unload the module while it is called.
        let _transport = Transport::register(module)?;
        Ok(Self { _transport })
    }
}

/// A registered transport (`struct nvmf_transport_ops`).
///
/// # Invariants
///
/// `ops` is in the list of nvme-fabrics.
struct Transport {
    ops: Pin<KBox<Opaque<bindings::nvmf_transport_ops>>>,
}

// SAFETY: Transports may be registered and unregistered in different threads: their list is locked.
unsafe impl Send for Transport {}
// SAFETY: Nothing can be done with a reference: the field is private, and only dropped.
unsafe impl Sync for Transport {}

impl Transport {
    fn register(module: &'static ThisModule) -> Result<Self> {
        let ops = bindings::nvmf_transport_ops {
            module: module.as_ptr(),
            name: c"rdma_rs".as_char_ptr(),
            required_opts: bindings::NVMF_OPT_TRADDR as c_int,
            create_ctrl: Some(create_ctrl),
            ..Default::default()
        };
        let ops = KBox::pin(Opaque::new(ops), GFP_KERNEL)?;
        // SAFETY: The structure is pinned, and stays until `drop` takes it out of the list. While
        // nvme-fabrics uses it outside the lock of the list, it has a reference to the module.
        to_result(unsafe { bindings::nvmf_register_transport(ops.get()) })?;
        // INVARIANT: It has just been put into the list.
        Ok(Self { ops })
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        // SAFETY: It is in the list by the type invariant.
        unsafe { bindings::nvmf_unregister_transport(self.ops.get()) };
    }
}

/// Refuses a controller (`nvmf_transport_ops.create_ctrl`).
///
/// # Safety
///
/// nvme-fabrics is calling `create_ctrl` with these.
unsafe extern "C" fn create_ctrl(
    _dev: *mut bindings::device,
    opts: *mut bindings::nvmf_ctrl_options,
) -> *mut bindings::nvme_ctrl {
    // SAFETY: By the safety requirements, the options are valid during the call, and they have an
    // address, which is a C string, as `required_opts` asks for it.
    let addr = unsafe { CStr::from_char_ptr((*opts).traddr) };
    pr_err!("{addr}: this version cannot connect to a target\n");
    EOPNOTSUPP.to_ptr()
}
