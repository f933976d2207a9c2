// SPDX-License-Identifier: GPL-2.0

//! Choosing what a peer may do with memory whose direction only its owner knows.

use rdma::{
    dma::OneWay,
    prelude::*,
    sg::{SgMap, SgOwner}, //
};

fn register<O: SgOwner<OneWay>>(region: &Region<OneWay, SgMap<O, OneWay>>) -> RegWr<'_> {
    #[cfg(mistake)]
    return RegWr::remote_write(region);
    //~^ E0277 the device does not write `OneWay` memory
    #[cfg(not(mistake))]
    RegWr::remote_one_way(region)
}
