// SPDX-License-Identifier: GPL-2.0

//! The steps, one of which is taken at a time.
//!
//! A step may fail: queues are full, requests are refused, QPs have failed, the device goes. What
//! it must not do is to lose an owner, or to get one twice; [`Life`] sees that. To add one, write a
//! function of a [`Turn`] and add it to [`Turn::STEPS`].

use crate::{
    faults,
    lost,
    owners::{
        none_posted,
        refused,
        Again,
        Awaited,
        Back,
        How,
        Memory,
        Message,
        Own,
        Reused,
        Shared,
        Transfer, //
    },
    rng::Rng,
    session,
    slow,
    talk,
    tally::Life,
    transfers,
    way::Way,
    world::{
        calm,
        Pair,
        World,
        LEN,
        QKEY, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    op::Op,
    prelude::*,
    qp::{
        Attr,
        Chain, //
    },
    ud::UdWr, //
};
use rdma_null::Injection;

/// The number of times that a thread looks for a completion before it is taken for lost.
pub(crate) const LOST: u32 = 100_000;

/// One thread's part in a world.
pub(crate) struct Turn<'a, C: Way> {
    pub(crate) world: &'a World<C>,
    pub(crate) rng: Rng,
    /// Arrays of requests, each with the number of its QP.
    pub(crate) kept: KVec<(u32, Requests<Reused>)>,
    /// Transfers that it has prepared.
    pub(crate) prepared: KVec<transfers::Prepared<C>>,
    pub(crate) cx: &'a Sleepable,
}

type End<C> = Qp<C>;
type Shareable = SharedRegion<Bidirectional>;

/// A step, and how often it is taken compared to others.
type Step<C> = (&'static str, u32, fn(&mut Turn<'_, C>) -> Result);

impl<C: Way> Turn<'_, C> {
    pub(crate) const STEPS: &'static [Step<C>] = &[
        ("poll", 60, C::poll),
        ("send", 40, send),
        ("recv", 30, recv),
        ("repost", 20, repost),
        ("start", 20, start),
        ("chain", 10, chain),
        ("batch", 10, batch),
        ("register", 10, register),
        ("invalidate", 10, invalidate),
        ("access", 20, access),
        ("own region", 10, own_region),
        ("transfer", 4, transfer),
        ("prepared", 8, transfers::prepared),
        ("staged", 6, transfers::staged),
        ("list", 6, transfers::list),
        ("vector", 4, transfers::vector),
        ("ask", 30, talk::ask),
        ("answer", 10, talk::answer),
        ("note", 15, talk::note),
        ("context", 10, C::context),
        ("slow handler", 3, slow::handler),
        ("end in a handler", 1, C::end_in_handler),
        ("operation", 10, operation),
        ("srq", 10, srq),
        ("slot", 4, slot),
        ("datagram", 10, datagram),
        ("status", 4, faults::status),
        ("refuse", 4, faults::refuse),
        ("late", 4, faults::late),
        ("stall", 2, faults::stall),
        ("arm", 2, faults::arm),
        ("peek", 1, faults::peek),
        ("event", 2, faults::event),
        ("creation", 1, faults::creation),
        ("failure", 1, faults::failure),
        ("modify", 1, faults::modify),
        ("error state", 1, error_state),
        ("drain", 1, drain),
        ("new pair", 2, new_pair),
        ("new SRQ pair", 1, new_srq_pair),
        ("other CQ", 1, other_cq),
        ("own CQ", 2, own_cq),
        ("ring", 1, talk::ring),
        ("lost", 1, lost::completion),
        ("reclaim", 1, talk::reclaim),
        ("close", 1, talk::close),
        ("new session", 1, talk::new_session),
    ];

    /// Takes a step, and returns which, and whether it could be done.
    pub(crate) fn step(&mut self) -> (usize, bool) {
        let mut left = self.rng.below(Self::STEPS.iter().map(|step| step.1).sum());
        for (index, (_, share, step)) in Self::STEPS.iter().enumerate() {
            match left.checked_sub(*share) {
                Some(less) => left = less,
                None => return (index, step(self).is_ok()),
            }
        }
        (0, false)
    }

    pub(crate) fn pair(&mut self) -> Result<Arc<Pair<C>>> {
        self.world.pair(&mut self.rng, self.cx)
    }

    /// Returns an end of a pair.
    pub(crate) fn end(&mut self) -> Result<End<C>> {
        let index = self.rng.below(2) as usize;
        self.pair()?.ends.get(index).cloned().ok_or(EINVAL)
    }

    /// Returns an end of a pair that an owner will have, too.
    pub(crate) fn held_end(&mut self) -> Result<(Arc<Pair<C>>, End<C>)> {
        let (pair, index) = (self.pair()?, self.rng.below(2) as usize);
        let end = pair.ends.get(index).ok_or(EINVAL)?.clone();
        pair.hold()?;
        Ok((pair, end))
    }

    /// Returns a region of a pair, and the end that the other may access it by.
    fn region(&mut self) -> Result<(Arc<Shareable>, End<C>)> {
        let index = self.rng.below(2) as usize;
        let pair = self.pair()?;
        let region = pair.regions.get(index).ok_or(EINVAL)?;
        let end = pair.ends.get(index).ok_or(EINVAL)?;
        Ok((region.clone(), end.clone()))
    }

    pub(crate) fn memory(&self) -> Result<Memory> {
        Memory::alloc(&self.world.parts.pd, LEN, self.cx)
    }

    pub(crate) fn life(&self) -> Life {
        Life::new(&self.world.tally)
    }

    /// Returns an end of a pair that something may be posted to in part.
    pub(crate) fn end_for_parts(&mut self) -> Result<(Arc<Pair<C>>, End<C>)> {
        let (pair, index) = (self.pair()?, self.rng.below(2) as usize);
        if !pair.in_part {
            return Err(EOPNOTSUPP);
        }
        let end = pair.ends.get(index).ok_or(EINVAL)?.clone();
        Ok((pair, end))
    }

    pub(crate) fn message(&self) -> Result<Pin<KBox<Message>>> {
        Message::new(self.memory()?, None, self.life())
    }
}

fn send<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (qp, message) = (t.end()?, t.message()?);
    let (kind, imm) = (t.rng.below(4), t.rng.next() as u32);
    message.life.post();
    let posted = qp.post_send(message, |m| {
        let wr = m.send()?;
        Ok(match kind {
            0 => wr.with_imm(imm),
            1 => wr.solicited(),
            2 => wr.fenced(),
            _ => wr,
        })
    });
    posted.map_err(|e| refused(e, |m| &m.life))
}

fn recv<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (qp, message) = (t.end()?, t.message()?);
    message.life.post();
    qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))
        .map_err(|e| refused(e, |m| &m.life))
}

fn repost<C: Way>(t: &mut Turn<'_, C>) -> Result {
    // The pair ends after the post.
    let (_pair, qp) = t.held_end()?;
    let how = t.rng.one_of(&[How::Send, How::Recv]).ok_or(EINVAL)?;
    let owner = Again::new(t.memory()?, &qp, t.rng.below(8), how, t.life())?;
    owner.life.post();
    match how {
        How::Recv => qp.post_recv(owner, Again::recv),
        _ => qp.post_send(owner, Again::send),
    }
    .map_err(|e| refused(e, |o| &o.life))
}

fn start<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let qp = t.end()?;
    let is_of = |kept: &(u32, Requests<Reused>)| kept.0 == qp.num();
    if t.kept.len() < 4 && !t.kept.iter().any(is_of) {
        let count = 1 + t.rng.below(3) as usize;
        let make = |_| Ok(Reused::new(t.memory()?, t.life()));
        let requests = Requests::new(&qp, count, make, t.cx)?;
        t.kept.push((qp.num(), requests), GFP_KERNEL)?;
    }
    if t.rng.once_in(8) {
        let index = t.rng.below(t.kept.len() as u32) as usize;
        // Some may be in flight.
        drop(t.kept.remove(index).map_err(|_| EINVAL)?);
        return Ok(());
    }
    // Another QP refuses them, in such kernels.
    let any = cfg!(debug_assertions) && t.rng.once_in(8);
    let kept = t.kept.iter_mut().find(|kept| any || is_of(kept));
    let request = kept.and_then(|(_, kept)| kept.take()).ok_or(EBUSY)?;
    request.life.post();
    qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))
        .map_err(|e| refused(e, |r| &r.life))
}

/// Adds the message a few times.
fn links<'a>(m: &'a Message, chain: &mut Chain<'a, 4>, count: u32) -> Result {
    (0..count).try_for_each(|_| chain.push(m.send()?))
}

fn chain<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let ((_pair, qp), message) = (t.end_for_parts()?, t.message()?);
    let count = 1 + t.rng.below(4);
    message.life.post_in_part();
    let posted = qp.post_chain(message, |m, chain: &mut Chain<'_, 4>| {
        links(m, chain, count)
    });
    posted.map_err(|e| {
        let error = e.error();
        none_posted(e.owner, |m| &m.life);
        error
    })
}

fn batch<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let ((_pair, qp), message) = (t.end_for_parts()?, t.message()?);
    let count = 1 + t.rng.below(4);
    message.life.post_in_part();
    let mut batch = qp.batch(message);
    for _ in 0..t.rng.below(3) {
        batch.post(|m, chain: &mut Chain<'_, 4>| links(m, chain, count))?;
    }
    if t.rng.once_in(4) {
        none_posted(batch.into_error(ECANCELED).owner, |m| &m.life);
        return Ok(());
    }
    let finished = batch.finish(|m, chain: &mut Chain<'_, 4>| links(m, chain, count));
    finished.inspect_err(|e| none_posted(batch.into_error(*e).owner, |m| &m.life))
}

fn register<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pair, index) = (t.pair()?, t.rng.below(2) as usize);
    let (Some(region), Some(qp)) = (pair.regions.get(index), pair.ends.get(index)) else {
        return Err(EINVAL);
    };
    let owner = Shared::new(region, t.life())?;
    owner.life.post();
    let remote = qp
        .post_send(owner, |o| Ok(RegWr::remote_read_write(&*o.region)))
        .map_err(|e| refused(e, |o| &o.life))?;
    pair.set_remote(index, remote);
    Ok(())
}

fn invalidate<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (region, qp) = t.region()?;
    let owner = Shared::new(&region, t.life())?;
    owner.life.post();
    qp.post_send(owner, |o| Ok(InvWr::new(&*o.region)))
        .map_err(|e| refused(e, |o| &o.life))
}

/// Accesses the peer's region, or has it invalidated.
fn access<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pair, message) = (t.pair()?, t.message()?);
    let ([qp, _], [_, region]) = (&pair.ends, &pair.regions);
    if region.is_idle() {
        return Err(ENOKEY);
    }
    let (remote, kind) = (pair.remote(1).ok_or(EINVAL)?, t.rng.below(4));
    message.life.post();
    let posted = qp.post_send(message, |m| {
        Ok(match kind {
            0 => SendWr::rdma_write([m.buf.whole()], remote),
            1 => SendWr::rdma_write([m.buf.whole()], remote).with_imm(1),
            2 => SendWr::rdma_read([m.buf.whole_mut()], remote),
            _ => SendWr::send([m.buf.whole()]).invalidating(remote.rkey),
        })
    });
    posted.map_err(|e| refused(e, |m| &m.life))
}

fn own_region<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_pair, qp) = t.held_end()?;
    let owner = Own::new(Region::new(t.memory()?, t.cx)?, &qp, t.life())?;
    owner.life.post();
    qp.post_send(owner, |o| Ok(RegWr::remote_write(&o.region)))
        .map_err(|e| refused(e, |o| &o.life))?;
    Ok(())
}

fn transfer<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (_pair, qp) = t.end_for_parts()?;
    let owner = Transfer::new(9 * PAGE_SIZE, t.life(), t.cx)?;
    owner.life.post_in_part();
    qp.post_rw(owner, |o| o.write(session::NOWHERE, t.cx))
        .map_err(|e| {
            let error = e.error();
            none_posted(e.owner, |o| &o.life);
            error
        })
}

fn operation<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (qp, write) = (t.end()?, t.rng.once_in(2));
    // Its handler, which drops it, is the crate's: only its end is counted.
    let op = Op::<Life>::new(t.memory()?, t.life(), t.cx)?;
    let posted = match write {
        true => op.send(&qp, 0..LEN),
        false => op.recv(&qp, 0..LEN),
    };
    Ok(posted?)
}

fn srq<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (srq_pair, message) = (t.world.srq_pair(&mut t.rng, t.cx)?, t.message()?);
    // Whether the slot that it comes to is kept.
    message.buf.write(0, &[t.rng.once_in(4).into()])?;
    message.life.post();
    srq_pair
        .from
        .post_send(message, Message::send)
        .map_err(|e| refused(e, |m| &m.life))
}

/// Gives back a slot that was kept, with a transfer that is prepared, maybe.
fn slot<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let slot = t.world.shelf.take().ok_or(ENODATA)?;
    match t.rng.once_in(4) {
        true => {
            let srq_pair = t.world.srq_pair(&mut t.rng, t.cx)?;
            session::prepare(&srq_pair.from, &slot.data, t.cx)
        }
        false => Ok(()),
    }
}

fn datagram<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (qp, to) = t.world.datagrams.as_ref().ok_or(EOPNOTSUPP)?;
    let message = Message::new(t.memory()?, Some(to.clone()), t.life())?;
    message.life.post();
    match t.rng.once_in(2) {
        true => qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()]))),
        false => qp.post_send(message, |m| {
            let to = m.to.as_ref().ok_or(EINVAL)?;
            Ok(UdWr::new([m.buf.whole()], to, qp.num(), QKEY))
        }),
    }
    .map_err(|e| refused(e, |m| &m.life))
}

fn error_state<C: Way>(t: &mut Turn<'_, C>) -> Result {
    t.end()?.modify(Attr::Error, t.cx)
}

/// What is held back is released all the time, so the end comes.
fn drain<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let drained = t.end()?.drain(t.cx);
    if drained == Err(ETIMEDOUT) {
        t.world.tally.wrong("a drain has waited for a minute");
    }
    drained
}

fn new_pair<C: Way>(t: &mut Turn<'_, C>) -> Result {
    t.world.forget_pair(&mut t.rng);
    Ok(())
}

fn new_srq_pair<C: Way>(t: &mut Turn<'_, C>) -> Result {
    t.world.forget_srq_pair();
    Ok(())
}

/// A CQ that ends at once, with what a QP on it has. One of the posts may fail and be done all the
/// same, as with siw; transfers, which may be in part then, are not for such a QP.
fn other_cq<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pd, caps) = (&t.world.parts.pd, Caps::new(2, 2));
    let pool = t.world.pools;
    let cq = C::make(&t.world.dev, caps.entries(), pool, &mut t.rng, t.cx)?;
    let qp = Qp::create_raw(pd, &cq, &cq, &caps, t.cx)?;
    if let Ok(null) = t.world.null() {
        faults::lone(null, qp.num(), &mut t.rng)?;
    }
    let posted = (0..2).try_for_each(|_| {
        let message = t.message()?;
        message.life.post();
        qp.post_send(message, Message::send)
            .map_err(|e| refused(e, |m| &m.life))
    });
    if t.rng.once_in(2) {
        C::leave(&cq, t.world)?;
    }
    if let Ok(null) = t.world.null() {
        calm(null, qp.num());
    }
    match t.rng.once_in(2) {
        true => qp.destroy(t.cx).and(posted),
        false => posted,
    }
}

/// A CQ of this thread alone: no other thread wakes it up, and it ends when all posts are back.
fn own_cq<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pd, caps, null) = (&t.world.parts.pd, Caps::new(4, 4), t.world.null()?);
    let cq = C::make(&t.world.dev, caps.entries(), false, &mut t.rng, t.cx)?;
    let qp = Qp::create_raw(pd, &cq, &cq, &caps, t.cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let way = t.rng.below(3);
    if way == 0 {
        // For longer than it takes to end the CQ.
        let (us, count) = (t.rng.below(20_000), 1 + t.rng.below(3));
        let honest = false;
        null.inject(Injection::Arm { us, count, honest })?;
    }
    // The completions of all but one come, as the round releases them, while the CQ is being armed.
    let meanwhile = way == 1;
    if meanwhile {
        let us = t.rng.below(5_000);
        let (count, honest) = (2, true);
        null.inject(Injection::Arm { us, count, honest })?;
    }
    let back = Back::new()?;
    for n in 0..1 + t.rng.below(4) {
        if meanwhile && n > 0 {
            null.inject_qp(qp.num(), Injection::Hold { count: 1 })?;
        }
        let message = Awaited::new(t.memory()?, &back, t.life())?;
        message.life.post();
        qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))
            .map_err(|e| refused(e, |m| &m.life))?;
        back.post();
    }
    for turn in 0.. {
        if back.is_all() {
            break;
        }
        if turn == LOST {
            t.world.tally.wrong("a completion does not come");
            break;
        }
        C::settle(&cq);
        fsleep(Delta::from_micros(100));
    }
    if t.world.in_part {
        give_up_batch(t, &qp)?;
    }
    qp.destroy(t.cx)
}

/// Gives a batch up of a QP of this thread alone: it is not drained, so the owner stays. The null
/// device is done with memory when the post returns, so KASAN would not see that it has gone.
fn give_up_batch<C: Way>(t: &mut Turn<'_, C>, qp: &Qp<C>) -> Result {
    let back = Back::new()?;
    let message = Awaited::new(t.memory()?, &back, t.life())?;
    message.life.post_in_part();
    let mut batch = qp.batch(message);
    let _ = batch.post(|m, chain: &mut Chain<'_, 2>| {
        (0..2).try_for_each(|_| chain.push(SendWr::send([m.buf.whole()])))
    });
    let posted = batch.posted() > 0;
    let owner = batch.into_error(ECANCELED).owner;
    if posted && (owner.is_some() || back.is_any_dropped()) {
        t.world
            .tally
            .wrong("an owner that is posted came back early");
    }
    none_posted(owner, |m| &m.life);
    Ok(())
}
