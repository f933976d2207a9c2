// SPDX-License-Identifier: GPL-2.0

//! Posting a counted owner where the handler takes a box.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Send {
    cqe: Cqe<Self>,
}

impl CqeHandler for Send {
    #[cfg(mistake)]
    type Pointer = Pin<KBox<Self>>;
    #[cfg(not(mistake))]
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &Qp<Softirq>, owner: Arc<Send>) -> Result {
    Ok(qp.post_send(owner, |_| Ok(SendWr::send([])))?) //~ E0271 type mismatch
}
