// SPDX-License-Identifier: GPL-2.0

//! NVMe over RDMA, the host.
//!
//! The module registers a transport with nvme-fabrics: `rdma_rs` beside nvme-rdma's `rdma`, or,
//! with the parameter `replace`, `rdma` in its place.

#[path = "../bindings.rs"]
mod bindings;
// In both, a panic by a number of a target would end the machine.
#[warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
mod nvme;
#[warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
mod rdma;

use ::rdma::{
    device::Device,
    prelude::{
        Client,
        ClientRef,
        DeviceData,
        Sleepable, //
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex, //
    }, //
};
use nvme::Registration;

/// The module.
#[pin_data]
struct Host {
    /// The transport, from the end of loading until unloading.
    #[pin]
    transport: Mutex<Option<Registration<rdma::Rdma>>>,
}

impl Client for Host {
    type Data = PerDevice;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            transport <- new_mutex!(None),
        })
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, cx: &Sleepable) -> Result {
        let transport = Registration::new(cx)?;
        *self.transport.lock() = Some(transport);
        Ok(())
    }

    /// There is no controller, as each has a reference to the module.
    fn unload(self: Pin<&Self>, _cx: &Sleepable) {
        let transport = self.transport.lock().take();
        drop(transport);
    }
}

/// The number of devices that there have been.
static DEVICES: Atomic<u64> = Atomic::new(0);

/// A device, by a number that no other has: a user may give it another name.
struct PerDevice {
    number: u64,
}

impl DeviceData<Host> for PerDevice {
    fn add(_host: Pin<&Host>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        let number = DEVICES.fetch_add(1, Relaxed).wrapping_add(1);
        Ok::<_, Error>(PerDevice { number })
    }

    /// Deletes all controllers that use the device (`nvme_rdma_remove_one`).
    fn remove(self: Pin<&Self>, host: Pin<&Host>, _dev: &Device, cx: &Sleepable) {
        if let Some(transport) = &*host.transport.lock() {
            transport.delete(|ctrl| ctrl.is_on(self.number), cx);
        }
    }
}

::rdma::module_rdma_client! {
    type: Host,
    name: "nvme_rdma_rs",
    authors: ["rdma-rs authors"],
    description: "NVMe over RDMA in Rust, the host",
    license: "GPL",
}
