// SPDX-License-Identifier: GPL-2.0

//! Random steps on connections of both connection managers, by several threads, from when the
//! module is loaded until it is unloaded: each handler and each message that is made is dropped
//! once, and nothing takes long.
//!
//! `tests/guest/connections` makes the devices rxe0 and rxe1, with the addresses that are used, and
//! has them go.

mod answer;
#[path = "../counts.rs"]
mod counts;
mod link;
mod message;
mod pool;
#[path = "../rng.rs"]
mod rng;
mod side;
mod steps;
// Nothing is posted in part here.
#[allow(dead_code)]
#[path = "../tally.rs"]
mod tally;
mod times;
mod world;

use kernel::prelude::*;
use rdma::prelude::*;
use world::{
    OnDevice,
    World, //
};

struct Random {
    world: Arc<World>,
}

impl Client for Random {
    type Data = OnDevice;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        let seed = module_parameters::seed.value();
        World::new(seed, module_parameters::share.value() != 0).map(|world| Random { world })
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, _cx: &Sleepable) -> Result {
        let threads = module_parameters::threads.value();
        pr_info!(
            "SEED={}, {threads} threads\n",
            module_parameters::seed.value()
        );
        for _ in 0..threads {
            let (world, rng) = (self.world.clone(), self.world.rng());
            client.spawn(GFP_KERNEL, move |cx| steps::walk(&world, rng, cx))?;
        }
        let (world, rng) = (self.world.clone(), self.world.rng());
        client.spawn(GFP_KERNEL, move |cx| steps::sweep(&world, rng, cx))
    }

    fn unload(self: Pin<&Self>, cx: &Sleepable) {
        self.world.close(cx);
    }
}

rdma::module_rdma_client! {
    type: Random,
    name: "rdma_random_connect",
    authors: ["rdma-rs authors"],
    description: "Random steps on connections",
    license: "GPL",
    params: {
        seed: u64 { default: 1, description: "what the random numbers begin with", },
        share: u8 { default: 0, description: "1 if listeners share ports, which C does not bear", },
        threads: u32 { default: 4, description: "how many at the same time", },
    },
}
