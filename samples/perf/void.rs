// SPDX-License-Identifier: GPL-2.0

//! Requests without a peer, for a null device: the cost of the layers above a device.
//!
//! The caller posts all requests, then processes their completions, and again. Posting and
//! processing are timed apart. So the requests have to come back to the caller: it takes them from
//! the array or the static dispatch, and lends its `Reusable` ones to callbacks.

use crate::{
    args::{
        Args,
        Context, //
    },
    end::{
        finish,
        End, //
    },
    link,
    poll::{
        Cq,
        Qp,
        BATCH, //
    },
    run::{
        device,
        post_times,
        Figures,
        Report,
        Run, //
    }, //
};
use core::num::NonZero;
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    cqe::CqePointer,
    prelude::*, //
};

/// A request that the caller has or has posted.
#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    run: Arc<Run<()>>,
}

/// A request that the caller keeps.
#[derive(HasCqe)]
struct Borrowed {
    cqe: Cqe<Self>,
    request: Request,
}

impl Request {
    fn new(end: &End, size: usize, run: &Arc<Run<()>>, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            cqe: Cqe::new(),
            buf: Buf::alloc(&end.pd, size, cx)?,
            run: run.clone(),
        })
    }

    #[inline]
    fn buf(&self) -> &Buf<ToDevice> {
        &self.buf
    }

    #[inline]
    fn completed(&self, wc: &Wc) {
        if let Err(e) = wc.result() {
            self.run.fail(e);
        }
    }
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    /// Not taken by the caller: flushed at the end.
    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl CqeHandler for Borrowed {
    type Pointer = InFlight<Self>;
    type Needs = Atomic;

    #[inline]
    fn done(this: InFlight<Self>, wc: &Wc, _cx: &Atomic) {
        this.request.completed(wc);
    }
}

/// Posts the requests of each owner to a QP.
#[inline]
fn post_round<'q, P>(
    mut each: impl Iterator<Item = (&'q Arc<Qp>, P)>,
    signal: NonZero<u32>,
    buf: impl for<'a> Fn(&'a P::Target) -> &'a Buf<ToDevice> + Copy + Sync,
) -> Result
where
    P: CqePointer<0>,
    P::Target: CqeHandler<Pointer = P, Needs = Atomic>,
{
    if signal.get() > 1 {
        for (qp, owner) in each {
            post_all(qp, owner, signal, buf)?;
        }
    } else {
        each.try_for_each(|(qp, owner)| {
            qp.post_send(owner, |o| Ok(SendWr::send([buf(o).whole()])))
        })?;
    }
    Ok(())
}

/// Posts requests of an owner, of which the last is signaled. Not inlined, so that single ones do
/// not lack the registers that this needs.
#[inline(never)]
fn post_all<P>(
    qp: &Qp,
    owner: P,
    signal: NonZero<u32>,
    buf: impl for<'a> Fn(&'a P::Target) -> &'a Buf<ToDevice> + Copy + Sync,
) -> Result
where
    P: CqePointer<0>,
    P::Target: CqeHandler<Pointer = P, Needs = Atomic>,
{
    Ok(post_times(qp, owner, signal, |o| {
        Ok(SendWr::send([buf(o).whole()]))
    })?)
}

/// The requests of a round.
trait Round {
    /// Posts all of them, each to one of these QPs.
    fn post(&mut self, qps: &[Arc<Qp>], signal: NonZero<u32>) -> Result;

    /// Processes completions, and returns their number.
    fn process(&mut self, cq: &Cq, left: u32) -> Result<u32>;
}

/// Completions come to callbacks.
struct ByCallback(KVec<(Arc<Qp>, Reusable<Borrowed>)>);

impl ByCallback {
    /// Yields the requests that are not posted.
    fn each(&mut self) -> impl Iterator<Item = (&Arc<Qp>, InFlight<Borrowed>)> {
        let each = self.0.iter_mut();
        each.map_while(|(qp, kept)| Some((&*qp, kept.start()?)))
    }

    /// Not inlined, as [`post_all`].
    #[inline(never)]
    fn post_times(&mut self, signal: NonZero<u32>) -> Result {
        self.each()
            .try_for_each(|(qp, b)| post_all(qp, b, signal, |b| &b.request.buf))
    }
}

impl Round for ByCallback {
    #[inline(never)]
    fn post(&mut self, _qps: &[Arc<Qp>], signal: NonZero<u32>) -> Result {
        if signal.get() > 1 {
            return self.post_times(signal);
        }
        self.each().try_for_each(|(qp, b)| {
            qp.post_send(b, |b| Ok(SendWr::send([b.request.buf.whole()])))
        })?;
        Ok(())
    }

    fn process(&mut self, cq: &Cq, left: u32) -> Result<u32> {
        Ok(cq.process(left))
    }
}

/// The caller takes the requests from the completions, which were polled into an array, or which
/// are dispatched statically.
struct Taken {
    here: KVec<Pin<KBox<Request>>>,
    back: KVec<Pin<KBox<Request>>>,
    is_static: bool,
}

impl Taken {
    fn new(here: KVec<Pin<KBox<Request>>>, context: Context) -> Result<Self> {
        Ok(Self {
            back: KVec::with_capacity(here.len(), GFP_KERNEL)?,
            here,
            is_static: context == Context::Static,
        })
    }
}

impl Round for Taken {
    #[inline(never)]
    fn post(&mut self, qps: &[Arc<Qp>], signal: NonZero<u32>) -> Result {
        let each = qps.iter().zip(self.here.drain_all());
        post_round(each, signal, Request::buf)?;
        core::mem::swap(&mut self.here, &mut self.back);
        Ok(())
    }

    #[inline(never)]
    fn process(&mut self, cq: &Cq, left: u32) -> Result<u32> {
        let here = &mut self.here;
        let take = |completion: Completion<'_>| {
            if let Ok((request, wc)) = completion.take::<Request, 0>() {
                request.completed(wc);
                // The vector has held all of them before.
                let _ = here.push_within_capacity(request);
            }
        };
        if self.is_static {
            return cq.process_with(left, take);
        }
        let mut batch = WcArray::<{ BATCH as usize }>::new();
        let n = cq.poll(&mut batch)?;
        batch.completions().for_each(take);
        Ok(n as u32)
    }
}

/// Does `count` requests, in whole rounds.
fn rounds(
    end: &End,
    qps: &[Arc<Qp>],
    round: &mut impl Round,
    args: &Args<'_>,
    run: &Run<()>,
    count: u32,
) -> Result<Figures> {
    let owners = qps.len() as u32;
    let signal = NonZero::new(args.signal).ok_or(EINVAL)?;
    let mut figures = Figures::default();
    let begin = Instant::<Monotonic>::now();
    while figures.ops < count.into() {
        let began = Instant::<Monotonic>::now();
        round.post(qps, signal)?;
        let posted = Instant::<Monotonic>::now();
        let mut left = owners;
        while left > 0 {
            match round.process(&end.cq, left)? {
                // On this device all are done when they are posted.
                0 => return Err(EIO),
                n => left = left.saturating_sub(n),
            }
        }
        figures.poll_ns += posted.elapsed().as_nanos();
        figures.post_ns += (posted - began).as_nanos();
        figures.ops += u64::from(owners) * u64::from(args.signal);
        figures.completions += u64::from(owners);
        run.check()?;
    }
    figures.ns = begin.elapsed().as_nanos();
    figures.posts = figures.ops;
    Ok(figures)
}

fn alternate(
    end: &End,
    qps: &[Arc<Qp>],
    mut round: impl Round,
    args: &Args<'_>,
    run: &Run<()>,
) -> Result<Figures> {
    rounds(end, qps, &mut round, args, run, args.warmup)?;
    let figures = rounds(end, qps, &mut round, args, run, args.count);
    args.held(figures)
}

fn stream(end: &End, args: &Args<'_>, run: &Arc<Run<()>>, cx: &Sleepable) -> Result<Figures> {
    link::connect_to_none(end, cx)?;
    // In turn to each QP, for each of the requests that go to it.
    let mut qps = KVec::new();
    for _ in 0..args.groups() {
        qps.extend_from_slice(&end.qps, GFP_KERNEL)?;
    }
    let (mut requests, mut kept) = (KVec::new(), KVec::new());
    for qp in qps.iter() {
        let request = Request::new(end, args.size, run, cx)?;
        if args.context == Context::Direct {
            let cqe = Cqe::new();
            let borrowed = Reusable::new(Borrowed { cqe, request }, GFP_KERNEL)?;
            kept.push((qp.clone(), borrowed), GFP_KERNEL)?;
        } else {
            requests.push(KBox::pin(request, GFP_KERNEL)?, GFP_KERNEL)?;
        }
    }
    match args.context {
        Context::Direct => alternate(end, &qps, ByCallback(kept), args, run),
        context => alternate(end, &qps, Taken::new(requests, context)?, args, run),
    }
}

/// Runs where the caller polls.
pub(crate) fn run(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device, cx)?;
    let end = End::new(&dev, args.qps, &Caps::new(args.depth, 0), args.context, cx)?;
    let run = Run::new(0)?;
    let result = stream(&end, args, &run, cx);
    Ok(finish(&run, [end], result, cx)?.into())
}
