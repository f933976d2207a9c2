// SPDX-License-Identifier: GPL-2.0

//! Posting a buffer that is lent to another subsystem.

use kernel::prelude::*;
use rdma::prelude::*;

fn send(buf: Buf<ToDevice>) -> Result {
    let lent = buf.lend();
    #[cfg(not(mistake))]
    let buf = lent.into_buf();
    #[cfg(mistake)]
    let _entry = lent.entry(0..4)?;
    let wr = SendWr::send([buf.whole()]); //~ E0382 borrow of moved value: `buf`
    drop(wr);
    Ok(())
}
