// SPDX-License-Identifier: GPL-2.0

//! Forgetting the handler of one callback, in an owner with several and with generics of all kinds.

use kernel::prelude::*;
use rdma::prelude::*;

#[derive(HasCqe)]
struct Request<T, const N: usize = 4>
where
    T: Fn(&[u8]) -> bool + core::marker::Send + Unpin + 'static,
{
    /// A callback at the beginning,
    sent: Cqe<Self>,
    answers: [u8; N],
    check: T,
    pub(crate) registered: rdma::cqe::Cqe<Self, { 1 + 1 }>,
    answered: Cqe<Request<T, N>, 1>,
}

impl<T, const N: usize> CqeHandler for Request<T, N>
where
    T: Fn(&[u8]) -> bool + core::marker::Send + Unpin + 'static,
{
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        (this.check)(&this.answers);
    }
}

impl<T, const N: usize> CqeHandler<1> for Request<T, N>
where
    T: Fn(&[u8]) -> bool + core::marker::Send + Unpin + 'static,
{
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Sleepable) {}
}

#[cfg(not(mistake))]
impl<T, const N: usize> CqeHandler<2> for Request<T, N>
where
    T: Fn(&[u8]) -> bool + core::marker::Send + Unpin + 'static,
{
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Bounds with an arrow, and with the `=` of an associated type.
#[derive(HasCqe)]
struct Mapped<
    F: Fn(u8) -> u8 + Send + Unpin + 'static,
    I: Iterator<Item = u8> + Send + Unpin + 'static = core::iter::Empty<u8>,
    const N: usize = { 1 + 1 },
> {
    cqe: Cqe<Self>,
    bytes: I,
    map: F,
    sums: [u8; N],
}

impl<F, I, const N: usize> CqeHandler for Mapped<F, I, N>
where
    F: Fn(u8) -> u8 + Send + Unpin + 'static,
    I: Iterator<Item = u8> + Send + Unpin + 'static,
{
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let this = &mut *this;
        for (sum, byte) in this.sums.iter_mut().zip(&mut this.bytes) {
            *sum = (this.map)(byte);
        }
    }
}

fn make() -> Result<Pin<KBox<Request<fn(&[u8]) -> bool, 8>>>> {
    let request = Request {
        sent: Cqe::new(),
        answers: [0; 8],
        check: (|answers| answers.is_empty()) as fn(&[u8]) -> bool,
        registered: Cqe::new(), //~ E0277 CqeHandler<2>` is not satisfied
        answered: Cqe::new(),
    };
    Ok(KBox::pin(request, GFP_KERNEL)?)
}
