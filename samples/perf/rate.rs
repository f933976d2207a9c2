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
use rdma::{
    prelude::*,
    qp::Chain, //
};

/// What a request does, and where.
#[derive(Clone, Copy)]
enum Op {
    Send,
    Write(Remote),
    Read(Remote),
}

/// So many requests, of which the last is signaled, and gives all of them back. It counts for itself:
/// nobody else has it.
#[derive(HasCqe)]
struct Group<C: PollContext + Provides<Atomic>> {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    op: Op,
    signal: u32,
    /// How often it is still to come back.
    left: u32,
    qp: Arc<Qp<C>>,
    run: Arc<Run<Pin<KBox<Self>>>>,
}

impl<C: PollContext + Provides<Atomic>> Group<C> {
    #[inline]
    fn wr(&self) -> Result<SendWr<'_>> {
        Ok(match self.op {
            Op::Send => SendWr::send([self.buf.whole()]),
            Op::Write(remote) => SendWr::rdma_write([self.buf.whole()], remote),
            Op::Read(remote) => SendWr::rdma_read([self.buf.whole_mut()], remote),
        })
    }

    /// Posts all requests, each by itself.
    #[inline]
    fn post(self: Pin<KBox<Self>>) {
        let qp = self.qp.clone();
        if self.signal == 1 {
            if let Err(e) = qp.post_send(self, Self::wr) {
                e.owner.run.fail(e.error);
            }
        } else if let Err((owner, error)) = self.post_all(&qp) {
            match owner {
                Some(group) => group.run.fail(error),
                // The QP has it.
                None => pr_err!("requests were not posted: {error:?}\n"),
            }
        }
    }

    #[inline]
    fn post_all(self: Pin<KBox<Self>>, qp: &Qp<C>) -> Result<(), (Option<Pin<KBox<Self>>>, Error)> {
        let unsignaled = self.signal - 1;
        let mut batch = qp.batch(self);
        for _ in 0..unsignaled {
            let posted = batch.post(|group, chain: &mut Chain<'_, 1>| chain.push(group.wr()?));
            if let Err(e) = posted {
                return Err((batch.into_owner(), e));
            }
        }
        batch
            .finish(|group, chain: &mut Chain<'_, 1>| chain.push(group.wr()?))
            .map_err(|e| (e.batch.into_owner(), e.error))
    }

    /// Its requests are done: posts them again, unless that was often enough.
    #[inline]
    fn completed(mut self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.run.fail(e);
        }
        self.left = self.left.wrapping_sub(1);
        if self.left % 64 == 0 {
            if self.left == 0 {
                return self.run.clone().through(self);
            }
            self.run.tick();
        }
        self.post();
    }
}

impl<C: PollContext + Provides<Atomic>> CqeHandler for Group<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl<C: PollContext + Provides<Atomic>> Owner for Group<C> {
    #[inline]
    fn claim(completion: Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            this.completed(wc);
        }
    }
}

/// A receive, which is posted again each time.
#[derive(HasCqe)]
struct Receive<C: PollContext + Provides<Atomic>> {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    qp: Arc<Qp<C>>,
}

impl<C: PollContext + Provides<Atomic>> Receive<C> {
    #[inline]
    fn post(self: Pin<KBox<Self>>) -> Result {
        let qp = self.qp.clone();
        Ok(qp.post_recv(self, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?)
    }

    /// If it was flushed, or cannot be posted, the sender learns that.
    #[inline]
    fn completed(self: Pin<KBox<Self>>, wc: &Wc) {
        if wc.result().is_ok() {
            let _ = self.post();
        }
    }
}

impl<C: PollContext + Provides<Atomic>> CqeHandler for Receive<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        this.completed(wc);
    }
}

impl<C: PollContext + Provides<Atomic>> Owner for Receive<C> {
    #[inline]
    fn claim(completion: Completion<'_>) {
        if let Ok((this, wc)) = completion.take::<Self, 0>() {
            this.completed(wc);
        }
    }
}

/// Both ends. There is no other end where requests go nowhere.
struct Stream<'a, 'b, M: Mode> {
    args: &'a Args<'b>,
    a: &'a End<M::Cq>,
    b: Option<&'a End<M::Cq>>,
    run: &'a Arc<Run<Pin<KBox<Group<M::Cq>>>>>,
}

impl<M: Mode> Stream<'_, '_, M> {
    /// Makes the owners of all requests.
    fn make(&self, op: Op, cx: &Sleepable) -> Result {
        for _ in 0..self.args.depth / self.args.signal {
            for qp in self.a.qps.iter() {
                let group = Group {
                    cqe: Cqe::new(),
                    buf: Buf::alloc(&self.a.pd, self.args.size, cx)?,
                    op,
                    signal: self.args.signal,
                    left: 0,
                    qp: qp.clone(),
                    run: self.run.clone(),
                };
                self.run.keep(KBox::pin(group, GFP_KERNEL)?);
            }
        }
        Ok(())
    }

    /// Posts more receives than there can be messages.
    fn receive(&self, b: &End<M::Cq>, cx: &Sleepable) -> Result {
        for _ in 0..2 * self.args.depth {
            for qp in b.qps.iter() {
                let receive = Receive {
                    cqe: Cqe::new(),
                    buf: Buf::alloc(&b.pd, self.args.size, cx)?,
                    qp: qp.clone(),
                };
                KBox::pin(receive, GFP_KERNEL)?.post()?;
            }
        }
        Ok(())
    }

    /// Does `count` requests, in whole groups.
    fn phase(&self, count: u32) -> Result<Figures> {
        let args = self.args;
        let total = count.div_ceil(args.signal);
        let owners = (args.depth / args.signal * args.qps).min(total);
        let mut groups = KVec::with_capacity(owners as usize, GFP_KERNEL)?;
        for n in 0..owners {
            let mut group = self.run.take().ok_or(EIO)?;
            group.left = total / owners + u32::from(n < total % owners);
            groups.push(group, GFP_KERNEL)?;
        }
        if owners == 0 {
            return Ok(Figures::default());
        }
        self.run.begin(owners);
        let began = Instant::<Monotonic>::now();
        for group in groups {
            group.post();
        }
        let end = self.run.wait::<M>(|| {
            let n = M::poll::<Group<M::Cq>>(&self.a.cq, args.depth)?;
            let b = match self.b {
                Some(b) => M::poll::<Receive<M::Cq>>(&b.cq, 2 * args.depth)?,
                None => 0,
            };
            Ok(n + b)
        })?;
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

pub(crate) fn run<M: Mode>(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device)?;
    let mut ends = KVec::with_capacity(2, GFP_KERNEL)?;
    let caps = Caps::new(args.depth, 0);
    ends.push(End::<M::Cq>::new(&dev, args.qps, &caps, cx)?, GFP_KERNEL)?;
    if args.load != Load::VoidRate {
        let peer = device(client, args.peer)?;
        let recvs = match args.load {
            Load::SendRate => 2 * args.depth,
            _ => 0,
        };
        let end = End::new(&peer, args.qps, &Caps::new(1, recvs), cx)?;
        ends.push(end, GFP_KERNEL)?;
    }
    let owners = (args.depth / args.signal * args.qps) as usize;
    let run = Run::new(owners)?;
    let result = stream::<M>(args, &mut ends, &run, cx);
    Ok(finish(&run, ends, result, cx)?.into())
}

fn stream<M: Mode>(
    args: &Args<'_>,
    ends: &mut [End<M::Cq>],
    run: &Arc<Run<Pin<KBox<Group<M::Cq>>>>>,
    cx: &Sleepable,
) -> Result<Figures> {
    let (a, b) = ends.split_first_mut().ok_or(EINVAL)?;
    let mut b = b.first_mut();
    match &b {
        Some(b) => link::connect(a, b, cx)?,
        None => link::connect_to_none(a, cx)?,
    }
    let op = match (args.load, &mut b) {
        (Load::WriteRate, Some(b)) => Op::Write(b.lend::<M>(args.size, cx)?),
        (Load::ReadRate, Some(b)) => Op::Read(b.lend::<M>(args.size, cx)?),
        _ => Op::Send,
    };
    let stream = Stream::<M> {
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
    stream.phase(args.count)
}
