// SPDX-License-Identifier: GPL-2.0

//! Posting a request whose handler sleeps to a QP whose completions are polled by its callers.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Needs = Sleepable;
#[cfg(not(mistake))]
type Needs = context::Atomic;

fn send(qp: &Qp<Direct>, message: Pin<KBox<ulp::Message<ToDevice, Needs>>>) -> Result {
    Ok(qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?)
    //~^ E0271 CqeHandler>::Needs == Atomic
}
