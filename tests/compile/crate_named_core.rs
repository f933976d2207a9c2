// SPDX-License-Identifier: GPL-2.0

//! Taking over `core`, which the macros that `module!` expands to name.

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
extern crate core as real;
#[cfg(mistake)]
extern crate self as core;
#[cfg(mistake)]
pub use real::*;

struct Ulp;

impl Client for Ulp {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

rdma::module_rdma_client! { //~0 E0659 `core` is ambiguous
    type: Ulp,
    name: "ulp",
    authors: ["rdma-rs authors"],
    description: "A ULP",
    license: "GPL",
}
