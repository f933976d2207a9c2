// SPDX-License-Identifier: GPL-2.0

//! An owner that must stay in its thread: handlers run in others.

use core::marker::PhantomData;
use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Local = PhantomData<*mut u8>;
#[cfg(not(mistake))]
type Local = PhantomData<u8>;

#[derive(HasCqe)]
struct Send {
    cqe: Cqe<Self>,
    local: Local,
}

impl CqeHandler for Send {
    type Pointer = Pin<KBox<Self>>; //~ E0277 `*mut u8` cannot be sent between threads safely
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
