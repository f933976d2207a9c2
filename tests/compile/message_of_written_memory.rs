// SPDX-License-Identifier: GPL-2.0

//! Sending the pages of an owner that are mapped for the device to write.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    sg::{SgMap, SgOwner},
    wr::SgeList, //
};

#[cfg(mistake)]
type Direction = FromDevice;
#[cfg(not(mistake))]
type Direction = ToDevice;

fn message<O: SgOwner<Direction>>(data: &SgMap<O, Direction>) -> Result<SendWr<'_, 4>> {
    let sges: SgeList<_, 4> = data.sges()?; //~ E0599 its trait bounds were not satisfied
    Ok(SendWr::send(sges))
}
