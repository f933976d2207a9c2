// SPDX-License-Identifier: GPL-2.0

//! Random steps on null devices, rxe and siw, by several threads, in each polling context: each
//! owner that is made is dropped once, and comes back once for each time that it was posted.
//!
//! It is done while the module is loaded, which fails if a number is wrong; or with `background=1`
//! afterwards, until the module is unloaded.

mod counts;
mod faults;
mod lost;
mod net;
mod owners;
mod rng;
mod round;
mod session;
mod slow;
mod steps;
mod talk;
mod tally;
mod transfers;
mod way;
mod world;

use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};
use net::Transport;
use rdma::prelude::*;
use round::{
    run,
    OnDevice,
    Plan, //
};

extern "C" {
    /// Has lockdep look at nothing more (`include/linux/debug_locks.h`).
    fn debug_locks_off() -> c_int;
}

struct Random {
    /// `true` if the module is unloaded.
    over: Arc<Atomic<bool>>,
}

impl Client for Random {
    type Data = OnDevice;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        let over = Arc::new(Atomic::new(false), GFP_KERNEL);
        over.map(|over| Random { over }).map_err(Error::from)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let plan = Plan {
            seed: module_parameters::seed.value(),
            threads: module_parameters::threads.value(),
            steps: module_parameters::steps.value(),
            round: module_parameters::round.value(),
            parts: module_parameters::parts.value() != 0,
            pool: module_parameters::pool.value() != 0,
            transport: Transport::new(module_parameters::device.value())?,
        };
        pr_info!("SEED={}, {} threads\n", plan.seed, plan.threads);
        if module_parameters::lockdep.value() == 0 {
            // SAFETY: It may be called at any time; lockdep does so when it has found something.
            unsafe { debug_locks_off() };
        }
        if module_parameters::background.value() == 0 {
            return run_all(client, &plan, &self.over, cx);
        }
        let (inner, over) = (client.clone(), self.over.clone());
        client.spawn(GFP_KERNEL, move |cx| {
            // It has said what was wrong.
            let _ = run_all(&inner, &plan, &over, cx);
        })
    }

    fn unload(self: Pin<&Self>, _cx: &Sleepable) {
        self.over.store(true, Relaxed);
    }
}

/// [`run`] in some context.
type Run = fn(&ClientRef, &Plan, &Atomic<bool>, &Sleepable) -> Result;

/// Takes the steps in each context.
fn run_all(client: &ClientRef, plan: &Plan, over: &Atomic<bool>, cx: &Sleepable) -> Result {
    let contexts: [Run; 5] = [
        run::<Direct>,
        run::<Waited>,
        run::<Softirq>,
        run::<Workqueue>,
        run::<UnboundWorkqueue>,
    ];
    for (n, run) in contexts.into_iter().enumerate() {
        if module_parameters::contexts.value() & 1 << n != 0 {
            run(client, plan, over, cx)?;
        }
    }
    Ok(())
}

rdma::module_rdma_client! {
    type: Random,
    name: "rdma_random",
    authors: ["rdma-rs authors"],
    description: "Random steps on RDMA devices",
    license: "GPL",
    params: {
        seed: u64 { default: 1, description: "what the random numbers begin with", },
        steps: u64 { default: 20_000, description: "how many, in each polling context", },
        round: u64 { default: 4_000, description: "how many of them on one device", },
        parts: u8 { default: 1, description: "0 without what may be posted in part", },
        pool: u8 { default: 1, description: "0 without shared CQs", },
        threads: u32 { default: 4, description: "how many at the same time", },
        device: u8 { default: 0, description: "null devices 0, rxe0 1, siw0 2", },
        lockdep: u8 { default: 1, description: "0 to do without lockdep from now on", },
        background: u8 { default: 0, description: "1 to go on when the module is loaded", },
        contexts: u32 {
            default: 31,
            description: "direct 1, waited 2, softirq 4, workqueue 8, unbound 16",
        },
    },
}
