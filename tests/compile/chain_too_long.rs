// SPDX-License-Identifier: GPL-2.0

//! A chain of requests that is larger than the stack.

use kernel::prelude::*;
use rdma::{prelude::*, qp::Chain};

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
const LINKS: usize = 64; //~0 E0080 evaluation of
#[cfg(not(mistake))]
const LINKS: usize = 4;

/// Sends.
pub fn send(qp: &Qp<Softirq>, pd: &Pd, cx: &Sleepable) -> Result {
    let message = Message {
        cqe: Cqe::new(),
        buf: Buf::alloc(pd, 64, cx)?,
    };
    let message = KBox::pin(message, GFP_KERNEL)?;
    Ok(
        qp.post_chain(message, |m, chain: &mut Chain<'_, LINKS, 32>| {
            chain.push(SendWr::send([m.buf.whole()]))
        })?,
    )
}
