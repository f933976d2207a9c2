// SPDX-License-Identifier: GPL-2.0

//! An owner that has an exclusive region with others: a box and a lock are fine, an `Arc` is not.

use kernel::{
    prelude::*,
    sync::{Mutex, SpinLock}, //
};
use rdma::prelude::*;

#[cfg(mistake)]
type Ours = Arc<Region<FromDevice>>;
#[cfg(not(mistake))]
type Ours = Arc<SharedRegion<FromDevice>>;

#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    ours: Ours,
    boxed: KBox<Region<FromDevice>>,
    many: KVec<Region<FromDevice>>,
    locked: Arc<SpinLock<Region<FromDevice>>>,
    sleeping: Arc<Mutex<Region<FromDevice>>>,
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>; //~ E0277 `Cell<u64>` cannot be shared between threads safely
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
