// SPDX-License-Identifier: GPL-2.0

//! Waiting for a CQ that never tells of completions.

use kernel::prelude::*;
use rdma::{
    cq::Wait,
    prelude::*, //
};

#[cfg(mistake)]
type Context = Direct;
#[cfg(not(mistake))]
type Context = Waited;

fn wait(cq: &Cq<Context>, cx: &Sleepable) -> Result<Wait> {
    cq.wait(Notify::NextComp, 1000, cx) //~ E0599 no method named `wait`
}
