// SPDX-License-Identifier: GPL-2.0

//! Preparing a transfer with the request that follows it, whose memory nothing would keep.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::{Ctx, Rw}, //
};

fn prepare(
    qp: &Qp<Workqueue>,
    data: &Ctx,
    _done: &Buf<ToDevice>,
    to: Remote,
    cx: &Sleepable,
) -> Result {
    let rw = Rw::write(data, .., to, cx);
    #[cfg(mistake)]
    let rw = rw.then(SendWr::send([_done.whole()]));
    qp.prepare_rw(rw) //~ E0308 mismatched types
}
