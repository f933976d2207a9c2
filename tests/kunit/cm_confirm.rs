// SPDX-License-Identifier: GPL-2.0

//! Connections that were accepted and that nobody confirms.

use crate::fixture::{
    dial,
    wait,
    Counter,
    Env,
    Forger,
    Place, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// As the peers that do not answer want to be asked: 4.3 s each, 16 times.
const TIMEOUT: u8 = 20;
const RETRIES: u8 = 15;

/// The state of a connection, which counts how many could not be made, and of what.
struct Waiting {
    _qp: Qp<Softirq>,
    failed: Arc<Counter>,
    said: Arc<Place<Error>>,
}

impl cm::Handler for Waiting {
    fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Failed(e) = event {
            self.said.put(e);
            self.failed.up();
        }
    }
}

/// A listener for connections of which some may wait, what they say at their end, and ids of
/// which one is each connection's.
struct Desk {
    env: Env,
    addr: SocketAddr,
    failed: Arc<Counter>,
    said: Arc<Place<Error>>,
    id: Arc<Place<cm::Id>>,
    _listener: cm::Listener,
}

fn listen(backlog: u32) -> Result<Desk> {
    let (env, failed, said, kept) = (Env::new()?, Counter::new()?, Place::new()?, Place::new()?);
    let (addr, pd) = (env.addr(), env.pd.clone());
    let (fails, says, keeps) = (failed.clone(), said.clone(), kept.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let waiting = Waiting {
            _qp: Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?,
            failed: fails.clone(),
            said: says.clone(),
        };
        let waiting = Arc::new(waiting, GFP_KERNEL)?;
        id.accept(waiting, &cm::ConnParam::default(), cx)?;
        keeps.put(id);
        Ok(())
    };
    let accept = Arc::new(accept, GFP_KERNEL)?;
    let listener = cm::Listener::new(&env.client, addr, backlog, accept, &env.cx)?;
    Ok(Desk {
        env,
        addr,
        failed,
        said,
        id: kept,
        _listener: listener,
    })
}

#[kunit_tests(rdma_cm_confirm)]
mod tests {
    use super::*;

    #[test]
    fn one_too_many_ends_the_first() -> Result {
        let desk = listen(2)?;
        let forger = Forger::new(&desk.env)?;
        for _ in 0..3 {
            forger.ask(desk.addr, TIMEOUT, RETRIES, &desk.env.cx)?;
            drop(desk.id.wait()?);
        }
        wait(|| desk.failed.get() == 1)?;
        check_eq!(desk.said.wait()?, ETIMEDOUT);
        let connected = dial(&desk.env, desk.addr, &[])?;
        wait(|| desk.failed.get() == 2)?;
        drop(connected);
        Ok(())
    }

    #[test]
    fn what_is_not_answered_waits() -> Result {
        let (env, kept) = (Env::new()?, Place::new()?);
        let (addr, keeps) = (env.addr(), kept.clone());
        let keep = move |request: cm::Request<'_>, cx: &Sleepable| {
            keeps.put(request.into_id(cx)?);
            Ok(())
        };
        let keep = Arc::new(keep, GFP_KERNEL)?;
        let _listener = cm::Listener::new(&env.client, addr, 1, keep, &env.cx)?;
        Forger::new(&env)?.ask(addr, TIMEOUT, RETRIES, &env.cx)?;
        let unanswered = kept.wait()?;
        // The ULP may still accept it, so it is the second one that has no room.
        check_err!(dial(&env, addr, &[]).map(drop), ECONNREFUSED);
        unanswered.destroy(&env.cx)
    }
}
