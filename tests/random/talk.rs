// SPDX-License-Identifier: GPL-2.0

//! The steps of sessions, and of rings and contexts of QPs.

use crate::{
    owners::{
        nap,
        none_posted,
        refused, //
    },
    session::{
        prepare,
        Conn,
        Frame,
        How,
        Kind,
        Note,
        Ring,
        Session,
        NOWHERE, //
    },
    steps::{
        Turn,
        LOST, //
    },
    tally::Life,
    way::Way,
    world::calm,
};
use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::{
            Full,
            Relaxed, //
        },
        Atomic, //
    },
    time::{
        delay::fsleep,
        Delta, //
    },
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        QpContext, //
    },
    rw::Ctx, //
};
use rdma_null::Injection;

/// A session, and an end of it.
type End<C> = (Arc<Session<C>>, Arc<Conn<C>>);

impl<C: Way> Turn<'_, C> {
    /// Returns a session, which lasts as long as this value, and an end of it.
    fn conn(&mut self) -> Result<End<C>> {
        let index = self.rng.below(2) as usize;
        let session = self.world.session(&mut self.rng, self.cx)?;
        let conn = session.ends.get(index).ok_or(EINVAL)?.clone();
        Ok((session, conn))
    }
}

/// Asks a question, or leaves a tag with a transfer that is prepared.
pub(crate) fn ask<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_session, conn) = t.conn()?;
    let mut tag = match t.rng.once_in(8) {
        true => conn.tags.wait(1, t.cx)?,
        false => conn.tags.take()?,
    };
    if t.rng.once_in(16) {
        let data = &mut tag.parts().0.data;
        if t.rng.once_in(2) {
            data.cancel();
        }
        return prepare(&conn.qp, data, t.cx);
    }
    let frame = Frame {
        kind: Kind::Question,
        how: t.rng.one_of(&How::ALL).ok_or(EINVAL)?,
        nap: if t.rng.once_in(8) { 50 } else { 0 },
        id: tag.id().to_u32(),
        rkey: 0,
    };
    let credit = conn.credits.take()?;
    let (question, wanted) = tag.parts();
    question.nap = if t.rng.once_in(16) { 100 } else { 0 };
    wanted.ask(frame.id);
    let registers = t.rng.once_in(2);
    let interval = t.rng.below(4);
    credit.spend(|| conn.ask(tag, frame, registers, interval))
}

/// Answers a question late.
pub(crate) fn answer<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_session, conn) = t.conn()?;
    conn.answer_kept()
}

/// Sends a message by a ring, which may have a transfer that is prepared.
pub(crate) fn note<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_session, conn) = t.conn()?;
    let data = match t.rng.once_in(16) {
        true => {
            let data = Ctx::alloc(8, t.cx)?;
            prepare(&conn.qp, &data, t.cx)?;
            Some(data)
        }
        false => None,
    };
    let note = Note::new(t.memory()?, data, t.life())?;
    let both = t.world.in_part && t.rng.once_in(2);
    let credit = conn.credits.take()?;
    note.life.post_in_part();
    credit.spend(|| conn.note(note, both))
}

/// Ends all that is posted of an end.
pub(crate) fn reclaim<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (session, conn) = t.conn()?;
    if !session.in_order {
        return Err(EOPNOTSUPP);
    }
    let ended = conn.reclaim(t.cx);
    if ended == Err(ETIMEDOUT) {
        t.world.tally.wrong("a drain has waited for a minute");
    }
    ended
}

pub(crate) fn close<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_session, conn) = t.conn()?;
    conn.close();
    Ok(())
}

pub(crate) fn new_session<C: Way>(t: &mut Turn<'_, C>) -> Result {
    t.world.forget_session(&mut t.rng);
    Ok(())
}

/// The context of a QP.
pub(crate) struct Found<C: Way> {
    num: u32,
    /// The handlers that have it.
    users: Atomic<i32>,
    _data: Option<Ctx>,
    _qp: Option<Qp<C>>,
    life: Life,
}

impl<C: Way> Drop for Found<C> {
    fn drop(&mut self) {
        if self.users.load(Relaxed) != 0 {
            self.life.wrong("a context was dropped that a handler has");
        }
    }
}

/// A request whose handler borrows the context of the QP.
#[derive(HasCqe)]
struct Borrower<C: Way> {
    cqe: Cqe<Self>,
    num: u32,
    us: u32,
    life: Life,
    _context: core::marker::PhantomData<fn() -> C>,
}

impl<C: Way + CorePolled> CqeHandler for Borrower<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = QpContext<Found<C>>;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &QpContext<Found<C>>) {
        this.life.back();
        let Some(found) = cx.get() else {
            return;
        };
        found.users.fetch_add(1, Full);
        if found.num != this.num {
            this.life
                .wrong("a handler has got the context of another QP");
        }
        nap(this.us);
        found.users.fetch_sub(1, Full);
    }
}

/// Has a handler borrow the context of a QP for so many microseconds.
fn borrow<C: Way + CorePolled>(qp: &Qp<C>, us: u32, life: Life) -> Result {
    let borrower = Borrower::<C> {
        cqe: Cqe::new(),
        num: qp.num(),
        us,
        life,
        _context: core::marker::PhantomData,
    };
    let borrower = KBox::pin(borrower, GFP_KERNEL)?;
    borrower.life.post();
    // Without its type the compiler takes `Needs` for what all contexts provide.
    qp.post_send::<Pin<KBox<Borrower<C>>>, _, _, 0, 0>(borrower, |_| {
        Ok(SendWr::rdma_write([], NOWHERE))
    })
    .map_err(|e| refused(e, |b| &b.life))
}

/// Sets the context of a QP, takes it away, or has a handler borrow it.
pub(crate) fn context<C: Way + CorePolled>(t: &mut Turn<'_, C>) -> Result {
    let (session, conn) = t.conn()?;
    let (qp, num) = (&conn.qp, conn.qp.num());
    match t.rng.below(16) {
        0..=2 => {
            let keeps = t.rng.once_in(2);
            let data = Ctx::alloc(8, t.cx)?;
            if t.rng.once_in(2) {
                prepare(qp, &data, t.cx)?;
            }
            let found = Found {
                num,
                users: Atomic::new(0),
                _data: Some(data),
                _qp: keeps.then(|| qp.clone()),
                life: t.life(),
            };
            let found = Arc::new(found, GFP_KERNEL)?;
            if keeps {
                conn.keeps_itself.store(true, Relaxed);
            }
            qp.set_context(found, t.cx)
        }
        // This drains the QP, so that it waits for the handler.
        3 if session.in_order => {
            borrow(qp, 500, t.life())?;
            qp.clear_context(t.cx)
        }
        _ => borrow(qp, if t.rng.once_in(8) { 200 } else { 0 }, t.life()),
    }
}

/// A ring on a CQ and a QP of this thread alone, of whose chains many are refused in part: it is
/// never full for good.
pub(crate) fn ring<C: Way>(t: &mut Turn<'_, C>) -> Result {
    if !t.world.in_part {
        return Err(EOPNOTSUPP);
    }
    let (pd, caps, null) = (&t.world.parts.pd, Caps::new(16, 1), t.world.null()?);
    let cq = C::make(&t.world.dev, caps.entries(), false, &mut t.rng, t.cx)?;
    let qp = Qp::create_raw(pd, &cq, &cq, &caps, t.cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let interval = 1 + t.rng.below(2);
    let owners = 2 * interval + t.rng.below(2);
    let mut ring = Ring::new(&qp, owners, interval, t.cx)?;
    for _ in 0..2 + t.rng.below(8) {
        if t.rng.once_in(2) {
            let (after, errno) = (t.rng.below(2), 5);
            null.inject_qp(qp.num(), Injection::Refuse { after, errno })?;
        }
        let note = Note::new(t.memory()?, None, t.life())?;
        let mut left = Some(note);
        for turn in 0.. {
            let Some(note) = left.take() else {
                break;
            };
            note.life.post_in_part();
            let posted = ring.post(&qp, note, |note, chain: &mut Chain<'_, 2>| {
                note.links(chain, true, false)
            });
            let Err(e) = posted else {
                break;
            };
            let is_full = e.error() == EAGAIN;
            match e.owner {
                Some(note) if is_full => {
                    note.life.refused();
                    left = Some(note);
                }
                owner => none_posted(owner, |note| &note.life),
            }
            if turn == LOST {
                t.world.tally.wrong("a ring stays full");
                break;
            }
            C::settle(&cq);
            if is_full {
                fsleep(Delta::from_micros(100));
            }
        }
    }
    calm(null, qp.num());
    match t.rng.once_in(2) {
        true => ring.reclaim(&qp, t.cx, drop)?,
        false => drop(ring),
    }
    qp.destroy(t.cx)
}
