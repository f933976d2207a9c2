// SPDX-License-Identifier: GPL-2.0

//! A ULP that lends handles of its client and its device to others.

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

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        // The module of the shelf stays loaded for as long as this one.
        shelf::listen(client, cx)
    }
}

impl DeviceData<Ulp> for Data {
    fn add(_client: Pin<&Ulp>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        // The module of the shelf stays loaded for as long as this one.
        shelf::make_qp(dev, cx).and_then(|qp| {
            shelf::serve(&qp, cx)?;
            shelf::put(Some((ClientRef::of::<Ulp>(cx)?, dev.clone())));
            Ok(Data { number: 0x123 })
        })
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
