// SPDX-License-Identifier: GPL-2.0

//! Going on with what was lent after it was posted.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = InFlight<Self>;
    type Needs = Atomic;

    fn done(_this: InFlight<Self>, _wc: &Wc, _cx: &Atomic) {}
}

fn send(qp: &Qp<Softirq>, mut lent: InFlight<Request>) -> Result {
    #[cfg(not(mistake))]
    lent.buf.cpu().fill(1);
    qp.post_send(lent, |r| Ok(SendWr::send([r.buf.whole()])))?;
    #[cfg(mistake)]
    lent.buf.cpu().fill(1); //~ E0382 borrow of moved value: `lent`
    Ok(())
}
