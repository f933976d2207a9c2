// SPDX-License-Identifier: GPL-2.0

//! Freeing the memory of requests that are not signaled before the one behind them has completed.

mod ulp;

use kernel::prelude::*;
use rdma::{prelude::*, qp::Chain};

type Owner = Pin<KBox<ulp::Message<ToDevice>>>;

fn send(qp: &Qp<Softirq>, header: Owner, body: Owner) -> Result {
    #[cfg(mistake)]
    qp.post_chain(body, |body, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::send([header.buf.whole()]))?; //~ E0597 does not live
        chain.push(SendWr::send([body.buf.whole()]))
    })?;
    #[cfg(not(mistake))]
    qp.post_chain(body, |body, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::send([body.buf.sge(0..8)?]))?;
        chain.push(SendWr::send([body.buf.sge(8..16)?]))
    })?;
    #[cfg(not(mistake))]
    drop(header);
    Ok(())
}
