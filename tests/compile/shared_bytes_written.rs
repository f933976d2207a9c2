// SPDX-License-Identifier: GPL-2.0

//! Mapping bytes that others read for a device to write.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    sg::{SgList, SgMap}, //
};

fn lend(pd: &Pd, shared: Arc<KVec<u8>>, cx: &Sleepable) -> Result {
    let list = SgList::new(shared, cx)?;
    #[cfg(mistake)]
    SgMap::<_, FromDevice>::new(pd, list)?; //~ E0277 SgOwner<rdma::dma::FromDevice>`
    #[cfg(not(mistake))]
    SgMap::<_, ToDevice>::new(pd, list)?;
    Ok(())
}
