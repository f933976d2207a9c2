// SPDX-License-Identifier: GPL-2.0

//! Destroying a QP in the handler of a request that was posted to it.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Last {
    cqe: Cqe<Self>,
    qp: Qp<Softirq>,
}

impl CqeHandler for Last {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &context::Atomic) {
        let this = KBox::into_inner(Pin::into_inner(this));
        #[cfg(mistake)]
        let _ = this.qp.destroy(cx); //~ E0308 mismatched types
        #[cfg(not(mistake))]
        let (_, _) = (this.qp, cx); // Dropped: a work item destroys it.
    }
}
