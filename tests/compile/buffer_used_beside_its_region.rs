// SPDX-License-Identifier: GPL-2.0

//! Keeping a buffer that an MR maps, to unmap or free it before the MR is gone.

use kernel::prelude::*;
use rdma::prelude::*;

fn share(mut buf: Buf<Bidirectional>, cx: &Sleepable) -> Result<Region<Bidirectional>> {
    #[cfg(not(mistake))]
    buf.cpu().fill(0xff);
    let region = Region::new(buf, cx)?;
    #[cfg(mistake)]
    buf.cpu().fill(0xff); //~ E0382 borrow of moved value: `buf`
    Ok(region)
}
