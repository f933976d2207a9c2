// SPDX-License-Identifier: GPL-2.0

//! Making an MR map other memory while peers may reach what it maps.

use kernel::prelude::*;
use rdma::{mr::Mr, prelude::*};

type Two = (Region<FromDevice>, Region<FromDevice>);

fn map(mr: Mr, spare: Mr, first: Buf<FromDevice>, second: Buf<FromDevice>) -> Result<Two> {
    let first = Region::map(mr, first)?;
    #[cfg(mistake)]
    let second = Region::map(mr, second)?; //~ E0382 use of moved value: `mr`
    #[cfg(not(mistake))]
    let second = Region::map(spare, second)?;
    #[cfg(mistake)]
    drop(spare);
    Ok((first, second))
}
