// SPDX-License-Identifier: GPL-2.0

//! The step of completions that never come. What the QP or the SRQ knows of ends with it all the
//! same: exchanges, rings, receives that are posted again, transfers and slots.
//!
//! A single owner is leaked then, and what is lost of a CQ whose completions were ever polled into
//! an array, as it may be there: so the QP has a CQ of its own.

use crate::{
    net::PORT,
    owners::{
        none_posted,
        refused,
        Message,
        Transfer, //
    },
    rng::Rng,
    session::{
        Ask,
        Conn,
        Note,
        Ring,
        CAPS,
        NOWHERE, //
    },
    steps::Turn,
    way::Way,
    world::{
        calm,
        LEN, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        InitAttr, //
    },
    session::{
        tags::Tags,
        RecvRing,
        SendCredits, //
    },
    srq::Srq, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// What is posted.
#[derive(Clone, Copy)]
enum Kind {
    Exchange,
    Ring,
    Receive,
    Transfer,
    Slot,
}

const KINDS: [Kind; 5] = [
    Kind::Exchange,
    Kind::Ring,
    Kind::Receive,
    Kind::Transfer,
    Kind::Slot,
];

/// Has a post be refused without a word about which request it was, or a completion of it not come.
/// What fails before it comes to the device loses nothing, nor may the drain of the QP then.
fn lose<R>(rng: &mut Rng, null: &NullDevice, num: u32, post: impl FnOnce() -> R) -> Result<R> {
    let injection = match rng.once_in(4) {
        true => Injection::Mute { after: 0, errno: 5 },
        false => Injection::Vanish { count: 1 },
    };
    null.inject_qp(num, injection)?;
    let posted = post();
    calm(null, num);
    Ok(posted)
}

/// A QP and a CQ of this thread alone; one of the completions does not come. Then both end.
pub(crate) fn completion<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let null = t.world.null()?.clone();
    let kind = t.rng.one_of(&KINDS).ok_or(EINVAL)?;
    if let Kind::Slot = kind {
        return slot(t, &null);
    }
    let pd = &t.world.parts.pd;
    let cq = C::make(&t.world.dev, 128, false, &mut t.rng, t.cx)?;
    let qp = InitAttr::new(pd, &cq, &cq, &CAPS)
        .rw_contexts(1, PORT)
        .create(t.cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    // Those before it, and behind it, come.
    send(t, &qp)?;
    let posted = post(t, kind, &null, &qp, &cq);
    let behind = send(t, &qp);
    C::settle(&cq);
    drop(qp);
    posted.and(behind)
}

fn send<C: Way>(t: &mut Turn<'_, C>, qp: &Qp<C>) -> Result {
    let message = t.message()?;
    message.life.post();
    qp.post_send(message, Message::send)
        .map_err(|e| refused(e, |m| &m.life))
}

fn post<C: Way>(
    t: &mut Turn<'_, C>,
    kind: Kind,
    null: &NullDevice,
    qp: &Qp<C>,
    cq: &Cq<C>,
) -> Result {
    let cx = t.cx;
    match kind {
        Kind::Exchange => {
            let tags = Tags::<Ask>::new(qp, (), 2, 0, |_| Conn::exchange(t.world, cx), cx)?;
            for n in 0..2 {
                let mut tag = tags.take()?;
                let id = tag.id().to_u32();
                tag.parts().1.ask(id);
                let interval = 1 + t.rng.below(2);
                let post = || {
                    tag.post_in_turn(qp, interval, |question, chain: &mut Chain<'_, 1>| {
                        chain.push(SendWr::send([question.buf.whole()]))
                    })
                };
                let posted = match n {
                    0 => lose(&mut t.rng, null, qp.num(), post)?,
                    _ => post(),
                };
                if let Err(mut e) = posted {
                    if let Some(tag) = &mut e.owner {
                        tag.parts().1.life.refused();
                    }
                }
            }
            match t.rng.once_in(2) {
                true => tags.reclaim(qp, cx),
                false => Ok(()),
            }
        }
        Kind::Ring => {
            let mut ring = Ring::new(qp, 4, 2, cx)?;
            for n in 0..4 {
                let note = Note::new(t.memory()?, None, t.life())?;
                note.life.post_in_part();
                let post = || {
                    ring.post(qp, note, |note, chain: &mut Chain<'_, 2>| {
                        note.links(chain, false, false)
                    })
                };
                let posted = match n {
                    1 => lose(&mut t.rng, null, qp.num(), post)?,
                    _ => post(),
                };
                if let Err(e) = posted {
                    none_posted(e.owner, |note| &note.life);
                }
            }
            match t.rng.once_in(2) {
                true => ring.reclaim(qp, cx, drop),
                false => Ok(()),
            }
        }
        Kind::Receive => {
            let credits = Arc::pin_init(SendCredits::new(0, 1), GFP_KERNEL)?;
            let conn = Conn::new(qp, &credits, &credits, t.world, cx)?;
            let (pd, count, len) = (&t.world.parts.pd, 1 + t.rng.below(4), LEN);
            let posted = RecvRing { pd, count, len }.post(&conn, cx);
            let count = 1 + t.rng.below(count);
            null.inject_qp(qp.num(), Injection::Vanish { count })?;
            null.inject_qp(qp.num(), Injection::Fail)?;
            calm(null, qp.num());
            // The others are being flushed.
            let released = match t.rng.once_in(2) {
                // They are freed with the QP, and are in no array then.
                true => qp.release_recvs(cx).and_then(|()| C::leave(cq, t.world)),
                false => {
                    conn.end();
                    Ok(())
                }
            };
            posted.and(released)
        }
        Kind::Transfer => {
            let owner = Transfer::new(LEN, t.life(), cx)?;
            owner.life.post_in_part();
            let post = || qp.post_rw(owner, |o| o.write(NOWHERE, cx));
            lose(&mut t.rng, null, qp.num(), post)?.map_err(|e| {
                let error = e.error();
                none_posted(e.owner, |o| &o.life);
                error
            })
        }
        Kind::Slot => Ok(()),
    }
}

/// The completion of a slot of an SRQ does not come: the slot ends with the SRQ.
fn slot<C: Way>(t: &mut Turn<'_, C>, null: &NullDevice) -> Result {
    let (parts, cx) = (&t.world.parts, t.cx);
    let srq = Srq::create(&parts.pd, 2, |_| t.world.recv_buf(cx), cx)?;
    let from = Qp::create_raw(
        &parts.pd,
        &parts.session_cq,
        &parts.session_cq,
        &Caps::new(4, 1),
        cx,
    )?;
    let cq = Cq::<Softirq>::alloc_any(&t.world.dev, 32, cx)?;
    let to = InitAttr::on_srq(&parts.pd, &cq, &srq, &Caps::new(2, 0)).create(cx)?;
    null.inject_qp(from.num(), Injection::Connect { peer: to.num() })?;
    null.inject_qp(to.num(), Injection::Connect { peer: from.num() })?;
    null.inject_qp(to.num(), Injection::Vanish { count: 1 })?;
    let posted = (0..2).try_for_each(|_| {
        let message = t.message()?;
        message.life.post();
        from.post_send(message, Message::send)
            .map_err(|e| refused(e, |m| &m.life))
    });
    calm(null, to.num());
    drop(srq);
    to.destroy(cx).and(posted)
}
