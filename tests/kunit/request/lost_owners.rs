// SPDX-License-Identifier: GPL-2.0

//! Single owners that the device loses: they end with their QP where posts are noted. The kernels
//! of these suites have no static branches, so that is with debug assertions only.

#![cfg(debug_assertions)]

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::{
        expect,
        TWICE, //
    },
    fixture::{
        both,
        duplicate,
        wait,
        CountDrop,
        Counter,
        Null,
        NullEnv,
        Polled,
        RegOwner,
        UdEnd,
        CAPS,
        PORT,
        QKEY, //
    }, //
};
use core::marker::PhantomData;
use kernel::prelude::*;
use rdma::{
    ah::{
        self,
        Ah, //
    },
    prelude::*,
    qp::{
        Chain,
        QpContext, //
    }, //
};
use rdma_null::Injection;

const COUNT: u32 = 4;
const ALL: u32 = u32::MAX;
const HOLD_ONE: Injection = Injection::Hold { count: 1 };
const HOLD_ALL: Injection = Injection::Hold { count: ALL };
const REFUSE: Injection = Injection::Refuse { after: 1, errno: 5 };
const RELEASE: Injection = Injection::Release {
    count: ALL,
    reversed: false,
};

/// Has posts noted until it is dropped.
struct Noted;

impl Noted {
    fn new() -> Result<Self> {
        // SAFETY: The tests run one after the other, and this one has posted nothing yet.
        unsafe { rdma::note_posts(true) }?;
        Ok(Self)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        // SAFETY: The device of the test is gone. A test that fails before that reports it.
        let _ = unsafe { rdma::note_posts(false) };
    }
}

/// What an owner has, which counts what becomes of it.
struct Parts {
    completed: Arc<Counter>,
    flushed: Arc<Counter>,
    _gone: CountDrop,
}

impl Parts {
    fn end(&self, wc: &Wc) {
        match wc.result() {
            Ok(_) => self.completed.up(),
            Err(_) => self.flushed.up(),
        };
    }
}

#[derive(HasCqe)]
struct Single<N: 'static> {
    cqe: Cqe<Self>,
    region: Region<Bidirectional>,
    parts: Parts,
    _needs: PhantomData<fn() -> N>,
}

/// The context of a handler of [`Single`].
trait Found: context::Context {
    fn is_found(&self) -> bool;
}

impl Found for context::Atomic {
    fn is_found(&self) -> bool {
        true
    }
}

impl Found for QpContext<Counter> {
    fn is_found(&self) -> bool {
        self.get().is_some()
    }
}

impl<N: Found> CqeHandler for Single<N> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = N;

    fn done(this: Self::Pointer, wc: &Wc, cx: &N) {
        if cx.is_found() {
            this.parts.end(wc);
        }
    }
}

#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    parts: Parts,
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, wc: &Wc, _cx: &context::Atomic) {
        this.parts.end(wc);
    }
}

/// Invalidates a region, which completes to a callback of the region's MR.
#[derive(HasCqe)]
struct Inv {
    cqe: Cqe<Self>,
    region: Arc<SharedRegion<Bidirectional>>,
    parts: Parts,
}

impl CqeHandler for Inv {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.parts.end(wc);
    }
}

/// What has become of the owners of a test.
struct Counts {
    completed: Arc<Counter>,
    flushed: Arc<Counter>,
    gone: Arc<Counter>,
}

impl Counts {
    fn new() -> Result<Self> {
        Ok(Self {
            completed: Counter::new()?,
            flushed: Counter::new()?,
            gone: Counter::new()?,
        })
    }

    fn parts(&self) -> Parts {
        Parts {
            completed: self.completed.clone(),
            flushed: self.flushed.clone(),
            _gone: CountDrop(self.gone.clone()),
        }
    }

    fn single<N: Found>(&self, pd: &Pd, cx: &Sleepable) -> Result<Pin<KBox<Single<N>>>> {
        let single = Single {
            cqe: Cqe::new(),
            region: Region::new(Buf::alloc(pd, 8, cx)?, cx)?,
            parts: self.parts(),
            _needs: PhantomData,
        };
        Ok(KBox::pin(single, GFP_KERNEL)?)
    }

    /// Returns how many have completed, were flushed, and are freed.
    fn get(&self) -> (i32, i32, i32) {
        (self.completed.get(), self.flushed.get(), self.gone.get())
    }
}

/// Takes the device away, which waits for all that was made of it.
fn is_removed(null: NullEnv) -> Result {
    let NullEnv { dev, env } = null;
    drop(env);
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

type Post<C, N> = fn(&Qp<C>, Pin<KBox<Single<N>>>) -> Result;

/// Owners of which the device loses the first, by `lose`; so many complete.
fn owners_end<C: Polled + Provides<N>, N: Found>(
    post: Post<C, N>,
    lose: Injection,
    completed: i32,
) -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let Null { a, b, cq, env, dev } = null;
    let counts = Counts::new()?;
    // Where there can be one.
    let _ = a.set_context(Counter::new()?, &env.cx);
    dev.inject_qp(a.num(), lose)?;
    for _ in 0..COUNT {
        // A device that says nothing fails, too.
        let _ = post(&a, counts.single(&env.pd, &env.cx)?);
    }
    a.destroy(&env.cx)?;
    let all = COUNT as i32;
    check_eq!(counts.get(), (completed, all - completed, all));
    drop((b, cq));
    is_removed(NullEnv { env, dev })
}

fn send<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, owner: Pin<KBox<Single<N>>>) -> Result {
    let nowhere = Remote { addr: 0, rkey: 0 };
    Ok(qp.post_send(owner, |_| Ok(SendWr::rdma_write([], nowhere)))?)
}

fn recv<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, owner: Pin<KBox<Single<N>>>) -> Result {
    Ok(qp.post_recv(owner, |_| Ok(RecvWr::new([])))?)
}

fn register<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, owner: Pin<KBox<Single<N>>>) -> Result {
    qp.post_send(owner, |o| Ok(both(&o.region)))?;
    Ok(())
}

fn chain<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, owner: Pin<KBox<Single<N>>>) -> Result {
    let nowhere = Remote { addr: 0, rkey: 0 };
    Ok(qp.post_chain(owner, |_, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::rdma_write([], nowhere))?;
        chain.push(SendWr::rdma_write([], nowhere))
    })?)
}

/// As [`send`]; an owner that comes back counts as flushed.
fn drop_refused<C>(qp: &Qp<C>, owner: Pin<KBox<Single<context::Atomic>>>) -> Result
where
    C: Polled + Provides<context::Atomic>,
{
    let nowhere = Remote { addr: 0, rkey: 0 };
    let posted = qp.post_send(owner, |_| Ok(SendWr::rdma_write([], nowhere)));
    if let Some(owner) = posted.err().and_then(|e| e.owner) {
        owner.parts.flushed.up();
    }
    Ok(())
}

/// A device that does not say what it has refused, and has posted or not.
fn unnamed_ends<C: Polled>(lose: Injection, completed: i32) -> Result {
    expect(
        1,
        "did not say which request it refused: the owner stays until the end of the QP",
    );
    owners_end::<C, context::Atomic>(send, lose, completed)
}

/// One owner that is posted several times to both queues of two QPs, each of which loses one.
fn shared_ends<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = NullEnv::new()?;
    let env = &null.env;
    let (cq, counts) = (env.cq::<C>(128)?, Counts::new()?);
    let nowhere = Remote { addr: 0, rkey: 0 };
    let shared = Shared {
        cqe: Cqe::new(),
        parts: counts.parts(),
    };
    let shared = Arc::new(shared, GFP_KERNEL)?;
    let qps = [env.raw_qp(&cq, &CAPS)?, env.raw_qp(&cq, &CAPS)?];
    for qp in &qps {
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        null.dev.inject_qp(qp.num(), HOLD_ONE)?;
        for _ in 0..COUNT {
            qp.post_send(shared.clone(), |_| Ok(SendWr::rdma_write([], nowhere)))
                .map_err(|e| e.error())?;
            qp.post_recv(shared.clone(), |_| Ok(RecvWr::new([])))
                .map_err(|e| e.error())?;
        }
    }
    let mut ended = 0;
    for qp in qps {
        qp.destroy(&env.cx)?;
        ended += 2 * COUNT as i32;
        check!(counts.completed.get() + counts.flushed.get() >= ended);
    }
    check_eq!(counts.completed.get() + counts.flushed.get(), ended);
    check_eq!(counts.gone.get(), 0);
    check!(Arc::into_unique_or_drop(shared).is_some());
    check_eq!(counts.gone.get(), 1);
    drop(cq);
    is_removed(null)
}

/// An invalidation that the device loses.
fn invalidation_ends<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let Null { a, b, cq, env, dev } = null;
    let (counts, region) = (Counts::new()?, env.region(8)?);
    let owner = RegOwner::new(&region)?;
    let registered = owner.registered.clone();
    a.post_send(owner, |o| Ok(both(&o.region)))?;
    wait(|| {
        C::poll(&cq);
        registered.get() == 1
    })?;
    dev.inject_qp(a.num(), HOLD_ONE)?;
    let inv = Inv {
        cqe: Cqe::new(),
        region,
        parts: counts.parts(),
    };
    let inv = KBox::pin(inv, GFP_KERNEL)?;
    a.post_send(inv, |i| Ok(InvWr::new(&i.region)))?;
    a.destroy(&env.cx)?;
    check_eq!(counts.get(), (0, 1, 1));
    drop((b, cq));
    is_removed(NullEnv { env, dev })
}

/// A chain that the device refuses in part: its owner is dropped with the QP, and no note is left.
fn part_of_a_chain_ends<C: Polled + Provides<context::Atomic>>() -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let Null { a, b, cq, env, dev } = null;
    let counts = Counts::new()?;
    dev.inject_qp(a.num(), REFUSE)?;
    let refused = chain(&a, counts.single::<context::Atomic>(&env.pd, &env.cx)?);
    check_err!(refused, EIO);
    for _ in 1..COUNT {
        chain(&a, counts.single::<context::Atomic>(&env.pd, &env.cx)?)?;
    }
    a.destroy(&env.cx)?;
    let all = COUNT as i32;
    wait(|| counts.get() == (all - 1, 0, all))?;
    drop((b, cq));
    is_removed(NullEnv { env, dev })
}

/// A datagram that the device loses.
fn datagram_ends<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = NullEnv::new()?;
    let attr = ah::Attr {
        dlid: 1,
        ..ah::Attr::new(PORT)
    };
    let to = Arc::new(Ah::create(&null.env.pd, &attr, &null.env.cx)?, GFP_KERNEL)?;
    let UdEnd { qp, cq, sent, .. } = {
        let end = UdEnd::<C>::new(&null.env, 0)?;
        null.dev.inject_qp(end.qp.num(), HOLD_ONE)?;
        for _ in 0..COUNT {
            end.send(&null.env, &to, 0, QKEY, b"lost")?;
        }
        end
    };
    qp.destroy(&null.env.cx)?;
    let sent = sent.take();
    check_eq!(sent.len(), COUNT as usize);
    check_eq!(sent.iter().filter(|it| it.result.is_err()).count(), 1);
    drop((sent, cq, to));
    is_removed(null)
}

/// Requests that were posted before posts were noted are polled as they are.
fn plain_completions_are_polled<C: Polled + Provides<context::Atomic>>() -> Result {
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let (counts, all) = (Counts::new()?, COUNT as i32);
    for _ in 0..COUNT {
        let owner = counts.single::<context::Atomic>(&null.env.pd, &null.env.cx)?;
        send(&null.a, owner)?;
    }
    let _noted = Noted::new()?;
    let owner = counts.single::<context::Atomic>(&null.env.pd, &null.env.cx)?;
    send(&null.a, owner)?;
    wait(|| {
        C::poll(&null.cq);
        counts.get() == (all + 1, 0, all + 1)
    })?;
    let Null { a, b, cq, env, dev } = null;
    drop((a, b, cq));
    is_removed(NullEnv { env, dev })
}

/// Completions that are late, and not lost: each owner comes back once.
fn late_ends_once<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let Null { a, b, cq, env, dev } = null;
    let counts = Counts::new()?;
    for round in 1..=COUNT as i32 {
        dev.inject_qp(a.num(), HOLD_ALL)?;
        send(&a, counts.single::<context::Atomic>(&env.pd, &env.cx)?)?;
        check_eq!(counts.get(), (round - 1, 0, round - 1));
        dev.inject_qp(a.num(), RELEASE)?;
        wait(|| {
            C::poll(&cq);
            counts.get() == (round, 0, round)
        })?;
    }
    a.destroy(&env.cx)?;
    let all = COUNT as i32;
    check_eq!(counts.get(), (all, 0, all));
    drop((b, cq));
    is_removed(NullEnv { env, dev })
}

/// A request that completes twice: the second time its note was taken.
fn twice_ends_once<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::new()?;
    null.disconnect()?;
    let counts = Counts::new()?;
    expect(1, TWICE);
    duplicate(&null.dev, null.a.num(), 1)?;
    for _ in 0..2 {
        let owner = counts.single::<context::Atomic>(&null.env.pd, &null.env.cx)?;
        send(&null.a, owner)?;
    }
    null.a.drain(&null.env.cx)?;
    check_eq!(counts.get(), (2, 0, 2));
    let Null { a, b, cq, env, dev } = null;
    drop((a, b, cq));
    is_removed(NullEnv { env, dev })
}

/// Requests for whose notes there is no memory are posted without.
#[cfg(has_faults)]
fn unnoted_completes<C: Polled>() -> Result {
    let _noted = Noted::new()?;
    let null = Null::<C>::new()?;
    null.disconnect()?;
    let counts = Counts::new()?;
    expect(1, "no memory to note a post: it does not end if it is lost");
    // The first two allocations are of the table of what is posted, and the third is the note,
    // unless a slab needs a page: that is not so each time. Ten messages can be printed at most.
    for ended in 1..=4 {
        let owner = counts.single::<context::Atomic>(&null.env.pd, &null.env.cx)?;
        let (posted, failed) = with_fault(3, || send(&null.a, owner));
        posted?;
        check!(failed);
        wait(|| {
            C::poll(&null.cq);
            counts.get() == (ended, 0, ended)
        })?;
    }
    let Null { a, b, cq, env, dev } = null;
    drop((a, b, cq));
    is_removed(NullEnv { env, dev })
}

#[kunit_tests(rdma_lost_owners)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_in_a_softirq() -> Result {
        twice_ends_once::<Softirq>()
    }

    #[test]
    fn duplicate_in_a_work_item() -> Result {
        twice_ends_once::<Workqueue>()
    }

    #[test]
    fn duplicate_at_a_caller() -> Result {
        twice_ends_once::<Direct>()
    }

    #[cfg(has_faults)]
    #[test]
    fn note_without_memory_in_a_softirq() -> Result {
        unnoted_completes::<Softirq>()
    }

    #[cfg(has_faults)]
    #[test]
    fn note_without_memory_at_a_caller() -> Result {
        unnoted_completes::<Direct>()
    }

    const LAST: i32 = COUNT as i32 - 1;

    #[test]
    fn sends_in_a_softirq() -> Result {
        owners_end::<Softirq, context::Atomic>(send, HOLD_ONE, LAST)
    }

    #[test]
    fn sends_in_a_work_item() -> Result {
        owners_end::<Workqueue, context::Atomic>(send, HOLD_ONE, LAST)
    }

    #[test]
    fn sends_at_a_caller() -> Result {
        owners_end::<Direct, context::Atomic>(send, HOLD_ONE, LAST)
    }

    #[test]
    fn sends_with_a_context_in_a_softirq() -> Result {
        owners_end::<Softirq, QpContext<Counter>>(send, HOLD_ONE, LAST)
    }

    #[test]
    fn receives_in_a_softirq() -> Result {
        owners_end::<Softirq, context::Atomic>(recv, HOLD_ONE, 0)
    }

    #[test]
    fn receives_in_a_work_item() -> Result {
        owners_end::<UnboundWorkqueue, context::Atomic>(recv, HOLD_ONE, 0)
    }

    #[test]
    fn receives_at_a_caller() -> Result {
        owners_end::<Direct, context::Atomic>(recv, HOLD_ONE, 0)
    }

    #[test]
    fn registrations_in_a_softirq() -> Result {
        owners_end::<Softirq, context::Atomic>(register, HOLD_ONE, LAST)
    }

    #[test]
    fn registrations_at_a_caller() -> Result {
        owners_end::<Direct, context::Atomic>(register, HOLD_ONE, LAST)
    }

    #[test]
    fn chains_in_a_softirq() -> Result {
        owners_end::<Softirq, context::Atomic>(chain, Injection::Vanish { count: 1 }, LAST)
    }

    #[test]
    fn chains_in_a_work_item() -> Result {
        owners_end::<Workqueue, context::Atomic>(chain, Injection::Vanish { count: 1 }, LAST)
    }

    #[test]
    fn sends_that_vanish_in_a_work_item() -> Result {
        owners_end::<Workqueue, context::Atomic>(send, Injection::Vanish { count: COUNT }, 0)
    }

    #[test]
    fn send_that_was_not_posted_in_a_softirq() -> Result {
        unnamed_ends::<Softirq>(Injection::Mute { after: 1, errno: 5 }, LAST)
    }

    #[test]
    fn send_that_was_not_posted_at_a_caller() -> Result {
        unnamed_ends::<Direct>(Injection::Mute { after: 1, errno: 5 }, LAST)
    }

    #[test]
    fn send_that_was_posted_in_a_work_item() -> Result {
        unnamed_ends::<Workqueue>(Injection::Lapse { after: 1, errno: 5 }, LAST + 1)
    }

    #[test]
    fn send_that_was_posted_at_a_caller() -> Result {
        unnamed_ends::<Direct>(Injection::Lapse { after: 1, errno: 5 }, LAST + 1)
    }

    #[test]
    fn refused_sends_come_back() -> Result {
        owners_end::<Softirq, context::Atomic>(drop_refused, REFUSE, LAST)
    }

    #[test]
    fn shared_owner_in_a_softirq() -> Result {
        shared_ends::<Softirq>()
    }

    #[test]
    fn shared_owner_in_a_work_item() -> Result {
        shared_ends::<Workqueue>()
    }

    #[test]
    fn shared_owner_at_a_caller() -> Result {
        shared_ends::<Direct>()
    }

    #[test]
    fn late_completions_in_a_softirq() -> Result {
        late_ends_once::<Softirq>()
    }

    #[test]
    fn late_completions_in_a_work_item() -> Result {
        late_ends_once::<Workqueue>()
    }

    #[test]
    fn late_completions_at_a_caller() -> Result {
        late_ends_once::<Direct>()
    }

    #[test]
    fn invalidation_in_a_softirq() -> Result {
        invalidation_ends::<Softirq>()
    }

    #[test]
    fn invalidation_at_a_caller() -> Result {
        invalidation_ends::<Direct>()
    }

    #[test]
    fn part_of_a_chain_in_a_softirq() -> Result {
        part_of_a_chain_ends::<Softirq>()
    }

    #[test]
    fn part_of_a_chain_at_a_caller() -> Result {
        part_of_a_chain_ends::<Direct>()
    }

    #[test]
    fn datagrams_in_a_work_item() -> Result {
        datagram_ends::<Workqueue>()
    }

    #[test]
    fn datagrams_at_a_caller() -> Result {
        datagram_ends::<Direct>()
    }

    #[test]
    fn plain_completions_at_a_caller() -> Result {
        plain_completions_are_polled::<Direct>()
    }

    /// A thread may keep what it has polled for as long as it likes.
    #[test]
    fn completion_in_an_array_is_not_lost() -> Result {
        let _noted = Noted::new()?;
        let null = Null::<Direct>::with(&Caps::new(16, 16))?;
        null.disconnect()?;
        let Null { a, b, cq, env, dev } = null;
        let (counts, mut array) = (Counts::new()?, WcArray::<1>::new());
        for _ in 0..2 {
            send(&a, counts.single::<context::Atomic>(&env.pd, &env.cx)?)?;
        }
        dev.inject_qp(a.num(), HOLD_ONE)?;
        send(&a, counts.single::<context::Atomic>(&env.pd, &env.cx)?)?;
        check_eq!(cq.poll(&mut array)?, 1);
        a.destroy(&env.cx)?;
        check_eq!(counts.get(), (1, 1, 2));
        drop(array);
        check_eq!(counts.get(), (2, 1, 3));
        drop((b, cq));
        is_removed(NullEnv { env, dev })
    }
}
