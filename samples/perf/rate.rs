// SPDX-License-Identifier: GPL-2.0

//! Streams of requests. Each owner posts itself again when it comes back, until it is through.

use crate::{
    args::{
        Args,
        Load, //
    },
    end::{
        finish,
        End, //
    },
    link,
    poll::{
        caller,
        Owner,
        Qp, //
    },
    run::{
        device,
        post_times,
        share,
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
use rdma::prelude::*;

/// The operation of a request and its range.
#[derive(Clone, Copy)]
enum Op {
    Send,
    Write(Remote),
    Read(Remote),
}

type Owned = Pin<KBox<Group>>;

/// The state that all requests of a stream share.
struct Common {
    op: Op,
    signal: NonZero<u32>,
    run: Arc<Run<Owned>>,
}

/// A number of requests, of which the last is signaled, and gives all of them back. It counts for
/// itself: it is not shared. All that a completion needs is in one cache line.
#[derive(HasCqe)]
#[repr(C)]
struct Group {
    cqe: Cqe<Self>,
    qp: Arc<Qp>,
    common: Arc<Common>,
    /// The number of times that it still has to complete.
    left: u32,
    buf: Buf<Bidirectional>,
}

impl Group {
    #[inline]
    fn wr(&self) -> Result<SendWr<'_>> {
        Ok(match self.common.op {
            Op::Send => SendWr::send([self.buf.whole()]),
            Op::Write(remote) => SendWr::rdma_write([self.buf.whole()], remote),
            Op::Read(remote) => SendWr::rdma_read([self.buf.whole_mut()], remote),
        })
    }

    /// Posts all requests, each by itself, to its QP, to which the caller has a reference.
    fn post(self: Pin<KBox<Self>>, qp: &Qp) {
        if self.common.signal.get() > 1 {
            return self.post_all(qp);
        }
        if let Err(e) = qp.post_send(self, Self::wr) {
            Self::refused(e);
        }
    }

    /// Posts requests of which only the last is signaled.
    #[inline(never)]
    fn post_all(self: Pin<KBox<Self>>, qp: &Qp) {
        let times = self.common.signal;
        if let Err(e) = post_times(qp, self, times, Self::wr) {
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
        match self.common.run.goes_on(self.left) {
            true => self.again(wc),
            false => self.common.run.clone().through(self),
        }
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
    fn repost(
        self: Pin<KBox<Self>>,
        wc: &Wc,
        wr: impl for<'a> FnOnce(&'a Self) -> SendWr<'a> + Send,
    ) {
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
        self.common.run.fail(e);
    }
}

impl CqeHandler for Group {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl Owner for Group {
    #[inline]
    fn claim(completion: Completion<'_>) {
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
    qp: Arc<Qp>,
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
    type Needs = Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl Owner for Receive {
    #[inline]
    fn claim(completion: Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            this.completed(wc);
        }
    }
}

/// Both ends. There is no other end where requests go nowhere.
struct Stream<'a, 'b> {
    args: &'a Args<'b>,
    a: &'a End,
    b: Option<&'a End>,
    run: &'a Arc<Run<Owned>>,
}

impl Stream<'_, '_> {
    /// Makes the owners of all requests.
    fn make(&self, op: Op, cx: &Sleepable) -> Result {
        let common = Common {
            op,
            signal: NonZero::new(self.args.signal).ok_or(EINVAL)?,
            run: self.run.clone(),
        };
        let common = Arc::new(common, GFP_KERNEL)?;
        for _ in 0..self.args.groups() {
            for qp in self.a.qps.iter() {
                let group = Group {
                    cqe: Cqe::new(),
                    buf: Buf::alloc(&self.a.pd, self.args.size, cx)?,
                    common: common.clone(),
                    left: 0,
                    qp: qp.clone(),
                };
                self.run.keep(KBox::pin(group, GFP_KERNEL)?);
            }
        }
        Ok(())
    }

    /// Posts more receives than there can be messages.
    fn receive(&self, b: &End, cx: &Sleepable) -> Result {
        for _ in 0..2 * self.args.depth {
            for qp in b.qps.iter() {
                let receive = Receive {
                    cqe: Cqe::new(),
                    buf: Buf::alloc(&b.pd, self.args.size, cx)?,
                    qp: qp.clone(),
                };
                qp.post_recv(KBox::pin(receive, GFP_KERNEL)?, Receive::wr)?;
            }
        }
        Ok(())
    }

    /// Does `count` requests, in whole groups.
    fn phase(&self, count: u32) -> Result<Figures> {
        let args = self.args;
        let total = count.div_ceil(args.signal);
        let owners = args.owners().min(total);
        let mut groups = KVec::with_capacity(owners as usize, GFP_KERNEL)?;
        let mut qps = KVec::with_capacity(owners as usize, GFP_KERNEL)?;
        for n in 0..owners {
            let mut group = self.run.take().ok_or(EIO)?;
            group.left = share(total, n, owners);
            qps.push(group.qp.clone(), GFP_KERNEL)?;
            groups.push(group, GFP_KERNEL)?;
        }
        if owners == 0 {
            return Ok(Figures::default());
        }
        let polls = caller::<Group>(args.context).zip(caller::<Receive>(args.context));
        // Otherwise nothing is posted there.
        let b = self.b.filter(|_| args.load == Load::SendRate);
        self.run.begin(owners);
        let began = Instant::<Monotonic>::now();
        for (group, qp) in groups.into_iter().zip(&qps) {
            group.post(qp);
        }
        let end = self.run.wait(polls.map(|(groups, receives)| {
            move || {
                let n = groups(&self.a.cq, args.depth)?;
                let b = match b {
                    Some(b) => receives(&b.cq, 2 * args.depth)?,
                    None => 0,
                };
                Ok(n + b)
            }
        }))?;
        let ops = u64::from(total) * u64::from(args.signal);
        Ok(Figures {
            ops,
            ns: (end - began).as_nanos(),
            posts: ops,
            completions: total.into(),
            ..Default::default()
        })
    }
}

pub(crate) fn run(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device, cx)?;
    let mut ends = KVec::with_capacity(2, GFP_KERNEL)?;
    let caps = Caps::new(args.depth, 0);
    ends.push(
        End::new(&dev, args.qps, &caps, args.context, cx)?,
        GFP_KERNEL,
    )?;
    if args.load != Load::VoidRate {
        let peer = device(client, args.peer, cx)?;
        let recvs = match args.load {
            Load::SendRate => 2 * args.depth,
            _ => 0,
        };
        let end = End::new(&peer, args.qps, &Caps::new(1, recvs), args.context, cx)?;
        ends.push(end, GFP_KERNEL)?;
    }
    let run = Run::new(args.owners() as usize)?;
    let result = stream(args, &mut ends, &run, cx);
    Ok(finish(&run, ends, result, cx)?.into())
}

#[inline(never)]
fn stream(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run<Owned>>,
    cx: &Sleepable,
) -> Result<Figures> {
    let (a, b) = ends.split_first_mut().ok_or(EINVAL)?;
    let mut b = b.first_mut();
    match &b {
        Some(b) => link::connect(a, b, args.timeout, cx)?,
        None => link::connect_to_none(a, cx)?,
    }
    let op = match (args.load, &mut b) {
        (Load::WriteRate, Some(b)) => Op::Write(b.lend(args.size, cx)?),
        (Load::ReadRate, Some(b)) => Op::Read(b.lend(args.size, cx)?),
        _ => Op::Send,
    };
    let stream = Stream {
        args,
        a,
        b: b.as_deref(),
        run,
    };
    stream.make(op, cx)?;
    if let (Load::SendRate, Some(b)) = (args.load, stream.b) {
        stream.receive(b, cx)?;
    }
    stream.phase(args.warmup)?;
    args.held(stream.phase(args.count))
}
