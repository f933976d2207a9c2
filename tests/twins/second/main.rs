// SPDX-License-Identifier: GPL-2.0

//! A ULP that asks another one's device handle for data of its own. Its types have the names of the
//! other's, and so has its file.

use kernel::prelude::*;
use rdma::prelude::*;

struct Ulp;

/// As large as the other's.
struct Data {
    address: usize,
}

impl Client for Ulp {
    type Data = Data;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, cx: &Sleepable) -> Result {
        let dev = shelf::put(None).ok_or(ENODEV)?;
        if let Some(data) = dev.data::<Ulp>(cx) {
            pr_err!("data of another ULP: {:#x}\n", data.address);
            return Err(EBADF);
        }
        Ok(())
    }
}

impl DeviceData<Ulp> for Data {
    fn add(_client: Pin<&Ulp>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<_, Error>(Data { address: 0 })
    }
}

rdma::module_rdma_client! {
    type: Ulp,
    name: "rdma_twin_second",
    authors: ["rdma-rs authors"],
    description: "ULP with the file and type names of another",
    license: "GPL",
}
