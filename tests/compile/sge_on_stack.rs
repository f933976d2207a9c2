// SPDX-License-Identifier: GPL-2.0

//! A scatter entry of a buffer that is freed when the function returns.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

type Owner = Pin<KBox<ulp::Message<ToDevice>>>;

fn send(qp: &Qp<Softirq>, message: Owner, pd: &Pd, cx: &Sleepable) -> Result {
    let local = Buf::<ToDevice>::alloc(pd, 64, cx)?;
    #[cfg(mistake)]
    let sge = local.whole(); //~ E0597 `local` does not live long enough
    #[cfg(mistake)]
    qp.post_send(message, move |_| Ok(SendWr::send([sge])))?;
    #[cfg(not(mistake))]
    drop(local);
    #[cfg(not(mistake))]
    qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
    Ok(())
}
