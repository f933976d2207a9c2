// SPDX-License-Identifier: GPL-2.0

//! A ULP that creates an id in the network namespace of each device that goes.

use kernel::prelude::*;
use rdma::{
    device::Device,
    prelude::*, //
};

struct Ulp;

struct Data;

impl Client for Ulp {
    type Data = Data;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }
}

impl DeviceData<Ulp> for Data {
    fn add(_client: Pin<&Ulp>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<_, Error>(Data)
    }

    fn remove(self: Pin<&Self>, _client: Pin<&Ulp>, dev: &Device, cx: &Sleepable) {
        let options = cm::Options {
            net_of: Some(dev),
            ..Default::default()
        };
        let client = ClientRef::of::<Ulp>(cx);
        let created = client.and_then(|client| cm::Id::create_with(&client, &options, cx));
        let errno = created.map_or_else(|e| e.to_errno(), |_| 0);
        pr_info!("id in the namespace of {dev}: {errno}\n");
    }
}

rdma::module_rdma_client! {
    type: Ulp,
    name: "rdma_netns",
    authors: ["rdma-rs authors"],
    description: "ULP that uses network namespaces until they end",
    license: "GPL",
}
