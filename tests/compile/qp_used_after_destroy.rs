// SPDX-License-Identifier: GPL-2.0

//! Posting to a QP that was destroyed.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn last(qp: Qp<Softirq>, message: Pin<KBox<ulp::Message<ToDevice>>>, cx: &Sleepable) -> Result {
    #[cfg(mistake)]
    qp.destroy(cx)?;
    qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
    //~^ E0382 borrow of moved value: `qp`
    #[cfg(not(mistake))]
    qp.destroy(cx)?;
    Ok(())
}
