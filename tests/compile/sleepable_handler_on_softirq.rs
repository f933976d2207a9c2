// SPDX-License-Identifier: GPL-2.0

//! Posting a request whose handler sleeps to a QP that completes in a softirq.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Context = Softirq;
#[cfg(not(mistake))]
type Context = Workqueue;

fn send(qp: &Qp<Context>, message: Pin<KBox<ulp::Message<ToDevice, Sleepable>>>) -> Result {
    Ok(qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?)
    //~^ E0277 `Provides<rdma::context::Sleepable>` is not implemented for
}
