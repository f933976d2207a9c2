// SPDX-License-Identifier: GPL-2.0

//! Reading a peer's memory into bytes that others read.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    sg::SgList, //
};

fn fetch(qp: &Qp<Softirq>, shared: Arc<KVec<u8>>, remote: Remote, cx: &Sleepable) -> Result {
    let data = Ctx::<ToDevice, _>::new(SgList::new(shared, cx)?, GFP_KERNEL)?;
    #[cfg(mistake)]
    qp.prepare_rw(Rw::read(&data, 0..8, remote, cx))?; //~ E0277 the device does not write
    #[cfg(not(mistake))]
    qp.prepare_rw(Rw::write(&data, 0..8, remote, cx))?;
    Ok(())
}
