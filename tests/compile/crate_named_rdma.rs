// SPDX-License-Identifier: GPL-2.0

//! Taking over the paths of the derive macro, so that a number passes for the address of a
//! callback.

extern crate rdma as real;

use kernel::prelude::*;
use real::{
    context::Atomic,
    prelude::{
        CqeHandler,
        HasCqe,
        Wc, //
    }, //
};

#[cfg(not(mistake))]
use real::prelude::Cqe;

#[cfg(mistake)]
extern crate self as rdma;
#[cfg(mistake)]
pub use real::*;

#[cfg(mistake)]
pub mod cqe {
    pub use real::cqe::*;

    pub struct Cqe<T, const ID: u64 = 0>(u64, core::marker::PhantomData<T>);
}

#[derive(HasCqe)] //~ E0308 mismatched types
struct Send {
    #[cfg(mistake)]
    cqe: crate::cqe::Cqe<Self>,
    #[cfg(not(mistake))]
    cqe: Cqe<Self>,
}

impl CqeHandler for Send {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {}
}
