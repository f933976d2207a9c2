// SPDX-License-Identifier: GPL-2.0

//! A callback that an owner has or has not.

use rdma::prelude::*;

#[cfg(mistake)]
#[derive(HasCqe)]
enum Request {
    //~^ HasCqe: only a struct can embed a Cqe
    Send { cqe: Cqe<Self> },
    Nothing,
}

#[cfg(not(mistake))]
#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
}

impl CqeHandler for Request {
    //~^ E0277 `Request` embeds no such `Cqe<Self>`
    type Pointer = Arc<Self>; //~ E0277 `Request` embeds no such `Cqe<Self>`
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}
