// SPDX-License-Identifier: GPL-2.0

//! Deriving `HasCqe` for a type without a callback.

use rdma::prelude::*;

#[derive(HasCqe)]
#[cfg(mistake)]
struct Send {
    //~^ HasCqe: no field of type Cqe<Self>
    number: u64,
}

#[derive(HasCqe)]
#[cfg(not(mistake))]
struct Send {
    cqe: Cqe<Self>,
}

#[cfg(not(mistake))]
impl CqeHandler for Send {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}
