// SPDX-License-Identifier: GPL-2.0

//! Requests that the device loses: they end with their QP.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::{
        expect,
        OVERRUN, //
    },
    fixture::{
        both,
        flush_events,
        wait,
        CountDrop,
        Counter,
        Env,
        Inbox,
        Message,
        Null,
        NullEnv,
        Polled,
        CAPS, //
    }, //
};
use core::marker::PhantomData;
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        InitAttr,
        QpContext,
        SendRing, //
    },
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        tags::{
            Exchange,
            Tag,
            Tags, //
        },
        Connecting,
        Received,
        RecvHandler,
        RecvRing, //
    }, //
};
use rdma_bindings as bindings;
use rdma_null::Injection;

const COUNT: u32 = 4;
const HOLD_ONE: Injection = Injection::Hold { count: 1 };
const HOLD_ALL: Injection = Injection::Hold { count: u32::MAX };
const CQ_FAILS: Injection = Injection::Event {
    event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
};

/// Takes the device away, which waits for all that was made of it.
fn is_removed(null: NullEnv) -> Result {
    let NullEnv { dev, env } = null;
    drop(env);
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

/// Exchanges that count their ends, and what becomes of their parts.
struct Io;

struct Request {
    buf: Buf<ToDevice>,
    ended: Arc<Counter>,
    _gone: CountDrop,
}

impl Exchange for Io {
    type Request = Request;
    type Reply = ();
    type Connection = ();
    type Needs = context::Atomic;

    fn ended(mut tag: Tag<Self>) {
        tag.parts().0.ended.up();
    }
}

/// A QP to no peer with exchanges of which one is lost, and the others have no reply. With
/// `cq_fails` its CQ fails before it ends.
fn exchanges_end<C: Polled>(lose: Injection, cq_fails: bool) -> Result {
    let null = Null::<C>::new()?;
    null.disconnect()?;
    let (ended, gone) = (Counter::new()?, Counter::new()?);
    let make = |_| -> Result<_> {
        let request = Request {
            buf: Buf::alloc(&null.env.pd, 8, &null.env.cx)?,
            ended: ended.clone(),
            _gone: CountDrop(gone.clone()),
        };
        Ok((request, ()))
    };
    let tags = Tags::<Io>::new(&null.a, (), COUNT, 4, make, &null.env.cx)?;
    null.inject(lose)?;
    for _ in 0..COUNT {
        let posted = tags
            .take()?
            .post(&null.a, |request, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([request.buf.whole()]))
            });
        if let Err(e) = posted {
            check!(e.owner.is_none());
        }
    }
    let Null { a, b, cq, env, dev } = null;
    tags.close(ENOTCONN);
    tags.reclaim(&a, &env.cx)?;
    check_eq!(ended.get(), COUNT as i32 - 1);
    if cq_fails {
        expect(1, OVERRUN);
        dev.inject(CQ_FAILS)?;
        // A CQ that is gone gets no event.
        flush_events();
    }
    a.destroy(&env.cx)?;
    wait(|| ended.get() == COUNT as i32)?;
    check_eq!(gone.get(), 0);
    drop(tags);
    wait(|| gone.get() == COUNT as i32)?;
    drop((b, cq));
    is_removed(NullEnv { env, dev })
}

/// A ring of sends of which none comes back.
fn ring_ends<C: Polled>() -> Result {
    let (null, inbox) = (Null::<C>::with(&Caps::new(16, 1))?, Inbox::new()?);
    null.disconnect()?;
    let mut ring = SendRing::<Pin<KBox<Message>>>::new(&null.a, 8, 2, &null.env.cx)?;
    null.inject(HOLD_ALL)?;
    for n in 0..5 {
        let message = null.env.message(&inbox, &[n])?;
        ring.post(&null.a, message, |m, chain: &mut Chain<'_, 1>| {
            chain.push(SendWr::send([m.buf.whole()]))
        })?;
    }
    // What the drain posts comes.
    null.inject(Injection::Hold { count: 0 })?;
    let Null { a, b, cq, env, dev } = null;
    a.destroy(&env.cx)?;
    wait(|| inbox.dropped() == 5)?;
    check_eq!(inbox.len(), 0);
    drop((ring, b, cq));
    is_removed(NullEnv { env, dev })
}

struct Conn<C: Polled> {
    qp: Qp<C>,
    failed: Arc<Counter>,
    _gone: CountDrop,
    _context: PhantomData<C>,
}

impl<C: Polled> RecvHandler for Conn<C> {
    type Send = C;
    type Recv = C;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<C> {
        &self.qp
    }

    fn received(_message: Received<'_, Self>, _cx: &context::Atomic) {}

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
        self.failed.up();
    }

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

/// A connection with `begin`, whose receives are posted under an injection, until it `ends`.
fn with_receives<C: Polled>(
    begin: impl FnOnce(&Arc<Conn<C>>, &Sleepable) -> Result,
    injection: Injection,
    ends: impl FnOnce(Arc<Conn<C>>, &NullEnv, &Counter) -> Result,
) -> Result {
    let null = Null::<C>::new()?;
    let Null { a, b, cq, env, dev } = null;
    let null = NullEnv { env, dev };
    let (failed, gone) = (Counter::new()?, Counter::new()?);
    let conn = Conn {
        qp: a,
        failed: failed.clone(),
        _gone: CountDrop(gone.clone()),
        _context: PhantomData,
    };
    let conn = Arc::new(conn, GFP_KERNEL)?;
    begin(&conn, &null.env.cx)?;
    null.dev.inject_qp(conn.qp.num(), injection)?;
    RecvRing {
        pd: &null.env.pd,
        count: COUNT,
        len: 16,
    }
    .post(&conn, &null.env.cx)?;
    ends(conn, &null, &gone)?;
    drop((b, cq));
    is_removed(null)
}

/// A connection that loses a receive, from `begin` to `end`.
fn receives_end<C: Polled>(
    begin: impl FnOnce(&Arc<Conn<C>>, &Sleepable) -> Result,
    end: impl FnOnce(&Qp<C>, &Sleepable) -> Result,
) -> Result {
    with_receives(begin, HOLD_ONE, |conn, null, gone| {
        end(&conn.qp, &null.env.cx)?;
        check_eq!(conn.failed.get(), COUNT as i32 - 1);
        drop(conn);
        wait(|| gone.get() == 1)
    })
}

/// A connection whose device completes nothing, and whose receives keep it, from `begin` to `end`.
fn receives_are_released<C: Polled>(
    begin: impl FnOnce(&Arc<Conn<C>>, &Sleepable) -> Result,
    end: impl FnOnce(&Qp<C>, &Env) -> Result,
) -> Result {
    with_receives(begin, HOLD_ALL, |conn, null, gone| {
        expect(1, OVERRUN);
        null.dev.inject(CQ_FAILS)?;
        check_err!(conn.qp.drain(&null.env.cx), EOVERFLOW);
        end(&conn.qp, &null.env)?;
        check_eq!((conn.failed.get(), gone.get()), (0, 0));
        drop(conn);
        check_eq!(gone.get(), 1);
        Ok(())
    })
}

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    flushed: Arc<Counter>,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if wc.result().is_err() {
            this.flushed.up();
        }
    }
}

/// A transfer that is lost.
fn transfer_ends<C: Polled>() -> Result {
    let (null, flushed) = (NullEnv::new()?, Counter::new()?);
    let env = &null.env;
    let cq = env.cq::<C>(64)?;
    let caps = Caps {
        send_sge: 32,
        ..Caps::new(4, 4)
    };
    let qp = InitAttr::new(&env.pd, &cq, &cq, &caps)
        .rw_contexts(2, 1)
        .create(&env.cx)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    null.dev.inject_qp(qp.num(), HOLD_ONE)?;
    let transfer = Transfer {
        cqe: Cqe::new(),
        data: Ctx::alloc(4 * PAGE_SIZE, &env.cx)?,
        flushed: flushed.clone(),
    };
    let nowhere = Remote { addr: 0, rkey: 0 };
    qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |t| {
        Ok(Rw::write(&t.data, .., nowhere, &env.cx))
    })?;
    qp.destroy(&env.cx)?;
    check_eq!(flushed.get(), 1);
    drop(cq);
    is_removed(null)
}

/// Has the memory of contexts be missing, at several depths of the stack.
#[cfg(has_faults)]
#[inline(never)]
fn contexts_fail(depth: u32) -> Result {
    let (made, failed) = with_fault(1, || Ctx::<Bidirectional>::empty(GFP_KERNEL));
    check!(failed && made.is_err());
    match depth.checked_sub(1) {
        Some(depth) => contexts_fail(core::hint::black_box(depth)),
        None => Ok(()),
    }
}

/// Many transfers that are lost, while there is no memory for others.
#[cfg(has_faults)]
fn transfers_end() -> Result {
    const MANY: u32 = 256;
    let (null, flushed) = (NullEnv::new()?, Counter::new()?);
    let env = &null.env;
    let cq = env.cq::<Softirq>(2 * MANY + 16)?;
    let qp = InitAttr::new(&env.pd, &cq, &cq, &Caps::new(4, 4))
        .rw_contexts(MANY, 1)
        .create(&env.cx)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let count = MANY;
    null.dev.inject_qp(qp.num(), Injection::Vanish { count })?;
    for _ in 0..MANY {
        let transfer = Transfer {
            cqe: Cqe::new(),
            data: Ctx::alloc(64, &env.cx)?,
            flushed: flushed.clone(),
        };
        let nowhere = Remote { addr: 0, rkey: 0 };
        qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |t| {
            Ok(Rw::write(&t.data, .., nowhere, &env.cx))
        })?;
    }
    contexts_fail(16)?;
    qp.destroy(&env.cx)?;
    check_eq!(flushed.get(), MANY as i32);
    drop(cq);
    is_removed(null)
}

/// A request of an array.
#[derive(HasCqe)]
struct Again<N: 'static> {
    cqe: Cqe<Self>,
    region: Region<Bidirectional>,
    completed: Arc<Counter>,
    flushed: Arc<Counter>,
    _needs: PhantomData<fn() -> N>,
}

/// The context of a handler of [`Again`].
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

impl<N: Found> CqeHandler for Again<N> {
    type Pointer = Taken<Self>;
    type Needs = N;

    fn done(this: Taken<Self>, wc: &Wc, cx: &N) {
        if cx.is_found() {
            match wc.result() {
                Ok(_) => this.completed.up(),
                Err(_) => this.flushed.up(),
            };
        }
    }
}

type Post<C, N> = fn(&Qp<C>, Taken<Again<N>>) -> core::result::Result<(), Error>;

/// Requests of an array of which the device loses the first.
fn requests_end<C: Polled + Provides<N>, N: Found>(post: Post<C, N>, completed: i32) -> Result {
    let null = Null::<C>::with(&Caps::new(16, 16))?;
    null.disconnect()?;
    let Null { a, b, cq, env, dev } = null;
    let (done, flushed) = (Counter::new()?, Counter::new()?);
    // Where there can be one.
    let _ = a.set_context(Counter::new()?, &env.cx);
    let make = |_| {
        Ok(Again {
            cqe: Cqe::new(),
            region: Region::new(Buf::alloc(&env.pd, 8, &env.cx)?, &env.cx)?,
            completed: done.clone(),
            flushed: flushed.clone(),
            _needs: PhantomData,
        })
    };
    let mut requests = Requests::new(&a, COUNT as usize, make, &env.cx)?;
    dev.inject_qp(a.num(), HOLD_ONE)?;
    for request in requests.idle() {
        post(&a, request)?;
    }
    a.destroy(&env.cx)?;
    check_eq!(
        (done.get(), flushed.get()),
        (completed, COUNT as i32 - completed)
    );
    check_eq!(requests.idle().count(), COUNT as usize);
    drop((requests, b, cq));
    is_removed(NullEnv { env, dev })
}

fn send<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, request: Taken<Again<N>>) -> Result {
    let nowhere = Remote { addr: 0, rkey: 0 };
    Ok(qp.post_send(request, |_| Ok(SendWr::rdma_write([], nowhere)))?)
}

fn recv<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, request: Taken<Again<N>>) -> Result {
    Ok(qp.post_recv(request, |_| Ok(RecvWr::new([])))?)
}

fn register<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, request: Taken<Again<N>>) -> Result {
    qp.post_send(request, |r| Ok(both(&r.region)))?;
    Ok(())
}

fn chain<C: Polled + Provides<N>, N: Found>(qp: &Qp<C>, request: Taken<Again<N>>) -> Result {
    let nowhere = Remote { addr: 0, rkey: 0 };
    Ok(qp.post_chain(request, |_, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::rdma_write([], nowhere))?;
        chain.push(SendWr::rdma_write([], nowhere))
    })?)
}

#[kunit_tests(rdma_lost_end)]
mod tests {
    use super::*;

    #[test]
    fn requests_in_a_softirq() -> Result {
        requests_end::<Softirq, context::Atomic>(send, COUNT as i32 - 1)
    }

    #[test]
    fn requests_in_a_work_item() -> Result {
        requests_end::<Workqueue, context::Atomic>(send, COUNT as i32 - 1)
    }

    #[test]
    fn requests_at_a_caller() -> Result {
        requests_end::<Direct, context::Atomic>(send, COUNT as i32 - 1)
    }

    #[test]
    fn requests_with_a_context_in_a_softirq() -> Result {
        requests_end::<Softirq, QpContext<Counter>>(send, COUNT as i32 - 1)
    }

    #[test]
    fn registrations_of_requests_in_a_softirq() -> Result {
        requests_end::<Softirq, context::Atomic>(register, COUNT as i32 - 1)
    }

    #[test]
    fn chains_of_requests_in_a_work_item() -> Result {
        requests_end::<UnboundWorkqueue, context::Atomic>(chain, COUNT as i32 - 1)
    }

    #[test]
    fn receives_of_requests_in_a_softirq() -> Result {
        requests_end::<Softirq, context::Atomic>(recv, 0)
    }

    #[test]
    fn receives_of_requests_at_a_caller() -> Result {
        requests_end::<Direct, context::Atomic>(recv, 0)
    }

    #[test]
    fn exchanges_in_a_softirq() -> Result {
        exchanges_end::<Softirq>(HOLD_ONE, false)
    }

    #[test]
    fn exchanges_in_a_work_item() -> Result {
        exchanges_end::<Workqueue>(HOLD_ONE, false)
    }

    #[test]
    fn exchanges_at_a_caller() -> Result {
        exchanges_end::<Direct>(HOLD_ONE, false)
    }

    #[test]
    fn exchanges_on_a_failed_cq_in_a_work_item() -> Result {
        exchanges_end::<Workqueue>(HOLD_ONE, true)
    }

    #[test]
    fn exchanges_on_a_failed_cq_at_a_caller() -> Result {
        exchanges_end::<Direct>(HOLD_ONE, true)
    }

    #[test]
    fn exchanges_that_were_not_posted() -> Result {
        expect(
            1,
            "did not say which request it refused: the owner is leaked",
        );
        exchanges_end::<Softirq>(Injection::Mute { after: 1, errno: 5 }, false)
    }

    #[test]
    fn ring_in_a_softirq() -> Result {
        ring_ends::<Softirq>()
    }

    #[test]
    fn ring_in_a_work_item() -> Result {
        ring_ends::<Workqueue>()
    }

    #[test]
    fn ring_at_a_caller() -> Result {
        ring_ends::<Direct>()
    }

    #[test]
    fn receives_in_a_softirq() -> Result {
        receives_end::<Softirq>(|_, _| Ok(()), Qp::drain)
    }

    #[test]
    fn receives_in_a_work_item() -> Result {
        receives_end::<UnboundWorkqueue>(|_, _| Ok(()), Qp::drain)
    }

    #[test]
    fn receives_at_a_caller() -> Result {
        receives_end::<Direct>(|_, _| Ok(()), Qp::drain)
    }

    #[test]
    fn receives_of_a_context_in_a_softirq() -> Result {
        let set = |conn: &Arc<Conn<_>>, cx: &_| conn.qp.set_context(conn.clone(), cx);
        receives_end::<Softirq>(set, Qp::clear_context)
    }

    #[test]
    fn receives_of_a_context_in_a_work_item() -> Result {
        let set = |conn: &Arc<Conn<_>>, cx: &_| conn.qp.set_context(conn.clone(), cx);
        receives_end::<Workqueue>(set, Qp::clear_context)
    }

    #[test]
    fn released_receives_in_a_softirq() -> Result {
        receives_are_released::<Softirq>(|_, _| Ok(()), |qp, env| qp.release_recvs(&env.cx))
    }

    #[test]
    fn released_receives_in_a_work_item() -> Result {
        receives_are_released::<Workqueue>(|_, _| Ok(()), |qp, env| qp.release_recvs(&env.cx))
    }

    #[test]
    fn released_receives_at_a_caller() -> Result {
        receives_are_released::<Direct>(|_, _| Ok(()), |qp, env| qp.release_recvs(&env.cx))
    }

    #[test]
    fn released_receives_of_a_context_in_a_work_item() -> Result {
        let set = |conn: &Arc<Conn<_>>, cx: &_| conn.qp.set_context(conn.clone(), cx);
        receives_are_released::<Workqueue>(set, |qp, env| {
            check_err!(qp.clear_context(&env.cx), EOVERFLOW);
            qp.release_recvs(&env.cx)?;
            qp.release_context(&env.cx)
        })
    }

    #[test]
    fn released_receives_of_an_attempt_to_connect() -> Result {
        expect(1, "was not drained");
        receives_are_released::<Softirq>(
            |_, _| Ok(()),
            |qp, env| {
                let id = cm::Id::create(&env.client, &env.cx)?;
                drop(Connecting::new(&id, qp, &env.cx));
                Ok(())
            },
        )
    }

    #[test]
    fn transfer_in_a_softirq() -> Result {
        transfer_ends::<Softirq>()
    }

    #[test]
    fn transfer_in_a_work_item() -> Result {
        transfer_ends::<Workqueue>()
    }

    #[test]
    fn transfer_at_a_caller() -> Result {
        transfer_ends::<Direct>()
    }

    /// A thread may keep what it has polled for as long as it likes.
    #[cfg(has_faults)]
    #[test]
    fn transfers_beside_contexts_without_memory() -> Result {
        transfers_end()
    }

    #[test]
    fn marker_does_not_wait_in_an_array() -> Result {
        let null = NullEnv::new()?;
        let env = &null.env;
        let cq = env.cq::<Direct>(64)?;
        let qp = env.raw_qp(&cq, &CAPS)?;
        let num = qp.num();
        null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
        null.dev.inject_qp(num, HOLD_ALL)?;
        let (drained, ended) = (qp.clone(), Counter::new()?);
        let ends = ended.clone();
        env.client.spawn(GFP_KERNEL, move |cx| {
            if drained.drain(cx).is_ok() {
                ends.up();
            }
        })?;
        wait(|| null.dev.held(num) == Ok(2))?;
        let mut array = WcArray::<8>::new();
        null.dev.inject_qp(
            num,
            Injection::Release {
                count: u32::MAX,
                reversed: false,
            },
        )?;
        // The drain looks each ten milliseconds.
        cq.poll(&mut array)?;
        wait(|| ended.get() == 1)?;
        check!(array.completions().next().is_none());
        Ok(())
    }
}
