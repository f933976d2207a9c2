// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/cq.rst.

use kernel::prelude::*;
use rdma::{
    op::{
        Op,
        Outcome,
        Pad, //
    },
    prelude::*, //
};

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = InFlight<Self>;
    type Needs = context::Atomic;

    fn done(this: InFlight<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            pr_info!("{}\n", e.status);
        }
        // `this` is dropped: the request can be started again.
    }
}

fn send_all(qp: &Qp<Softirq>, requests: &mut KVec<Reusable<Request>>) -> Result {
    for request in requests.iter_mut().filter_map(Reusable::start) {
        qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
    }
    Ok(())
}

fn poll(cq: &Cq<Direct>, finished: fn(InFlight<Request>, &Wc)) -> Result {
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
