// SPDX-License-Identifier: GPL-2.0

//! Connecting to peers that do not answer, by both connection managers.

use super::timed;
use crate::fixture::{
    connect_to,
    connect_to_service,
    listen,
    listen_to_service,
    wait,
    Counter,
    Env,
    Events,
    Place,
    CAPS,
    STEP_MS, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::{
    ibcm::Param,
    prelude::*, //
};

/// The time that the InfiniBand connection manager waits for an answer to the first request and to
/// 15 more, in milliseconds: 4.096 us << 20 each, and as long as packets live.
const GIVES_UP_MS: core::ops::Range<i64> = 16 * 4295..16 * 5000;

/// A connection that is made by its events.
struct Dialer {
    pd: Pd,
    qp: SetOnce<Qp<Softirq>>,
    said: Arc<Place<Error>>,
}

impl cm::Handler for Dialer {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Failed(e) = event {
            self.said.put(e);
        }
    }
}

impl cm::Connect for Dialer {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        let cq = Cq::alloc_any(self.pd.device(), 64, cx)?;
        self.qp
            .populate(Qp::create(id, &self.pd, &cq, &cq, &CAPS, cx)?);
        Ok(cm::ConnParam {
            timeout_ms: 7_000,
            ..Default::default()
        })
    }
}

/// Connects to a peer that keeps the request, whose connection manager reports that this takes a
/// while: C goes on waiting for minutes. Returns how long the call takes, and what it returns.
fn kept_request(timeout_ms: Option<u32>) -> Result<(i64, Result)> {
    let (env, kept) = (Env::new()?, Place::new()?);
    let (addr, keep) = (env.addr(), kept.clone());
    let keeps = move |request: cm::Request<'_>, cx: &Sleepable| {
        keep.put(request.into_id(cx)?);
        Ok(())
    };
    let listener = listen(&env, addr, keeps)?;
    let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
    let cq = env.cq::<Softirq>(64)?;
    let qp = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
    let mut param = cm::ConnParam::default();
    if let Some(timeout_ms) = timeout_ms {
        param.timeout_ms = timeout_ms;
    }
    let (ms, said) = timed(|| id.connect(Events::new()?, &param, &env.cx).map(drop));
    drop((qp, id, kept.take()));
    listener.destroy(&env.cx)?;
    Ok((ms, said))
}

#[kunit_tests(rdma_connect_timeout)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_for_a_service() -> Result {
        let (env, over) = (Env::new()?, Counter::new()?);
        let done = over.clone();
        // The answer would come from the callback, which waits until it is too late.
        let (_listener, service) = listen_to_service(&env, move |_, _| wait(|| done.get() == 1))?;
        let (ms, said) = timed(|| connect_to_service(&env, service, &Param::default()));
        over.up();
        check_err!(said, ETIMEDOUT);
        check!(GIVES_UP_MS.contains(&ms));
        Ok(())
    }

    #[test]
    fn peer_keeps_the_request() -> Result {
        let (ms, said) = kept_request(Some(5_000))?;
        check_err!(said, ETIMEDOUT);
        check!((5_000..6_000).contains(&ms));
        let (ms, said) = kept_request(None)?;
        check_err!(said, ETIMEDOUT);
        // The kernel's timers are late by up to an eighth.
        check!((90_000..100_000).contains(&ms));
        Ok(())
    }

    /// As [`kept_request`], without a call that waits.
    #[test]
    fn peer_keeps_the_request_of_a_connection_by_events() -> Result {
        let (env, kept, said) = (Env::new()?, Place::new()?, Place::new()?);
        let (addr, keep) = (env.addr(), kept.clone());
        let keeps = move |request: cm::Request<'_>, cx: &Sleepable| {
            keep.put(request.into_id(cx)?);
            Ok(())
        };
        let listener = listen(&env, addr, keeps)?;
        let dialer = Dialer {
            pd: env.pd.clone(),
            qp: SetOnce::new(),
            said: said.clone(),
        };
        let (client, options) = (&env.client, cm::Options::default());
        let dialer = Arc::new(dialer, GFP_KERNEL)?;
        let (ms, failed) = timed(|| {
            let id = cm::Id::connect_to(client, addr, STEP_MS, &options, dialer, &env.cx)?;
            said.wait().map(|error| (id, error))
        });
        let (id, error) = failed?;
        check_eq!(error, ETIMEDOUT);
        check!((7_000..8_000).contains(&ms));
        drop((id, kept.take()));
        listener.destroy(&env.cx)
    }

    #[test]
    fn no_answer_at_an_address() -> Result {
        let (env, over) = (Env::new()?, Counter::new()?);
        let (addr, done) = (env.addr(), over.clone());
        let silent = move |_: cm::Request<'_>, _: &Sleepable| wait(|| done.get() == 1);
        let _listener = listen(&env, addr, silent)?;
        let (ms, said) = timed(|| connect_to(&env, addr, &[]).map(drop));
        over.up();
        check_err!(said, ETIMEDOUT);
        check!(GIVES_UP_MS.contains(&ms));
        Ok(())
    }
}
