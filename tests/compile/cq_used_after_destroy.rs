// SPDX-License-Identifier: GPL-2.0

//! Destroying a CQ oneself, and using it after that.

use kernel::prelude::*;
use rdma::prelude::*;

fn end(cq: Cq<Direct>, cx: &Sleepable) -> Result {
    #[cfg(not(mistake))]
    cq.process(16);
    cq.destroy(cx)?;
    #[cfg(mistake)]
    cq.process(16); //~ E0382 borrow of moved value: `cq`
    Ok(())
}
