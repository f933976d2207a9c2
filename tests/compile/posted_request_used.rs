// SPDX-License-Identifier: GPL-2.0

//! Keeping access to a request of an array, which was taken and posted.

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

fn send(qp: &Qp<Softirq>, requests: &mut Requests<Request>) -> Result {
    let mut in_flight = requests.take().ok_or(EBUSY)?;
    let request = &mut *in_flight;
    request.buf.cpu().fill(0);
    qp.post_send(in_flight, |r| Ok(SendWr::send([r.buf.whole()])))?;
    //~^ E0505 cannot move out of `in_flight` because it is borrowed
    #[cfg(mistake)]
    request.buf.cpu().fill(1);
    Ok(())
}
