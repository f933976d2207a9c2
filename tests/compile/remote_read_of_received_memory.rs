// SPDX-License-Identifier: GPL-2.0

//! Letting a peer read memory that is mapped for the device to write only.

use rdma::prelude::*;

#[cfg(mistake)]
type Memory = Region<FromDevice>;
#[cfg(not(mistake))]
type Memory = Region<Bidirectional>;

fn register(region: &Memory) -> RegWr<'_> {
    RegWr::remote_read(region) //~ E0277 the device does not read `rdma::dma::FromDevice` memory
}
