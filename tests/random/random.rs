// SPDX-License-Identifier: GPL-2.0

//! Random steps on null devices, by several threads, in each polling context: each owner that is made
//! is dropped once, and comes back once for each time that it was posted.
//!
//! All of it is done while the module is loaded, which fails if a number is wrong.

mod counts;
mod faults;
mod owners;
mod rng;
mod round;
mod steps;
mod tally;
mod way;
mod world;

use kernel::prelude::*;
use rdma::prelude::*;
use round::{
    run,
    Plan, //
};

struct Random;

impl Client for Random {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Random)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let plan = Plan {
            seed: module_parameters::seed.value(),
            threads: module_parameters::threads.value(),
            steps: module_parameters::steps.value(),
            round: module_parameters::round.value(),
            parts: module_parameters::parts.value() != 0,
        };
        let contexts: [fn(&ClientRef, &Plan, &Sleepable) -> Result; 5] = [
            run::<Direct>,
            run::<Waited>,
            run::<Softirq>,
            run::<Workqueue>,
            run::<UnboundWorkqueue>,
        ];
        pr_info!("SEED={}, {} threads\n", plan.seed, plan.threads);
        for (n, run) in contexts.into_iter().enumerate() {
            if module_parameters::contexts.value() & 1 << n != 0 {
                run(client, &plan, cx)?;
            }
        }
        Ok(())
    }
}

rdma::module_rdma_client! {
    type: Random,
    name: "rdma_random",
    authors: ["rdma-rs authors"],
    description: "Random steps on null devices",
    license: "GPL",
    params: {
        seed: u64 { default: 1, description: "what the random numbers begin with", },
        steps: u64 { default: 20_000, description: "how many, in each polling context", },
        round: u64 { default: 4_000, description: "how many of them on one device", },
        parts: u8 { default: 1, description: "0 without what may be posted in part", },
        threads: u32 { default: 4, description: "how many at the same time", },
        contexts: u32 { default: 31, description: "direct 1, waited 2, softirq 4, workqueue 8, unbound 16", },
    },
}
