// SPDX-License-Identifier: GPL-2.0

//! Taking completions from a CQ that the core polls.

use kernel::prelude::*;
use rdma::{cq::WcArray, prelude::*};

#[cfg(mistake)]
type Context = Workqueue;
#[cfg(not(mistake))]
type Context = Direct;

fn poll(cq: &Cq<Context>, batch: &mut WcArray<16>) -> Result<usize> {
    cq.poll(batch) //~ E0599 exists for reference `&Cq<Workqueue>`, but
}
