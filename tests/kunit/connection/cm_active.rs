// SPDX-License-Identifier: GPL-2.0

//! The connection manager, as the active side sees it.

use crate::fixture::{
    listen,
    wait,
    Counter,
    Env,
    Events,
    Place,
    IPV6,
    STEP_MS, //
};
use core::net::IpAddr;
use kernel::prelude::*;
use rdma::prelude::*;

/// An address that nobody has and no route leads to.
const NOWHERE: SocketAddr =
    SocketAddr::new(IpAddr::V4(core::net::Ipv4Addr::new(198, 51, 100, 1)), 1);

/// An id that could be connected to `addr`, and its QP.
fn ready(env: &Env, addr: SocketAddr) -> Result<(cm::Id, Qp<Softirq>)> {
    let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
    let qp = qp(env, &id)?;
    Ok((id, qp))
}

fn qp(env: &Env, id: &cm::Id) -> Result<Qp<Softirq>> {
    let cq = env.cq(64)?;
    Qp::create(id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)
}

/// Says how the id is refused a connection; the handler is not kept.
fn refusal(env: &Env, id: &cm::Id, param: &cm::ConnParam<'_>) -> Result<Option<Error>> {
    let events = Events::new()?;
    let gone = events.gone();
    let connected = id.connect(events, param, &env.cx);
    check_eq!(gone.get(), 1);
    Ok(connected.err())
}

#[kunit_tests(rdma_cm_active)]
mod tests {
    use super::*;

    #[test]
    fn own_address_resolves_to_the_device() -> Result {
        let env = Env::new()?;
        let id = cm::Id::resolve(&env.client, env.addr(), STEP_MS, &env.cx)?;
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn ipv6_address_resolves_to_the_device() -> Result {
        let env = Env::new()?;
        let id = cm::Id::resolve(
            &env.client,
            SocketAddr::new(IPV6.into(), 1),
            STEP_MS,
            &env.cx,
        )?;
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn unknown_address_does_not_resolve() -> Result {
        let env = Env::new()?;
        let id = cm::Id::create(&env.client, &env.cx)?;
        check_err!(id.resolve_addr(NOWHERE, STEP_MS, &env.cx), ENETUNREACH);
        check_err!(id.device(), ENOTCONN);
        Ok(())
    }

    #[test]
    fn address_can_be_resolved_after_a_failure() -> Result {
        let env = Env::new()?;
        let id = cm::Id::create(&env.client, &env.cx)?;
        check_err!(id.resolve_addr(NOWHERE, STEP_MS, &env.cx), ENETUNREACH);
        id.resolve_addr(env.addr(), STEP_MS, &env.cx)?;
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn address_is_resolved_once() -> Result {
        let env = Env::new()?;
        let id = env.id()?;
        check_err!(id.resolve_addr(env.addr(), STEP_MS, &env.cx), EINVAL);
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn route_needs_an_address() -> Result {
        let env = Env::new()?;
        let id = cm::Id::create(&env.client, &env.cx)?;
        check_err!(id.resolve_route(STEP_MS, &env.cx), ENOTCONN);
        Ok(())
    }

    #[test]
    fn disconnected_while_it_connects() -> Result {
        let (env, asked, kept) = (Env::new()?, Counter::new()?, Place::new()?);
        let (counts, keeps) = (asked.clone(), kept.clone());
        let never = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            keeps.put(request.into_id(cx)?);
            counts.up();
            Ok(())
        };
        let addr = env.addr();
        let _listener = listen(&env, addr, never)?;
        let (id, _qp) = ready(&env, addr)?;
        let other = id.clone();
        env.client.spawn(GFP_KERNEL, move |cx| {
            // Also if the request was lost: the peer does not answer, and C waits for long.
            let _ = (wait(|| asked.get() == 1), other.disconnect(cx));
        })?;
        let connected = id.connect(Events::new()?, &cm::ConnParam::default(), &env.cx);
        drop(kept.take());
        check_err!(connected.map(|_| ()), ECANCELED);
        Ok(())
    }

    #[test]
    fn connection_needs_a_qp() -> Result {
        let env = Env::new()?;
        let id = cm::Id::resolve(&env.client, env.addr(), STEP_MS, &env.cx)?;
        check_eq!(refusal(&env, &id, &cm::ConnParam::default())?, Some(EINVAL));
        Ok(())
    }

    #[test]
    fn connection_needs_a_route() -> Result {
        let env = Env::new()?;
        let id = env.id()?;
        let _qp = qp(&env, &id)?;
        check_eq!(refusal(&env, &id, &cm::ConnParam::default())?, Some(EINVAL));
        Ok(())
    }

    #[test]
    fn nobody_listens() -> Result {
        not_on_iwarp!(c"TCP says so before there is an event");
        let env = Env::new()?;
        let (id, _qp) = ready(&env, env.addr())?;
        let events = Events::new()?;
        let gone = events.gone();
        let connected = id.connect(events.clone(), &cm::ConnParam::default(), &env.cx);
        check_err!(connected.map(|_| ()), ECONNREFUSED);
        wait(|| events.failed() == 1)?;
        check_eq!(events.established(), 0);
        drop(events);
        wait(|| gone.get() == 1)
    }

    #[test]
    fn too_much_private_data() -> Result {
        not_on_iwarp!(c"there is room for more");
        let env = Env::new()?;
        let (id, _qp) = ready(&env, env.addr())?;
        for len in [57, 255, 256, 1000] {
            let bytes = KVec::from_elem(1, len, GFP_KERNEL)?;
            let param = cm::ConnParam {
                private_data: &bytes,
                ..Default::default()
            };
            check_eq!(refusal(&env, &id, &param)?, Some(EINVAL));
        }
        Ok(())
    }

    #[test]
    fn disconnect_needs_a_connection() -> Result {
        let env = Env::new()?;
        check_err!(env.id()?.disconnect(&env.cx), EINVAL);
        check_err!(
            cm::Id::create(&env.client, &env.cx)?.disconnect(&env.cx),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn reject_needs_a_request() -> Result {
        let env = Env::new()?;
        check_err!(env.id()?.reject(&[], &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn accept_needs_a_request() -> Result {
        let env = Env::new()?;
        let id = env.id()?;
        let _qp = qp(&env, &id)?;
        let events = Events::new()?;
        let gone = events.gone();
        check_err!(
            id.accept(events, &cm::ConnParam::default(), &env.cx),
            EINVAL
        );
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn unused_ids_are_destroyed() -> Result {
        let env = Env::new()?;
        for _ in 0..20 {
            let id = cm::Id::create(&env.client, &env.cx)?;
            id.disconnect_later();
            drop(id.clone());
        }
        Ok(())
    }
}
