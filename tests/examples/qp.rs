// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/qp.rst.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        SendRing, //
    }, //
};

#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    data: Buf<ToDevice>,
    message: Buf<ToDevice>,
    region: Region<FromDevice>,
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn register(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
        let remote = chain.push(RegWr::remote_write(&io.region))?;
        io.message.write(0, &remote.rkey.to_le_bytes())?;
        chain.push(SendWr::send([io.message.whole()]))
    })?;
    Ok(())
}

fn write(qp: &Qp<Softirq>, io: Pin<KBox<Io>>, remote: Remote) -> Result {
    qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::rdma_write([io.data.whole()], remote))?;
        chain.push(SendWr::send([io.message.whole()]))
    })?;
    Ok(())
}

#[derive(HasCqe)]
struct Log {
    cqe: Cqe<Self>,
    record: Buf<ToDevice>,
    index: Buf<ToDevice>,
}

impl CqeHandler for Log {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn append(qp: &Qp<Softirq>, log: Pin<KBox<Log>>, to: [Remote; 2]) -> Result {
    let mut batch = qp.batch(log);
    batch.post(|log, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::rdma_write([log.record.whole()], to[0]))
    })?;
    pr_debug!("{} records are on their way\n", batch.posted());
    batch.finish(|log, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::rdma_write([log.index.whole()], to[1]))
    })
}

#[derive(HasCqe)]
struct Capsule {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    free: Arc<Free>,
}

struct Free;

impl Free {
    fn put(&self, _capsule: Pin<KBox<Capsule>>) {}
}

impl CqeHandler for Capsule {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.free.clone().put(this);
    }
}

fn send(qp: &Qp<Softirq>, capsule: Pin<KBox<Capsule>>, cx: &Sleepable) -> Result {
    let mut ring = made(qp, cx)?;
    ring.post(qp, capsule, |c, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::send([c.buf.whole()]))
    })?;
    Ok(())
}

fn made(qp: &Qp<Softirq>, cx: &Sleepable) -> Result<SendRing<Pin<KBox<Capsule>>>> {
    let ring: SendRing<Pin<KBox<Capsule>>> = SendRing::new(qp, 64, 16, cx)?;
    Ok(ring)
}

fn stop(
    ring: &mut SendRing<Pin<KBox<Capsule>>>,
    qp: &Qp<Softirq>,
    free: &Free,
    cx: &Sleepable,
) -> Result {
    ring.reclaim(qp, cx, |capsule| free.put(capsule))?;
    Ok(())
}
