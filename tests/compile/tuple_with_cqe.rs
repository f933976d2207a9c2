// SPDX-License-Identifier: GPL-2.0

//! Deriving `HasCqe` for a struct whose fields have no names.

use rdma::prelude::*;

#[cfg(mistake)]
#[derive(HasCqe)]
struct Request(Cqe<Self>); //~ HasCqe: the struct needs named fields

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
