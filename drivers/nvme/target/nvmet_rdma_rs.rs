// SPDX-License-Identifier: GPL-2.0

//! NVMe over RDMA, the target.
//!
//! The module registers the RDMA transport with nvmet, in the place of nvmet-rdma: nvmet has one
//! transport of each type. It cannot listen yet: a port that is enabled is refused, with a message.

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
    name: "nvmet_rdma_rs",
    authors: ["rdma-rs authors"],
    description: "NVMe over RDMA in Rust, the target",
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

/// A registered transport (`struct nvmet_fabrics_ops`).
///
/// # Invariants
///
/// `ops` is what nvmet calls for RDMA ports.
struct Transport {
    ops: Pin<KBox<Opaque<bindings::nvmet_fabrics_ops>>>,
}

// SAFETY: Transports may be registered and unregistered in different threads, under nvmet's lock.
unsafe impl Send for Transport {}
// SAFETY: Nothing can be done with a reference: the field is private, and only dropped.
unsafe impl Sync for Transport {}

impl Transport {
    fn register(module: &'static ThisModule) -> Result<Self> {
        // All other operations are called for ports that were added.
        let ops = bindings::nvmet_fabrics_ops {
            owner: module.as_ptr(),
            type_: bindings::NVMF_TRTYPE_RDMA,
            add_port: Some(add_port),
            ..Default::default()
        };
        let ops = KBox::pin(Opaque::new(ops), GFP_KERNEL)?;
        // SAFETY: The structure is pinned, and stays until `drop` unregisters it. While nvmet uses
        // it outside its lock, it has a reference to the module.
        to_result(unsafe { bindings::nvmet_register_transport(ops.get()) }).inspect_err(|_| {
            pr_err!("nvmet has a transport for RDMA: unload nvmet-rdma first\n")
        })?;
        // INVARIANT: It has just been registered.
        Ok(Self { ops })
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        // SAFETY: It is registered by the type invariant.
        unsafe { bindings::nvmet_unregister_transport(self.ops.get()) };
    }
}

/// Refuses a port (`nvmet_fabrics_ops.add_port`).
///
/// # Safety
///
/// nvmet is calling `add_port` with this.
unsafe extern "C" fn add_port(port: *mut bindings::nvmet_port) -> c_int {
    // SAFETY: By the safety requirements, the port is valid, and nvmet holds the lock under which
    // the address is written.
    let addr = unsafe { &(*port).disc_addr.traddr };
    let addr = CStr::from_bytes_until_nul(addr).unwrap_or(c"?");
    pr_err!("{addr}: this version cannot listen on a port\n");
    EOPNOTSUPP.to_errno()
}
