// SPDX-License-Identifier: GPL-2.0

//! The same request several times in a batch: where the device refuses or flushes it, and in the
//! handler of an owner that has its QP.

use crate::{
    check::fail,
    fixture::{
        send,
        wait,
        CountDrop,
        Counter,
        Inbox,
        Message,
        Null,
        NullEnv,
        Polled, //
    }, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::{
    cqe::CqePointer,
    prelude::*,
    qp::Chain, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(8, 8);
const MOST: u32 = 4;

/// Posts a request `times` times, only the last one signaled.
fn post_times<S, R, P, const N: usize>(
    qp: &Qp<S, R>,
    owner: P,
    times: u32,
    wr: impl for<'a> Fn(&'a P::Target) -> Result<SendWr<'a, N>> + Sync,
) -> Result<(), PostError<P>>
where
    S: Provides<context::Atomic>,
    R: PollContext,
    P: CqePointer<0>,
    P::Target: CqeHandler<Pointer = P, Needs = context::Atomic>,
{
    let mut batch = qp.batch(owner);
    for _ in 1..times {
        let posted = batch.post(|owner, chain: &mut Chain<'_, 1, N>| chain.push(wr(owner)?));
        if let Err(e) = posted {
            return Err(batch.into_error(e));
        }
    }
    match batch.finish(|owner, chain: &mut Chain<'_, 1, N>| chain.push(wr(owner)?)) {
        Ok(()) => Ok(()),
        Err(e) => Err(batch.into_error(e)),
    }
}

fn whole(message: &Message) -> Result<SendWr<'_>> {
    Ok(SendWr::send([message.buf.whole()]))
}

/// Two QPs, one of which has more receives than it gets messages, and inboxes for what is sent and
/// received.
fn ready<C: Polled>() -> Result<(Null<C>, Arc<Inbox>, Arc<Inbox>)> {
    let (null, sent, received) = (Null::new()?, Inbox::new()?, Inbox::new()?);
    for _ in 0..MOST + 1 {
        null.recv(&received, 1)?;
    }
    Ok((null, sent, received))
}

/// Is posted several times, again and again.
#[derive(HasCqe)]
struct Burst<C: Polled> {
    cqe: Cqe<Self>,
    /// The number of times that it is still to come back.
    left: u32,
    qp: Qp<C>,
    seen: Arc<Seen>,
    _gone: CountDrop,
}

/// The results of bursts.
struct Seen {
    done: Arc<Counter>,
    gone: Arc<Counter>,
    /// The number of requests that were posted before one was refused, and `true` if there was an
    /// owner.
    refused: SetOnce<(u32, bool)>,
}

impl Seen {
    fn new() -> Result<Arc<Self>> {
        let seen = Self {
            done: Counter::new()?,
            gone: Counter::new()?,
            refused: SetOnce::new(),
        };
        Ok(Arc::new(seen, GFP_KERNEL)?)
    }
}

impl<C: Polled> Burst<C> {
    fn new(qp: &Qp<C>, left: u32, seen: &Arc<Seen>) -> Result<Pin<KBox<Self>>> {
        let burst = Self {
            cqe: Cqe::new(),
            left,
            qp: qp.clone(),
            seen: seen.clone(),
            _gone: CountDrop(seen.gone.clone()),
        };
        Ok(KBox::pin(burst, GFP_KERNEL)?)
    }
}

impl<C: Polled> CqeHandler for Burst<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if wc.result().is_err() || this.left == 0 {
            return;
        }
        this.left -= 1;
        this.seen.done.up();
        let (qp, seen) = (this.qp.clone(), this.seen.clone());
        if let Err(e) = post_times(&qp, this, MOST, |_| Ok(SendWr::send([]))) {
            seen.refused.populate((e.posted(), e.owner.is_some()));
        }
    }
}

/// A QP that sends to nobody.
fn lone<C: Polled>(null: &NullEnv, cq: &Cq<C>) -> Result<Qp<C>> {
    let qp = null.env.raw_qp(cq, &CAPS)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    Ok(qp)
}

/// The only references to the QP are those of owners: the last one goes in a handler.
fn goes_round<C: Polled>() -> Result {
    const ROUNDS: u32 = 20;

    let (null, seen) = (NullEnv::new()?, Seen::new()?);
    let cq = null.env.cq::<C>(CAPS.entries())?;
    let qp = lone(&null, &cq)?;
    for _ in 0..CAPS.send_wr / MOST {
        post_times(&qp, Burst::new(&qp, ROUNDS, &seen)?, MOST, |_| {
            Ok(SendWr::send([]))
        })?;
    }
    drop(qp);
    wait(|| {
        C::poll(&cq);
        seen.gone.get() == 2 && null.dev.objects()[1] == 0
    })?;
    check_eq!(seen.done.get(), 2 * ROUNDS as i32);
    check!(seen.refused.as_ref().is_none());
    Ok(())
}

/// Refuses a request of a handler, at each position of its first rounds.
fn is_refused_in_a_handler<C: Polled>() -> Result {
    for after in MOST..3 * MOST {
        let (null, seen) = (NullEnv::new()?, Seen::new()?);
        let cq = null.env.cq::<C>(CAPS.entries())?;
        let qp = lone(&null, &cq)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after, errno: 5 })?;
        post_times(&qp, Burst::new(&qp, 9, &seen)?, MOST, |_| {
            Ok(SendWr::send([]))
        })?;
        wait(|| {
            C::poll(&cq);
            seen.refused.as_ref().is_some()
        })?;
        let kept = seen.gone.get() == 0;
        // First, as it ends what keeps the QP.
        qp.drain(&null.env.cx)?;
        let posted = after % MOST;
        check_eq!(seen.done.get(), (after / MOST) as i32);
        check_eq!(seen.refused.copy(), Some((posted, posted == 0)));
        check!(kept || posted == 0);
        check_eq!(seen.gone.get(), 1);
        drop(qp);
        wait(|| {
            C::poll(&cq);
            null.dev.objects()[1] == 0
        })?;
    }
    Ok(())
}

#[kunit_tests(rdma_times)]
mod tests {
    use super::*;

    #[test]
    fn arrives_as_often_as_it_is_posted() -> Result {
        for n in 1..=MOST {
            let (null, sent, received) = ready::<Softirq>()?;
            let message = null.env.message(&sent, &[n as u8])?;
            post_times(&null.a, message, n, whole)?;
            for mut arrived in null.take(&received, n as usize)? {
                check_eq!(arrived.bytes()?[..], [n as u8][..]);
            }
            null.one(&sent)?.ok()?;
            null.a.drain(&null.env.cx)?;
            check_eq!((sent.len(), sent.dropped()), (0, 1));
            check_eq!(received.len(), 0);
        }
        Ok(())
    }

    /// So the queue has room again each time.
    #[test]
    fn only_the_last_completes() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.disconnect()?;
        for round in 0..20 {
            let message = null.env.message(&sent, b"x")?;
            post_times(&null.a, message, 1 + round % MOST, whole)?;
            check_eq!(null.cq.process(16), 1);
            null.one(&sent)?.ok()?;
        }
        Ok(())
    }

    #[test]
    fn is_refused_at_each_position() -> Result {
        for after in 0..MOST {
            let (null, sent, received) = ready::<Softirq>()?;
            null.inject(Injection::Refuse { after, errno: 5 })?;
            let message = null.env.message(&sent, b"x")?;
            let Err(e) = post_times(&null.a, message, MOST, whole) else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), EIO);
            check_eq!(e.posted(), after);
            // Those before it arrive.
            null.take(&received, after as usize)?;
            check_eq!(sent.len() + sent.dropped() as usize, 0);
            match e.owner {
                Some(owner) => {
                    check_eq!(after, 0);
                    send(&null.a, owner)?;
                    null.one(&sent)?.ok()?;
                }
                None => {
                    check!(after > 0);
                    null.a.drain(&null.env.cx)?;
                    check_eq!(sent.len(), 0);
                }
            }
            check_eq!(sent.dropped(), 1);
        }
        Ok(())
    }

    #[test]
    fn more_than_there_is_room_for() -> Result {
        let (null, sent) = (Null::<Direct>::with(&CAPS)?, Inbox::new()?);
        null.disconnect()?;
        let [first, second] = [
            null.env.message(&sent, b"x")?,
            null.env.message(&sent, b"x")?,
        ];
        post_times(&null.a, first, CAPS.send_wr, whole)?;
        let Err(e) = post_times(&null.a, second, CAPS.send_wr, whole) else {
            return Err(fail("it was posted"));
        };
        check_eq!(e.error(), ENOMEM);
        // There is a place for the marker of a drain.
        check!(e.posted() > 0);
        check!(e.owner.is_none());
        check_eq!(sent.dropped(), 0);
        null.one(&sent)?.ok()?;
        null.a.drain(&null.env.cx)?;
        check_eq!((sent.len(), sent.dropped()), (0, 2));
        Ok(())
    }

    #[test]
    fn flush_completes_each_request_and_the_owner_once() -> Result {
        for n in 1..=MOST {
            let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
            null.inject(Injection::Fail)?;
            let message = null.env.message(&sent, b"x")?;
            post_times(&null.a, message, n, whole)?;
            check_eq!(null.cq.process(16), n);
            check!(null.one(&sent)?.was_flushed());
            null.a.drain(&null.env.cx)?;
            check_eq!((sent.len(), sent.dropped()), (0, 1));
        }
        Ok(())
    }

    #[test]
    fn failure_of_the_first_flushes_those_behind_it() -> Result {
        for n in 1..=MOST {
            let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
            null.disconnect()?;
            null.inject_fatal(wc::Status::LOC_PROT_ERR)?;
            let message = null.env.message(&sent, b"x")?;
            post_times(&null.a, message, n, whole)?;
            check_eq!(null.cq.process(16), n);
            let status = match n {
                1 => wc::Status::LOC_PROT_ERR,
                _ => wc::Status::WR_FLUSH_ERR,
            };
            check_eq!(null.one(&sent)?.status(), Some(status));
            null.a.drain(&null.env.cx)?;
            check_eq!((sent.len(), sent.dropped()), (0, 1));
        }
        Ok(())
    }

    #[test]
    fn what_cannot_be_posted_gives_its_owner_back() -> Result {
        let (null, other, inbox) = (Null::<Softirq>::new()?, NullEnv::new()?, Inbox::new()?);
        null.disconnect()?;
        let foreign = other.env.message(&inbox, b"x")?;
        let own = || null.env.message(&inbox, b"x");
        let refused = [
            (post_times(&null.a, foreign, 2, whole), EINVAL),
            (
                post_times(&null.a, own()?, 2, |_| Err::<SendWr<'_>, _>(EDOM)),
                EDOM,
            ),
        ];
        for (result, error) in refused {
            let Err(e) = result else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), error);
            check_eq!(e.posted(), 0);
            check!(e.owner.is_some());
        }
        check_eq!(inbox.dropped(), 2);
        Ok(())
    }

    #[test]
    fn from_a_softirq() -> Result {
        goes_round::<Softirq>()
    }

    #[test]
    fn from_a_work_item() -> Result {
        goes_round::<Workqueue>()
    }

    #[test]
    fn from_a_caller() -> Result {
        goes_round::<Direct>()
    }

    #[test]
    fn from_a_waiter() -> Result {
        goes_round::<Waited>()
    }

    #[test]
    fn is_refused_in_a_softirq() -> Result {
        is_refused_in_a_handler::<Softirq>()
    }

    #[test]
    fn is_refused_in_a_work_item() -> Result {
        is_refused_in_a_handler::<Workqueue>()
    }

    #[test]
    fn is_refused_at_a_caller() -> Result {
        is_refused_in_a_handler::<Direct>()
    }
}
