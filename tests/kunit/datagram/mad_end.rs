// SPDX-License-Identifier: GPL-2.0

//! The end of MAD agents, whatever is going on.

use crate::fixture::{
    message,
    serve,
    wait,
    Counter,
    Env,
    Mads,
    OnDone,
    BACKLOG,
    CLASS,
    LONG_MS,
    THREADS, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;
use rdma::{
    mad::{
        Agent,
        Method, //
    },
    prelude::*, //
};

/// Waits until the class can be served again, as the last server is gone.
fn served_again(env: &Env) -> Result {
    let mut server = None;
    wait(|| {
        server = serve(env, CLASS, 1).ok();
        server.is_some()
    })?;
    if let Some(server) = server {
        server.stop(&env.cx)?;
    }
    Ok(())
}

#[kunit_tests(rdma_mad_end)]
mod tests {
    use super::*;

    #[test]
    fn nothing_works_after_stop() -> Result {
        let (mads, cx) = (Mads::new()?, Sleepable::current()?);
        mads.tell(0)?;
        mads.client.stop(&cx)?;
        mads.client.stop(&cx)?;
        check_err!(mads.client.recv(None, &cx), ECANCELED);
        check_err!(mads.client.recv(Some(0), &cx), ECANCELED);
        check_err!(mads.tell(0), ECANCELED);
        check_err!(mads.ask(&[]), ECANCELED);
        Ok(())
    }

    #[test]
    fn stop_drops_what_is_queued() -> Result {
        let mads = Mads::new()?;
        for number in 0..4 {
            mads.tell(number)?;
        }
        check_eq!(mads.told()?, 0);
        mads.server.stop(&mads.env.cx)?;
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ECANCELED);
        Ok(())
    }

    #[test]
    fn stop_ends_receivers() -> Result {
        let mads = Mads::new()?;
        let recv = |agent: &Agent, cx: &Sleepable| agent.recv(None, cx).map(drop);
        let failed = mads.threads(ECANCELED, recv, &mads.server)?;
        mads.server.stop(&mads.env.cx)?;
        wait(|| failed.get() == THREADS)
    }

    #[test]
    fn stop_ends_requests() -> Result {
        let mads = Mads::new()?;
        let peer = mads.peer.clone();
        let ask = move |agent: &Agent, cx: &Sleepable| {
            let asked = message(Method::GET, 0, &[]);
            agent.request(&peer, &asked, LONG_MS, 9, cx).map(drop)
        };
        let failed = mads.threads(ECANCELED, ask, &mads.client)?;
        for _ in 0..THREADS {
            mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        }
        mads.client.stop(&mads.env.cx)?;
        wait(|| failed.get() == THREADS)
    }

    #[test]
    fn stop_races_with_requests() -> Result {
        for _ in 0..4 {
            let mads = Mads::new()?;
            mads.echo()?;
            let peer = mads.peer.clone();
            let ask = move |agent: &Agent, cx: &Sleepable| loop {
                let asked = message(Method::GET, 0, &[]);
                agent.request(&peer, &asked, LONG_MS, 0, cx)?;
            };
            let failed = mads.threads(ECANCELED, ask, &mads.client)?;
            mads.ask(&[])?;
            mads.client.stop(&mads.env.cx)?;
            wait(|| failed.get() == THREADS)?;
        }
        Ok(())
    }

    #[test]
    fn dropped_with_mads_queued_and_on_their_way() -> Result {
        let mads = Mads::new()?;
        for number in 0..BACKLOG as u32 {
            mads.tell(number)?;
        }
        let env = Env::new()?;
        drop(mads);
        served_again(&env)
    }

    #[test]
    fn dropped_without_stop() -> Result {
        let env = Env::new()?;
        for _ in 0..4 {
            drop(serve(&env, CLASS, 4)?);
            served_again(&env)?;
        }
        Ok(())
    }

    #[test]
    fn dropped_in_a_softirq_handler() -> Result {
        let (env, calls) = (Env::new()?, Counter::new()?);
        let server = serve(&env, CLASS, 4)?;
        let peer = Mads::with(rdma::mad::Class::new(0x0a, 1), 1)?.peer.clone();
        let cq = env.cq::<Softirq>(64)?;
        let qp = env.qp(&cq, &Caps::new(2, 2))?;
        let counts = calls.clone();
        let handler = OnDone::<context::Atomic, _>::new(move |_, _| {
            drop(server);
            drop(peer);
            counts.up();
        })?;
        qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        qp.drain(&env.cx)?;
        check_eq!(calls.get(), 1);
        served_again(&env)
    }

    #[test]
    fn received_mad_outlives_its_agent() -> Result {
        let mads = Mads::new()?;
        let sent = message(Method::SEND, 0, b"still here");
        mads.client.send(&mads.peer, &sent, &mads.env.cx)?;
        let mad = mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        mads.server.stop(&mads.env.cx)?;
        check_err!(mads.server.reply(&mad, 0, &[], &mads.env.cx), ECANCELED);
        drop(mads);
        check!(mad.payload().starts_with(b"still here\0"));
        Ok(())
    }

    #[test]
    fn peer_outlives_its_agent() -> Result {
        let mads = Mads::new()?;
        mads.echo()?;
        mads.client.stop(&mads.env.cx)?;
        let (env, cx) = (&mads.env, &mads.env.cx);
        let other = Agent::register(&env.dev, 1, mads.class, &[], 0, cx)?;
        let asked = message(Method::GET, 0, b"peer");
        let reply = other.request(&mads.peer, &asked, LONG_MS, 0, cx)?;
        check!(reply.payload().starts_with(b"peer\0"));
        Ok(())
    }

    #[test]
    fn forgotten_agent_stays_registered() -> Result {
        let env = Env::new()?;
        let server = ManuallyDrop::new(serve(&env, CLASS, 4)?);
        check_err!(serve(&env, CLASS, 4), EINVAL);
        drop(ManuallyDrop::into_inner(server));
        served_again(&env)
    }
}
