// SPDX-License-Identifier: GPL-2.0

//! Peers that ask for connections and never answer.

use crate::fixture::{
    gid,
    listen,
    message,
    own_class,
    wait,
    with_faults,
    CountDrop,
    Counter,
    Env,
    Forger,
    HeldGuard,
    NullEnv,
    Place,
    CAPS, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    mad::{
        Agent,
        Method,
        Peer, //
    },
    prelude::*, //
};

/// A peer's patience, 4.096 us times two to this power: the manager makes 32 ms of it.
const TIMEOUT: u8 = 13;

/// A handler that counts its drop; the connection manager drops it at the end.
struct Nothing {
    _gone: CountDrop,
}

impl cm::Handler for Nothing {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

/// Uses an agent of the port in the callback of a peer that has not answered, and keeps what that
/// returns.
struct UsesAgent {
    agent: Agent,
    peer: Peer,
    said: Arc<Place<(Result, Result)>>,
}

impl cm::Handler for UsesAgent {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        if let cm::Event::Failed(_) = event {
            let asked = self
                .agent
                .request(&self.peer, &message(Method::GET, 0, &[]), 1, 0, cx);
            self.said.put((asked.map(drop), self.agent.stop(cx)));
        }
    }
}

/// More ids than a workqueue runs work items of at a time (`WQ_DFL_ACTIVE`).
const MANY: usize = 1_100;

/// Accepts a request with a QP, which is returned.
fn accept(
    request: cm::Request<'_>,
    pd: &Pd,
    handler: Arc<dyn cm::Handler>,
    cx: &Sleepable,
) -> Result<(Qp<Softirq>, cm::Id)> {
    let id = request.into_id(cx)?;
    let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
    let qp = Qp::create(&id, pd, &cq, &cq, &Caps::new(4, 4), cx)?;
    id.accept(handler, &cm::ConnParam::default(), cx)?;
    Ok((qp, id))
}

#[kunit_tests(rdma_cm_silent)]
mod tests {
    use super::*;

    #[test]
    fn times_out_while_it_is_destroyed() -> Result {
        const TURNS: i32 = 20;
        let (env, gone, returned) = (Env::new()?, Counter::new()?, Counter::new()?);
        let (addr, pd) = (env.addr(), env.pd.clone());
        let (drops, returns) = (gone.clone(), returned.clone());
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            let handler = Nothing {
                _gone: CountDrop(drops.clone()),
            };
            let accepted = accept(request, &pd, Arc::new(handler, GFP_KERNEL)?, cx);
            // This was the last handle of the id, but the id is locked until this returns.
            drop(accepted?);
            fsleep(Delta::from_millis(150));
            returns.up();
            Ok(())
        };
        let listener = listen(&env, addr, accepts)?;
        let forger = Forger::new(&env)?;
        for turn in 1..=TURNS {
            forger.ask(addr, TIMEOUT, 0, &env.cx)?;
            wait(|| returned.get() == turn && gone.get() == turn)?;
        }
        listener.destroy(&env.cx)
    }

    /// The ends of ids wait for it, and no others do.
    #[test]
    fn callback_that_does_not_return() -> Result {
        let (env, null, kept) = (Env::new()?, NullEnv::new()?, Place::new()?);
        let (addr, pd, keep) = (env.addr(), env.pd.clone(), kept.clone());
        let held = HeldGuard::new()?;
        let handler = held.handler();
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            keep.put(accept(request, &pd, handler.clone(), cx)?);
            Ok(())
        };
        let listener = listen(&env, addr, accepts)?;
        Forger::new(&env)?.ask(addr, TIMEOUT, 0, &env.cx)?;
        held.wait()?;
        let options = cm::Options {
            src: Some(SocketAddr::new(env.ip, 0)),
            ..Default::default()
        };
        let many = if with_faults() { 1 } else { MANY };
        for _ in 0..many {
            drop(cm::Id::create_with(&env.client, &options, &env.cx)?);
        }
        // Its end is queued behind those of the ids.
        let cq = null.env.cq::<Softirq>(CAPS.entries())?;
        drop(null.env.raw_qp(&cq, &CAPS)?);
        wait(|| null.dev.objects()[1] == 0)?;
        drop((held, kept.take()));
        listener.destroy(&env.cx)
    }

    #[test]
    fn agent_in_the_callback_of_a_timeout() -> Result {
        let (env, said, kept) = (Env::new()?, Place::new()?, Place::new()?);
        let (addr, pd, keep, gid) = (env.addr(), env.pd.clone(), kept.clone(), gid(&env, env.ip)?);
        let agent = Agent::register(&env.dev, 1, own_class(), &[], 0, &env.cx)?;
        let uses = UsesAgent {
            peer: Peer::new(&agent, &gid, gid.gid(), &env.cx)?,
            agent,
            said: said.clone(),
        };
        let uses = Arc::new(uses, GFP_KERNEL)?;
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            keep.put(accept(request, &pd, uses.clone(), cx)?);
            Ok(())
        };
        let listener = listen(&env, addr, accepts)?;
        Forger::new(&env)?.ask(addr, TIMEOUT, 0, &env.cx)?;
        let (asked, stopped) = said.wait()?;
        drop(kept.take());
        listener.destroy(&env.cx)?;
        check_err!(asked, EDEADLK);
        check_err!(stopped, EDEADLK);
        Ok(())
    }
}
