// SPDX-License-Identifier: GPL-2.0

//! Posting a request whose handler borrows the QP's context to a QP that its users may poll, which
//! is only known at run time.

mod ulp;

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::QpContext, //
};

#[cfg(mistake)]
type Context = AnyContext;
#[cfg(not(mistake))]
type Context = Softirq;

struct Conn;

fn send(qp: &Qp<Context>, message: Pin<KBox<ulp::Message<ToDevice, QpContext<Conn>>>>) -> Result {
    Ok(qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?)
    //~^ E0271 CqeHandler>::Needs == Atomic
}
