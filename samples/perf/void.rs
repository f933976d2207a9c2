// SPDX-License-Identifier: GPL-2.0

//! Requests to nobody, for a null device: what the layers above a device cost.
//!
//! The caller posts all requests, then processes their completions, and again. Posting and
//! processing are timed apart.

use crate::{
    args::Args,
    end::{
        finish,
        End, //
    },
    link,
    poll::{
        Mode,
        Owner, //
    },
    run::{
        device,
        Figures,
        Report,
        Run, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// A request. The caller keeps a reference, and so has it again without being told.
#[derive(HasCqe)]
struct Request<C: PollContext> {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    qp: Arc<Qp<C>>,
    run: Arc<Run<()>>,
}

impl<C: PollContext + Provides<Atomic>> Request<C> {
    fn post(self: &Arc<Self>) -> Result {
        Ok(self
            .qp
            .post_send(self.clone(), |r| Ok(SendWr::send([r.buf.whole()])))?)
    }

    #[inline]
    fn completed(&self, wc: &Wc) {
        if let Err(e) = wc.result() {
            self.run.fail(e);
        }
    }
}

impl<C: PollContext + Provides<Atomic>> CqeHandler for Request<C> {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Arc<Self>, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl<C: PollContext + Provides<Atomic>> Owner for Request<C> {
    #[inline]
    fn claim(completion: Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            this.completed(wc);
        }
    }
}

/// Does `count` requests, in whole rounds.
fn rounds<M: Mode>(
    end: &End<M::Cq>,
    requests: &[Arc<Request<M::Cq>>],
    run: &Run<()>,
    count: u64,
) -> Result<Figures> {
    let mut figures = Figures::default();
    let begin = Instant::<Monotonic>::now();
    while figures.ops < count {
        let began = Instant::<Monotonic>::now();
        for request in requests {
            request.post()?;
        }
        let posted = Instant::<Monotonic>::now();
        let mut left = requests.len() as u32;
        while left > 0 {
            left = left.saturating_sub(M::poll::<Request<M::Cq>>(&end.cq, left)?);
        }
        figures.poll_ns += posted.elapsed().as_nanos();
        figures.post_ns += (posted - began).as_nanos();
        figures.ops += requests.len() as u64;
        run.check()?;
    }
    figures.ns = begin.elapsed().as_nanos();
    (figures.posts, figures.completions) = (figures.ops, figures.ops);
    Ok(figures)
}

fn make<C: PollContext + Provides<Atomic>>(
    end: &End<C>,
    args: &Args<'_>,
    run: &Arc<Run<()>>,
    cx: &Sleepable,
) -> Result<KVec<Arc<Request<C>>>> {
    let mut requests = KVec::new();
    for _ in 0..args.depth {
        for qp in end.qps.iter() {
            let request = Request {
                cqe: Cqe::new(),
                buf: Buf::alloc(&end.pd, args.size, cx)?,
                qp: qp.clone(),
                run: run.clone(),
            };
            requests.push(Arc::new(request, GFP_KERNEL)?, GFP_KERNEL)?;
        }
    }
    Ok(requests)
}

pub(crate) fn run<M: Mode>(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device)?;
    let end = End::new(&dev, args.qps, &Caps::new(args.depth, 0), cx)?;
    link::connect_to_none(&end, cx)?;
    let run = Run::new(0)?;
    let requests = make(&end, args, &run, cx)?;
    let result = rounds::<M>(&end, &requests, &run, args.warmup.into())
        .and_then(|_| rounds::<M>(&end, &requests, &run, args.count.into()));
    drop(requests);
    Ok(finish(&run, [end], result, cx)?.into())
}
