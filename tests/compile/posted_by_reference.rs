// SPDX-License-Identifier: GPL-2.0

//! Posting a request that stays with the poster.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

type Owner = Pin<KBox<ulp::Message<ToDevice>>>;

#[cfg(mistake)]
fn send(qp: &Qp<Softirq>, owner: &'static Owner) -> Result {
    Ok(qp.post_send(owner, |m| Ok(SendWr::send([m.buf.whole()])))?)
    //~^ E0277 cannot own a request
    //~^^ E0277 CqeHandler<_>` is not satisfied
}

#[cfg(not(mistake))]
fn send(qp: &Qp<Softirq>, owner: Owner) -> Result {
    Ok(qp.post_send(owner, |m| Ok(SendWr::send([m.buf.whole()])))?)
}
