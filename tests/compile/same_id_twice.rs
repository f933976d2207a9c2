// SPDX-License-Identifier: GPL-2.0

//! Two callbacks of one owner that cannot be told apart.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Request {
    send: Cqe<Self>,
    #[cfg(mistake)]
    recv: Cqe<Self>, //~ E0119 conflicting implementations
    #[cfg(not(mistake))]
    recv: Cqe<Self, 1>,
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[cfg(not(mistake))]
impl CqeHandler<1> for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
