// SPDX-License-Identifier: GPL-2.0

//! Posting a receive whose handler sleeps, where only the completions of sends may sleep.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Queues = Qp<Workqueue, Softirq>;
#[cfg(not(mistake))]
type Queues = Qp<Softirq, Workqueue>;

fn recv(qp: &Queues, message: Pin<KBox<ulp::Message<FromDevice, Sleepable>>>) -> Result {
    Ok(qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?)
    //~^ E0277 `Provides<rdma::context::Sleepable>` is not implemented for
}
