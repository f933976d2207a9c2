// SPDX-License-Identifier: GPL-2.0

//! rping: a client and a server that speak the protocol of rdma-core's `rping`.
//!
//! A round ("ping") goes like this, and is repeated on the same connection:
//!
//! 1. The client fills a buffer and advertises it: address, remote key and size (`protocol.rs`).
//! 2. The server reads it by RDMA READ and says "go ahead" with a message.
//! 3. The client advertises a second buffer.
//! 4. The server writes what it has read there by RDMA WRITE and says "go ahead".
//! 5. The client compares.
//!
//! Read `protocol.rs` first, for the protocol of both sides; then `conn.rs`, for a connection from
//! its beginning to its end, and what it posts; then `instance.rs` and `config.rs`, for all
//! connections, and their control through configfs.
//!
//! ```sh
//! mkdir /sys/kernel/config/rdma_rping/s
//! echo 1 >/sys/kernel/config/rdma_rping/s/listen
//! rping -c -a 192.0.2.1 -C 100 -V
//! cat /sys/kernel/config/rdma_rping/s/stats
//! ```

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod config;
mod conn;
mod instance;
mod protocol;

use kernel::{
    configfs::Subsystem,
    prelude::*, //
};
use rdma::prelude::*;

/// The module's state: the directory in configfs.
#[pin_data]
struct Rping {
    #[pin]
    _config: Subsystem<config::Root>,
}

impl Client for Rping {
    // Everything of a device belongs to a connection, and the crate ends those when it goes.
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _config <- config::subsystem(),
        })
    }
}

rdma::module_rdma_client! {
    type: Rping,
    name: "rdma_rping",
    authors: ["rdma-rs authors"],
    description: "rping client and server in Rust",
    license: "GPL",
}
