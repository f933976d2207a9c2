// SPDX-License-Identifier: GPL-2.0

//! Freeing an MR while its registration is posted.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn share(qp: &Qp<Softirq>, owner: Pin<KBox<ulp::Registration<FromDevice>>>) -> Result<Remote> {
    let remote = qp.post_send(owner, |o| Ok(RegWr::remote_write(&o.region)))?;
    #[cfg(mistake)]
    drop(owner); //~ E0382 use of moved value: `owner`
    Ok(remote)
}
