// SPDX-License-Identifier: GPL-2.0

//! A module that passes a device handle from one ULP to another.

use kernel::prelude::*;
use rdma::device::Device;

module! {
    type: Shelf,
    name: "rdma_twin_shelf",
    authors: ["rdma-rs authors"],
    description: "Passes a device handle between the RDMA twins",
    license: "GPL",
}

struct Shelf;

impl kernel::Module for Shelf {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        // SAFETY: This is the module's init, so it is called once.
        unsafe { SLOT.init() };
        Ok(Shelf)
    }
}

kernel::sync::global_lock! {
    // SAFETY: The module's init initialises it before any other module can call into this one.
    unsafe(uninit) static SLOT: Mutex<Option<Device>> = None;
}

/// Puts a handle on the shelf, and returns what was there.
#[inline(never)]
pub fn put(dev: Option<Device>) -> Option<Device> {
    core::mem::replace(&mut *SLOT.lock(), dev)
}
