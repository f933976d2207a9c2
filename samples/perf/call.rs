// SPDX-License-Identifier: GPL-2.0

//! Requests that are answered, as those of storage protocols: an operation takes a tag, registers
//! memory and sends its key, in one post. The other end answers with a SEND that invalidates the
//! key. When the send has completed and the answer has come, the tag is free.

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
        handlers,
        Qp, //
    },
    run::{
        shares,
        Figures,
        Report,
        Run, //
    }, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::SpinLockIrq,
    time::Instant, //
};
use rdma::{
    prelude::*,
    qp::Chain,
    session::{
        tags::{
            Exchange,
            Tag,
            TagId,
            Tags, //
        },
        Received,
        RecvHandler,
        RecvRing, //
    }, //
};

/// A message: the name of the exchange, and the key to be invalidated if that is not 0.
const MESSAGE: usize = 8;

/// The bits of a generation that come back.
const BITS: u32 = 4;

/// An end that calls.
struct Caller {
    qp: Qp,
    tags: Tags<Call>,
    run: Arc<Run>,
    registers: bool,
}

/// The exchanges of a caller.
struct Call;

/// The memory of a request, which is posted.
struct Request {
    message: Buf<ToDevice>,
    region: Region<Bidirectional>,
    through: Arc<Through>,
}

/// The state of a request that waits for the answer.
struct Waiting {
    answered: bool,
    /// The number of times that the tag still has to be free again in this phase.
    left: u32,
}

/// The tags that were in use often enough, until the phase is over.
#[pin_data]
struct Through {
    #[pin]
    tags: SpinLockIrq<KVec<Tag<Call>>>,
    run: Arc<Run>,
}

impl Exchange for Call {
    type Request = Request;
    type Reply = Waiting;
    type Connection = ();
    type Needs = context::Atomic;

    #[inline]
    fn sent(request: &Request, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            request.through.run.fail(e.into());
        }
    }

    #[inline]
    fn ended(mut tag: Tag<Self>) {
        let (_, waiting) = tag.parts();
        if !core::mem::take(&mut waiting.answered) {
            return unanswered(tag);
        }
        waiting.left = waiting.left.wrapping_sub(1);
        if waiting.left % 64 == 0 {
            milestone(tag);
        }
    }
}

/// The answer is no proof that the key is invalid, or the run has failed and there is none.
#[cold]
#[inline(never)]
fn unanswered(mut tag: Tag<Call>) {
    tag.parts().0.through.run.fail(EIO);
}

#[cold]
#[inline(never)]
fn milestone(mut tag: Tag<Call>) {
    let (request, waiting) = tag.parts();
    if waiting.left != 0 {
        return request.through.run.tick();
    }
    let through = request.through.clone();
    // There is room for all.
    let kept = through.tags.lock().push_within_capacity(tag);
    drop(kept);
    through.run.ended();
}

impl Caller {
    /// Posts the request of a tag.
    #[inline]
    fn start(&self, tag: Tag<Call>) {
        let id = u64::from(tag.id().to_u32());
        let posted = if self.registers {
            tag.post(&self.qp, |request, chain: &mut Chain<'_, 2>| {
                let remote = chain.push(RegWr::remote_write(&request.region))?;
                let message = u64::from(remote.rkey) << 32 | id;
                request.message.write(0, &message.to_le_bytes())?;
                chain.push(SendWr::send([request.message.whole()]))
            })
        } else {
            tag.post(&self.qp, |request, chain: &mut Chain<'_, 1>| {
                request.message.write(0, &id.to_le_bytes())?;
                chain.push(SendWr::send([request.message.whole()]))
            })
        };
        if let Err(e) = posted {
            self.run.fail(e.error());
        }
    }
}

impl RecvHandler for Caller {
    type Send = AnyContext;
    type Recv = AnyContext;
    type Needs = context::Atomic;

    #[inline]
    fn qp(&self) -> &Qp {
        &self.qp
    }

    /// An answer has come: its exchange ends, and another begins. On the null device a send has
    /// completed before its answer comes.
    #[inline]
    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let wc = *message.wc();
        let (caller, bytes) = message.open();
        let id = bytes.get(..4).and_then(|id| id.try_into().ok());
        let id = TagId::from_u32(id.map_or(u32::MAX, u32::from_le_bytes));
        let Ok(mut reply) = caller.tags.reply(&wc, id) else {
            return caller.run.fail(EPROTO);
        };
        let region = &reply.request().region;
        reply.answered = !caller.registers || region.remote_invalidated(&wc, &caller.qp);
        drop(reply);
        if let Ok(tag) = caller.tags.take() {
            caller.start(tag);
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, error: WcError) {
        self.run.fail(error.into());
    }

    fn refused(self: ArcBorrow<'_, Self>, error: Error) {
        self.run.fail(error);
    }
}

/// The uses of an [`Answer`] as a request.
const CAME: u64 = 0;
const SENT: u64 = 1;

/// A receive of the other end, which is sent back.
#[derive(HasCqe)]
struct Answer {
    came: Cqe<Self, CAME>,
    sent: Cqe<Self, SENT>,
    buf: Buf<Bidirectional>,
    qp: Qp,
    run: Arc<Run>,
}

impl Answer {
    #[inline]
    fn recv_wr(&self) -> Result<RecvWr<'_, 1, CAME>> {
        Ok(RecvWr::new([self.buf.whole_mut()]).done_by())
    }

    #[inline]
    fn came(mut self: Pin<KBox<Self>>, wc: &Wc) {
        let len = match wc.result() {
            Ok(wc) => wc.byte_len(),
            Err(e) => return self.failed(e.into()),
        };
        if len < MESSAGE {
            return self.failed(EPROTO);
        }
        let key = self
            .buf
            .cpu()
            .get(4..MESSAGE)
            .and_then(|key| key.try_into().ok());
        let key = key.map_or(0, u32::from_le_bytes);
        let posted = Qp::repost_send(
            self,
            wc,
            |answer| &answer.qp,
            |answer| {
                let send = SendWr::send([answer.buf.whole()]).done_by::<SENT>();
                Ok(if key == 0 {
                    send
                } else {
                    send.invalidating(key)
                })
            },
        );
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[inline]
    fn sent(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.failed(e.into());
        }
        let posted = Qp::repost_recv(self, wc, |answer| &answer.qp, Self::recv_wr);
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
        if let Some(answer) = e.owner {
            answer.failed(error);
        }
    }
}

impl CqeHandler<CAME> for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.came(wc);
    }
}

impl CqeHandler<SENT> for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.sent(wc);
    }
}

/// Has the other end answer.
fn answer(args: &Args<'_>, b: &End, run: &Arc<Run>, cx: &Sleepable) -> Result {
    let qp = b.qps.first().ok_or(EINVAL)?;
    for _ in 0..args.receives() {
        let answer = KBox::new_uninit(GFP_KERNEL)?;
        let buf = Buf::alloc(&b.pd, args.size, cx)?;
        let answer = answer.write(Answer {
            came: Cqe::new(),
            sent: Cqe::new(),
            buf,
            qp: qp.clone(),
            run: run.clone(),
        });
        qp.post_recv(Pin::from(answer), Answer::recv_wr)?;
    }
    Ok(())
}

/// Does `count` exchanges, in all tags.
fn phase(
    args: &Args<'_>,
    (a, b): (&End, &End),
    caller: &Caller,
    through: &Through,
    count: u32,
    figures: &mut Figures,
) -> Result {
    through.tags.lock().clear();
    let lanes = args.depth.min(count);
    let mut tags = KVec::with_capacity(lanes as usize, GFP_KERNEL)?;
    for times in shares(count, lanes) {
        let mut tag = caller.tags.take()?;
        tag.parts().1.left = times;
        tags.push_within_capacity(tag)?;
    }
    caller.run.begin(lanes);
    let began = Instant::now();
    if lanes == 0 {
        return Ok(());
    }
    for tag in tags {
        caller.start(tag);
    }
    let there = handlers(args.context, &a.cq, args.depth);
    let back = handlers(args.context, &b.cq, args.depth);
    figures.ns = caller.run.wait(began, &there, &back)?;
    figures.ops = count.into();
    figures.posts = figures.ops.saturating_mul(2);
    figures.completions = figures.posts.saturating_mul(2);
    Ok(())
}

fn call(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [a, b] = ends else { return Err(EINVAL) };
    link::connect(a, b, args.timeout, cx)?;
    let qp = a.qps.first().ok_or(EINVAL)?.clone();
    let spare = KVec::with_capacity(args.depth as usize, GFP_KERNEL)?;
    let through = pin_init!(Through {
        tags <- new_spinlock_irq!(spare),
        run: run.clone(),
    });
    let through = Arc::pin_init(through, GFP_KERNEL)?;
    let init = |_| {
        let request = Request {
            message: Buf::alloc(&a.pd, args.size, cx)?,
            region: Region::new(Buf::alloc(&a.pd, PAGE_SIZE, cx)?, cx)?,
            through: through.clone(),
        };
        let waiting = Waiting {
            answered: false,
            left: 0,
        };
        Ok((request, waiting))
    };
    let caller = Caller {
        tags: Tags::new(&qp, (), args.depth, BITS, init, cx)?,
        qp,
        run: run.clone(),
        registers: args.load == Load::CallRate,
    };
    let caller = Arc::new(caller, GFP_KERNEL)?;
    let ring = RecvRing {
        pd: &a.pd,
        count: args.receives(),
        len: args.size,
    };
    ring.post(&caller, cx)?;
    answer(args, b, run, cx)?;
    let figures = &mut report.figures;
    let done = phase(args, (a, b), &caller, &through, args.warmup, figures)
        .and_then(|()| phase(args, (a, b), &caller, &through, args.count, figures));
    // Nothing is out, or it ends now.
    let reclaimed = caller.tags.reclaim(&caller.qp, cx);
    // These keep the requests, which have references to the list.
    let tags = core::mem::take(&mut *through.tags.lock());
    drop(tags);
    done.and(reclaimed)
}

pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    if matches!(args.context, Context::Batch | Context::Static) || args.size < MESSAGE {
        return Err(EINVAL);
    }
    // A call is a registration and a message.
    let caps = Caps::new(args.depth.saturating_mul(2), args.receives());
    between(client, args, 1, &[caps, caps], call, report, cx)
}
