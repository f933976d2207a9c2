// SPDX-License-Identifier: GPL-2.0

//! Registering a client that no module owns, so that its code could go while the core calls it.

use kernel::prelude::*;
#[cfg(mistake)]
use rdma::client::Registration;
use rdma::prelude::*;

struct Ulp;

impl Client for Ulp {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

#[cfg(mistake)]
fn register() -> impl PinInit<Registration<Ulp>, Error> {
    Registration::<Ulp>::new(c"ulp") //~ E0277 no module owns the client `Ulp`
                                     //~^ E0599 its trait bounds were not satisfied
}

#[cfg(not(mistake))]
rdma::module_rdma_client! {
    type: Ulp,
    name: "ulp",
    authors: ["rdma-rs authors"],
    description: "A ULP",
    license: "GPL",
}
