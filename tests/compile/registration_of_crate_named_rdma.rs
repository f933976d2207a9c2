// SPDX-License-Identifier: GPL-2.0

//! Taking over the paths of `module_rdma_client!`, so that the registration is a type of the ULP's.

extern crate rdma as real;

use kernel::prelude::*;
use real::prelude::{
    Client,
    ClientRef, //
};

#[cfg(mistake)]
extern crate self as rdma;
#[cfg(mistake)]
pub use real::*;

#[cfg(mistake)]
pub mod client {
    pub use real::client::*;

    pub struct Registration<T>(core::marker::PhantomData<T>);
}

#[cfg(mistake)]
use crate::client::Registration;
#[cfg(not(mistake))]
use real::client::Registration;

struct Ulp;

impl Client for Ulp {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

#[cfg(mistake)]
rdma::module_rdma_client! {
    type: Ulp,
    name: "ulp",
    authors: ["rdma-rs authors"],
    description: "A ULP",
    license: "GPL",
}
#[cfg(not(mistake))]
real::module_rdma_client! {
    type: Ulp,
    name: "ulp",
    authors: ["rdma-rs authors"],
    description: "A ULP",
    license: "GPL",
}

fn registration(module: &RdmaClientModule) -> &Registration<Ulp> {
    &module._registration //~ E0308 mismatched types
}
