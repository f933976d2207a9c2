// SPDX-License-Identifier: GPL-2.0

//! Posting a request that is posted already, so that its buffer is freed twice.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn send(qp: &Qp<Softirq>, message: Pin<KBox<ulp::Message<ToDevice>>>) -> Result {
    qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
    #[cfg(mistake)]
    qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?; //~ E0382 use of moved value
    Ok(())
}
