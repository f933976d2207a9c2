// SPDX-License-Identifier: GPL-2.0

//! A ULP that lends its device handle to others.

use kernel::prelude::*;
use rdma::{
    device::Device,
    prelude::*, //
};

struct Ulp;

struct Data {
    number: u64,
}

impl Client for Ulp {
    type Data = Data;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

impl DeviceData<Ulp> for Data {
    fn add(_client: Pin<&Ulp>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        // The module of the shelf is there for as long as this one.
        let served = shelf::make_qp(dev, cx).and_then(|qp| shelf::serve(&qp, cx));
        shelf::put(Some(dev.clone()));
        served.map(|()| Data { number: 0x123 })
    }

    fn remove(self: Pin<&Self>, _client: Pin<&Ulp>, dev: &Device, _cx: &Sleepable) {
        shelf::put(None);
        pr_info!("{dev} had {:#x}\n", self.number);
    }
}

rdma::module_rdma_client! {
    type: Ulp,
    name: "rdma_twin_first",
    authors: ["rdma-rs authors"],
    description: "ULP with the file and type names of another",
    license: "GPL",
}
