// SPDX-License-Identifier: GPL-2.0

//! Connections that were accepted, and whose peers do not confirm.

use crate::fixture::{
    connect_to,
    wait,
    Counter,
    Env,
    Forger,
    Place, //
};
use kernel::prelude::*;
use rdma::{
    ibcm,
    prelude::*, //
};

/// The timeout and retries of the peers that do not confirm: 4.3 s, 16 times.
const TIMEOUT: u8 = 20;
const RETRIES: u8 = 15;

/// The handler of a connection, which counts the failed ones and keeps their error.
struct Waiting {
    _qp: Option<Qp<Softirq>>,
    failed: Arc<Counter>,
    said: Arc<Place<Error>>,
}

impl cm::Handler for Waiting {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Failed(e) = event {
            self.said.put(e);
            self.failed.up();
        }
    }
}

/// A listener, the error of the last connection that has failed, and the id of the last request.
struct Server {
    env: Env,
    addr: SocketAddr,
    failed: Arc<Counter>,
    said: Arc<Place<Error>>,
    id: Arc<Place<cm::Id>>,
    _listener: cm::Listener,
}

fn listen(backlog: u32) -> Result<Server> {
    let (env, failed, said, kept) = (Env::new()?, Counter::new()?, Place::new()?, Place::new()?);
    let (addr, pd) = (env.addr(), env.pd.clone());
    let (fails, says, keeps) = (failed.clone(), said.clone(), kept.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let waiting = Waiting {
            _qp: Some(Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?),
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
    Ok(Server {
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
    fn full_backlog_ends_the_first() -> Result {
        let server = listen(2)?;
        let forger = Forger::new(&server.env)?;
        for _ in 0..3 {
            forger.ask(server.addr, TIMEOUT, RETRIES, &server.env.cx)?;
            drop(server.id.wait()?);
        }
        wait(|| server.failed.get() == 1)?;
        check_eq!(server.said.wait()?, ETIMEDOUT);
        let connected = connect_to(&server.env, server.addr, &[])?;
        wait(|| server.failed.get() == 2)?;
        drop(connected);
        Ok(())
    }

    #[test]
    fn full_backlog_of_a_service_ends_the_first() -> Result {
        let (env, failed, said) = (Env::new()?, Counter::new()?, Place::new()?);
        let (addr, pd, kept) = (env.addr(), env.pd.clone(), Place::new()?);
        let (fails, says, keeps) = (failed.clone(), said.clone(), kept.clone());
        let accept = move |request: ibcm::Request<'_>, cx: &Sleepable| {
            let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
            let qp = Qp::create_raw(&pd, &cq, &cq, &Caps::new(4, 4), cx)?;
            let waiting = Waiting {
                _qp: None,
                failed: fails.clone(),
                said: says.clone(),
            };
            let waiting = Arc::new(waiting, GFP_KERNEL)?;
            keeps.put((request.accept(&qp, waiting, &Default::default(), cx)?, qp));
            Ok(())
        };
        // That of the port (`RDMA_PS_TCP`), which the forger asks for.
        let service = 0x0106_0000 | u64::from(addr.port());
        let accept = Arc::new(accept, GFP_KERNEL)?;
        let _listener = ibcm::Listener::new(&env.dev, service, 2, accept, &env.cx)?;
        let (forger, mut accepted) = (Forger::new(&env)?, KVec::new());
        for _ in 0..3 {
            forger.ask(addr, TIMEOUT, RETRIES, &env.cx)?;
            accepted.push(kept.wait()?, GFP_KERNEL)?;
        }
        wait(|| failed.get() == 1)?;
        check_eq!(said.wait()?, ETIMEDOUT);
        // One is given up and two wait, so there is room for a fourth.
        forger.ask(addr, TIMEOUT, RETRIES, &env.cx)?;
        accepted.push(kept.wait()?, GFP_KERNEL)?;
        wait(|| failed.get() == 2)
    }

    #[test]
    fn unanswered_request_is_in_the_backlog() -> Result {
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
        check_err!(connect_to(&env, addr, &[]).map(drop), ECONNREFUSED);
        unanswered.destroy(&env.cx)
    }
}
