// SPDX-License-Identifier: GPL-2.0

//! A request whose entries are larger than the stack.

use kernel::prelude::*;
use rdma::{prelude::*, wr::SgeList};

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[cfg(mistake)]
const SGES: usize = 65; //~0 E0080 evaluation of
#[cfg(not(mistake))]
const SGES: usize = 64;

/// Sends.
pub fn send(qp: &Qp<Softirq>, pd: &Pd, cx: &Sleepable) -> Result {
    let message = Message {
        cqe: Cqe::new(),
        buf: Buf::alloc(pd, 64, cx)?,
    };
    let message = KBox::pin(message, GFP_KERNEL)?;
    Ok(qp.post_send(message, |m| {
        Ok(SendWr::send(SgeList::<_, SGES>::new(m.buf.whole())))
    })?)
}
