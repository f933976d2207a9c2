// SPDX-License-Identifier: GPL-2.0

//! Writing to a request in flight after it was posted.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(_this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &Qp<Softirq>, mut in_flight: Taken<Request>) -> Result {
    #[cfg(not(mistake))]
    in_flight.buf.cpu().fill(1);
    qp.post_send(in_flight, |r| Ok(SendWr::send([r.buf.whole()])))?;
    #[cfg(mistake)]
    in_flight.buf.cpu().fill(1); //~ E0382 borrow of moved value: `in_flight`
    Ok(())
}
