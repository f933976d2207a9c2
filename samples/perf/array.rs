// SPDX-License-Identifier: GPL-2.0

//! Requests in arrays, on a null device: an array for each QP, as an NVMe queue has it, or one for
//! all QPs, as a pool.
//!
//! In both the requests of a QP are side by side, and they are posted in the order of memory. Where
//! the caller polls, posting and processing are timed apart, and a request whose completion was
//! processed is idle. Otherwise its handler posts it again.

use crate::{
    args::{
        Args,
        Context,
        Load, //
    },
    end::{
        between,
        End, //
    },
    link,
    poll::{
        process,
        Cq,
        Qp, //
    },
    run::{
        shares,
        Figures,
        Report,
        Run, //
    }, //
};
use core::{
    mem,
    slice, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// Arrays of requests, and the QPs of each.
struct Arrays<'a, T> {
    arrays: KVec<Requests<T>>,
    qps: &'a [Qp],
    is_pool: bool,
    depth: usize,
}

/// Takes the QPs of the next array.
#[inline]
fn next<'a>(qps: &mut &'a [Qp], is_pool: bool) -> &'a [Qp] {
    match qps.split_first() {
        Some((first, others)) if !is_pool => {
            *qps = others;
            slice::from_ref(first)
        }
        _ => mem::take(qps),
    }
}

impl<'a, T: Send + 'static> Arrays<'a, T> {
    #[inline(never)]
    fn new(
        args: &Args<'_>,
        end: &'a End,
        mut init: impl FnMut(&Qp) -> Result<T>,
        cx: &Sleepable,
    ) -> Result<Self> {
        let depth = args.depth as usize;
        let is_pool = args.load == Load::PoolRate;
        let qps = &end.qps[..];
        let mut left = &end.qps[..];
        let count = if is_pool { 1 } else { qps.len() };
        let mut arrays = KVec::with_capacity(count, GFP_KERNEL)?;
        for _ in 0..count {
            let qps = next(&mut left, is_pool);
            let of_index = |index: usize| {
                let n = index.checked_div(depth).ok_or(EINVAL)?;
                let qp = qps.get(n).ok_or(EINVAL)?;
                Ok((qp, init(qp)?))
            };
            let requests = qps.len().checked_mul(depth).ok_or(EINVAL)?;
            arrays.push_within_capacity(Requests::of_qps(requests, of_index, cx)?)?;
        }
        Ok(Self {
            arrays,
            qps,
            is_pool,
            depth,
        })
    }

    /// Calls `post` with requests that are idle, and the QP of each.
    #[inline]
    fn each(&mut self, mut post: impl FnMut(&Qp, Taken<T>) -> Result) -> Result {
        let mut left = self.qps;
        for requests in &mut self.arrays {
            let mut idle = requests.idle();
            for qp in next(&mut left, self.is_pool) {
                each_of(qp, idle.by_ref().take(self.depth), &mut post)?;
            }
        }
        Ok(())
    }
}

/// Calls `post` with requests of one QP. Not inlined, so that the handle is read once.
#[inline(never)]
fn each_of<T>(
    qp: &Qp,
    mut requests: impl Iterator<Item = Taken<T>>,
    post: &mut impl FnMut(&Qp, Taken<T>) -> Result,
) -> Result {
    requests.try_for_each(|request| post(qp, request))
}

/// A request that the caller posts.
#[derive(HasCqe)]
#[repr(C)]
struct Posted {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    run: Arc<Run>,
}

impl CqeHandler for Posted {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            this.failed(e);
        }
    }
}

impl Posted {
    #[cold]
    #[inline(never)]
    fn failed(&self, e: WcError) {
        self.run.fail(e.into());
    }

    #[inline]
    fn claim(completion: cq::Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            if let Err(e) = wc.result() {
                this.failed(e);
            }
        }
    }
}

impl Arrays<'_, Posted> {
    #[inline(never)]
    fn post(&mut self) -> Result {
        self.each(|qp, request| {
            qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
            Ok(())
        })
    }
}

#[inline(never)]
fn process_each(cq: &Cq, left: u32) -> Result<u32> {
    cq.process_with(left, Posted::claim)
}

/// Does `count` requests, in whole rounds.
fn rounds(
    args: &Args<'_>,
    cq: &Cq,
    arrays: &mut Arrays<'_, Posted>,
    run: &Run,
    count: u32,
) -> Result<Figures> {
    let process = match args.context {
        Context::Static => process_each,
        _ => process,
    };
    let owners = args.owners();
    let mut figures = Figures::default();
    let begin = Instant::<Monotonic>::now();
    while figures.ops < count.into() {
        let began = Instant::<Monotonic>::now();
        arrays.post()?;
        let posted = Instant::<Monotonic>::now();
        let mut left = owners;
        while left > 0 {
            match process(cq, left)? {
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
    Ok(figures)
}

/// A request that its handler posts again.
#[derive(HasCqe)]
#[repr(C)]
struct Again {
    cqe: Cqe<Self>,
    qp: Qp,
    /// The number of times that it still has to complete.
    left: u32,
    buf: Buf<ToDevice>,
    run: Arc<Run>,
}

impl CqeHandler for Again {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    #[inline]
    fn done(mut this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            return Self::failed(this, e.into());
        }
        this.left = this.left.wrapping_sub(1);
        if this.left % 64 == 0 {
            return Self::milestone(this, wc);
        }
        Self::repost(this, wc);
    }
}

impl Again {
    #[inline]
    fn repost(this: Taken<Self>, wc: &Wc) {
        let posted = Qp::repost_send(
            this,
            wc,
            |this| &this.qp,
            |this| Ok(SendWr::send([this.buf.whole()])),
        );
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[cold]
    #[inline(never)]
    fn milestone(this: Taken<Self>, wc: &Wc) {
        this.run.tick();
        if this.left != 0 {
            return Self::repost(this, wc);
        }
        let run = this.run.clone();
        // The last one ends the phase: then all are idle.
        drop(this);
        run.ended();
    }

    #[cold]
    #[inline(never)]
    fn failed(this: Taken<Self>, e: Error) {
        this.run.fail(e);
    }

    #[cold]
    #[inline(never)]
    fn refused(e: PostError<Taken<Self>>) {
        let error = e.error();
        if let Some(this) = e.owner {
            Self::failed(this, error);
        }
    }
}

/// Does `count` requests, which handlers post again.
fn stream(
    args: &Args<'_>,
    arrays: &mut Arrays<'_, Again>,
    run: &Run,
    count: u32,
) -> Result<Figures> {
    let mut figures = Figures::default();
    let owners = count.min(args.owners());
    if owners == 0 {
        return Ok(figures);
    }
    run.begin(owners);
    let mut shares = shares(count, owners);
    let began = Instant::now();
    arrays.each(|qp, mut request| {
        let Some(times) = shares.next() else {
            return Ok(());
        };
        request.left = times;
        qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
        Ok(())
    })?;
    figures.ns = run.wait(began, &None, &None)?;
    figures.ops = count.into();
    figures.posts = figures.ops;
    figures.completions = figures.ops;
    Ok(figures)
}

fn both(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [end] = ends else { return Err(EINVAL) };
    link::connect_to_none(end, cx)?;
    let end = &*end;
    if args.context.is_polled() {
        let init = |_: &Qp| {
            Ok(Posted {
                cqe: Cqe::new(),
                buf: Buf::alloc(&end.pd, args.size, cx)?,
                run: run.clone(),
            })
        };
        let mut arrays = Arrays::new(args, end, init, cx)?;
        rounds(args, &end.cq, &mut arrays, run, args.warmup)?;
        report.figures = rounds(args, &end.cq, &mut arrays, run, args.count)?;
        return args.hold();
    }
    let init = |qp: &Qp| {
        Ok(Again {
            cqe: Cqe::new(),
            qp: qp.clone(),
            left: 0,
            buf: Buf::alloc(&end.pd, args.size, cx)?,
            run: run.clone(),
        })
    };
    let mut arrays = Arrays::new(args, end, init, cx)?;
    stream(args, &mut arrays, run, args.warmup)?;
    report.figures = stream(args, &mut arrays, run, args.count)?;
    args.hold()
}

pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    if args.signal != 1 || args.context == Context::Batch {
        return Err(EINVAL);
    }
    let caps = [Caps::new(args.depth, 0)];
    between(client, args, args.qps, &caps, both, report, cx)
}
