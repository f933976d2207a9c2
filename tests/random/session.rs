// SPDX-License-Identifier: GPL-2.0

//! Two ends that ask each other, with what `rdma::session` has for that: tags, receives that are
//! posted again, credits, and sends of which few are signaled.

use crate::{
    net::Parts,
    owners::{
        nap,
        none_posted,
        refused,
        Memory, //
    },
    tally::{
        Life,
        Tally, //
    },
    way::Way,
    world::{
        calm,
        World,
        LEN, //
    },
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        SpinLockIrq, //
    },
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        SendRing,
        State, //
    },
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        tags::{
            Exchange,
            Tag,
            TagId,
            Tags, //
        },
        Kept,
        Received,
        RecvHandler,
        RecvRing,
        SendCredits, //
    },
    wc::Success, //
};
use rdma_null::NullDevice;

const TAGS: u32 = 6;
/// The bits of an exchange's number that the peer returns.
const BITS: u32 = 4;
/// The receives of an end, and the messages that its peer may send.
const RECVS: u32 = 8;
/// The owners in a ring, of which one in so many is signaled.
const OWNERS: u32 = 6;
const INTERVAL: u32 = 3;

/// The sizes of each end, whose queue is never full.
pub(crate) const CAPS: Caps = Caps::new(40, RECVS);

/// Where no memory is registered.
pub(crate) const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

/// What a message is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Nothing,
    Question,
    Answer,
}

/// How a question is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    Once,
    Twice,
    /// By one of the steps.
    Later,
    Never,
    /// As the next question of the tag, which may not be posted yet, and then rightly.
    Wrongly,
    /// And its region is invalidated.
    Invalidating,
}

impl How {
    pub(crate) const ALL: [Self; 8] = [
        Self::Once,
        Self::Once,
        Self::Twice,
        Self::Later,
        Self::Never,
        Self::Wrongly,
        Self::Invalidating,
        Self::Invalidating,
    ];
}

/// The first bytes of a message.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) how: How,
    /// The time that the handler of the message takes, in units of 4 microseconds.
    pub(crate) nap: u8,
    pub(crate) id: u32,
    /// The key of a region that is registered; or 0.
    pub(crate) rkey: u32,
}

impl Frame {
    const LEN: usize = 11;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [
            self.kind as u8,
            self.how as u8,
            self.nap,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ];
        for (to, from) in bytes.iter_mut().skip(3).zip(self.id.to_le_bytes()) {
            *to = from;
        }
        for (to, from) in bytes.iter_mut().skip(7).zip(self.rkey.to_le_bytes()) {
            *to = from;
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(word))
        };
        let how = |how: &How| *how as u8 == bytes.get(1).copied().unwrap_or(0);
        Some(Self {
            kind: match bytes.first()? {
                0 => Kind::Nothing,
                1 => Kind::Question,
                2 => Kind::Answer,
                _ => return None,
            },
            how: How::ALL.into_iter().find(how)?,
            nap: *bytes.get(2)?,
            id: word(3)?,
            rkey: word(7)?,
        })
    }
}

/// The part of an exchange that is posted.
pub(crate) struct Question {
    pub(crate) buf: Memory,
    region: Region<Bidirectional>,
    /// Of transfers that are prepared while the tag is held, and left so.
    pub(crate) data: Ctx,
    /// The time that the handler of the send takes, in microseconds.
    pub(crate) nap: u32,
}

impl Question {
    /// Adds the request that registers the region, if it is to, and one that sends the question.
    fn links<'a>(&'a self, chain: &mut Chain<'a, 2>, frame: Frame, registers: bool) -> Result {
        let rkey = match registers && self.region.is_idle() {
            true => chain.push(RegWr::remote_write(&self.region))?.rkey,
            false => 0,
        };
        self.buf.write(0, &Frame { rkey, ..frame }.to_bytes())?;
        chain.push(SendWr::send([self.buf.whole()]))
    }
}

/// The part of an exchange that waits for the answer.
pub(crate) struct Wanted {
    /// The id of the question.
    pub(crate) asked: u32,
    answered: Option<u32>,
    pub(crate) life: Life,
}

impl Wanted {
    /// A question is about to be posted.
    pub(crate) fn ask(&mut self, id: u32) {
        (self.asked, self.answered) = (id, None);
        self.life.post();
    }
}

pub(crate) struct Ask;

impl Exchange for Ask {
    type Request = Question;
    type Reply = Wanted;
    type Connection = ();
    type Needs = context::Atomic;

    const IN_TURN: bool = true;

    fn sent(request: &Question, _wc: &Wc, _cx: &context::Atomic) {
        nap(request.nap);
    }

    fn ended(mut tag: Tag<Self>) {
        let wanted = tag.parts().1;
        if wanted.answered.is_some_and(|id| id != wanted.asked) {
            wanted.life.wrong("a reply came to another question");
        }
        wanted.life.back();
    }
}

/// An answer, which is used again.
#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    buf: Memory,
    life: Life,
}

impl CqeHandler for Answer {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// A message of a ring.
#[derive(HasCqe)]
pub(crate) struct Note {
    cqe: Cqe<Self>,
    buf: Memory,
    /// Of a transfer that is prepared, and left so.
    _data: Option<Ctx>,
    pub(crate) life: Life,
}

impl Note {
    pub(crate) fn new(buf: Memory, data: Option<Ctx>, life: Life) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            buf,
            _data: data,
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    /// Adds a request that writes nothing to the peer, or none, and one that sends the message.
    pub(crate) fn links<'a>(&'a self, chain: &mut Chain<'a, 2>, both: bool, sends: bool) -> Result {
        if both {
            chain.push(SendWr::rdma_write([], NOWHERE))?;
        }
        match sends {
            true => chain.push(SendWr::send([self.buf.whole()])),
            false => chain.push(SendWr::rdma_write([], NOWHERE)),
        }
    }
}

impl CqeHandler for Note {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// A ring of sends.
pub(crate) type Ring = SendRing<Pin<KBox<Note>>>;

/// One end.
#[pin_data]
pub(crate) struct Conn<C: Way> {
    pub(crate) qp: Qp<C>,
    pub(crate) tags: Tags<Ask>,
    #[pin]
    pub(crate) ring: SpinLockIrq<Option<Ring>>,
    /// Messages that are not answered yet; `None` from when the session ends.
    #[pin]
    kept: SpinLockIrq<Option<KVec<Kept<Self>>>>,
    #[pin]
    answers: SpinLockIrq<Requests<Answer>>,
    /// The messages that this end, and that the other may send.
    pub(crate) credits: Arc<SendCredits>,
    granted: Arc<SendCredits>,
    /// `true` if the session must no longer be used.
    over: Atomic<bool>,
    /// `true` if the context of the QP may have that. Otherwise it stays until the QP ends.
    pub(crate) keeps_itself: Atomic<bool>,
    tally: Arc<Tally>,
    /// Each receive keeps this.
    _life: Life,
}

impl<C: Way> Conn<C> {
    pub(crate) fn new(
        qp: &Qp<C>,
        credits: &Arc<SendCredits>,
        granted: &Arc<SendCredits>,
        world: &World<C>,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let tally = &world.tally;
        let tags = Tags::new(qp, (), TAGS, BITS, |_| Self::exchange(world, cx), cx)?;
        let ring = SendRing::new(qp, OWNERS, INTERVAL, cx)?;
        let kept = KVec::with_capacity(RECVS as usize, GFP_KERNEL)?;
        let answer = |_| {
            Ok(Answer {
                cqe: Cqe::new(),
                buf: Memory::alloc(&world.parts.pd, LEN, cx)?,
                life: Life::new(tally),
            })
        };
        let answers = Requests::new(qp, RECVS as usize, answer, cx)?;
        let init = pin_init!(Self {
            qp: qp.clone(),
            tags,
            ring <- new_spinlock_irq!(Some(ring)),
            kept <- new_spinlock_irq!(Some(kept)),
            answers <- new_spinlock_irq!(answers),
            credits: credits.clone(),
            granted: granted.clone(),
            over: Atomic::new(false),
            keeps_itself: Atomic::new(false),
            tally: tally.clone(),
            _life: Life::new(tally),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Makes both parts of an exchange.
    pub(crate) fn exchange(world: &World<C>, cx: &Sleepable) -> Result<(Question, Wanted)> {
        let memory = || Memory::alloc(&world.parts.pd, LEN, cx);
        let question = Question {
            buf: memory()?,
            region: Region::new(memory()?, cx)?,
            data: Ctx::alloc(LEN, cx)?,
            nap: 0,
        };
        let wanted = Wanted {
            asked: 0,
            answered: None,
            life: Life::new(&world.tally),
        };
        Ok((question, wanted))
    }

    /// Posts a question. One in `interval` is signaled; all are, if it is 0, and bring no other
    /// home.
    pub(crate) fn ask(
        &self,
        tag: Tag<Ask>,
        frame: Frame,
        registers: bool,
        interval: u32,
    ) -> Result {
        let posted = match interval {
            0 => tag.post(&self.qp, |question, chain| {
                question.links(chain, frame, registers)
            }),
            _ => tag.post_in_turn(&self.qp, interval, |question, chain| {
                question.links(chain, frame, registers)
            }),
        };
        posted.map_err(|mut e| {
            if let Some(tag) = &mut e.owner {
                tag.parts().1.life.refused();
            }
            e.error()
        })
    }

    /// Posts a message by the ring.
    pub(crate) fn note(&self, note: Pin<KBox<Note>>, both: bool) -> Result {
        let posted = match &mut *self.ring.lock() {
            Some(ring) => ring.post(&self.qp, note, |note, chain: &mut Chain<'_, 2>| {
                note.links(chain, both, true)
            }),
            None => {
                note.life.refused();
                return Err(ESHUTDOWN);
            }
        };
        posted.map_err(|e| {
            let error = e.error();
            none_posted(e.owner, |note| &note.life);
            error
        })
    }

    /// Answers a question.
    fn answer(&self, to: &Frame, id: u32, rkey: u32) -> Result {
        let credit = self.credits.take()?;
        let answer = self.answers.lock().take();
        let answer = answer.ok_or(EBUSY)?;
        let frame = Frame {
            kind: Kind::Answer,
            id,
            ..*to
        };
        answer.buf.write(0, &frame.to_bytes())?;
        answer.life.post();
        credit.spend(|| {
            let posted = self.qp.post_send(answer, |answer| {
                let wr = SendWr::send([answer.buf.whole()]);
                Ok(match rkey {
                    0 => wr,
                    rkey => wr.invalidating(rkey),
                })
            });
            posted.map_err(|e| refused(e, |answer| &answer.life))
        })
    }

    /// Answers a question as it asks for. What is not answered is as if it never came.
    fn answer_all(&self, frame: &Frame) {
        let next = frame.id.wrapping_add(1 << 16) & ((1 << (16 + BITS)) - 1);
        let (ids, rkey) = match frame.how {
            How::Never => return,
            How::Once | How::Later => ([Some(frame.id), None], 0),
            How::Twice => ([Some(frame.id); 2], 0),
            How::Wrongly => ([Some(next), Some(frame.id)], 0),
            How::Invalidating => ([Some(frame.id), None], frame.rkey),
        };
        for id in ids.into_iter().flatten() {
            let _ = self.answer(frame, id, rkey);
        }
    }

    /// Answers a question that was kept.
    pub(crate) fn answer_kept(&self) -> Result {
        let kept = match &mut *self.kept.lock() {
            Some(kept) => kept.pop(),
            None => None,
        };
        let mut kept = kept.ok_or(ENODATA)?;
        if let Some(frame) = Frame::from_bytes(&kept.open().1) {
            self.answer_all(&frame);
        }
        drop(kept);
        self.granted.give(1)
    }

    /// Takes an answer, which may come twice, or be that of no question.
    fn answered(&self, wc: &Success<'_>, frame: &Frame) -> Result {
        let mut reply = self.tags.reply(wc, TagId::from_u32(frame.id))?;
        if reply.answered.replace(frame.id).is_some() {
            self.tally.wrong("a question was answered twice");
        }
        let region = &reply.request().region;
        if region.is_idle() || region.remote_invalidated(wc, &self.qp) {
            return Ok(());
        }
        let posted = reply.post(&self.qp, |question| Ok(InvWr::new(&question.region)));
        posted.map_err(|e| e.error())
    }

    /// Keeps a question to be answered later.
    fn keep(&self, message: Kept<Self>) {
        let refused = match &mut *self.kept.lock() {
            Some(kept) => kept.push_within_capacity(message).err().map(|e| e.0),
            None => Some(message),
        };
        if refused.is_some() {
            drop(refused);
            let _ = self.granted.give(1);
        }
    }

    /// The session must no longer be used.
    pub(crate) fn close(&self) {
        self.over.store(true, Relaxed);
        self.tags.close(ECONNRESET);
        self.credits.close(ECONNRESET);
    }

    /// Ends all that was posted.
    pub(crate) fn reclaim(&self, cx: &Sleepable) -> Result {
        self.over.store(true, Relaxed);
        self.tags.reclaim(&self.qp, cx)?;
        let ring = self.ring.lock().take();
        match ring {
            Some(mut ring) => ring.reclaim(&self.qp, cx, drop),
            None => Ok(()),
        }
    }

    fn is_broken(&self, cx: &Sleepable) -> bool {
        let is_ready = |info: rdma::qp::QpAttr| info.state == State::Rts;
        self.over.load(Relaxed) || !self.qp.query(cx).is_ok_and(is_ready)
    }

    /// Opens the circle of the receives, and of a context that has the QP.
    pub(crate) fn end(&self) {
        self.over.store(true, Relaxed);
        let kept = self.kept.lock().take();
        drop(kept);
        let Ok(cx) = Sleepable::current() else {
            return;
        };
        if self.keeps_itself.load(Relaxed) {
            let _ = self.qp.clear_context(&cx);
        }
        // What a handler has posted meanwhile is flushed before the second drain has ended.
        for _ in 0..2 {
            if self.qp.drain(&cx) == Err(ETIMEDOUT) {
                self.tally.wrong("the last drain has waited for a minute");
            }
        }
    }
}

impl<C: Way> RecvHandler for Conn<C> {
    type Send = C;
    type Recv = C;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<C> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let (wc, conn) = (*message.wc(), message.conn().clone());
        let frame = Frame::from_bytes(&message.open().1);
        if let Some(frame) = &frame {
            match frame.kind {
                Kind::Nothing => {}
                Kind::Question if frame.how == How::Later => return conn.keep(message.keep()),
                Kind::Question => conn.answer_all(frame),
                Kind::Answer => {
                    let _ = conn.answered(&wc, frame);
                }
            }
            nap(4 * u32::from(frame.nap));
        }
        // The receive is posted again, and then the peer may use it.
        drop(message);
        let _ = conn.granted.give(1);
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
        self.over.store(true, Relaxed);
        self.granted.close(ECONNRESET);
    }
}

/// Two ends.
pub(crate) struct Session<C: Way> {
    pub(crate) ends: [Arc<Conn<C>>; 2],
    /// `true` if no completion is held back. A drain takes a receive for lost that is behind its
    /// marker, as the completions of one queue come in order: only such QPs are drained.
    pub(crate) in_order: bool,
    null: Option<Arc<NullDevice>>,
}

impl<C: Way> Session<C> {
    /// Makes the tables of two QPs that are connected, and posts their receives.
    pub(crate) fn new(
        qps: &[Qp<C>; 2],
        in_order: bool,
        world: &World<C>,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let credits = || Arc::pin_init(SendCredits::new(RECVS, RECVS), GFP_KERNEL);
        let (ours, theirs) = (credits()?, credits()?);
        let [a, b] = qps;
        // What was posted ends with this, if the rest fails.
        let this = Self {
            ends: [
                Conn::new(a, &ours, &theirs, world, cx)?,
                Conn::new(b, &theirs, &ours, world, cx)?,
            ],
            in_order,
            null: world.null().ok().cloned(),
        };
        for conn in &this.ends {
            let Parts { pd, .. } = &*world.parts;
            let (count, len) = (RECVS, LEN);
            RecvRing { pd, count, len }.post(conn, cx)?;
        }
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    pub(crate) fn is_broken(&self, cx: &Sleepable) -> bool {
        self.ends.iter().any(|conn| conn.is_broken(cx))
    }
}

impl<C: Way> Drop for Session<C> {
    fn drop(&mut self) {
        for conn in &self.ends {
            if let Some(null) = &self.null {
                calm(null, conn.qp.num());
            }
        }
        for conn in &self.ends {
            conn.end();
        }
    }
}

/// Prepares a transfer that is left as it is, and which the QP must not wait for.
pub(crate) fn prepare<C: Way>(qp: &Qp<C>, data: &Ctx, cx: &Sleepable) -> Result {
    qp.prepare_rw(Rw::write(data, .., NOWHERE, cx))
}
