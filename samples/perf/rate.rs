// SPDX-License-Identifier: GPL-2.0

//! Streams of requests. Each owner posts itself again when it comes back, until it is through.

use crate::{
    args::{
        Args,
        Load, //
    },
    end::{
        between,
        End,
        Op, //
    },
    link,
    poll::{
        caller,
        handlers,
        Owner,
        Qp, //
    },
    run::{
        Figures,
        Owned,
        Report,
        Run, //
    }, //
};
use core::num::NonZero;
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Chain, //
};

/// The state that all requests of a stream share.
struct Common {
    op: Op,
    signal: NonZero<u32>,
    run: Arc<Run>,
}

/// A number of requests, of which the last is signaled, and gives all of them back. It counts for
/// itself: it is not shared. All that a completion needs is in one cache line.
#[derive(HasCqe)]
#[repr(C)]
pub(crate) struct Group {
    cqe: Cqe<Self>,
    pub(crate) qp: Qp,
    common: Arc<Common>,
    /// The number of times that it still has to complete.
    left: u32,
    buf: Buf<Bidirectional>,
}

/// Posts a request `times` times, only the last one signaled.
#[inline]
fn post_times(
    qp: &Qp,
    owner: Pin<KBox<Group>>,
    times: NonZero<u32>,
    wr: impl for<'a> Fn(&'a Group) -> SendWr<'a> + Sync,
) -> Result<(), PostError<Pin<KBox<Group>>>> {
    let mut batch = qp.batch(owner);
    for _ in 1..times.get() {
        let posted = batch.post(|owner, chain: &mut Chain<'_, 1>| chain.push(wr(owner)));
        if let Err(e) = posted {
            return Err(batch.into_error(e));
        }
    }
    match batch.finish(|owner, chain: &mut Chain<'_, 1>| chain.push(wr(owner))) {
        Ok(()) => Ok(()),
        Err(e) => Err(batch.into_error(e)),
    }
}

impl Group {
    #[inline]
    fn wr(&self) -> SendWr<'_> {
        match self.common.op {
            Op::Send => SendWr::send([self.buf.whole()]),
            Op::Write(remote) => SendWr::rdma_write([self.buf.whole()], remote),
            Op::Read(remote) => SendWr::rdma_read([self.buf.whole_mut()], remote),
        }
    }

    /// Has it complete so often, and returns its QP.
    pub(crate) fn prepare(&mut self, times: u32) -> Qp {
        self.left = times;
        self.qp.clone()
    }

    /// Posts all requests for the first time, each by itself.
    pub(crate) fn start(self: Pin<KBox<Self>>, qp: &Qp) {
        if self.common.signal.get() > 1 {
            return self.post_all(qp);
        }
        if let Err(e) = qp.post_send(self, |group| Ok(group.wr())) {
            Self::refused(e);
        }
    }

    /// Posts requests of which only the last is signaled. The compiler knows the operation only if
    /// they are SENDs, which are measured.
    #[inline(never)]
    fn post_all(self: Pin<KBox<Self>>, qp: &Qp) {
        let times = self.common.signal;
        let posted = match self.common.op {
            Op::Send => post_times(qp, self, times, |group| SendWr::send([group.buf.whole()])),
            _ => post_times(qp, self, times, Self::wr),
        };
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    /// If some were posted, or that is not known, the QP has the owner.
    #[cold]
    fn refused(e: PostError<Pin<KBox<Self>>>) {
        let error = e.error();
        pr_err!("a request was refused: {error:?}\n");
        if let Some(group) = e.owner {
            group.common.run.fail(error);
        }
    }

    /// Its requests are done: posts them again, unless that was often enough.
    #[inline]
    fn completed(mut self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.failed(e);
        }
        self.left = self.left.wrapping_sub(1);
        if self.left % 64 == 0 {
            return self.milestone(wc);
        }
        self.again(wc);
    }

    /// Not inlined, so that registers that only this needs are not saved each time.
    #[cold]
    #[inline(never)]
    fn milestone(self: Pin<KBox<Self>>, wc: &Wc) {
        if self.left == 0 {
            let common = self.common.clone();
            return common.run.through_inlined(Owned::Group(self));
        }
        self.common.run.tick();
        self.again(wc);
    }

    #[inline]
    fn again(self: Pin<KBox<Self>>, wc: &Wc) {
        if self.common.signal.get() > 1 {
            return self.again_all();
        }
        match self.common.op {
            Op::Send => self.repost(wc, |group| SendWr::send([group.buf.whole()])),
            Op::Write(to) => self.repost(wc, |group| SendWr::rdma_write([group.buf.whole()], to)),
            Op::Read(of) => self.repost(wc, |group| SendWr::rdma_read([group.buf.whole_mut()], of)),
        }
    }

    #[inline]
    fn repost(self: Pin<KBox<Self>>, wc: &Wc, wr: impl for<'a> FnOnce(&'a Self) -> SendWr<'a>) {
        if let Err(e) = Qp::repost_send(self, wc, |group| &group.qp, |group| Ok(wr(group))) {
            Self::refused(e);
        }
    }

    /// As [`Group::post_all`], in a handler.
    #[inline(never)]
    fn again_all(self: Pin<KBox<Self>>) {
        let qp = self.qp.clone();
        self.post_all(&qp);
    }

    #[cold]
    #[inline(never)]
    fn failed(self: Pin<KBox<Self>>, e: WcError) {
        self.common.run.fail(e.into());
    }
}

impl CqeHandler for Group {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.completed(wc);
    }
}

impl Owner for Group {
    #[inline]
    fn claim(completion: cq::Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            this.completed(wc);
        }
    }
}

/// A receive, which is posted again each time.
#[derive(HasCqe)]
struct Receive {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    qp: Qp,
}

impl Receive {
    #[inline]
    fn wr(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }

    /// If it was flushed, or cannot be posted, the sender learns that.
    #[inline]
    fn completed(self: Pin<KBox<Self>>, wc: &Wc) {
        if wc.result().is_ok() {
            let _ = Qp::repost_recv(self, wc, |receive| &receive.qp, Self::wr);
        }
    }
}

impl CqeHandler for Receive {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.completed(wc);
    }
}

/// Makes the owners of all requests.
fn make(args: &Args<'_>, a: &End, op: Op, run: &Arc<Run>, cx: &Sleepable) -> Result {
    let common = Common {
        op,
        signal: NonZero::new(args.signal).ok_or(EINVAL)?,
        run: run.clone(),
    };
    let common = Arc::new(common, GFP_KERNEL)?;
    for qp in a.qps.iter().cycle().take(args.owners() as usize) {
        let group = KBox::new_uninit(GFP_KERNEL)?;
        let buf = Buf::alloc(&a.pd, args.size, cx)?;
        let group = group.write(Group {
            cqe: Cqe::new(),
            buf,
            common: common.clone(),
            left: 0,
            qp: qp.clone(),
        });
        run.keep(Owned::Group(group.into()));
    }
    Ok(())
}

/// Posts more receives than there can be messages.
fn receive(args: &Args<'_>, b: &End, cx: &Sleepable) -> Result {
    for _ in 0..args.receives() {
        for qp in b.qps.iter() {
            let receive = KBox::new_uninit(GFP_KERNEL)?;
            let buf = Buf::alloc(&b.pd, args.size, cx)?;
            let receive = receive.write(Receive {
                cqe: Cqe::new(),
                buf,
                qp: qp.clone(),
            });
            qp.post_recv(Pin::from(receive), Receive::wr)?;
        }
    }
    Ok(())
}

/// Does `count` requests, in whole groups.
fn phase(
    args: &Args<'_>,
    a: &End,
    b: Option<&End>,
    run: &Run,
    count: u32,
    figures: &mut Figures,
) -> Result {
    let total = count.div_ceil(args.signal);
    let receives = b.and_then(|b| handlers(args.context, &b.cq, args.receives()));
    let groups = caller::<Group>(args.context, &a.cq, args.depth);
    let (_, ns) = run.phase(total, &groups, &receives)?;
    let ops = u64::from(total).saturating_mul(args.signal.into());
    figures.ops = ops;
    figures.ns = ns;
    figures.posts = ops;
    figures.completions = total.into();
    Ok(())
}

fn stream(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let (a, others) = ends.split_first_mut().ok_or(EINVAL)?;
    let mut b = others.first_mut();
    match &b {
        Some(b) => link::connect(a, b, args.timeout, cx)?,
        None => link::connect_to_none(a, cx)?,
    }
    let op = match &mut b {
        Some(b) => b.op(args, cx)?,
        None => Op::Send,
    };
    make(args, a, op, run, cx)?;
    // Otherwise nothing is posted there.
    let b = b.as_deref().filter(|_| args.load == Load::SendRate);
    if let Some(b) = b {
        receive(args, b, cx)?;
    }
    phase(args, a, b, run, args.warmup, &mut report.figures)?;
    phase(args, a, b, run, args.count, &mut report.figures)?;
    args.hold()
}

pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let caps = Caps::new(args.depth, 0);
    let caps: &[Caps] = match args.load {
        Load::VoidRate => &[caps],
        Load::SendRate => &[caps, Caps::new(1, args.receives())],
        _ => &[caps, Caps::new(1, 0)],
    };
    between(client, args, args.qps, caps, stream, report, cx)
}
