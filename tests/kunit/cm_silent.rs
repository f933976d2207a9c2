// SPDX-License-Identifier: GPL-2.0

//! Peers that ask for connections and never answer.

use crate::fixture::{
    gid,
    listen,
    message,
    own_class,
    Env,
    Forger,
    Place, //
};
use kernel::prelude::*;
use rdma::{
    mad::{
        Agent,
        Method,
        Methods,
        Peer, //
    },
    prelude::*, //
};

/// A peer's patience, 4.096 us times two to this power: the manager makes 32 ms of it.
const TIMEOUT: u8 = 13;

/// Uses an agent of the port in the callback of a peer that has not answered, and keeps what that
/// says.
struct UsesAgent {
    agent: Agent,
    peer: Peer,
    said: Arc<Place<(Result, Result)>>,
}

impl cm::Handler for UsesAgent {
    fn event(&self, event: cm::Event<'_>, cx: &Sleepable) {
        if let cm::Event::Failed(_) = event {
            let asked = self
                .agent
                .request(&self.peer, &message(Method::GET, 0, &[]), 1, 0, cx);
            self.said.put((asked.map(drop), self.agent.stop(cx)));
        }
    }
}

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
    fn agent_in_the_callback_of_a_timeout() -> Result {
        let (env, said, kept) = (Env::new()?, Place::new()?, Place::new()?);
        let (addr, pd, keep, gid) = (env.addr(), env.pd.clone(), kept.clone(), gid(&env, env.ip)?);
        let agent = Agent::register(&env.dev, 1, own_class(), Methods::NONE, 0, &env.cx)?;
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
