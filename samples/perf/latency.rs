// SPDX-License-Identifier: GPL-2.0

//! The time of a message to the peer and back, or of an RDMA READ: one at a time.
//!
//! Each end has a few slots. What comes is sent back out of the slot that it came in, whose receive
//! is posted again once it is sent.

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
    laps::{
        Laps,
        Times, //
    },
    link,
    poll::{
        caller,
        Owner,
        Qp, //
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

/// The slots of an end.
const SLOTS: u32 = 4;

/// The uses of a [`Slot`] as a request: what comes, by a receive or a READ; and what goes.
const ARRIVED: u64 = 0;
const SENT: u64 = 1;

type Owned = Pin<KBox<Slot>>;

/// The operation that carries a message.
#[derive(Clone, Copy)]
enum Op {
    Send,
    Write(Remote),
    Read(Remote),
}

/// A place for a message. It is posted as a receive, or as what sends the message on.
#[derive(HasCqe)]
struct Slot {
    arrived: Cqe<Self, ARRIVED>,
    sent: Cqe<Self, SENT>,
    buf: Buf<Bidirectional>,
    op: Op,
    qp: Arc<Qp>,
    run: Arc<Run<Owned>>,
    /// At the end that measures.
    laps: Option<Laps>,
}

impl Slot {
    #[inline]
    fn send_wr(&self) -> SendWr<'_> {
        SendWr::send([self.buf.whole()])
    }

    /// The peer learns of it.
    #[inline]
    fn write_wr(&self, to: Remote) -> SendWr<'_> {
        SendWr::rdma_write([self.buf.whole()], to).with_imm(0)
    }

    #[inline]
    fn read_wr(&self, of: Remote) -> SendWr<'_> {
        SendWr::rdma_read([self.buf.whole_mut()], of)
    }

    #[inline]
    fn recv_wr(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }

    /// Begins the first lap of a phase.
    fn begin(self: Pin<KBox<Self>>, qp: &Qp) -> Result {
        let posted = match self.op {
            Op::Send => qp.post_send::<_, _, SENT, 1>(self, |slot| Ok(slot.send_wr())),
            Op::Write(to) => qp.post_send::<_, _, SENT, 1>(self, |slot| Ok(slot.write_wr(to))),
            Op::Read(of) => qp.post_send::<_, _, ARRIVED, 1>(self, |slot| Ok(slot.read_wr(of))),
        };
        Ok(posted?)
    }

    /// A message is here.
    #[inline]
    fn arrived(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.failed(e.into());
        }
        self.go_on(wc);
    }

    /// Sends a message on, unless it was the last. Not inlined, as handlers and loops that poll
    /// share it.
    #[inline(never)]
    fn go_on(mut self: Pin<KBox<Self>>, wc: &Wc) {
        if let Some(laps) = &mut self.laps {
            let n = laps.lap();
            if laps.is_milestone(n) && self.is_over(n) {
                return self.end();
            }
        }
        match self.op {
            Op::Send => self.repost::<SENT>(wc, Self::send_wr),
            Op::Write(to) => self.repost::<SENT>(wc, |slot| slot.write_wr(to)),
            Op::Read(of) => self.repost::<ARRIVED>(wc, |slot| slot.read_wr(of)),
        }
    }

    /// Returns whether the phase is over after this number of laps, and otherwise notes the
    /// progress.
    #[cold]
    #[inline(never)]
    fn is_over(&self, n: usize) -> bool {
        let over = self.laps.as_ref().is_some_and(|laps| laps.is_end(n));
        if !over {
            self.run.tick();
        }
        over
    }

    #[cold]
    #[inline(never)]
    fn end(self: Pin<KBox<Self>>) {
        self.run.clone().through(self);
    }

    #[inline]
    fn repost<const ID: u64>(
        self: Pin<KBox<Self>>,
        wc: &Wc,
        wr: impl for<'a> FnOnce(&'a Self) -> SendWr<'a> + Send,
    ) where
        Self: CqeHandler<ID, Pointer = Owned, Needs = Atomic>,
    {
        let posted = Qp::repost_send::<_, _, ID, 1>(self, wc, |slot| &slot.qp, |slot| Ok(wr(slot)));
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    /// The message is on its way: makes room for another.
    #[inline]
    fn sent(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.failed(e.into());
        }
        let posted = Qp::repost_recv::<_, ARRIVED, 1>(self, wc, |slot| &slot.qp, Self::recv_wr);
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[cold]
    #[inline(never)]
    fn failed(self: Pin<KBox<Self>>, e: Error) {
        self.run.fail(e);
    }

    #[cold]
    #[inline(never)]
    fn refused(e: PostError<Pin<KBox<Self>>>) {
        let error = e.error();
        if let Some(slot) = e.owner {
            slot.failed(error);
        }
    }
}

impl CqeHandler<ARRIVED> for Slot {
    type Pointer = Owned;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned, wc: &Wc, _cx: &Atomic) {
        this.arrived(wc);
    }
}

impl CqeHandler<SENT> for Slot {
    type Pointer = Owned;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned, wc: &Wc, _cx: &Atomic) {
        this.sent(wc);
    }
}

impl Owner for Slot {
    #[inline]
    fn claim(completion: Completion<'_>) {
        match completion.take::<Self, ARRIVED>() {
            Ok((this, wc)) => this.arrived(wc),
            Err(other) => {
                if let Ok((this, wc)) = other.take::<Self, SENT>() {
                    this.sent(wc);
                }
            }
        }
    }
}

/// Makes the slots of an end. The end that measures keeps the first one, the ball, and all others
/// are posted as receives.
fn fill(
    end: &End,
    args: &Args<'_>,
    op: Op,
    run: &Arc<Run<Owned>>,
    times: Option<&Arc<Times>>,
    cx: &Sleepable,
) -> Result {
    let qp = end.qps.first().ok_or(EINVAL)?;
    // A READ comes back to where it was posted from.
    let slots = if matches!(op, Op::Read(_)) { 1 } else { SLOTS };
    for n in 0..slots {
        let laps = times.map(|times| {
            // The ball, which is the first slot, comes back to the next one.
            let first = n.checked_sub(1).unwrap_or(slots - 1);
            Laps::new(times, args, first as usize, slots as usize)
        });
        let slot = Slot {
            arrived: Cqe::new(),
            sent: Cqe::new(),
            buf: Buf::alloc(&end.pd, args.size, cx)?,
            op,
            qp: qp.clone(),
            run: run.clone(),
            laps,
        };
        let slot = KBox::pin(slot, GFP_KERNEL)?;
        if n == 0 && times.is_some() {
            run.keep(slot);
        } else {
            qp.post_recv::<_, ARRIVED, 1>(slot, Slot::recv_wr)?;
        }
    }
    Ok(())
}

/// Sends the ball so many times there and back. Says also when that began.
fn phase(
    a: &End,
    b: &End,
    run: &Run<Owned>,
    context: Context,
    count: u32,
) -> Result<(Figures, Instant<Monotonic>)> {
    let began = Instant::<Monotonic>::now();
    if count == 0 {
        return Ok((Figures::default(), began));
    }
    let ball = run.take().ok_or(EIO)?;
    let there_only = matches!(ball.op, Op::Read(_));
    let sends = if there_only { 1 } else { 2 };
    let poll = caller::<Slot>(context);
    let qp = ball.qp.clone();
    run.begin(1);
    let began = Instant::now();
    ball.begin(&qp)?;
    let end = run.wait(poll.map(|poll| {
        move || {
            let n = poll(&a.cq, SLOTS)?;
            if there_only {
                return Ok(n);
            }
            Ok(n + poll(&b.cq, SLOTS)?)
        }
    }))?;
    let figures = Figures {
        ops: count.into(),
        ns: (end - began).as_nanos(),
        posts: u64::from(count) * sends,
        completions: u64::from(count) * sends,
        ..Default::default()
    };
    Ok((figures, began))
}

#[inline(never)]
fn ping(
    args: &Args<'_>,
    ends: &mut [End; 2],
    run: &Arc<Run<Owned>>,
    cx: &Sleepable,
) -> Result<Report> {
    let [a, b] = ends;
    link::connect(a, b, args.timeout, cx)?;
    let times = Times::new(args.count)?;
    if args.load == Load::ReadLat {
        let op = Op::Read(b.lend(args.size, cx)?);
        fill(a, args, op, run, Some(&times), cx)?;
    } else {
        let (to_a, to_b) = match args.load {
            Load::WriteLat => (
                Op::Write(a.lend(args.size, cx)?),
                Op::Write(b.lend(args.size, cx)?),
            ),
            _ => (Op::Send, Op::Send),
        };
        fill(a, args, to_b, run, Some(&times), cx)?;
        fill(b, args, to_a, run, None, cx)?;
    }
    phase(a, b, run, args.context, args.warmup)?;
    let (figures, began) = phase(a, b, run, args.context, args.count)?;
    Ok(Report {
        figures,
        samples: times.samples(began)?,
    })
}

pub(crate) fn run(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    // A slot may be both a receive and, for a moment, what was sent.
    let caps = Caps::new(SLOTS, SLOTS);
    let (dev, peer) = (
        device(client, args.device, cx)?,
        device(client, args.peer, cx)?,
    );
    let mut ends = [
        End::new(&dev, 1, &caps, args.context, cx)?,
        End::new(&peer, 1, &caps, args.context, cx)?,
    ];
    let run = Run::new(1)?;
    let result = ping(args, &mut ends, &run, cx);
    finish(&run, ends, result, cx)
}
