// SPDX-License-Identifier: GPL-2.0

//! Contexts of QPs, which handlers of their completions borrow.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::{
        expect,
        OVERRUN, //
    },
    fixture::{
        to_init,
        wait,
        CountDrop,
        Counter,
        Null,
        NullEnv,
        OnDone,
        Polled,
        RecvListGuard,
        CAPS, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    context::{
        Context,
        CorePolled, //
    },
    prelude::*,
    qp::{
        InitAttr,
        QpContext,
        State, //
    }, //
};
use rdma_bindings as bindings;
use rdma_null::Injection;

/// A number, as one type.
struct One(u32);

/// A number, as another type that nothing but its name tells from the first.
struct Other(u32);

/// Counts when it is dropped.
struct Dropped(Arc<Counter>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.up();
    }
}

/// A connection: the context owns its QP.
struct Conn {
    qp: Qp<Workqueue>,
}

/// The number that a handler finds.
trait Number: Send + Sync + 'static {
    fn number(&self) -> u32;
}

impl Number for One {
    fn number(&self) -> u32 {
        self.0
    }
}

impl Number for Other {
    fn number(&self) -> u32 {
        self.0
    }
}

/// Completes a receive of `qp` by a handler that looks for a `T`, and returns what it has found.
fn found<T, C>(qp: &Qp<C>, peer: &Qp<C>) -> Result<Option<u32>>
where
    T: Number,
    C: CorePolled + Provides<context::Atomic> + Provides<QpContext<T>>,
{
    let (count, sum) = (Counter::new()?, Counter::new()?);
    let (done, number) = (count.clone(), sum.clone());
    let handler = OnDone::<QpContext<T>, _>::new(move |_, cx| {
        if let Some(context) = cx.get() {
            (0..=context.number()).for_each(|_| {
                number.up();
            });
        }
        done.up();
    })?;
    qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    let sent = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    peer.post_send(sent, |_| Ok(SendWr::send([])))?;
    wait(|| count.get() == 1)?;
    Ok((sum.get() as u32).checked_sub(1))
}

/// Two QPs on one CQ each have their context, and find no other type's.
fn each_has_its_own<C: CorePolled + Polled + Provides<context::Atomic>>() -> Result {
    let null = Null::<C>::new()?;
    let (a, b, cx) = (&null.a, &null.b, &null.env.cx);
    check_eq!(found::<One, C>(a, b)?, None);
    a.set_context(Arc::new(One(3), GFP_KERNEL)?, cx)?;
    b.set_context(Arc::new(Other(5), GFP_KERNEL)?, cx)?;
    check_eq!(found::<One, C>(a, b)?, Some(3));
    check_eq!(found::<Other, C>(b, a)?, Some(5));
    check_eq!(found::<Other, C>(a, b)?, None);
    check_eq!(found::<One, C>(b, a)?, None);
    Ok(())
}

/// Takes the context from a QP while a handler borrows it, which goes on by `then` once the drain
/// has begun. In the end nothing has the QP.
fn cleared_in_handler<T: Send + Sync + 'static>(
    make: impl FnOnce(Qp<Workqueue>) -> Result<Arc<T>>,
    then: impl FnOnce(&T, &Sleepable) + Unpin + Send + 'static,
) -> Result {
    let null = Null::<Workqueue>::new()?;
    let (cx, (begun, cleared)) = (&null.env.cx, (Counter::new()?, Counter::new()?));
    let free = null.cq.free_entries();
    let qp = null.a;
    qp.set_context(make(qp.clone())?, cx)?;

    let (begins, own) = (begun.clone(), qp.clone());
    let handler = OnDone::<QpContext<T, Sleepable>, _>::new(move |_, cx| {
        let context = cx.get();
        begins.up();
        let failed = wait(|| own.query(cx).is_ok_and(|info| info.state == State::Error));
        if let (Some(context), Ok(())) = (context, failed) {
            then(context, cx);
        }
    })?;
    qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    let sent = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    null.b.post_send(sent, |_| Ok(SendWr::send([])))?;
    wait(|| begun.get() == 1)?;
    let clears = cleared.clone();
    null.env.client.spawn(GFP_KERNEL, move |cx| {
        if qp.clear_context(cx).is_ok() {
            clears.up();
        }
    })?;
    wait(|| cleared.get() == 1 && null.cq.free_entries() > free)
}

/// A connection that ends although its QP is not drained: the context owns it.
struct Ending<C: PollContext> {
    qp: Qp<C>,
    _gone: CountDrop,
}

/// A request whose handler finds no context.
#[derive(HasCqe)]
struct Posted<C: PollContext> {
    cqe: Cqe<Self>,
    alone: Arc<Counter>,
    _context: core::marker::PhantomData<fn() -> C>,
}

impl<C: PollContext> CqeHandler for Posted<C> {
    type Pointer = Taken<Self>;
    type Needs = QpContext<Ending<C>>;

    fn done(this: Taken<Self>, wc: &Wc, cx: &Self::Needs) {
        if cx.get().is_none() && wc.result().is_err() {
            this.alone.up();
        }
    }
}

/// Ends a connection whose device completes none of `posts` requests, and neither marker.
fn ends<C>(null: NullEnv, qp: Qp<C>, posts: usize) -> Result
where
    C: CorePolled + Polled + Provides<QpContext<Ending<C>>>,
{
    let NullEnv { env, dev } = null;
    let (gone, alone, cx) = (Counter::new()?, Counter::new()?, &env.cx);
    let conn = Ending {
        qp,
        _gone: CountDrop(gone.clone()),
    };
    let conn = Arc::new(conn, GFP_KERNEL)?;
    conn.qp.set_context(conn.clone(), cx)?;
    let make = |_| {
        Ok(Posted {
            cqe: Cqe::new(),
            alone: alone.clone(),
            _context: core::marker::PhantomData,
        })
    };
    let mut requests = Requests::new(&conn.qp, posts.max(1), make, cx)?;
    dev.inject_qp(conn.qp.num(), Injection::Hold { count: u32::MAX })?;
    for request in requests.idle().take(posts) {
        conn.qp.post_send(request, |_| Ok(SendWr::send([])))?;
    }
    expect(1, OVERRUN);
    dev.inject(Injection::Event {
        event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
    })?;
    check_err!(conn.qp.drain(cx), EOVERFLOW);
    check_err!(conn.qp.clear_context(cx), EOVERFLOW);
    conn.qp.release_context(cx)?;
    check_eq!(gone.get(), 0);
    drop(conn);
    check_eq!(gone.get(), 1);
    wait(|| alone.get() == posts as i32)?;
    check_eq!(requests.idle().count(), posts.max(1));
    drop((requests, env));
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

fn ends_with_its_sends<C>() -> Result
where
    C: CorePolled + Polled + Provides<QpContext<Ending<C>>>,
{
    let null = NullEnv::new()?;
    let qp = null.env.raw_qp(&null.env.cq::<C>(32)?, &CAPS)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    ends(null, qp, 4)
}

/// Gives a context up in a handler that borrows it.
fn release_in_handler() -> Result {
    let null = Null::<Workqueue>::new()?;
    let qp = null.a;
    qp.set_context(Arc::new(One(0), GFP_KERNEL)?, &null.env.cx)?;
    let (refused, own) = (Counter::new()?, qp.clone());
    let count = refused.clone();
    let handler = OnDone::<Sleepable, _>::new(move |_, cx| {
        if own.release_context(cx) == Err(EDEADLK) {
            count.up();
        }
    })?;
    qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    qp.drain(&null.env.cx)?;
    check_eq!(refused.get(), 1);
    qp.release_context(&null.env.cx)
}

/// Releases a context by `release` while a handler borrows it, which goes on when no other
/// handler finds it.
fn released_in_handler(release: fn(&Qp<Workqueue>, &Sleepable) -> Result) -> Result {
    let null = Null::<Workqueue>::new()?;
    let (cx, gone) = (&null.env.cx, Counter::new()?);
    let (begun, alive, ended) = (Counter::new()?, Counter::new()?, Counter::new()?);
    let qp = null.a;
    let context = || -> Result<_> { Ok(Arc::new(Dropped(gone.clone()), GFP_KERNEL)?) };
    qp.set_context(context()?, cx)?;
    let (begins, lives, own, other) = (begun.clone(), alive.clone(), qp.clone(), context()?);
    let handler = OnDone::<QpContext<Dropped, Sleepable>, _>::new(move |_, cx| {
        let found = cx.get();
        begins.up();
        // It is busy as long as the context is, which is being taken.
        let taking = wait(|| own.set_context(other.clone(), cx) == Err(EBUSY) && begins.get() == 2);
        kernel::time::delay::fsleep(kernel::time::Delta::from_millis(20));
        if taking.is_ok() && found.is_some_and(|it| it.0.get() == 0) {
            lives.up();
        }
    })?;
    qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    let sent = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    null.b.post_send(sent, |_| Ok(SendWr::send([])))?;
    wait(|| begun.get() == 1)?;
    let (ends, begins) = (ended.clone(), begun.clone());
    null.env.client.spawn(GFP_KERNEL, move |cx| {
        begins.up();
        if release(&qp, cx).is_ok() {
            ends.up();
        }
    })?;
    wait(|| ended.get() == 1)?;
    check_eq!(alive.get(), 1);
    wait(|| gone.get() == 2)
}

/// A request that is posted again and again, until it is stopped.
#[derive(HasCqe)]
struct Again<C: PollContext> {
    cqe: Cqe<Self>,
    qp: Qp<C>,
    times: Arc<Counter>,
    stop: Arc<Counter>,
}

impl<C: Polled> CqeHandler for Again<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.times.up();
        if wc.result().is_ok() && this.stop.get() == 0 {
            let qp = this.qp.clone();
            let _ = qp.post_send(this, |_| Ok(SendWr::send([])));
        }
    }
}

/// Releases the context of a QP while its CQ has completions of another one all the time.
fn released_on_a_busy_cq<C: CorePolled + Polled>() -> Result {
    let null = Null::<C>::new()?;
    let Null { a, b, cq, env, dev } = null;
    let (times, stop, gone) = (Counter::new()?, Counter::new()?, Counter::new()?);
    dev.inject_qp(b.num(), Injection::Connect { peer: 0 })?;
    for _ in 0..4 {
        let again = Again {
            cqe: Cqe::new(),
            qp: b.clone(),
            times: times.clone(),
            stop: stop.clone(),
        };
        let again = KBox::pin(again, GFP_KERNEL)?;
        b.post_send(again, |_| Ok(SendWr::send([])))?;
    }
    a.set_context(Arc::new(Dropped(gone.clone()), GFP_KERNEL)?, &env.cx)?;
    let released = a.release_context(&env.cx);
    let (freed, seen) = (gone.get(), times.get());
    let busy = wait(|| times.get() > seen);
    stop.up();
    released?;
    busy?;
    check_eq!(freed, 1);
    drop((a, b, cq));
    drop(env);
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

#[kunit_tests(rdma_null_context)]
mod tests {
    use super::*;

    #[test]
    fn each_qp_has_its_own_softirq() -> Result {
        each_has_its_own::<Softirq>()
    }

    #[test]
    fn each_qp_has_its_own_workqueue() -> Result {
        each_has_its_own::<Workqueue>()
    }

    #[test]
    fn each_qp_has_its_own_unbound_workqueue() -> Result {
        each_has_its_own::<UnboundWorkqueue>()
    }

    #[test]
    fn context_is_set_once() -> Result {
        let null = Null::<Softirq>::new()?;
        let (a, b, cx) = (&null.a, &null.b, &null.env.cx);
        a.set_context(Arc::new(One(1), GFP_KERNEL)?, cx)?;
        check_err!(a.set_context(Arc::new(One(2), GFP_KERNEL)?, cx), EBUSY);
        check_eq!(found::<One, _>(a, b)?, Some(1));
        Ok(())
    }

    /// A QP that was cleared is in the error state, and can have another context.
    #[test]
    fn cleared_context_is_dropped() -> Result {
        let null = Null::<Softirq>::new()?;
        let (a, cx, dropped) = (&null.a, &null.env.cx, Counter::new()?);
        a.clear_context(cx)?;
        a.set_context(Arc::new(Dropped(dropped.clone()), GFP_KERNEL)?, cx)?;
        check_eq!(dropped.get(), 0);
        a.clear_context(cx)?;
        check_eq!(dropped.get(), 1);
        a.set_context(Arc::new(Dropped(dropped.clone()), GFP_KERNEL)?, cx)?;
        Ok(())
    }

    /// A QP that is destroyed with its context drops it after its last handler.
    #[test]
    fn context_goes_with_its_qp() -> Result {
        let null = Null::<Workqueue>::new()?;
        let (dropped, found) = (Counter::new()?, Counter::new()?);
        let context = Arc::new(Dropped(dropped.clone()), GFP_KERNEL)?;
        null.a.set_context(context, &null.env.cx)?;
        let (gone, finds) = (dropped.clone(), found.clone());
        let handler = OnDone::<QpContext<Dropped>, _>::new(move |_, cx| {
            if cx.get().is_some() && gone.get() == 0 {
                finds.up();
            }
        })?;
        null.a.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        let Null { a, env, .. } = null;
        a.destroy(&env.cx)?;
        check_eq!((found.get(), dropped.get()), (1, 1));
        Ok(())
    }

    /// While a handler borrows the context, it is not dropped.
    #[test]
    fn clearing_waits_for_handlers() -> Result {
        let (dropped, alive) = (Counter::new()?, Counter::new()?);
        let (context, lives) = (Dropped(dropped.clone()), alive.clone());
        cleared_in_handler(
            |_| Arc::new(context, GFP_KERNEL).map_err(Error::from),
            move |context: &Dropped, _| {
                if context.0.get() == 0 {
                    lives.up();
                }
            },
        )?;
        check_eq!((alive.get(), dropped.get()), (1, 1));
        Ok(())
    }

    #[test]
    fn own_handler_does_not_clear() -> Result {
        let null = Null::<Workqueue>::new()?;
        let qp = null.a;
        qp.set_context(Arc::new(One(0), GFP_KERNEL)?, &null.env.cx)?;
        let (refused, own) = (Counter::new()?, qp.clone());
        let count = refused.clone();
        let handler = OnDone::<Sleepable, _>::new(move |_, cx| {
            if own.clear_context(cx) == Err(EDEADLK) {
                count.up();
            }
        })?;
        qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        qp.drain(&null.env.cx)?;
        check_eq!(refused.get(), 1);
        let other = || Ok::<_, Error>(Arc::new(Other(0), GFP_KERNEL)?);
        check_err!(qp.set_context(other()?, &null.env.cx), EBUSY);
        qp.clear_context(&null.env.cx)?;
        qp.set_context(other()?, &null.env.cx)
    }

    /// Requests of a handler are drained, too, if the drain that takes its context has begun.
    #[test]
    fn context_may_own_its_qp() -> Result {
        let sent = Counter::new()?;
        let count = sent.clone();
        cleared_in_handler(
            |qp| Arc::new(Conn { qp }, GFP_KERNEL).map_err(Error::from),
            move |conn: &Conn, _| {
                let count = count.clone();
                let answer = OnDone::<context::Atomic, _>::new(move |_, _| {
                    count.up();
                });
                if let Ok(answer) = answer {
                    let _ = conn.qp.post_send(answer, |_| Ok(SendWr::send([])));
                }
            },
        )?;
        wait(|| sent.get() == 1)
    }

    /// The first context, whose memory for the end of a QP takes the lock of its changes: a drain
    /// does not have that while it waits for handlers.
    #[test]
    fn context_is_set_in_a_handler_while_the_qp_is_drained() -> Result {
        let null = Null::<Workqueue>::new()?;
        let (begun, set) = (Counter::new()?, Counter::new()?);
        let qp = null.a;
        let (begins, sets, own) = (begun.clone(), set.clone(), qp.clone());
        let context = Arc::new(One(1), GFP_KERNEL)?;
        let handler = OnDone::<Sleepable, _>::new(move |_, cx| {
            begins.up();
            let failed = wait(|| own.query(cx).is_ok_and(|info| info.state == State::Error));
            if failed.and_then(|()| own.set_context(context, cx)).is_ok() {
                sets.up();
            }
        })?;
        qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        let sent = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        null.b.post_send(sent, |_| Ok(SendWr::send([])))?;
        wait(|| begun.get() == 1)?;
        qp.drain(&null.env.cx)?;
        check_eq!(set.get(), 1);
        Ok(())
    }

    #[test]
    fn shared_cq_gives_no_context() -> Result {
        let null = NullEnv::new()?;
        let entries = 2 * CAPS.entries();
        let cq = Cq::<Softirq>::pool_get(&null.env.dev, entries, None, &null.env.cx)?;
        let (a, b) = (null.env.raw_qp(&cq, &CAPS)?, null.env.raw_qp(&cq, &CAPS)?);
        null.connect(&a, &b)?;
        check_err!(
            a.set_context(Arc::new(One(1), GFP_KERNEL)?, &null.env.cx),
            EOPNOTSUPP
        );
        check_eq!(found::<One, _>(&a, &b)?, None);
        Ok(())
    }

    #[test]
    fn released_with_its_sends_softirq() -> Result {
        ends_with_its_sends::<Softirq>()
    }

    #[test]
    fn released_with_its_sends_workqueue() -> Result {
        ends_with_its_sends::<Workqueue>()
    }

    /// Of a connection that was never made.
    #[test]
    fn released_in_init_on_an_srq() -> Result {
        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
        let env = &null.env;
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Workqueue>(32)?);
        let qp = InitAttr::on_srq(&env.pd, &cq, &srq, &CAPS).create(&env.cx)?;
        qp.modify(to_init(), &env.cx)?;
        drop((srq, cq));
        ends(null, qp, 0)
    }

    #[test]
    fn own_handler_does_not_release() -> Result {
        release_in_handler()
    }

    #[test]
    fn release_waits_for_handlers() -> Result {
        released_in_handler(Qp::release_context)
    }

    #[cfg(has_faults)]
    #[test]
    fn release_needs_no_memory() -> Result {
        released_in_handler(|qp, cx| {
            let (released, failed) = with_fault(1, || qp.release_context(cx));
            check!(!failed);
            released
        })
    }

    #[test]
    fn released_on_a_busy_cq_softirq() -> Result {
        released_on_a_busy_cq::<Softirq>()
    }

    #[test]
    fn released_on_a_busy_cq_workqueue() -> Result {
        released_on_a_busy_cq::<Workqueue>()
    }

    /// The token is that of the context that it is made of.
    #[test]
    fn token_is_passed_on() -> Result {
        fn sleeps<C: Context>(_cx: &C) {}
        let (null, count) = (Null::<Workqueue>::new()?, Counter::new()?);
        let done = count.clone();
        let handler = OnDone::<QpContext<One, Sleepable>, _>::new(move |_, cx| {
            sleeps::<Sleepable>(cx);
            done.up();
        })?;
        null.a.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        null.a.drain(&null.env.cx)?;
        check_eq!(count.get(), 1);
        Ok(())
    }
}
