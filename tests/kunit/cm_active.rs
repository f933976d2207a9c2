// SPDX-License-Identifier: GPL-2.0

//! The connection manager, as the active side sees it.

use crate::fixture::{
    wait,
    Counter,
    Env,
    Events,
    IPV6,
    STEP_MS, //
};
use core::net::IpAddr;
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::prelude::*;

/// An address that nobody has and no route leads to.
const NOWHERE: SocketAddr =
    SocketAddr::new(IpAddr::V4(core::net::Ipv4Addr::new(198, 51, 100, 1)), 1);

/// Keeps the id of a request that is not answered.
#[pin_data]
struct Kept {
    #[pin]
    id: Mutex<Option<cm::Id>>,
}

impl Kept {
    fn new() -> Result<Arc<Self>> {
        Arc::pin_init(pin_init!(Self { id <- new_mutex!(None) }), GFP_KERNEL)
    }
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
        check!(id.resolve_addr(NOWHERE, STEP_MS, &env.cx).is_err());
        check_err!(id.device(), ENOTCONN);
        Ok(())
    }

    #[test]
    fn address_can_be_resolved_after_a_failure() -> Result {
        let env = Env::new()?;
        let id = cm::Id::create(&env.client, &env.cx)?;
        check!(id.resolve_addr(NOWHERE, STEP_MS, &env.cx).is_err());
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
        check_err!(id.resolve_route(STEP_MS, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn disconnected_while_it_connects() -> Result {
        let (env, asked) = (Env::new()?, Counter::new()?);
        let (addr, counts) = (env.addr(), asked.clone());
        let kept = Kept::new()?;
        let keeps = kept.clone();
        let never = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            *keeps.id.lock() = Some(request.into_id(cx)?);
            counts.up();
            Ok(())
        };
        let _listener =
            cm::Listener::new(&env.client, addr, 1, Arc::new(never, GFP_KERNEL)?, &env.cx)?;
        let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        let other = id.clone();
        env.client.spawn(GFP_KERNEL, move |cx| {
            let _ = wait(|| asked.get() == 1).and_then(|()| other.disconnect(cx));
        })?;
        let connected = id.connect(Events::new()?, &cm::ConnParam::default(), &env.cx);
        drop(kept.id.lock().take());
        check_err!(connected.map(|_| ()), ECANCELED);
        Ok(())
    }

    #[test]
    fn connection_needs_a_qp() -> Result {
        let env = Env::new()?;
        let id = cm::Id::resolve(&env.client, env.addr(), STEP_MS, &env.cx)?;
        let events = Events::new()?;
        let gone = events.gone();
        check_err!(
            id.connect(events, &cm::ConnParam::default(), &env.cx)
                .map(|_| ()),
            EINVAL
        );
        // The handler was not kept.
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn connection_needs_a_route() -> Result {
        let env = Env::new()?;
        let id = env.id()?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        let events = Events::new()?;
        let gone = events.gone();
        check_err!(
            id.connect(events, &cm::ConnParam::default(), &env.cx)
                .map(|_| ()),
            EINVAL
        );
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn nobody_listens() -> Result {
        let env = Env::new()?;
        let id = cm::Id::resolve(&env.client, env.addr(), STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
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
        let env = Env::new()?;
        let id = cm::Id::resolve(&env.client, env.addr(), STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        for len in [57, 255, 256, 1000] {
            let bytes = KVec::from_elem(1, len, GFP_KERNEL)?;
            let param = cm::ConnParam {
                private_data: &bytes,
                ..Default::default()
            };
            check_err!(
                id.connect(Events::new()?, &param, &env.cx).map(|_| ()),
                EINVAL
            );
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
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
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
        for _ in 0..50 {
            let id = cm::Id::create(&env.client, &env.cx)?;
            id.disconnect_later();
            drop(id.clone());
        }
        Ok(())
    }
}
