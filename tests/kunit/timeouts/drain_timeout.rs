// SPDX-License-Identifier: GPL-2.0

//! Drains that cannot prove anything.

use super::timed;
use crate::fixture::{
    to_init,
    wait,
    CountDrop,
    Counted,
    Counter,
    Inbox,
    Null,
    NullEnv,
    OnDone,
    RecvListGuard, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        InitAttr, //
    },
    session::{
        Received,
        RecvHandler,
        RecvRing, //
    }, //
};
use rdma_null::Injection;

const ALL: u32 = u32::MAX;

/// Fills the send queue of a QP with requests of which none will be reported.
fn fill<S: Provides<context::Atomic>, R: PollContext>(
    qp: &Qp<S, R>,
    times: &Arc<Counter>,
) -> Result {
    let mut batch = qp.batch(Counted::new(times)?);
    let mut posts = || batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])));
    while posts().is_ok() {}
    Ok(())
}

/// Returns an owner whose handler counts that it has begun, and takes some seconds.
fn slow(
    begun: &Arc<Counter>,
    secs: i64,
) -> Result<Pin<KBox<OnDone<Sleepable, impl FnOnce(&Wc, &Sleepable) + Unpin + Send>>>> {
    let begins = begun.clone();
    OnDone::new(move |_: &Wc, _: &Sleepable| {
        begins.up();
        fsleep(Delta::from_secs(secs));
    })
}

/// A connection whose receives keep it.
struct Receiver {
    qp: Qp<Softirq>,
    _life: CountDrop,
}

impl RecvHandler for Receiver {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<Softirq> {
        &self.qp
    }

    fn received(_message: Received<'_, Self>, _cx: &context::Atomic) {}

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

/// Waits longer than a drain does.
fn wait_long(condition: impl Fn() -> bool) -> Result {
    for _ in 0..100 {
        if condition() {
            return Ok(());
        }
        fsleep(Delta::from_secs(1));
    }
    Err(ETIMEDOUT)
}

#[kunit_tests(rdma_drain_timeout)]
mod tests {
    use super::*;

    fn gives_up_without_its_markers<C: crate::fixture::Polled>() -> Result {
        let (null, sent) = (Null::<C>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.send(&sent, b"x")?;
        null.take(&sent, 1)?;
        null.inject(Injection::Hold { count: ALL })?;
        let (ms, drained) = timed(|| null.a.drain(&null.env.cx));
        let held = null.dev.held(null.a.num())?;
        // The markers are late, and the next drain has new ones.
        null.inject(Injection::Release {
            count: ALL,
            reversed: false,
        })?;
        check_err!(drained, ETIMEDOUT);
        check!((60_000..61_000).contains(&ms));
        // Both are posted before one is waited for.
        check_eq!(held, 2);
        null.a.drain(&null.env.cx)
    }

    #[test]
    fn gives_up_in_a_softirq() -> Result {
        gives_up_without_its_markers::<Softirq>()
    }

    #[test]
    fn gives_up_in_a_workqueue() -> Result {
        gives_up_without_its_markers::<Workqueue>()
    }

    #[test]
    fn gives_up_where_the_caller_polls() -> Result {
        gives_up_without_its_markers::<Direct>()
    }

    /// A reset takes the completions of the QP out of its CQ. Its poller may be late.
    #[test]
    fn full_queue_is_not_reset_before_its_cq_is_polled() -> Result {
        let null = NullEnv::new()?;
        let (begun, times, cx) = (Counter::new()?, Counter::new()?, &null.env.cx);
        let cq = null.env.cq::<Workqueue>(16)?;
        let recv_cq = null.env.cq::<Workqueue>(16)?;
        let qp = Qp::create_raw(&null.env.pd, &cq, &recv_cq, &Caps::new(8, 8), cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        qp.post_send(slow(&begun, 15)?, |_| Ok(SendWr::send([])))?;
        wait(|| begun.get() == 1)?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        fill(&qp, &times)?;
        qp.destroy(cx)?;
        check_eq!(times.get(), 1);
        Ok(())
    }

    /// A caller may take long over a completion, and the CQ have more.
    #[test]
    fn full_queue_is_not_reset_while_a_caller_polls_its_cq() -> Result {
        let null = NullEnv::new()?;
        let (begun, times, cx) = (Counter::new()?, Counter::new()?, &null.env.cx);
        let cq = null.env.cq::<Direct>(16)?;
        let recv_cq = null.env.cq::<Direct>(16)?;
        let qp = Qp::create_raw(&null.env.pd, &cq, &recv_cq, &Caps::new(8, 8), cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        for _ in 0..2 {
            qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        }
        let begins = begun.clone();
        null.env.client.spawn(GFP_KERNEL, move |_| {
            let _ = cq.process_with(1, |completion| {
                begins.up();
                fsleep(Delta::from_secs(5));
                completion.dispatch();
            });
        })?;
        wait(|| begun.get() == 1)?;
        fill(&qp, &times)?;
        qp.destroy(cx)?;
        check_eq!(times.get(), 2);
        Ok(())
    }

    /// A reset empties the receive queue, too, and its poller may be late.
    #[test]
    fn full_queue_is_not_reset_before_receives_are_polled() -> Result {
        let null = NullEnv::new()?;
        let (begun, times, cx) = (Counter::new()?, Counter::new()?, &null.env.cx);
        let cq = null.env.cq::<Workqueue>(16)?;
        let recv_cq = null.env.cq::<Workqueue>(16)?;
        let qp = Qp::create_raw(&null.env.pd, &cq, &recv_cq, &Caps::new(8, 8), cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        fill(&qp, &times)?;
        qp.post_recv(slow(&begun, 15)?, |_| Ok(RecvWr::new([])))?;
        for _ in 0..4 {
            qp.post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])))?;
        }
        qp.destroy(cx)?;
        check_eq!((begun.get(), times.get()), (1, 4));
        Ok(())
    }

    /// Where a device frees entries as completions are polled, a late poller is no full queue.
    #[test]
    fn late_poller_is_waited_for() -> Result {
        let null = NullEnv::new()?;
        let (begun, times, cx) = (Counter::new()?, Counter::new()?, &null.env.cx);
        let cq = null.env.cq::<Workqueue>(32)?;
        let qp = null.env.raw_qp(&cq, &Caps::new(8, 8))?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        qp.post_send(slow(&begun, 5)?, |_| Ok(SendWr::send([])))?;
        wait(|| begun.get() == 1)?;
        let mut posted = 0;
        while qp
            .post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))
            .is_ok()
        {
            posted += 1;
        }
        qp.drain(cx)?;
        check_eq!(times.get(), posted);
        Ok(())
    }

    /// A queue has room for one marker.
    #[test]
    fn drains_come_one_after_the_other() -> Result {
        let null = NullEnv::new()?;
        let (begun, drained) = (Counter::new()?, Counter::new()?);
        let cq = null.env.cq::<Workqueue>(32)?;
        let qp = null.env.raw_qp(&cq, &Caps::new(8, 8))?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        qp.post_send(slow(&begun, 5)?, |_| Ok(SendWr::send([])))?;
        wait(|| begun.get() == 1)?;
        for _ in 0..8 {
            let sent = Counted::new(&drained)?;
            if qp.post_send(sent, |_| Ok(SendWr::send([]))).is_err() {
                break;
            }
        }
        let (ended, failed) = (Counter::new()?, Counter::new()?);
        for _ in 0..3 {
            let (other, ends, fails) = (qp.clone(), ended.clone(), failed.clone());
            null.env.client.spawn(GFP_KERNEL, move |cx| {
                if other.drain(cx).is_err() {
                    fails.up();
                }
                ends.up();
            })?;
        }
        fsleep(Delta::from_secs(20));
        check_eq!((ended.get(), failed.get()), (3, 0));
        Ok(())
    }

    /// What is not reported keeps the QP, which the context keeps.
    #[test]
    fn full_queue_lets_go_of_its_context() -> Result {
        struct Conn {
            qp: Qp<Workqueue>,
            _life: CountDrop,
        }

        let null = NullEnv::new()?;
        let (gone, times, cx) = (Counter::new()?, Counter::new()?, &null.env.cx);
        let cq = null.env.cq::<Workqueue>(32)?;
        let conn = Conn {
            qp: null.env.raw_qp(&cq, &Caps::new(8, 8))?,
            _life: CountDrop(gone.clone()),
        };
        let conn = Arc::new(conn, GFP_KERNEL)?;
        null.dev
            .inject_qp(conn.qp.num(), Injection::Connect { peer: 0 })?;
        conn.qp.set_context(conn.clone(), cx)?;
        fill(&conn.qp, &times)?;
        check_err!(conn.qp.drain(cx), EBUSY);
        conn.qp.clear_context(cx)?;
        check_eq!(gone.get(), 0);
        drop(conn);
        check_eq!(gone.get(), 1);
        wait(|| null.dev.objects()[1] == 0)
    }

    /// A connection on an SRQ that was never made, and whose device says nothing: its owner waits a
    /// minute for the drain, and the QP another one.
    #[test]
    fn connection_ends_without_its_device() -> Result {
        struct Conn {
            qp: Qp<Workqueue>,
            _life: CountDrop,
        }

        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
        let (gone, env, cx) = (Counter::new()?, &null.env, &null.env.cx);
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Workqueue>(32)?);
        let conn = Conn {
            qp: InitAttr::on_srq(&env.pd, &cq, &srq, &Caps::new(8, 0)).create(cx)?,
            _life: CountDrop(gone.clone()),
        };
        let conn = Arc::new(conn, GFP_KERNEL)?;
        conn.qp.modify(to_init(), cx)?;
        conn.qp.set_context(conn.clone(), cx)?;
        null.dev
            .inject_qp(conn.qp.num(), Injection::Hold { count: ALL })?;
        let (ms, drained) = timed(|| conn.qp.drain(cx));
        check_err!(drained, ETIMEDOUT);
        check!((60_000..61_000).contains(&ms));
        let (ms, released) = timed(|| conn.qp.release_context(cx));
        released?;
        check!(ms < 1_000);
        drop(conn);
        check_eq!(gone.get(), 1);
        let (ms, ended) = timed(|| wait_long(|| null.dev.objects()[1] == 0));
        ended?;
        check!((59_000..70_000).contains(&ms));
        Ok(())
    }

    /// The same with receives that keep the connection.
    #[test]
    fn receives_end_without_their_device() -> Result {
        let (null, gone) = (NullEnv::new()?, Counter::new()?);
        let (env, cx) = (&null.env, &null.env.cx);
        let conn = Receiver {
            qp: env.raw_qp(&env.cq(32)?, &Caps::new(8, 8))?,
            _life: CountDrop(gone.clone()),
        };
        let conn = Arc::new(conn, GFP_KERNEL)?;
        let num = conn.qp.num();
        null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
        null.dev.inject_qp(num, Injection::Hold { count: ALL })?;
        let ring = RecvRing {
            pd: &env.pd,
            count: 4,
            len: 16,
        };
        ring.post(&conn, cx)?;
        check_err!(conn.qp.drain(cx), ETIMEDOUT);
        let (ms, released) = timed(|| conn.qp.release_recvs(cx));
        released?;
        check!(ms < 1_000);
        drop(conn);
        check_eq!(gone.get(), 1);
        let (ms, ended) = timed(|| wait_long(|| null.dev.objects()[1] == 0));
        ended?;
        check!((59_000..70_000).contains(&ms));
        Ok(())
    }

    /// Neither empties it.
    #[test]
    fn full_queue_fails_two_drains_at_once() -> Result {
        for _ in 0..3 {
            let null = NullEnv::new()?;
            let (times, failed) = (Counter::new()?, Counter::new()?);
            let cq = null.env.cq::<Workqueue>(32)?;
            let qp = null.env.raw_qp(&cq, &Caps::new(8, 8))?;
            null.dev
                .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
            fill(&qp, &times)?;
            let (other, counts) = (qp.clone(), failed.clone());
            null.env.client.spawn(GFP_KERNEL, move |cx| {
                if other.drain(cx) == Err(EBUSY) {
                    counts.up();
                }
            })?;
            check_err!(qp.drain(&null.env.cx), EBUSY);
            wait(|| failed.get() == 1)?;
        }
        Ok(())
    }
}
