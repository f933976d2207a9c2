// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/cq.rst.

use kernel::prelude::*;
use rdma::{
    op::{
        Op,
        Outcome,
        Pad, //
    },
    prelude::*,
    qp::{
        Requests,
        Taken, //
    }, //
};

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            pr_info!("{}\n", e.status);
        }
        // `this` is dropped: the request can be taken again.
    }
}

fn alloc(qp: &Qp<Softirq>, pd: &Pd, count: usize, cx: &Sleepable) -> Result<Requests<Request>> {
    let make = |_| {
        Ok(Request {
            cqe: Cqe::new(),
            buf: Buf::alloc(pd, 4096, cx)?,
        })
    };
    Requests::new(qp, count, make, cx)
}

fn send_all(qp: &Qp<Softirq>, requests: &mut Requests<Request>) -> Result {
    for request in requests.idle() {
        qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
    }
    Ok(())
}

/// Sends request number `tag`, or any, if none is given.
fn send_one(qp: &Qp<Softirq>, commands: &mut Requests<Request>, tag: Option<usize>) -> Result {
    let command = match tag {
        Some(tag) if tag >= commands.count() => return Err(EINVAL),
        Some(tag) => commands.take_at(tag),
        None => commands.take(),
    };
    let command = command.ok_or(EBUSY)?;
    Ok(qp.post_send(command, |c| Ok(SendWr::send([c.buf.whole()])))?)
}

/// Allocates a request for each of two QPs.
fn alloc_pair(qps: [&Qp<Softirq>; 2], pd: &Pd, cx: &Sleepable) -> Result<Requests<Request>> {
    let make = |index: usize| {
        let command = Request {
            cqe: Cqe::new(),
            buf: Buf::alloc(pd, 4096, cx)?,
        };
        Ok((*qps.get(index).ok_or(EINVAL)?, command))
    };
    Requests::of_qps(qps.len(), make, cx)
}

fn poll(cq: &Cq<Direct>, finished: fn(Taken<Request>, &Wc)) -> Result {
    let mut batch = WcArray::<16>::new();
    while cq.poll(&mut batch)? != 0 {
        for completion in batch.completions() {
            match completion.take::<Request, 0>() {
                Ok((request, wc)) => finished(request, wc),
                Err(other) => other.dispatch(),
            }
        }
    }
    Ok(())
}

/// The state of an operation of the example.
struct Context;

fn write(qp: &Qp<Waited>, len: usize, (op, place): (Op<Context>, Remote)) -> Result {
    op.write(&qp, 0..len, place)?;
    Ok(())
}

fn continue_with(
    (qp, pad): (&Qp<Waited>, &Arc<Pad>),
    completions: &mut dyn Iterator<Item = cq::Completion<'_>>,
    (len, place): (usize, Remote),
    acknowledged: fn(Op<Context>),
    received: fn(Op<Context>, usize, Option<u32>),
) -> Result {
    for completion in completions {
        let Ok(done) = Op::<Context>::take(completion) else {
            continue;
        };
        match done.result? {
            Outcome::Write => done.op.flush(&qp, &pad, place, len)?,
            Outcome::Flush => acknowledged(done.op),
            Outcome::Recv { len, imm } => received(done.op, len, imm),
            _ => {}
        }
    }
    Ok(())
}
