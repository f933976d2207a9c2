// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/mr.rst.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    sg::SgList, //
};

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &Qp<Softirq>, mut request: Pin<KBox<Request>>, header: &[u8], text: &[u8]) -> Result {
    request.buf.fill(&[header, text])?;
    qp.post_send(request, |r| Ok(SendWr::send([r.buf.filled()?])))?;
    Ok(())
}

#[derive(HasCqe)]
struct Job {
    cqe: Cqe<Self>,
    data: Ctx,
}

impl CqeHandler for Job {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn read(qp: &Qp<Softirq>, job: Pin<KBox<Job>>, remote: Remote, cx: &Sleepable) -> Result {
    qp.post_rw(job, |job| Ok(Rw::read(&job.data, .., remote, cx)))?;
    Ok(())
}

fn respond(qp: &Qp<Softirq>, answer: Pin<KBox<Job>>, remote: Remote, cx: &Sleepable) -> Result {
    // When the request came:
    qp.prepare_rw(Rw::write(&answer.data, .., remote, cx))?;
    // When the data are there:
    qp.post_rw(answer, |answer| Ok(Rw::prepared(&answer.data)))?;
    Ok(())
}

fn fill_again(memory: SgList<KVec<u8>>) -> Result<Option<SgList<KVec<u8>>>> {
    // When the connection is made:
    let mut data = Ctx::empty(GFP_KERNEL)?;
    // For each request:
    data.fill(memory)?;
    let ctx: &Ctx<ToDevice, _> = &data;
    pr_info!("{} bytes\n", ctx.len());
    let memory = data.take();
    Ok(memory)
}
