// SPDX-License-Identifier: GPL-2.0

//! Invalidating an exclusive region that is not the owner's, and which this thread keeps: the
//! completion would change its state in another one.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

type Owner = Pin<KBox<ulp::Registration<FromDevice>>>;

#[cfg(mistake)]
type Leaked = Region<FromDevice>;
#[cfg(not(mistake))]
type Leaked = SharedRegion<FromDevice>;

fn end(qp: &Qp<Softirq>, owner: Owner, region: &'static Leaked) -> Result {
    qp.post_send(owner, move |_| Ok(InvWr::new(region)))?;
    //~^ E0277 `Cell<u64>` cannot be shared between threads safely
    Ok(())
}

fn end_described(qp: &Qp<Softirq>, owner: Owner, region: &'static Leaked) -> Result {
    let wr = InvWr::new(region);
    qp.post_send(owner, move |_| Ok(wr))?;
    //~^ E0277 `Cell<u64>` cannot be shared between threads safely
    Ok(())
}
