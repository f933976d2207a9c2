// SPDX-License-Identifier: GPL-2.0

//! A scatter entry of memory that the request does not own.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

type Owner = Pin<KBox<ulp::Message<ToDevice>>>;

fn send(qp: &Qp<Softirq>, message: Owner, header: &Owner) -> Result {
    #[cfg(mistake)]
    qp.post_send(message, |_| Ok(SendWr::send([header.buf.whole()])))?;
    //~^ lifetime may not live long enough
    #[cfg(not(mistake))]
    let _ = header;
    #[cfg(not(mistake))]
    qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
    Ok(())
}
