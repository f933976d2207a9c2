// SPDX-License-Identifier: GPL-2.0

//! Registering an exclusive region of an owner that threads share: another one could invalidate it
//! before that is posted.

use rdma::prelude::*;

#[cfg(mistake)]
type Memory = Region<FromDevice>;
#[cfg(not(mistake))]
type Memory = SharedRegion<FromDevice>;

#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    region: Memory,
}

impl CqeHandler for Io {
    type Pointer = Arc<Self>; //~ E0277 `Cell<u64>` cannot be shared between threads safely
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}
