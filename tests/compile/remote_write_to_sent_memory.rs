// SPDX-License-Identifier: GPL-2.0

//! Letting a peer write memory that is mapped for the device to read only.

use rdma::prelude::*;

#[cfg(mistake)]
type Memory = Region<ToDevice>;
#[cfg(not(mistake))]
type Memory = Region<FromDevice>;

fn register(region: &Memory) -> RegWr<'_> {
    RegWr::remote_write(region) //~ E0277 the device does not write `rdma::dma::ToDevice` memory
}
