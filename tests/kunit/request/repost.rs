// SPDX-License-Identifier: GPL-2.0

//! Owners that have their QP and post themselves again.

use crate::fixture::{
    wait,
    CountDrop,
    Counter,
    Env,
    NullEnv,
    Polled,
    Polls, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::prelude::*;
use rdma_null::Injection;

const CAPS: Caps = Caps::new(4, 4);

/// Goes round until it was often enough.
#[derive(HasCqe)]
struct Beat<C: Polls> {
    sent: Cqe<Self, 0>,
    received: Cqe<Self, 1>,
    left: u32,
    buf: Buf<Bidirectional>,
    qp: Qp<C>,
    /// The QP that it is posted to, if not to `qp`.
    peer: Option<Qp<C>>,
    count: Arc<Counter>,
    refused: Arc<Counter>,
    _gone: CountDrop,
}

impl<C: Polls> Beat<C> {
    fn new(env: &Env, qp: &Qp<C>, left: u32, counts: &Counts) -> Result<Pin<KBox<Self>>> {
        let beat = Self {
            sent: Cqe::new(),
            received: Cqe::new(),
            left,
            buf: Buf::alloc(&env.pd, 16, &env.cx)?,
            qp: qp.clone(),
            peer: None,
            count: counts.done.clone(),
            refused: counts.refused.clone(),
            _gone: CountDrop(counts.gone.clone()),
        };
        Ok(KBox::pin(beat, GFP_KERNEL)?)
    }

    /// Counts, and returns whether there is to be another round.
    fn goes_on(&mut self, wc: &Wc) -> bool {
        if wc.result().is_err() || self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.count.up();
        true
    }
}

struct Counts {
    done: Arc<Counter>,
    refused: Arc<Counter>,
    gone: Arc<Counter>,
}

impl Counts {
    fn new() -> Result<Self> {
        Ok(Self {
            done: Counter::new()?,
            refused: Counter::new()?,
            gone: Counter::new()?,
        })
    }
}

impl<C: Polls> CqeHandler<0> for Beat<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if !this.goes_on(wc) {
            return;
        }
        let posted = Qp::repost_send(
            this,
            wc,
            |beat| beat.peer.as_ref().unwrap_or(&beat.qp),
            |beat| Ok(SendWr::send([beat.buf.whole()])),
        );
        if let Some(beat) = posted.err().and_then(|e| e.owner) {
            beat.refused.up();
        }
    }
}

impl<C: Polls> CqeHandler<1> for Beat<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if !this.goes_on(wc) {
            return;
        }
        let posted = Qp::repost_recv(
            this,
            wc,
            |beat| &beat.qp,
            |beat| Ok(RecvWr::new([beat.buf.whole_mut()]).done_by::<1>()),
        );
        if let Some(beat) = posted.err().and_then(|e| e.owner) {
            beat.refused.up();
        }
    }
}

/// A QP that sends to no peer.
fn lone<C: Polls>(null: &NullEnv, cq: &Cq<C>) -> Result<Qp<C>> {
    let qp = null.env.raw_qp(cq, &CAPS)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    Ok(qp)
}

/// Returns whether this is the only handle of the QP.
fn is_only<C: Polls>(qp: &Qp<C>) -> bool {
    // SAFETY: A handle is the address of a value in an `Arc`, which is aligned as a `u64` is: their
    // counts are at the same place. The reference is borrowed: below it is not let go, or replaced.
    let borrowed = unsafe { Arc::from_raw(core::mem::transmute_copy::<Qp<C>, *const u64>(qp)) };
    match Arc::into_unique_or_drop(borrowed) {
        Some(only) => {
            core::mem::forget(only);
            true
        }
        None => {
            core::mem::forget(qp.clone());
            false
        }
    }
}

/// The queue that an owner is posted to, and again.
#[derive(Clone, Copy)]
enum Queues {
    Send,
    Recv,
    SendThenRecv,
}

/// Posts itself again once, and reports whether it had the only reference to its QP meanwhile.
#[derive(HasCqe)]
struct Asks<C: Polls> {
    sent: Cqe<Self, 0>,
    received: Cqe<Self, 1>,
    queues: Queues,
    qp: Qp<C>,
    only: Arc<SetOnce<bool>>,
}

impl<C: Polls> Asks<C> {
    fn ask(&self) {
        self.only.populate(is_only(&self.qp));
    }

    fn again(this: Pin<KBox<Self>>, wc: &Wc) {
        if this.only.copy().is_some() {
            return;
        }
        let posted = match this.queues {
            Queues::Send => Qp::repost_send(
                this,
                wc,
                |asks| &asks.qp,
                |asks| {
                    asks.ask();
                    Ok(SendWr::send([]))
                },
            ),
            Queues::Recv | Queues::SendThenRecv => Qp::repost_recv(
                this,
                wc,
                |asks| &asks.qp,
                |asks| {
                    asks.ask();
                    Ok(RecvWr::new([]).done_by::<1>())
                },
            ),
        };
        if let Err(e) = posted {
            pr_err!("FAILED: {:?}\n", e.error());
        }
    }
}

impl<C: Polls> CqeHandler<0> for Asks<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        Self::again(this, wc);
    }
}

impl<C: Polls> CqeHandler<1> for Asks<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        Self::again(this, wc);
    }
}

/// Returns whether the reference to a QP on these CQs is counted while its owner is posted again.
fn is_counted<C: Polls>(null: &NullEnv, cqs: [&Cq<C>; 2], queues: Queues) -> Result<bool> {
    is_counted_by(null, cqs, queues, C::poll)
}

/// The same, where CQs are polled by a function of the caller's.
fn is_counted_by<C: Polls>(
    null: &NullEnv,
    cqs: [&Cq<C>; 2],
    queues: Queues,
    polls: impl Fn(&Cq<C>),
) -> Result<bool> {
    let only = Arc::new(SetOnce::new(), GFP_KERNEL)?;
    let free = cqs.map(Cq::free_entries);
    let qp = Qp::create_raw(&null.env.pd, cqs[0], cqs[1], &CAPS, &null.env.cx)?;
    let num = qp.num();
    let inject = |injection| null.dev.inject_qp(num, injection);
    inject(Injection::Connect { peer: 0 })?;
    let asks = Asks {
        sent: Cqe::new(),
        received: Cqe::new(),
        queues,
        qp: qp.clone(),
        only: only.clone(),
    };
    let asks = KBox::pin(asks, GFP_KERNEL)?;
    // When it completes it has the only reference.
    inject(Injection::Hold { count: 1 })?;
    match queues {
        Queues::Recv => {
            qp.post_recv(asks, |_| Ok(RecvWr::new([]).done_by::<1>()))?;
            inject(Injection::Fail)?;
        }
        Queues::Send | Queues::SendThenRecv => {
            qp.post_send(asks, |_| Ok(SendWr::send([])))?;
        }
    }
    drop(qp);
    inject(Injection::Release {
        count: 1,
        reversed: false,
    })?;
    let poll = || cqs.iter().for_each(|cq| polls(cq));
    wait(|| {
        poll();
        only.copy().is_some()
    })?;
    // Requests in the receive queue end with the QP, if that is still there.
    let _ = inject(Injection::Fail);
    // The QP's entries are given back a little after it is gone.
    wait(|| {
        poll();
        cqs.map(Cq::free_entries) == free
    })?;
    Ok(only.copy() == Some(false))
}

/// The same for both queues of a QP that has one CQ.
fn are_counted<C: Polls>(null: &NullEnv, cq: &Cq<C>) -> Result<[bool; 2]> {
    Ok([
        is_counted(null, [cq, cq], Queues::Send)?,
        is_counted(null, [cq, cq], Queues::Recv)?,
    ])
}

fn poll_until<C: Polls>(cq: &Cq<C>, mut condition: impl FnMut() -> bool) -> Result {
    wait(|| {
        C::poll(cq);
        condition()
    })
}

/// The only references to the QP are those of owners: the last one goes in a handler.
fn sends<C: Polled>(rounds: u32) -> Result {
    sends_on(rounds, |env| env.cq::<C>(2 * CAPS.entries()))
}

fn sends_on<C: Polls>(rounds: u32, cq: impl FnOnce(&Env) -> Result<Cq<C>>) -> Result {
    let (null, counts) = (NullEnv::new()?, Counts::new()?);
    let cq = cq(&null.env)?;
    let qp = lone(&null, &cq)?;
    for _ in 0..2 {
        let beat = Beat::new(&null.env, &qp, rounds, &counts)?;
        qp.post_send(beat, |beat| Ok(SendWr::send([beat.buf.whole()])))?;
    }
    drop(qp);
    poll_until(&cq, || counts.gone.get() == 2)?;
    check_eq!(counts.done.get(), 2 * rounds as i32);
    check_eq!(counts.refused.get(), 0);
    poll_until(&cq, || null.dev.objects()[1] == 0)
}

#[kunit_tests(rdma_repost)]
mod tests {
    use super::*;

    #[test]
    fn from_a_softirq() -> Result {
        sends::<Softirq>(50)
    }

    #[test]
    fn from_a_work_item() -> Result {
        sends::<Workqueue>(50)
    }

    /// The type does not say that a work item polls, which knows where it is.
    #[test]
    fn from_a_work_item_by_choice() -> Result {
        let entries = 2 * CAPS.entries();
        sends_on(50, |env| Ok(env.cq::<Workqueue>(entries)?.into_any()))?;
        sends_on(50, |env| {
            Ok(env.cq::<UnboundWorkqueue>(entries)?.into_any())
        })
    }

    #[test]
    fn from_a_caller() -> Result {
        sends::<Direct>(20)
    }

    #[test]
    fn from_who_waits() -> Result {
        sends::<Waited>(20)
    }

    /// The new request completes elsewhere, perhaps before the handler has returned.
    #[test]
    fn to_another_cq() -> Result {
        let (null, counts) = (NullEnv::new()?, Counts::new()?);
        let cqs = [
            null.env.cq::<Softirq>(2 * CAPS.entries())?,
            null.env.cq::<Softirq>(2 * CAPS.entries())?,
        ];
        for n in 1..=10 {
            let (qp, other) = (lone(&null, &cqs[0])?, lone(&null, &cqs[1])?);
            let mut beat = Beat::new(&null.env, &qp, 1, &counts)?;
            beat.peer = Some(other);
            qp.post_send(beat, |beat| Ok(SendWr::send([beat.buf.whole()])))?;
            drop(qp);
            wait(|| counts.gone.get() == n && null.dev.objects()[1] == 0)?;
        }
        check_eq!(counts.done.get(), 10);
        check_eq!(counts.refused.get(), 0);
        Ok(())
    }

    #[test]
    fn receives() -> Result {
        let (null, counts) = (NullEnv::new()?, Counts::new()?);
        let cq = null.env.cq::<Softirq>(4 * CAPS.entries())?;
        let (a, b) = (lone(&null, &cq)?, lone(&null, &cq)?);
        null.dev
            .inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
        null.dev
            .inject_qp(b.num(), Injection::Connect { peer: a.num() })?;
        // Two, as a handler counts before it posts its own again.
        for _ in 0..2 {
            let beat = Beat::new(&null.env, &b, 5, &counts)?;
            b.post_recv(beat, |beat| {
                Ok(RecvWr::new([beat.buf.whole_mut()]).done_by::<1>())
            })?;
        }
        for n in 1..=5 {
            let message = Beat::new(&null.env, &a, 0, &counts)?;
            a.post_send(message, |beat| Ok(SendWr::send([beat.buf.whole()])))?;
            wait(|| counts.done.get() == n)?;
        }
        check_eq!(counts.refused.get(), 0);
        b.drain(&null.env.cx)?;
        check_eq!(counts.gone.get(), 7);
        Ok(())
    }

    #[test]
    fn counts_no_reference_where_the_poller_has_it() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let softirq = null.env.cq::<Softirq>(entries)?;
        check_eq!(are_counted(&null, &softirq)?, [false; 2]);
        let workqueue = null.env.cq::<Workqueue>(entries)?;
        check_eq!(are_counted(&null, &workqueue)?, [false; 2]);
        let unbound = null.env.cq::<UnboundWorkqueue>(entries)?;
        check_eq!(are_counted(&null, &unbound)?, [false; 2]);
        let chosen = null.env.cq::<Workqueue>(entries)?.into_any();
        check_eq!(are_counted(&null, &chosen)?, [false; 2]);
        Ok(())
    }

    #[test]
    fn counts_no_reference_where_the_caller_polls() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let direct = null.env.cq::<Direct>(entries)?;
        check_eq!(are_counted(&null, &direct)?, [false; 2]);
        let waited = null.env.cq::<Waited>(entries)?;
        check_eq!(are_counted(&null, &waited)?, [false; 2]);
        Ok(())
    }

    #[test]
    fn counts_no_reference_where_each_completion_is_looked_at() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let cq = null.env.cq::<Direct>(entries)?;
        let polls = |cq: &Cq<Direct>| {
            let _ = cq.process_with(16, |c| c.dispatch());
        };
        let counted = |queues| is_counted_by(&null, [&cq, &cq], queues, polls);
        check!(!counted(Queues::Send)? && !counted(Queues::Recv)?);
        Ok(())
    }

    #[test]
    fn counts_references_of_what_was_in_a_batch() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let cq = null.env.cq::<Direct>(entries)?;
        let polls = |cq: &Cq<Direct>| {
            let _ = cq.poll(&mut WcArray::<16>::new());
        };
        let counted = |queues| is_counted_by(&null, [&cq, &cq], queues, polls);
        check!(counted(Queues::Send)? && counted(Queues::Recv)?);
        Ok(())
    }

    #[test]
    fn counts_references_where_others_may_poll() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let pooled = Cq::<Softirq>::pool_get(&null.env.dev, entries, None, &null.env.cx)?;
        check_eq!(are_counted(&null, &pooled)?, [true; 2]);
        Ok(())
    }

    #[test]
    fn counts_references_in_a_handler_of_another_cq() -> Result {
        let (null, entries) = (NullEnv::new()?, CAPS.entries());
        let (one, other) = (
            null.env.cq::<Softirq>(entries)?,
            null.env.cq::<Softirq>(entries)?,
        );
        check!(is_counted(&null, [&one, &other], Queues::SendThenRecv)?);
        check!(!is_counted(&null, [&one, &one], Queues::SendThenRecv)?);
        Ok(())
    }

    #[test]
    fn is_refused() -> Result {
        let (null, counts) = (NullEnv::new()?, Counts::new()?);
        let cq = null.env.cq::<Softirq>(2 * CAPS.entries())?;
        let qp = lone(&null, &cq)?;
        let refuse = Injection::Refuse {
            after: 3,
            errno: ENOMEM.to_errno().unsigned_abs(),
        };
        null.dev.inject_qp(qp.num(), refuse)?;
        let beat = Beat::new(&null.env, &qp, 10, &counts)?;
        qp.post_send(beat, |beat| Ok(SendWr::send([beat.buf.whole()])))?;
        wait(|| counts.gone.get() == 1)?;
        check_eq!(counts.refused.get(), 1);
        check_eq!(counts.done.get(), 3);
        Ok(())
    }
}
