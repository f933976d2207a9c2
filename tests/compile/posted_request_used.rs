// SPDX-License-Identifier: GPL-2.0

//! Writing to a reusable request, after it was started and posted.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = InFlight<Self>;
    type Needs = context::Atomic;

    fn done(_this: InFlight<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &Qp<Softirq>, kept: &mut Reusable<Request>) -> Result {
    let request = kept.get().ok_or(EBUSY)?;
    request.buf.cpu().fill(0);
    let in_flight = kept.start().ok_or(EBUSY)?;
    //~^ E0499 cannot borrow `*kept` as mutable more than once
    qp.post_send(in_flight, |r| Ok(SendWr::send([r.buf.whole()])))?;
    #[cfg(mistake)]
    request.buf.cpu().fill(1);
    Ok(())
}
