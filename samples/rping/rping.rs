// SPDX-License-Identifier: GPL-2.0

//! rping: a client and a server that speak the protocol of rdma-core's `rping`.
//!
//! A round ("ping") goes like this, and is repeated on the same connection:
//!
//! 1. The client fills a buffer and advertises it: address, remote key and size ([`proto`]).
//! 2. The server reads it by RDMA READ and says "go ahead" with a message.
//! 3. The client advertises a second buffer.
//! 4. The server writes what it has read there by RDMA WRITE and says "go ahead".
//! 5. The client compares.
//!
//! Where to read on, in this order:
//!
//! - [`conn`] and [`control`]: what a connection consists of, who owns it, and how it ends.
//! - [`server`] and [`client`]: the protocol, as completion handlers.
//! - [`context`]: the four polling contexts, from one source.
//! - [`registry`]: how connections let go when their device or their instance goes.
//! - [`config`] and [`instance`]: control through configfs.
//!
//! ```sh
//! mkdir /sys/kernel/config/rdma_rping/s
//! echo 1 >/sys/kernel/config/rdma_rping/s/listen
//! rping -c -a 192.0.2.1 -C 100 -V
//! cat /sys/kernel/config/rdma_rping/s/stats
//! ```

mod client;
mod config;
mod conn;
mod context;
mod control;
mod instance;
mod proto;
mod reason;
mod registry;
mod server;
mod stats;

use kernel::{
    configfs::Subsystem,
    prelude::*, //
};
use rdma::prelude::*;
use registry::Registry;

/// The module's state.
#[pin_data]
struct Rping {
    registry: Arc<Registry>,
    #[pin]
    _config: Subsystem<config::Root>,
}

impl Client for Rping {
    type Data = PerDevice;

    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        let client = client.clone();
        try_pin_init!(Self {
            registry: Registry::new(client)?,
            _config <- config::subsystem(registry.clone()),
        })
    }
}

/// What the module keeps for a device: nothing but that it may be used.
struct PerDevice;

impl rdma::client::DeviceData<Rping> for PerDevice {
    fn add(client: Pin<&Rping>, dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        client.registry.add_device(dev).map(|()| Self)
    }

    fn remove(self: Pin<&Self>, client: Pin<&Rping>, dev: &Device, cx: &Sleepable) {
        client.registry.remove_device(dev, cx);
    }
}

rdma::module_rdma_client! {
    type: Rping,
    name: "rdma_rping",
    authors: ["rdma-rs authors"],
    description: "rping client and server in Rust",
    license: "GPL",
}
