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
//! - `latency.rs` with `laps.rs`, `rate.rs`, `void.rs`, `reg.rs`, `call.rs`, `rw.rs`, `connect.rs`,
//!   `setup.rs`: the loads.

mod args;
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

use kernel::{
    debugfs::{
        Dir,
        File, //
    },
    prelude::*, //
};
use rdma::prelude::*;

/// The files of one run at a time.
#[pin_data]
struct Files {
    #[pin]
    run: File<Arc<control::Control>>,
    #[pin]
    result: File<Arc<control::Control>>,
    #[pin]
    samples: File<Arc<control::Control>>,
    #[pin]
    held: File<Arc<control::Control>>,
}

impl Files {
    #[inline]
    fn new<'a>(client: &'a ClientRef, dir: &'a Dir) -> impl PinInit<Self, Error> + 'a {
        let control = control::Control::new(client);
        try_pin_init!(Self {
            run <- {
                let control = control?;
                dir.write_callback_file(c"run", control, &control::run)
            },
            result <- dir.read_callback_file(c"result", (**run).clone(), &control::result),
            samples <- dir.read_callback_file(c"samples", (**run).clone(), &control::samples),
            held <- dir.read_write_callback_file(
                c"held",
                (**run).clone(),
                &control::held,
                &control::release,
            ),
        })
    }
}

/// The module's state: its files.
#[pin_data]
struct Perf {
    #[pin]
    first: Files,
    #[pin]
    second: Files,
    _dirs: [Dir; 2],
}

impl Client for Perf {
    // The objects of a run are gone when it ends, and the removal of the device waits for that.
    type Data = ();

    #[inline]
    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        let dir = Dir::new(client.name());
        let subdir = dir.subdir(c"second");
        try_pin_init!(Self {
            first <- Files::new(client, &dir),
            second <- Files::new(client, &subdir),
            _dirs: [subdir, dir],
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
