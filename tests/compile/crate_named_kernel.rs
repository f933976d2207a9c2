// SPDX-License-Identifier: GPL-2.0

//! Taking over the paths of `module!`, so that the registration has no owner.

extern crate kernel as real;

use rdma::prelude::*;
use real::prelude::*;

#[cfg(mistake)]
extern crate self as kernel;
#[cfg(mistake)]
pub use real::*;

struct Ulp;

impl Client for Ulp {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

rdma::module_rdma_client! { //~0 E0659 `kernel` is ambiguous
    type: Ulp,
    name: "ulp",
    authors: ["rdma-rs authors"],
    description: "A ULP",
    license: "GPL",
}
