// SPDX-License-Identifier: GPL-2.0

//! Requests without a peer, for a null device: the cost of the layers above a device.
//!
//! The caller posts all requests, then processes their completions, and again. Posting and
//! processing are timed apart. So the requests have to come back to the caller: it takes them from
//! the array or the static dispatch, and has callbacks use `Requests`.

use crate::{
    args::{
        Args,
        Context, //
    },
    end::{
        between,
        End, //
    },
    link,
    poll::{
        process,
        Cq,
        Qp,
        BATCH, //
    },
    run::{
        Figures,
        Report,
        Run, //
    }, //
};
use kernel::{
    alloc::kvec::PushError,
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// A request that the caller has or has posted. Its callback is at its address, as the twin's.
#[derive(HasCqe)]
#[repr(C)]
struct Request {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    run: Arc<Run>,
}

/// A request that the caller keeps.
#[derive(HasCqe)]
#[repr(C)]
struct Borrowed {
    cqe: Cqe<Self>,
    request: Request,
}

impl Request {
    #[inline(never)]
    fn new(end: &End, size: usize, run: &Arc<Run>, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            cqe: Cqe::new(),
            buf: Buf::alloc(&end.pd, size, cx)?,
            run: run.clone(),
        })
    }

    /// Not inlined, and takes what has failed, so that no register is saved each time.
    #[cold]
    #[inline(never)]
    fn failed(self: Pin<KBox<Self>>, e: WcError) {
        self.run.fail(e.into());
    }
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    /// Not taken by the caller: flushed at the end.
    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            this.failed(e);
        }
    }
}

impl CqeHandler for Borrowed {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            failed(this, e);
        }
    }
}

/// As [`Request::failed`].
#[cold]
#[inline(never)]
fn failed(this: Taken<Borrowed>, e: WcError) {
    this.request.run.fail(e.into());
}

/// Completions come to callbacks. Each QP has an array of requests.
struct ByCallback(KVec<(Qp, Requests<Borrowed>)>);

impl ByCallback {
    fn post(&mut self) -> Result {
        let mut qps = self.0.iter_mut();
        qps.try_for_each(|(qp, requests)| post_idle(qp, requests))
    }
}

#[inline(never)]
fn post_idle(qp: &Qp, requests: &mut Requests<Borrowed>) -> Result {
    requests.idle().try_for_each(|borrowed| {
        qp.post_send(borrowed, |b| Ok(SendWr::send([b.request.buf.whole()])))?;
        Ok(())
    })
}

/// The caller takes the requests from the completions, which were polled into an array, or which
/// are dispatched statically.
struct ByCaller {
    qps: KVec<Qp>,
    here: KVec<Pin<KBox<Request>>>,
    is_static: bool,
}

impl ByCaller {
    #[inline(never)]
    fn post(&mut self) -> Result {
        let mut qps = self.qps.iter();
        self.here.drain_all().try_for_each(|request| {
            let qp = qps.next().ok_or(EINVAL)?;
            qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
            Ok(())
        })
    }

    fn process(&mut self, cq: &Cq, left: u32) -> Result<u32> {
        if self.is_static {
            self.process_each(cq, left)
        } else {
            self.process_batch(cq)
        }
    }

    #[inline(never)]
    fn process_each(&mut self, cq: &Cq, left: u32) -> Result<u32> {
        let here = &mut self.here;
        cq.process_with(left, |completion| take(here, completion))
    }

    #[inline(never)]
    fn process_batch(&mut self, cq: &Cq) -> Result<u32> {
        let here = &mut self.here;
        let mut batch = WcArray::<{ BATCH as usize }>::new();
        let n = cq.poll(&mut batch)?;
        batch
            .completions()
            .for_each(|completion| take(here, completion));
        Ok(n as u32)
    }
}

/// Takes a request back.
#[inline]
fn take(here: &mut KVec<Pin<KBox<Request>>>, completion: cq::Completion<'_>) {
    if let Ok((request, wc)) = completion.take::<Request, 0>() {
        if let Err(e) = wc.result() {
            return request.failed(e);
        }
        // The vector has held all of them before.
        here.push_within_capacity(request).unwrap_or_else(lost);
    }
}

/// Not inlined, as it never happens.
#[cold]
#[inline(never)]
fn lost(_: PushError<Pin<KBox<Request>>>) {}

/// The requests of a round, in turn for each QP.
enum Round {
    ByCallback(ByCallback),
    ByCaller(ByCaller),
}

impl Round {
    fn new(args: &Args<'_>, end: &End, run: &Arc<Run>, cx: &Sleepable) -> Result<Self> {
        let owners = args.owners() as usize;
        let qps = end.qps.iter().cycle().take(owners);
        if args.context == Context::Direct {
            let mut all = KVec::with_capacity(end.qps.len(), GFP_KERNEL)?;
            for qp in end.qps.iter() {
                let make = |_| {
                    Ok(Borrowed {
                        cqe: Cqe::new(),
                        request: Request::new(end, args.size, run, cx)?,
                    })
                };
                let requests = Requests::new(qp, args.depth as usize, make, cx)?;
                all.push_within_capacity((qp.clone(), requests))?;
            }
            return Ok(Self::ByCallback(ByCallback(all)));
        }
        let mut taken = ByCaller {
            qps: KVec::with_capacity(owners, GFP_KERNEL)?,
            here: KVec::with_capacity(owners, GFP_KERNEL)?,
            is_static: args.context == Context::Static,
        };
        for qp in qps {
            let request = KBox::new_uninit(GFP_KERNEL)?;
            let request = request.write(Request::new(end, args.size, run, cx)?);
            taken.qps.push_within_capacity(qp.clone())?;
            taken.here.push_within_capacity(request.into())?;
        }
        Ok(Self::ByCaller(taken))
    }

    /// Posts all of them.
    fn post(&mut self) -> Result {
        match self {
            Self::ByCallback(round) => round.post(),
            Self::ByCaller(round) => round.post(),
        }
    }

    /// Processes completions, and returns their number.
    fn process(&mut self, cq: &Cq, left: u32) -> Result<u32> {
        match self {
            Self::ByCallback(_) => process(cq, left),
            Self::ByCaller(round) => round.process(cq, left),
        }
    }
}

/// Does `count` requests, in whole rounds.
#[inline(never)]
fn rounds(
    cq: &Cq,
    round: &mut Round,
    args: &Args<'_>,
    run: &Run,
    count: u32,
    report: &mut Report,
) -> Result {
    let owners = args.owners();
    let figures = &mut report.figures;
    *figures = Figures::default();
    let begin = Instant::<Monotonic>::now();
    while figures.ops < count.into() {
        let began = Instant::<Monotonic>::now();
        round.post()?;
        let posted = Instant::<Monotonic>::now();
        let mut left = owners;
        while left > 0 {
            match round.process(cq, left)? {
                // On this device all are done when they are posted.
                0 => return Err(EIO),
                n => left = left.saturating_sub(n),
            }
        }
        figures.add_round(owners, began, posted);
        run.check()?;
    }
    figures.ns = begin.elapsed().as_nanos();
    figures.posts = figures.ops;
    figures.completions = figures.ops;
    Ok(())
}

fn alternate(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [end] = ends else { return Err(EINVAL) };
    link::connect_to_none(end, cx)?;
    let mut round = Round::new(args, end, run, cx)?;
    rounds(&end.cq, &mut round, args, run, args.warmup, report)?;
    rounds(&end.cq, &mut round, args, run, args.count, report)?;
    args.hold()
}

/// Runs where the caller polls. Each request is signaled.
pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let caps = [Caps::new(args.depth, 0)];
    between(client, args, args.qps, &caps, alternate, report, cx)
}
