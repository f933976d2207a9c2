// SPDX-License-Identifier: GPL-2.0

//! Ending a request of blk-mq whose pages are listed for the device.

use crate::nvme::{
    Payload,
    Rq, //
};
use kernel::prelude::*;
use rdma::{
    dma::OneWay,
    mr::Region,
    sg::SgMap, //
};

fn reply(region: Region<OneWay, SgMap<Payload, OneWay>>, status: u16) {
    #[cfg(mistake)]
    region.into_owner().into_rq().end(status, 0); //~ E0599 no method named `into_owner` found
    #[cfg(not(mistake))]
    if let Ok((_, memory)) = region.into_parts() {
        memory.into_owner().into_rq().end(status, 0);
    }
}

fn send(rq: Rq) -> Result<Payload, (Rq, Error)> {
    let payload = rq.map()?;
    #[cfg(mistake)]
    rq.end(0, 0); //~ E0382 use of moved value: `rq`
    Ok(payload)
}
