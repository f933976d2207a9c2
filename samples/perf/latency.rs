// SPDX-License-Identifier: GPL-2.0

//! The time of a message to the peer and back, or of an RDMA READ: one at a time.
//!
//! Each end has a few slots. What comes is sent back out of the slot that it came in, whose receive
//! is posted again once it is sent.

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
        Figures,
        Owned,
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

/// A place for a message. It is posted as a receive, or as what sends the message on.
#[derive(HasCqe)]
pub(crate) struct Slot {
    arrived: Cqe<Self, ARRIVED>,
    sent: Cqe<Self, SENT>,
    buf: Buf<Bidirectional>,
    op: Op,
    pub(crate) qp: Qp,
    run: Arc<Run>,
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

    fn wr(&self) -> SendWr<'_> {
        match self.op {
            Op::Send => self.send_wr(),
            Op::Write(to) => self.write_wr(to),
            Op::Read(of) => self.read_wr(of),
        }
    }

    #[inline]
    fn recv_wr(&self) -> Result<RecvWr<'_, 1, ARRIVED>> {
        Ok(RecvWr::new([self.buf.whole_mut()]).done_by())
    }

    /// Begins the first lap of a phase.
    #[inline(never)]
    pub(crate) fn start(self: Pin<KBox<Self>>, qp: &Qp) {
        let posted = match self.op {
            Op::Read(_) => qp.post_send(self, |slot| Ok(slot.wr().done_by::<ARRIVED>())),
            _ => qp.post_send(self, |slot| Ok(slot.wr().done_by::<SENT>())),
        };
        if let Err(e) = posted {
            Self::refused(e);
        }
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
        self.run.clone().through(Owned::Ball(self));
    }

    #[inline]
    fn repost<const ID: u64>(
        self: Pin<KBox<Self>>,
        wc: &Wc,
        wr: impl for<'a> FnOnce(&'a Self) -> SendWr<'a>,
    ) where
        Self: CqeHandler<ID, Pointer = Pin<KBox<Self>>, Needs = context::Atomic>,
    {
        let posted = Qp::repost_send(
            self,
            wc,
            |slot| &slot.qp,
            |slot| Ok(wr(slot).done_by::<ID>()),
        );
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
        let posted = Qp::repost_recv(self, wc, |slot| &slot.qp, Self::recv_wr);
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
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.arrived(wc);
    }
}

impl CqeHandler<SENT> for Slot {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.sent(wc);
    }
}

impl Owner for Slot {
    #[inline]
    fn claim(completion: cq::Completion<'_>) {
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
    run: &Arc<Run>,
    times: Option<&Arc<Times>>,
    cx: &Sleepable,
) -> Result {
    let qp = end.qps.first().ok_or(EINVAL)?;
    // A READ comes back to where it was posted from.
    let slots = if matches!(op, Op::Read(_)) { 1 } else { SLOTS };
    for n in 0..slots {
        let slot = KBox::new_uninit(GFP_KERNEL)?;
        let buf = Buf::alloc(&end.pd, args.size, cx)?;
        let laps = times.map(|times| {
            // The ball, which is the first slot, comes back to the next one.
            let first = n.checked_sub(1).unwrap_or(slots.saturating_sub(1));
            Laps::new(times, args, first as usize, slots as usize)
        });
        let slot = Pin::from(slot.write(Slot {
            arrived: Cqe::new(),
            sent: Cqe::new(),
            buf,
            op,
            qp: qp.clone(),
            run: run.clone(),
            laps,
        }));
        if n == 0 && times.is_some() {
            run.keep(Owned::Ball(slot));
        } else {
            qp.post_recv(slot, Slot::recv_wr)?;
        }
    }
    Ok(())
}

/// Sends the ball so many times there and back. Returns when that began.
fn phase(
    args: &Args<'_>,
    a: &End,
    b: &End,
    run: &Run,
    count: u32,
    figures: &mut Figures,
) -> Result<Instant<Monotonic>> {
    // A READ is of one end.
    let b = Some(b).filter(|_| args.load != Load::ReadLat);
    let sends = if b.is_some() { 2 } else { 1 };
    let there = caller::<Slot>(args.context, &a.cq, SLOTS);
    let back = b.and_then(|b| caller::<Slot>(args.context, &b.cq, SLOTS));
    let (began, ns) = run.phase(count, &there, &back)?;
    figures.ops = count.into();
    figures.ns = ns;
    figures.posts = figures.ops.saturating_mul(sends);
    figures.completions = figures.posts;
    Ok(began)
}

fn ping(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [a, b] = ends else { return Err(EINVAL) };
    link::connect(a, b, args.timeout, cx)?;
    let times = Times::new(args.count)?;
    let to_b = b.op(args, cx)?;
    fill(a, args, to_b, run, Some(&times), cx)?;
    // A READ comes back by itself.
    if args.load != Load::ReadLat {
        let to_a = a.op(args, cx)?;
        fill(b, args, to_a, run, None, cx)?;
    }
    phase(args, a, b, run, args.warmup, &mut report.figures)?;
    let began = phase(args, a, b, run, args.count, &mut report.figures)?;
    report.laps = Some((times, began));
    Ok(())
}

pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    // A slot may be both a receive and, for a moment, what was sent.
    let caps = Caps::new(SLOTS, SLOTS);
    between(client, args, 1, &[caps, caps], ping, report, cx)
}
