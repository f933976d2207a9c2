// SPDX-License-Identifier: GPL-2.0

//! An owner that borrows what may be gone before it completes.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Send<T: 'static + core::marker::Send + Unpin> {
    cqe: Cqe<Self>,
    counter: T,
}

impl<T: 'static + core::marker::Send + Unpin> CqeHandler for Send<T> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &Qp<Softirq>) -> Result {
    let counter = 1;
    #[cfg(mistake)]
    let counter = &counter; //~ E0597 borrowed value does not live long enough
    let cqe = Cqe::new();
    let send = KBox::pin(Send { cqe, counter }, GFP_KERNEL)?;
    Ok(qp.post_send(send, |_| Ok(SendWr::send([])))?)
}
