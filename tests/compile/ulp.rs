// SPDX-License-Identifier: GPL-2.0

//! The common part of the programs of this folder: the owners of a small ULP's requests.

use kernel::prelude::*;
use rdma::{
    context::Context,
    dma::Direction,
    prelude::*, //
};

/// A message that its handler frees, in a context that the program chooses.
#[derive(HasCqe)]
pub(crate) struct Message<D: Direction, N: Context = context::Atomic> {
    cqe: Cqe<Self>,
    pub(crate) buf: Buf<D>,
    needs: core::marker::PhantomData<fn(N)>,
}

impl<D: Direction + Unpin, N: Context> CqeHandler for Message<D, N> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = N;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &N) {}
}

/// An owner that is counted.
#[derive(HasCqe)]
pub(crate) struct Shared {
    cqe: Cqe<Self>,
    pub(crate) buf: Buf<FromDevice>,
    pub(crate) qp: Qp<Softirq>,
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

/// The owner of a region that is being registered.
#[derive(HasCqe)]
pub(crate) struct Registration<D: Direction> {
    cqe: Cqe<Self>,
    pub(crate) region: Region<D>,
}

impl<D: Direction + Unpin> CqeHandler for Registration<D> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}
