// SPDX-License-Identifier: GPL-2.0

//! Requests that are posted together, and signaled at their end only.

use crate::fixture::{
    recv,
    send,
    wait,
    CountDrop,
    Counter,
    Env,
    Inbox,
    Message,
    Pair,
    RegOwner, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Attr,
        Chain, //
    }, //
};

const CAPS: Caps = Caps::new(8, 8);

/// Adds the message to a chain, as a SEND.
fn add<'a, const LINKS: usize>(m: &'a Message, chain: &mut Chain<'a, LINKS>) -> Result {
    chain.push(SendWr::send([m.buf.whole()]))
}

/// Adds the message three times.
fn thrice<'a>(m: &'a Message, chain: &mut Chain<'a, 3>) -> Result {
    add(m, chain)?;
    add(m, chain)?;
    add(m, chain)
}

/// Posts sends that find no receive until the queue has room for `room` more only, and returns
/// their number.
fn fill(pair: &Pair<Softirq>, inbox: &Arc<Inbox>, room: usize) -> Result<usize> {
    let size = pair.a.query(&pair.env.cx)?.caps.send_wr as usize;
    for _ in room..size {
        send(&pair.a, pair.env.message(inbox, &[0; 4])?)?;
    }
    Ok(size - room)
}

/// A registration and a message.
#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    region: Arc<SharedRegion<Bidirectional>>,
    sent: Arc<Counter>,
    _gone: CountDrop,
}

impl Io {
    fn new(env: &Env, sent: &Arc<Counter>, gone: &Arc<Counter>) -> Result<Pin<KBox<Self>>> {
        let region = Region::new(Buf::alloc(&env.pd, 64, &env.cx)?, &env.cx)?;
        let this = Self {
            cqe: Cqe::new(),
            buf: Buf::alloc(&env.pd, 16, &env.cx)?,
            region: Arc::new(region.into_shared(), GFP_KERNEL)?,
            sent: sent.clone(),
            _gone: CountDrop(gone.clone()),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if wc.result().is_ok_and(|wc| wc.opcode() == Opcode::Send) {
            this.sent.up();
        }
    }
}

#[kunit_tests(rdma_chain)]
mod tests {
    use super::*;

    #[test]
    fn all_arrive_and_the_owner_comes_back_once() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        for _ in 0..3 {
            recv(&pair.b, pair.env.message(&received, &[0; 4])?)?;
        }
        pair.a
            .post_chain(pair.env.message(&sent, &[7; 4])?, thrice)?;
        pair.wait(|| sent.len() == 1 && received.len() == 3)?;
        check_eq!(sent.pop()?.ok()?.opcode, Opcode::Send);
        for mut arrived in received.take() {
            check_eq!(arrived.bytes()?[..], [7; 4][..]);
        }
        check_eq!(sent.len(), 0);
        Ok(())
    }

    #[test]
    fn direct_cq_counts_the_last_only() -> Result {
        let pair = Pair::<Direct>::new(&CAPS)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        for _ in 0..3 {
            recv(&pair.b, pair.env.message(&received, &[0; 4])?)?;
        }
        pair.a
            .post_chain(pair.env.message(&sent, &[7; 4])?, thrice)?;
        let mut polled = 0;
        crate::fixture::wait(|| {
            polled += pair.cq.process(16);
            sent.len() == 1 && received.len() == 3
        })?;
        check_eq!(polled, 4);
        Ok(())
    }

    #[test]
    fn registration_and_message() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (received, written) = (Inbox::new()?, Inbox::new()?);
        let (sent, gone) = (Counter::new()?, Counter::new()?);
        recv(&pair.b, pair.env.message(&received, &[0; 16])?)?;
        let io = Io::new(&pair.env, &sent, &gone)?;
        let region = io.region.clone();
        pair.a.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
            let Remote { addr, rkey } = chain.push(RegWr::remote_write(&io.region))?;
            check_err!(io.buf.write(13, &[0; 4]), EINVAL);
            check_err!(io.buf.write(usize::MAX, &[0; 4]), EINVAL);
            io.buf.write(0, &addr.to_le_bytes())?;
            io.buf.write(8, &rkey.to_le_bytes())?;
            chain.push(SendWr::send([io.buf.whole()]))
        })?;
        pair.wait(|| received.len() == 1 && gone.get() == 1)?;
        check_eq!(sent.get(), 1);

        // The peer of the message can write now, at the address in it.
        let told = received.pop()?.bytes()?;
        let le = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        let remote = Remote {
            addr: le(&told[..8]),
            rkey: le(&told[8..12]) as u32,
        };
        let message = pair.env.message(&written, &[9; 64])?;
        pair.b
            .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
        pair.wait(|| written.len() == 1)?;
        written.pop()?.ok()?;
        let mut bytes = [0; 64];
        region.read(0, &mut bytes)?;
        check_eq!(bytes, [9; 64]);
        Ok(())
    }

    #[test]
    fn flushed_chain_comes_back_once() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        pair.a.modify(Attr::Error, &pair.env.cx)?;
        pair.a
            .post_chain(pair.env.message(&inbox, &[0; 4])?, thrice)?;
        pair.wait(|| inbox.len() == 1)?;
        pair.a.drain(&pair.env.cx)?;
        check!(inbox.pop()?.was_flushed());
        check_eq!(inbox.len(), 0);
        Ok(())
    }

    #[test]
    fn flush_in_the_middle_of_a_chain() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&pair.b, pair.env.message(&received, &[0; 4])?)?;
        pair.a
            .post_chain(pair.env.message(&sent, &[0; 4])?, thrice)?;
        // The first has a receive, the others wait for one.
        pair.wait(|| received.len() == 1)?;
        check_eq!(sent.len(), 0);
        pair.a.drain(&pair.env.cx)?;
        check_eq!(sent.len(), 1);
        check!(sent.pop()?.was_flushed());
        Ok(())
    }

    #[test]
    fn full_queue_gives_the_owner_back() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let others = fill(&pair, &inbox, 0)?;
        let io = Io::new(&pair.env, &Counter::new()?, &Counter::new()?)?;
        let posted = pair.a.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
            chain.push(RegWr::remote_write(&io.region))?;
            chain.push(SendWr::send([io.buf.whole()]))
        });
        let Err(e) = posted else {
            return Err(crate::check::fail("the chain was posted"));
        };
        check_eq!(e.error(), ENOMEM);
        check_eq!(e.posted(), 0);
        let io = e.owner.ok_or(EIO)?;
        pair.a.drain(&pair.env.cx)?;
        check_eq!(inbox.len(), others);
        // The registration was taken back, so there can be another.
        let again = RegOwner::new(&io.region)?;
        pair.a
            .post_send(again, |o| Ok(RegWr::remote_write(&o.region)))?;
        pair.a.drain(&pair.env.cx)
    }

    #[test]
    fn refused_in_the_middle_keeps_the_owner_until_a_drain() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let chained = Inbox::new()?;
        fill(&pair, &inbox, 2)?;
        let Err(e) = pair
            .a
            .post_chain(pair.env.message(&chained, &[0; 4])?, thrice)
        else {
            return Err(crate::check::fail("the chain was posted"));
        };
        check_eq!(e.error(), ENOMEM);
        check_eq!(e.posted(), 2);
        check!(e.owner.is_none());
        check_eq!(chained.dropped(), 0);
        pair.a.drain(&pair.env.cx)?;
        check_eq!(chained.dropped(), 1);
        check_eq!(chained.len(), 0);
        Ok(())
    }

    #[test]
    fn kept_owner_is_dropped_at_the_end_of_the_qp() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let chained = Inbox::new()?;
        fill(&pair, &inbox, 1)?;
        let message = pair.env.message(&chained, &[0; 4])?;
        check_err!(pair.a.post_chain(message, thrice), ENOMEM);
        check_eq!(chained.dropped(), 0);
        drop(pair);
        wait(|| chained.dropped() == 1)
    }

    #[test]
    fn registration_that_was_not_posted_is_taken_back() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let gone = Counter::new()?;
        fill(&pair, &inbox, 1)?;
        let io = Io::new(&pair.env, &Counter::new()?, &gone)?;
        let region = io.region.clone();
        let posted = pair.a.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
            chain.push(SendWr::send([io.buf.whole()]))?;
            chain.push(RegWr::remote_write(&io.region)).map(|_| ())
        });
        check_err!(posted, ENOMEM);
        pair.a.drain(&pair.env.cx)?;
        check_eq!(gone.get(), 1);
        let again = RegOwner::new(&region)?;
        pair.a
            .post_send(again, |o| Ok(RegWr::remote_write(&o.region)))?;
        pair.a.drain(&pair.env.cx)
    }

    #[test]
    fn error_while_making_a_chain_takes_all_back() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let io = Io::new(&pair.env, &Counter::new()?, &Counter::new()?)?;
        let posted = pair.a.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
            chain.push(RegWr::remote_write(&io.region))?;
            Err(EDOM)
        });
        let Err(e) = posted else {
            return Err(crate::check::fail("the chain was posted"));
        };
        check_eq!(e.error(), EDOM);
        let io = e.owner.ok_or(EIO)?;
        let again = RegOwner::new(&io.region)?;
        pair.a
            .post_send(again, |o| Ok(RegWr::remote_write(&o.region)))?;
        pair.a.drain(&pair.env.cx)
    }

    #[test]
    fn chain_has_room_for_what_its_type_says() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let message = pair.env.message(&inbox, &[0; 4])?;
        let posted = pair.a.post_chain(message, |m, chain: &mut Chain<'_, 1>| {
            add(m, chain)?;
            add(m, chain)
        });
        check_err!(posted, ENOSPC);
        let message = pair.env.message(&inbox, &[0; 4])?;
        let posted = pair.a.post_chain(message, |_, _: &mut Chain<'_, 1>| Ok(()));
        check_err!(posted, EINVAL);
        check_eq!(inbox.dropped(), 2);
        Ok(())
    }

    #[test]
    fn entries_of_another_pd_are_refused() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let other = Env::new()?;
        let posted = pair.a.post_chain(other.message(&inbox, &[0; 4])?, thrice);
        check_err!(posted, EINVAL);
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn batch_goes_around_the_queue_many_times() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        for n in 0..10 {
            for _ in 0..4 {
                recv(&pair.b, pair.env.message(&received, &[0; 4])?)?;
            }
            let mut batch = pair.a.batch(pair.env.message(&sent, &[n; 4])?);
            for _ in 0..3 {
                batch.post(|m, chain: &mut Chain<'_, 1>| add(m, chain))?;
            }
            check_eq!(batch.posted(), 3);
            batch.finish(|m, chain: &mut Chain<'_, 1>| add(m, chain))?;
            pair.wait(|| sent.len() == 1 && received.len() == 4)?;
            sent.pop()?.ok()?;
            for mut arrived in received.take() {
                check_eq!(arrived.bytes()?[..], [n; 4][..]);
            }
        }
        check_eq!(sent.dropped(), 10);
        Ok(())
    }

    #[test]
    fn batch_that_posted_nothing_drops_its_owner() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        drop(pair.a.batch(pair.env.message(&inbox, &[0; 4])?));
        check_eq!(inbox.dropped(), 1);
        let batch = pair.a.batch(pair.env.message(&inbox, &[0; 4])?);
        check!(batch.into_error(ECANCELED).owner.is_some());
        Ok(())
    }

    #[test]
    fn batch_that_was_not_finished_keeps_its_owner_until_a_drain() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        for n in 1..4 {
            let mut batch = pair.a.batch(pair.env.message(&inbox, &[0; 4])?);
            batch.post(|m, chain: &mut Chain<'_, 1>| add(m, chain))?;
            drop(batch);
            check_eq!(inbox.dropped(), 0);
            check!(n < 4);
        }
        pair.a.drain(&pair.env.cx)?;
        check_eq!(inbox.dropped(), 3);
        check_eq!(inbox.len(), 0);
        Ok(())
    }

    #[test]
    fn batch_can_be_finished_again() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        let mut batch = pair.a.batch(pair.env.message(&inbox, &[0; 4])?);
        batch.post(|m, chain: &mut Chain<'_, 1>| add(m, chain))?;
        let Err(e) = batch.finish(|_, _: &mut Chain<'_, 1>| Err(EDOM)) else {
            return Err(crate::check::fail("the batch was finished"));
        };
        check_eq!(e, EDOM);
        check_eq!(batch.posted(), 1);
        batch.finish(|m, chain: &mut Chain<'_, 1>| add(m, chain))?;
        pair.a.drain(&pair.env.cx)?;
        check_eq!(inbox.len(), 1);
        Ok(())
    }

    #[test]
    fn chains_from_several_threads() -> Result {
        let pair = Pair::<Workqueue>::new(&Caps::new(64, 64))?;
        let (sent, done) = (Inbox::new()?, Counter::new()?);
        let qp = pair.a;
        let peer = pair.b;
        let received = Inbox::new()?;
        for _ in 0..48 {
            recv(&peer, pair.env.message(&received, &[0; 4])?)?;
        }
        for n in 0..4u8 {
            let (qp, done, sent) = (qp.clone(), done.clone(), sent.clone());
            let pd = pair.env.pd.clone();
            pair.env.client.spawn(GFP_KERNEL, move |cx| {
                for _ in 0..4 {
                    let posted = Message::new(&pd, &sent, &[n; 4], cx)
                        .and_then(|m| Ok(qp.post_chain(m, thrice)?));
                    if posted.is_err() {
                        pr_err!("FAILED: a chain was not posted\n");
                    }
                }
                done.up();
            })?;
        }
        wait(|| done.get() == 4 && sent.len() == 16 && received.len() == 48)?;
        // The three of a chain arrive one after the other.
        for three in received.take().chunks_mut(3) {
            let [a, b, c] = three else { return Err(EIO) };
            check_eq!(a.bytes()?[..], b.bytes()?[..]);
            check_eq!(a.bytes()?[..], c.bytes()?[..]);
        }
        Ok(())
    }
}
