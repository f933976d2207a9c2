// SPDX-License-Identifier: GPL-2.0

//! A benchmark of the crate, and the twin of `c/`, which does the same in C.
//!
//! Both ends of every load are in this module, on one device or on two. What to do is written to a
//! file, and the write returns when it is done:
//!
//! ```text
//! # cd /sys/kernel/debug/rdma_perf_rs
//! # echo load=send_lat device=rxe0 context=softirq size=64 count=1000 > run
//! # cat result
//! # cat samples
//! ```
//!
//! In the folder `second` are the same files again, for a run at the same time on another CPU.
//!
//! The files, in the order to read them:
//!
//! - `args.rs` and `control.rs`: what can be asked for, and how.
//! - `end.rs` and `link.rs`: what an end is made of, and how the QPs of two ends are connected.
//! - `poll.rs` and `run.rs`: how completions are come by, and how a run ends.
//! - `latency.rs` with `laps.rs`, `rate.rs`, `void.rs`, `array.rs`, `reg.rs`, `call.rs`, `rw.rs`,
//!   `connect.rs`, `setup.rs`: the loads.

// A panic by a number of a user or a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod args;
mod array;
mod call;
mod connect;
mod control;
mod end;
mod laps;
mod latency;
mod link;
mod poll;
mod rate;
mod reg;
mod run;
mod rw;
mod setup;
mod void;

use control::Control;
use kernel::{
    debugfs::Scope,
    prelude::*, //
};
use rdma::prelude::*;

/// The controls of two runs that may be in progress at once.
#[pin_data]
struct Controls {
    #[pin]
    first: Control,
    #[pin]
    second: Control,
}

/// The module's state: its files.
#[pin_data]
struct Perf {
    #[pin]
    files: Scope<Controls>,
}

impl Client for Perf {
    // The objects of a run are gone when it ends, and the removal of the device waits for that.
    type Data = ();

    #[inline]
    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        let controls = try_pin_init!(Controls {
            first <- Control::new(),
            second <- Control::new(),
        });
        try_pin_init!(Self {
            files <- Scope::dir(controls, client.name(), |controls, dir| {
                controls.second.add_files(&dir.dir(c"second"));
                controls.first.add_files(dir);
            }),
        })
    }
}

rdma::module_rdma_client! {
    type: Perf,
    name: "rdma_perf_rs",
    authors: ["rdma-rs authors"],
    description: "Benchmark of RDMA in Rust",
    license: "GPL",
}
