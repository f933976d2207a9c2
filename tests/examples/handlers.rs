// SPDX-License-Identifier: GPL-2.0

//! An owner with two handlers: whatever it is posted with, types are inferred.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        SendRing, //
    },
    rw::{
        Ctx,
        Rw, //
    }, //
};

/// The handler of the first callback is the one that requests complete to unless they name another.
const SENT: u64 = 1;

#[derive(HasCqe)]
struct Command {
    cqe: Cqe<Self>,
    sent: Cqe<Self, SENT>,
    buf: Buf<Bidirectional>,
    data: Ctx,
    region: Region<FromDevice>,
    qp: Qp<Softirq>,
}

impl CqeHandler for Command {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let _ = Qp::repost_send(this, wc, |c| &c.qp, |_| Ok(SendWr::send([])));
    }
}

impl CqeHandler<SENT> for Command {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let _ = Qp::repost_recv(
            this,
            wc,
            |c| &c.qp,
            |_| Ok(RecvWr::new([]).done_by::<SENT>()),
        );
    }
}

type Owner = Pin<KBox<Command>>;

fn first(qp: &Qp<Softirq>, remote: Remote, next: &dyn Fn() -> Result<Owner>) -> Result {
    qp.post_recv(next()?, |_| Ok(RecvWr::new([])))?;
    qp.post_recv(next()?, |c| Ok(RecvWr::new([c.buf.whole_mut()])))?;
    qp.post_send(next()?, |_| Ok(SendWr::send([])))?;
    qp.post_send(next()?, |c| Ok(SendWr::send([c.buf.whole()]).fenced()))?;
    let _: Remote = qp.post_send(next()?, |c| Ok(RegWr::remote_write(&c.region)))?;
    qp.post_send(next()?, |c| Ok(InvWr::new(&c.region)))?;
    qp.post_rw(next()?, |c| Ok(Rw::prepared(&c.data)))?;
    qp.post_rw(next()?, |c| {
        Ok(Rw::prepared(&c.data).then(SendWr::send([c.buf.whole()])))
    })?;
    qp.post_chain(next()?, |c, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::rdma_write([c.buf.whole()], remote))
    })?;
    let mut batch = qp.batch(next()?);
    batch.finish(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))
}

fn second(qp: &Qp<Softirq>, remote: Remote, next: &dyn Fn() -> Result<Owner>) -> Result {
    qp.post_recv(next()?, |_| Ok(RecvWr::new([]).done_by::<SENT>()))?;
    qp.post_recv(next()?, |c| {
        Ok(RecvWr::new([c.buf.whole_mut()]).done_by::<SENT>())
    })?;
    qp.post_send(next()?, |_| Ok(SendWr::send([]).done_by::<SENT>()))?;
    qp.post_send(next()?, |c| {
        Ok(SendWr::send([c.buf.whole()]).done_by::<SENT>().fenced())
    })?;
    let _: Remote = qp.post_send(next()?, |c| {
        Ok(RegWr::remote_write(&c.region).done_by::<SENT>())
    })?;
    qp.post_send(next()?, |c| Ok(InvWr::new(&c.region).done_by::<SENT>()))?;
    qp.post_rw(next()?, |c| Ok(Rw::prepared(&c.data).done_by::<SENT>()))?;
    qp.post_rw(next()?, |c| {
        let reply = SendWr::send([c.buf.whole()]);
        Ok(Rw::prepared(&c.data).then(reply).done_by::<SENT>())
    })?;
    qp.post_chain(next()?, |c, chain: &mut Chain<'_, 1, 1, SENT>| {
        chain.push(SendWr::rdma_write([c.buf.whole()], remote))
    })?;
    let mut batch = qp.batch(next()?);
    batch.finish(|_, chain: &mut Chain<'_, 1, 1, SENT>| chain.push(SendWr::send([])))
}

fn ring(qp: &Qp<Softirq>, owner: Owner, cx: &Sleepable) -> Result {
    let mut ring = SendRing::new(qp, 16, 4, cx)?;
    Ok(
        ring.post(qp, owner, |_, chain: &mut Chain<'_, 1, 1, SENT>| {
            chain.push(SendWr::send([]))
        })?,
    )
}

/// Closures that describe requests may have what stays in its thread, such as a token.
fn in_this_thread(qp: &Qp<Softirq>, owner: Owner, cx: &Sleepable) -> Result {
    Ok(qp.post_send(owner, |c| {
        let imm = number(cx);
        Ok(SendWr::send([c.buf.whole()]).with_imm(imm))
    })?)
}

fn number(_cx: &Sleepable) -> u32 {
    1
}
