// SPDX-License-Identifier: GPL-2.0

//! Taking handles of values for handles of a supertype of these.

use kernel::prelude::*;
use rdma::{
    cq::HandlerCell,
    op::Op,
    prelude::*,
    qp::{Batch, SendRing},
    session::{
        tags::{Exchange, Reply, Tag, Tags},
        Kept,
        Received,
        RecvHandler,
        Room, //
    }, //
};

type Any = fn(&[u8]);

#[cfg(mistake)]
type Other = fn(&'static [u8]);
#[cfg(not(mistake))]
type Other = Any;

#[derive(HasCqe)]
struct Message<F: 'static + Send + Sync + Unpin> {
    cqe: Cqe<Self>,
    read: F,
}

impl<F: 'static + Send + Sync + Unpin> CqeHandler for Message<F> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

struct Ask<F>(F);

impl<F: 'static + Send> Exchange for Ask<F> {
    type Request = F;
    type Reply = F;
    type Needs = context::Atomic;
    type Connection = ();
}

struct Conn<F> {
    qp: Qp<Softirq>,
    _read: F,
}

impl<F: 'static + Send + Sync> RecvHandler for Conn<F> {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<Softirq> {
        &self.qp
    }

    fn received(_message: Received<'_, Self>, _cx: &context::Atomic) {}

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

fn cqe(cqe: Cqe<Message<Any>>) -> Cqe<Message<Other>> {
    cqe //~ E0308 mismatched types
}

fn owner(owner: Pin<KBox<Message<Any>>>) -> Pin<KBox<Message<Other>>> {
    owner //~ E0308 mismatched types
}

fn batch(batch: Batch<'_, Pin<KBox<Message<Any>>>>) -> Batch<'_, Pin<KBox<Message<Other>>>> {
    batch //~ E0308 mismatched types
}

fn ring(ring: SendRing<Pin<KBox<Message<Any>>>>) -> SendRing<Pin<KBox<Message<Other>>>> {
    ring //~ E0308 mismatched types
}

fn op(op: Op<Any>) -> Op<Other> {
    op //~ E0308 mismatched types
}

fn tags(tags: Tags<Ask<Any>>) -> Tags<Ask<Other>> {
    tags //~ E0308 mismatched types
}

fn tag(tag: Tag<Ask<Any>>) -> Tag<Ask<Other>> {
    tag //~ E0308 mismatched types
}

fn reply(reply: Reply<'_, Ask<Any>>) -> Reply<'_, Ask<Other>> {
    reply //~ E0308 mismatched types
}

fn received(message: Received<'_, Conn<Any>>) -> Received<'_, Conn<Other>> {
    message //~ E0308 mismatched types
}

fn kept(message: Kept<Conn<Any>>) -> Kept<Conn<Other>> {
    message //~ E0308 mismatched types
}

fn cell(cell: HandlerCell<Any>) -> HandlerCell<Other> {
    cell //~ E0308 mismatched types
}

fn room(room: Room<Any>) -> Room<Other> {
    room //~ E0308 mismatched types
}
