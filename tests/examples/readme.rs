// SPDX-License-Identifier: GPL-2.0

//! Examples of README.md.

use kernel::{
    prelude::*,
    sync::Completion, //
};
use rdma::prelude::*;

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,          // struct ib_cqe: 8 bytes
    buf: Buf<Bidirectional>, // DMA-mapped memory
    done: Arc<Completion>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>; // what is moved into the queue
    type Needs = context::Atomic; // so it can be posted in every polling context

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        match wc.result().map(|wc| wc.opcode()) {
            Ok(op) => pr_info!("{op:?}: {:?}\n", core::str::from_utf8(&this.buf.cpu())),
            Err(e) => pr_err!("{}\n", e.status),
        }
        this.done.complete_all();
    }
}

fn hello(qp: &Qp<Softirq>, hello: Pin<KBox<Message>>) -> Result {
    // Elsewhere: the queue owns `hello` from here on; if it cannot be posted, the error gives it
    // back.
    qp.post_send(hello, |m| Ok(SendWr::send([m.buf.whole()])))?;
    Ok(())
}
