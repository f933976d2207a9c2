// SPDX-License-Identifier: GPL-2.0

//! How long a message takes to the peer and back, or an RDMA READ: one at a time.
//!
//! Each end has a few slots. What comes is sent back out of the slot that it came in, whose receive is
//! posted again once it is sent.

use crate::{
    args::{
        Args,
        Context,
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
    sync::atomic::{
        Atomic as AtomicCell,
        Relaxed, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// The slots of an end.
const SLOTS: u32 = 4;
/// How many latencies are kept.
const SAMPLES: usize = 1 << 16;

/// The uses of a [`Slot`] as a request.
const RECV: u64 = 0;
const SEND: u64 = 1;

type Owned<C> = Pin<KBox<Slot<C>>>;

/// What the end that measures knows. One handler at a time has it: the next message comes when this
/// one was answered.
struct Meter {
    epoch: Instant<Monotonic>,
    /// When the last message was sent, in nanoseconds from the epoch.
    last: AtomicCell<i64>,
    /// How many are back, and how many are to come.
    n: AtomicCell<u32>,
    count: AtomicCell<u32>,
    samples: KVVec<AtomicCell<i64>>,
}

impl Meter {
    fn new() -> Result<Arc<Self>> {
        let mut samples = KVVec::with_capacity(SAMPLES, GFP_KERNEL)?;
        for _ in 0..SAMPLES {
            samples.push(AtomicCell::new(0), GFP_KERNEL)?;
        }
        let meter = Self {
            epoch: Instant::now(),
            last: AtomicCell::new(0),
            n: AtomicCell::new(0),
            count: AtomicCell::new(0),
            samples,
        };
        Ok(Arc::new(meter, GFP_KERNEL)?)
    }

    fn start(&self, count: u32) {
        self.n.store(0, Relaxed);
        self.count.store(count, Relaxed);
        self.last.store(self.epoch.elapsed().as_nanos(), Relaxed);
    }

    /// A message is back: says how many are still to come.
    #[inline]
    fn lap(&self) -> u32 {
        let (now, n) = (self.epoch.elapsed().as_nanos(), self.n.load(Relaxed));
        if let Some(sample) = self.samples.get(n as usize) {
            sample.store(now - self.last.load(Relaxed), Relaxed);
        }
        self.last.store(now, Relaxed);
        let n = n.wrapping_add(1);
        self.n.store(n, Relaxed);
        self.count.load(Relaxed).wrapping_sub(n)
    }

    /// Returns the latencies, in order.
    fn samples(&self) -> Result<KVVec<i64>> {
        let n = SAMPLES.min(self.n.load(Relaxed) as usize);
        let mut samples = KVVec::with_capacity(n, GFP_KERNEL)?;
        for sample in self.samples.iter().take(n) {
            samples.push(sample.load(Relaxed), GFP_KERNEL)?;
        }
        Ok(samples)
    }
}

/// How a message travels.
#[derive(Clone, Copy)]
enum Op {
    Send,
    Write(Remote),
    Read(Remote),
}

/// A place for a message. It is posted as a receive, or as what sends the message on.
#[derive(HasCqe)]
struct Slot<C: PollContext + Provides<Atomic>> {
    recv: Cqe<Self, RECV>,
    send: Cqe<Self, SEND>,
    buf: Buf<Bidirectional>,
    op: Op,
    qp: Arc<Qp<C>>,
    run: Arc<Run<Owned<C>>>,
    /// Of the end that measures.
    meter: Option<Arc<Meter>>,
}

impl<C: PollContext + Provides<Atomic>> Slot<C> {
    #[inline]
    fn wr(&self) -> Result<SendWr<'_>> {
        Ok(match self.op {
            Op::Send => SendWr::send([self.buf.whole()]),
            Op::Write(remote) => SendWr::rdma_write([self.buf.whole()], remote).with_imm(0),
            Op::Read(remote) => SendWr::rdma_read([self.buf.whole_mut()], remote),
        })
    }

    #[inline]
    fn recv_wr(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }

    /// A message is here: sends it on, unless it was the last.
    #[inline]
    fn arrived(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Some(meter) = &self.meter {
            if !self.run.goes_on(meter.lap()) {
                return self.run.clone().through(self);
            }
        }
        if let Err(e) = Qp::repost_send::<_, SEND, 1>(self, wc, |slot| &slot.qp, Self::wr) {
            e.owner.run.fail(e.error);
        }
    }

    #[inline]
    fn received(self: Pin<KBox<Self>>, wc: &Wc) {
        match wc.result() {
            Ok(_) => self.arrived(wc),
            Err(e) => self.run.fail(e),
        }
    }

    /// The message is on its way: makes room for another.
    #[inline]
    fn sent(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.run.fail(e);
        }
        if matches!(self.op, Op::Read(_)) {
            return self.arrived(wc);
        }
        if let Err(e) = Qp::repost_recv::<_, RECV, 1>(self, wc, |slot| &slot.qp, Self::recv_wr) {
            e.owner.run.fail(e.error);
        }
    }
}

impl<C: PollContext + Provides<Atomic>> CqeHandler<RECV> for Slot<C> {
    type Pointer = Owned<C>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned<C>, wc: &Wc, _cx: &Atomic) {
        this.received(wc);
    }
}

impl<C: PollContext + Provides<Atomic>> CqeHandler<SEND> for Slot<C> {
    type Pointer = Owned<C>;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned<C>, wc: &Wc, _cx: &Atomic) {
        this.sent(wc);
    }
}

impl<C: PollContext + Provides<Atomic>> Owner for Slot<C> {
    #[inline]
    fn claim(completion: Completion<'_>) {
        match completion.take::<Self, RECV>() {
            Ok((this, wc)) => this.received(wc),
            Err(other) => {
                if let Ok((this, wc)) = other.take::<Self, SEND>() {
                    this.sent(wc);
                }
            }
        }
    }
}

/// Posts the slots of an end as receives; keeps the first one, the ball, of the end that measures.
fn fill<C: PollContext + Provides<Atomic>>(
    end: &End<C>,
    size: usize,
    op: Op,
    run: &Arc<Run<Owned<C>>>,
    meter: Option<&Arc<Meter>>,
    cx: &Sleepable,
) -> Result {
    let qp = end.qps.first().ok_or(EINVAL)?;
    for n in 0..SLOTS {
        let slot = Slot {
            recv: Cqe::new(),
            send: Cqe::new(),
            buf: Buf::alloc(&end.pd, size, cx)?,
            op,
            qp: qp.clone(),
            run: run.clone(),
            meter: meter.cloned(),
        };
        let slot = KBox::pin(slot, GFP_KERNEL)?;
        if n == 0 && meter.is_some() {
            run.keep(slot);
        } else {
            qp.post_recv::<_, RECV, 1>(slot, Slot::recv_wr)?;
        }
    }
    Ok(())
}

/// Sends the ball so many times there and back.
fn phase<C: Mode>(
    a: &End<C>,
    b: &End<C>,
    run: &Run<Owned<C>>,
    meter: &Meter,
    context: Context,
    count: u32,
) -> Result<Figures> {
    if count == 0 {
        return Ok(Figures::default());
    }
    let ball = run.take().ok_or(EIO)?;
    let sends = if matches!(ball.op, Op::Read(_)) { 1 } else { 2 };
    let poll = C::poll::<Slot<C>>(context);
    run.begin(1);
    meter.start(count);
    let began = Instant::<Monotonic>::now();
    let qp = ball.qp.clone();
    qp.post_send::<_, SEND, 1>(ball, Slot::wr)?;
    let end = run.wait(poll.map(|poll| move || Ok(poll(&a.cq, SLOTS)? + poll(&b.cq, SLOTS)?)))?;
    Ok(Figures {
        ops: count.into(),
        ns: (end - began).as_nanos(),
        posts: u64::from(count) * sends,
        completions: u64::from(count) * sends,
        ..Default::default()
    })
}

#[inline(never)]
fn ping<C: Mode>(
    args: &Args<'_>,
    ends: &mut [End<C>; 2],
    run: &Arc<Run<Owned<C>>>,
    meter: &Arc<Meter>,
    cx: &Sleepable,
) -> Result<Figures> {
    let [a, b] = ends;
    link::connect(a, b, cx)?;
    let (to_a, to_b) = match args.load {
        Load::WriteLat => (
            Op::Write(a.lend(args.size, cx)?),
            Op::Write(b.lend(args.size, cx)?),
        ),
        Load::ReadLat => (Op::Send, Op::Read(b.lend(args.size, cx)?)),
        _ => (Op::Send, Op::Send),
    };
    fill(a, args.size, to_b, run, Some(meter), cx)?;
    fill(b, args.size, to_a, run, None, cx)?;
    phase(a, b, run, meter, args.context, args.warmup)?;
    phase(a, b, run, meter, args.context, args.count)
}

pub(crate) fn run<C: Mode>(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let (dev, peer) = (device(client, args.device)?, device(client, args.peer)?);
    // A slot may be both a receive and, for a moment, what was sent.
    let caps = Caps::new(SLOTS, SLOTS);
    let mut ends = [
        End::<C>::new(&dev, 1, &caps, args.context, cx)?,
        End::new(&peer, 1, &caps, args.context, cx)?,
    ];
    let (run, meter) = (Run::new(1)?, Meter::new()?);
    let result = ping(args, &mut ends, &run, &meter, cx);
    let figures = finish(&run, ends, result, cx)?;
    Ok(Report {
        figures,
        samples: meter.samples()?,
    })
}
