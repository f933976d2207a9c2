// SPDX-License-Identifier: GPL-2.0

//! Claiming that a closure may describe the invalidation of an exclusive region, though nobody
//! knows whether it is `Send`.

use kernel::prelude::*;
use rdma::{
    mr::{Exclusive, InvOp},
    prelude::*, //
};

#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    region: Region<FromDevice>,
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

trait Smuggle: for<'a> Fn(&'a Io) -> Result<InvWr<'a>> {}

impl<T: for<'a> Fn(&'a Io) -> Result<InvWr<'a>>> Smuggle for T {}

#[cfg(mistake)]
impl<'x> rdma::wr::SendOp<&'x (dyn Smuggle + 'x)> for InvOp<Exclusive> {}
//~^ E0277 `(dyn Smuggle + 'x)` cannot be shared between threads safely

fn end(qp: &Qp<Softirq>, io: Pin<KBox<Io>>, smuggle: fn(&Io) -> Result<InvWr<'_>>) -> Result {
    let _: &dyn Smuggle = &smuggle;
    Ok(qp.post_send(io, smuggle)?)
}

fn op(_: InvOp<Exclusive>) {}
