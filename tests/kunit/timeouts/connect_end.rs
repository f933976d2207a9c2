// SPDX-License-Identifier: GPL-2.0

//! Ids whose last message the connection manager would send again for a minute.

use super::timed;
use crate::fixture::{
    connect_to,
    connect_to_service,
    listen,
    listen_to_service,
    signal_current,
    wait,
    CmEvents,
    Counter,
    Env,
    Events,
    Forger,
    Place, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    ibcm::{
        self,
        Param, //
    },
    prelude::*,
    qp::State, //
};

/// No id takes so long to be destroyed, in milliseconds.
const BOUND_MS: i64 = 10_000;

/// Lets the work item run that reports that a connection is made: time does not pass here before.
fn noted() {
    fsleep(Delta::from_millis(1));
}

/// Accepts a request, does this to its id, and returns how long the destruction of that takes.
fn destroyed_after(
    then: impl Fn(&cm::Id, &Sleepable) -> Result + Send + Sync + 'static,
) -> Result<i64> {
    let (env, said) = (Env::new()?, Place::new()?);
    let (addr, pd, tell) = (env.addr(), env.pd.clone(), said.clone());
    let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        id.accept(Events::new()?, &cm::ConnParam::default(), cx)?;
        tell.put((then(&id, cx), qp, id));
        Ok(())
    };
    let listener = listen(&env, addr, accepts)?;
    let _ = connect_to(&env, addr, &[]).map(drop);
    let (done, qp, id) = said.wait()?;
    done?;
    listener.destroy(&env.cx)?;
    let (ms, destroyed) = timed(|| {
        qp.destroy(&env.cx)?;
        id.destroy(&env.cx)
    });
    destroyed?;
    Ok(ms)
}

/// Accepts a request, reports that the connection is made, which the manager cannot find yet, and
/// returns how long the destruction of the id takes after `then`.
fn destroyed_when_said(then: impl Fn()) -> Result<i64> {
    let (env, said, called) = (Env::new()?, Place::new()?, Counter::new()?);
    let (addr, pd, tell, calls) = (env.addr(), env.pd.clone(), said.clone(), called.clone());
    let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
        if calls.up() > 1 {
            // The manager's only worker on this kernel finds nothing meanwhile.
            fsleep(Delta::from_secs(2));
            return Ok(());
        }
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        id.accept(Events::new()?, &cm::ConnParam::default(), cx)?;
        tell.put((qp, id));
        Ok(())
    };
    let (listener, forger) = (listen(&env, addr, accepts)?, Forger::new(&env)?);
    forger.ask(addr, 20, 15, &env.cx)?;
    let (qp, id) = said.wait()?;
    forger.ask(addr, 20, 15, &env.cx)?;
    wait(|| called.get() == 2)?;
    id.notify_established();
    noted();
    then();
    let (ms, destroyed) = timed(|| {
        qp.destroy(&env.cx)?;
        id.destroy(&env.cx)
    });
    listener.destroy(&env.cx)?;
    destroyed?;
    Ok(ms)
}

/// Accepts a request of the other manager, does this to the connection before the peer has
/// confirmed it, and returns what that does, and the connection's events.
fn accepted_by_service<T: Send + Unpin + 'static>(
    then: impl Fn(ibcm::Connection, &Sleepable) -> T + Send + Sync + 'static,
) -> Result<(T, Arc<CmEvents>)> {
    let (env, said) = (Env::new()?, Place::new()?);
    let (pd, tell) = (env.pd.clone(), said.clone());
    let (listener, service) = listen_to_service(&env, move |request, cx| {
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create_raw(&pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        let events = CmEvents::new()?;
        let connection = request.accept(&qp, events.clone(), &cm::ConnParam::default(), cx)?;
        let done = then(connection, cx);
        // The dropped connection is destroyed now, while the manager's worker waits for this.
        fsleep(Delta::from_millis(100));
        tell.put((done, events, qp));
        Ok(())
    })?;
    let connected = connect_to_service(&env, service, &Param::default()).map(drop);
    let (done, events, qp) = said.wait()?;
    drop((connected, qp));
    listener.destroy(&env.cx)?;
    Ok((done, events))
}

#[kunit_tests(rdma_connect_end)]
mod tests {
    use super::*;

    #[test]
    fn rejected_after_it_was_accepted() -> Result {
        let ms = destroyed_after(|id, cx| {
            let _ = id.reject(&[], cx);
            Ok(())
        })?;
        check!(ms < BOUND_MS);
        Ok(())
    }

    #[test]
    fn disconnected_after_it_was_said_to_be_there() -> Result {
        let ms = destroyed_after(|id, cx| {
            id.notify_established();
            noted();
            id.disconnect(cx)
        })?;
        check!(ms < BOUND_MS);
        Ok(())
    }

    #[test]
    fn destroyed_when_it_was_just_said_to_be_there() -> Result {
        check!(destroyed_when_said(|| {})? < BOUND_MS);
        Ok(())
    }

    #[test]
    fn destroyed_after_a_signal_when_it_was_just_said_to_be_there() -> Result {
        check!(destroyed_when_said(signal_current)? < BOUND_MS);
        Ok(())
    }

    /// One that is used has room, however many others wait, before the manager finds it there.
    #[test]
    fn full_backlog_keeps_what_was_just_said_to_be_there() -> Result {
        let (env, said, called) = (Env::new()?, Place::new()?, Counter::new()?);
        let (addr, pd, tell, calls) = (env.addr(), env.pd.clone(), said.clone(), called.clone());
        let unanswered = Place::new()?;
        let keep = unanswered.clone();
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            match calls.up() {
                1 => {
                    let (id, events) = (request.into_id(cx)?, Events::new()?);
                    let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
                    let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
                    id.accept(events.clone(), &cm::ConnParam::default(), cx)?;
                    tell.put((qp, id, events));
                    return Ok(());
                }
                2 => keep.put(request.into_id(cx)?),
                _ => (),
            }
            // The manager's only worker on this kernel finds nothing meanwhile.
            fsleep(Delta::from_secs(2));
            Ok(())
        };
        let accepts = Arc::new(accepts, GFP_KERNEL)?;
        let _listener = cm::Listener::new(&env.client, addr, 2, accepts, &env.cx)?;
        let forger = Forger::new(&env)?;
        forger.ask(addr, 20, 15, &env.cx)?;
        let (qp, id, events) = said.wait()?;
        forger.ask(addr, 20, 15, &env.cx)?;
        let _second = unanswered.wait()?;
        forger.ask(addr, 20, 15, &env.cx)?;
        // The third request waits for the worker, and what is said now comes behind it.
        fsleep(Delta::from_millis(500));
        id.notify_established();
        noted();
        wait(|| called.get() == 3)?;
        fsleep(Delta::from_secs(3));
        check_eq!(events.established(), 1);
        check!(qp.query(&env.cx)?.state == State::Rts);
        let (ms, destroyed) = timed(|| {
            qp.destroy(&env.cx)?;
            id.destroy(&env.cx)
        });
        destroyed?;
        check!(ms < BOUND_MS);
        Ok(())
    }

    #[test]
    fn service_disconnected_when_it_was_just_said_to_be_there() -> Result {
        let (done, events) = accepted_by_service(|connection, cx| {
            connection.notify_established();
            noted();
            (connection.disconnect(cx), connection)
        })?;
        let (disconnected, _connection) = done;
        disconnected?;
        wait(|| events.disconnected() == 1)?;
        // The worker has found it, and so has cancelled the answer.
        check_eq!(events.established(), 1);
        Ok(())
    }

    #[test]
    fn service_dropped_when_it_was_just_said_to_be_there() -> Result {
        let ((), events) = accepted_by_service(|connection, _| {
            connection.notify_established();
            noted();
        })?;
        // The id has the handler until it is destroyed.
        let gone = events.gone();
        drop(events);
        let (ms, waited) = timed(|| wait(|| gone.get() == 1));
        waited?;
        check!(ms < BOUND_MS);
        Ok(())
    }
}
