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

fn message<'a, O: SgOwner<Direction>>(
    header: &'a Buf<ToDevice>,
    data: &'a SgMap<O, Direction>,
) -> Result<SendWr<'a, 4>> {
    let mut sges = SgeList::<_, 4>::new(header.whole());
    data.append_to(&mut sges)?; //~ E0599 its trait bounds were not satisfied
    Ok(SendWr::send(sges))
}
