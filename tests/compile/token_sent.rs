// SPDX-License-Identifier: GPL-2.0

//! Handing the proof that one may sleep to another thread.

use kernel::prelude::*;
use rdma::prelude::*;

fn drain_later(client: &ClientRef, qp: Qp<Softirq>) -> Result {
    let cx = Sleepable::current()?;
    qp.drain(&cx)?;
    #[cfg(mistake)]
    client.spawn(GFP_KERNEL, move |_| {
        //~^ E0277 `*mut ()` cannot be sent between threads safely
        let _ = qp.drain(&cx);
    })?;
    #[cfg(not(mistake))]
    client.spawn(GFP_KERNEL, move |cx| {
        let _ = qp.drain(cx);
    })?;
    Ok(())
}
