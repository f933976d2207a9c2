// SPDX-License-Identifier: GPL-2.0

//! A direct CQ from the shared pool: its users would poll each other's completions.

use kernel::prelude::*;
use rdma::{
    device::Device,
    prelude::*, //
};

#[cfg(mistake)]
type Context = Direct;
#[cfg(not(mistake))]
type Context = Workqueue;

fn take(dev: &Device, cx: &Sleepable) -> Result<Cq<Context>> {
    Cq::<Context>::pool_get(dev, 16, None, cx) //~ E0599 `pool_get` exists for struct
}
