// SPDX-License-Identifier: GPL-2.0

//! Ends of QPs that wait for handlers which take more than a minute.

use super::timed;
use crate::{
    check::expect,
    fixture::{
        accepts,
        listen,
        own_class,
        wait,
        Counter,
        Env,
        Events,
        Forger,
        NullEnv,
        OnDone,
        Place,
        BACKLOG,
        CAPS,
        STEP_MS, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    mad::Agent,
    prelude::*, //
};
use rdma_null::Injection;

/// Returns a QP whose CQ is in a handler, which does this.
fn busy(
    null: &NullEnv,
    handle: impl FnOnce(&Sleepable) + Unpin + Send + 'static,
) -> Result<Qp<Workqueue>> {
    let begun = Counter::new()?;
    let cq = null.env.cq::<Workqueue>(32)?;
    let qp = null.env.raw_qp(&cq, &CAPS)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let begins = begun.clone();
    let owner = OnDone::new(move |_: &Wc, cx: &Sleepable| {
        begins.up();
        handle(cx);
    })?;
    qp.post_send(owner, |_| Ok(SendWr::send([])))?;
    wait(|| begun.get() == 1)?;
    Ok(qp)
}

/// Sleeps. A timer of some minutes fires up to five seconds late.
fn nap(secs: i64) {
    fsleep(Delta::from_secs(secs));
}

/// The QPs of the device end, and so does its removal.
fn all_end(null: NullEnv) -> Result {
    wait(|| null.dev.objects()[1] == 0)?;
    let NullEnv { dev, env } = null;
    drop(env);
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

/// Destroys the QP that is put here, in a handler, and keeps what that returned.
fn destroy_in_handler(
    put: &Arc<Place<Qp<Workqueue>>>,
    said: &Arc<Place<Result>>,
) -> impl Fn(&Sleepable) + Unpin + Send + Sync + 'static {
    let (put, said) = (put.clone(), said.clone());
    move |cx: &Sleepable| {
        let destroyed = put.wait().and_then(|qp| qp.destroy(cx));
        said.put(destroyed);
    }
}

/// The handler of a connection that is not confirmed.
struct OnFailure<F: Fn(&Sleepable) + Send + Sync + 'static>(F);

impl<F: Fn(&Sleepable) + Send + Sync + 'static> cm::Handler for OnFailure<F> {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        if matches!(event, cm::Event::Failed(_)) {
            (self.0)(cx);
        }
    }
}

#[kunit_tests(rdma_late_end)]
mod tests {
    use super::*;

    #[test]
    fn caller_waits_for_a_minute() -> Result {
        let null = NullEnv::new()?;
        let qp = busy(&null, |_| nap(63))?;
        let text = "a handler of which has not returned";
        expect(6, text);
        let (ms, destroyed) = timed(|| qp.destroy(&null.env.cx));
        check_err!(destroyed, ETIMEDOUT);
        check!((60_000..61_000).contains(&ms));
        let (ms, ended) = timed(|| wait(|| null.dev.objects()[1] == 0));
        ended?;
        check!(ms < 10_000);
        all_end(null)
    }

    #[test]
    fn work_item_waits_as_long_as_it_takes() -> Result {
        let null = NullEnv::new()?;
        let qp = busy(&null, |_| nap(244))?;
        expect(24, "a handler of which has not returned");
        let (ms, ended) = timed(|| {
            drop(qp);
            nap(240);
            wait(|| null.dev.objects()[1] == 0)
        });
        ended?;
        check!((243_000..251_000).contains(&ms));
        all_end(null)
    }

    /// One that waits does not keep others from their ends.
    #[test]
    fn others_end_meanwhile() -> Result {
        let (null, other) = (NullEnv::new()?, NullEnv::new()?);
        let mut late = KVec::new();
        for _ in 0..32 {
            late.push(busy(&null, |_| nap(100))?, GFP_KERNEL)?;
        }
        drop(late);
        nap(1);
        let cq = other.env.cq::<Softirq>(32)?;
        drop(other.env.raw_qp(&cq, &CAPS)?);
        let (ms, ended) = timed(|| wait(|| other.dev.objects()[1] == 0));
        ended?;
        check!(ms < 1_000);
        all_end(null)
    }

    /// A peer decides how long this takes.
    #[test]
    fn handler_connects_to_a_silent_peer() -> Result {
        let null = NullEnv::with_cm()?;
        let env = &null.env;
        let addr = env.addr();
        let listener = listen(env, addr, accepts(env, &[]))?;
        null.dev.inject(Injection::Silence { count: 1 })?;
        let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let to_peer = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
        let said = Place::new()?;
        let says = said.clone();
        let qp = busy(&null, move |cx| {
            let connected = Events::new()
                .and_then(|events| id.connect(events, &cm::ConnParam::default(), cx).map(drop));
            says.put(connected);
        })?;
        drop(qp);
        nap(100);
        null.dev.inject(Injection::Expire)?;
        check!(said.wait()?.is_err());
        drop((to_peer, cq));
        listener.destroy(&env.cx)?;
        all_end(null)
    }

    #[test]
    fn handlers_destroy_the_qps_of_each_other() -> Result {
        let null = NullEnv::new()?;
        let (a, b) = (Place::new()?, Place::new()?);
        let (said_a, said_b) = (Place::new()?, Place::new()?);
        let first = busy(&null, destroy_in_handler(&b, &said_b))?;
        let second = busy(&null, destroy_in_handler(&a, &said_a))?;
        a.put(first);
        b.put(second);
        // The one that gives up lets the other go on.
        let said = [said_a.wait()?, said_b.wait()?];
        check!(said.contains(&Err(ETIMEDOUT)));
        check!(said
            .iter()
            .all(|said| matches!(said, Ok(()) | Err(ETIMEDOUT))));
        all_end(null)
    }

    /// One that stops an agent waits for callbacks of the connection manager, one of which waits
    /// for it. A peer that confirms nothing is enough.
    #[test]
    fn handler_stops_an_agent() -> Result {
        let (null, env) = (NullEnv::new()?, Env::new()?);
        let (put, said, stopped) = (Place::new()?, Place::new()?, Place::new()?);
        let (addr, pd) = (env.addr(), env.pd.clone());
        let called = Counter::new()?;
        let (calls, destroy) = (called.clone(), destroy_in_handler(&put, &said));
        let on_failure = Arc::new(
            OnFailure(move |cx: &Sleepable| {
                calls.up();
                destroy(cx);
            }),
            GFP_KERNEL,
        )?;
        let ids = Place::new()?;
        let tell = ids.clone();
        let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
            let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
            id.accept(on_failure.clone(), &cm::ConnParam::default(), cx)?;
            tell.put((qp, id));
            Ok(())
        };
        let (listener, forger) = (listen(&env, addr, accept)?, Forger::new(&env)?);
        let agent = Agent::register(&env.dev, 1, own_class(), &[], BACKLOG, &env.cx)?;
        forger.ask(addr, 18, 1, &env.cx)?;
        let accepted = ids.wait()?;
        wait(|| called.get() == 1)?;
        let stops = stopped.clone();
        let qp = busy(&null, move |cx| stops.put(agent.stop(cx)))?;
        put.put(qp);
        check_err!(said.wait()?, ETIMEDOUT);
        stopped.wait()??;
        drop((accepted, forger));
        listener.destroy(&env.cx)?;
        all_end(null)
    }

    #[test]
    fn handler_destroys_a_listener() -> Result {
        let (null, env) = (NullEnv::new()?, Env::new()?);
        let (put, said, destroyed) = (Place::new()?, Place::new()?, Place::new()?);
        let (addr, called) = (env.addr(), Counter::new()?);
        let (calls, destroy) = (called.clone(), destroy_in_handler(&put, &said));
        let accept = move |_: cm::Request<'_>, cx: &Sleepable| {
            calls.up();
            destroy(cx);
            Err(ECONNREFUSED)
        };
        let (listener, forger) = (listen(&env, addr, accept)?, Forger::new(&env)?);
        forger.ask(addr, 18, 1, &env.cx)?;
        wait(|| called.get() == 1)?;
        let done = destroyed.clone();
        let qp = busy(&null, move |cx| done.put(listener.destroy(cx)))?;
        put.put(qp);
        check_err!(said.wait()?, ETIMEDOUT);
        destroyed.wait()??;
        all_end(null)
    }
}
