// SPDX-License-Identifier: GPL-2.0

//! Calls that come when the connection manager is not ready for them.

use crate::fixture::{
    accept,
    connect_to,
    gid,
    listen,
    listen_to_service,
    refused,
    wait,
    CmEvents,
    Counter,
    Env,
    Events,
    OwnLink,
    Place,
    STEP_MS, //
};
use kernel::prelude::*;
use rdma::{
    ibcm,
    prelude::*, //
};

/// A connection that gets no QP.
struct NoQp;

impl cm::Handler for NoQp {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl cm::Connect for NoQp {
    fn resolved(self: &Arc<Self>, _id: &cm::Id, _cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        Err(ENOSPC)
    }
}

fn begin(env: &Env, addr: SocketAddr) -> Result<cm::Id> {
    let (options, none) = (cm::Options::default(), Arc::new(NoQp, GFP_KERNEL)?);
    cm::Id::connect_to(&env.client, addr, STEP_MS, &options, none, &env.cx)
}

/// Destroys a listener when the device goes, and keeps what that returns.
struct Waits(Arc<Place<ibcm::Listener>>, Arc<Place<Result>>);

impl cm::Handler for Waits {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        if let (cm::Event::DeviceRemoval, Some(listener)) = (event, self.0.take()) {
            self.1.put(listener.destroy(cx));
        }
    }
}

fn raw_qp(pd: &Pd, cx: &Sleepable) -> Result<Qp<Softirq>> {
    let cq = Cq::alloc_any(pd.device(), 64, cx)?;
    Qp::create_raw(pd, &cq, &cq, &Caps::new(4, 4), cx)
}

#[kunit_tests(rdma_cm_order)]
mod tests {
    use super::*;

    #[test]
    fn route_before_the_address() -> Result {
        let env = Env::new()?;
        let bound = cm::Options {
            src: Some(SocketAddr::new(env.ip, 0)),
            ..Default::default()
        };
        for options in [cm::Options::default(), bound] {
            let id = cm::Id::create_with(&env.client, &options, &env.cx)?;
            check_err!(id.resolve_route(STEP_MS, &env.cx), ENOTCONN);
            check_err!(id.gids().map(|_| ()), ENOTCONN);
        }
        Ok(())
    }

    #[test]
    fn route_while_the_address_is_being_found() -> Result {
        const TURNS: i32 = 300;
        let env = Env::new()?;
        let addr = env.addr();
        let (ended, wrong) = (Counter::new()?, Counter::new()?);
        for _ in 0..TURNS {
            let id = begin(&env, addr)?;
            // From before the address is known until the connection has failed.
            for _ in 0..400 {
                if id.resolve_route(STEP_MS, &env.cx) != Err(EBUSY) {
                    wrong.up();
                }
            }
            ended.up();
        }
        check_eq!((ended.get(), wrong.get()), (TURNS, 0));
        Ok(())
    }

    #[test]
    fn accept_of_another_id_in_a_callback() -> Result {
        let (env, first, said) = (Env::new()?, Place::<cm::Id>::new()?, Place::new()?);
        let (addr, pd) = (env.addr(), env.pd.clone());
        let (kept, tell, own_pd) = (first.clone(), said.clone(), pd.clone());
        let accepts_others = move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let Some(other) = kept.take() else {
                kept.put(id);
                return Ok(());
            };
            tell.put((accept(&other, &own_pd, &[], cx), other));
            Ok(())
        };
        let _listener = listen(&env, addr, accepts_others)?;
        let (connected, client) = (Place::new()?, env.client.clone());
        let tell = connected.clone();
        client.spawn(GFP_KERNEL, move |_| {
            tell.put(Env::new().and_then(|env| connect_to(&env, addr, &[]).map(|_| ())));
        })?;
        wait(|| first.is_full())?;
        check_err!(connect_to(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        let (accepted, other) = said.wait()?;
        check_err!(accepted, EDEADLK);
        // Nothing has become of the request. The QP that was made for it goes by a work item.
        wait(|| accept(&other, &pd, &[], &env.cx).is_ok())?;
        connected.wait()?
    }

    #[test]
    fn one_answer_to_a_request() -> Result {
        let (env, said) = (Env::new()?, Place::new()?);
        let (addr, pd, tell) = (env.addr(), env.pd.clone(), said.clone());
        let accepts_first = move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let accepted = accept(&id, &pd, &[], cx);
            let rejected = id.reject(&[], cx);
            tell.put((id, accepted, rejected));
            Ok(())
        };
        let _listener = listen(&env, addr, accepts_first)?;
        let connected = connect_to(&env, addr, &[]);
        let (id, accepted, rejected) = said.wait()?;
        accepted?;
        check_err!(rejected, EINVAL);
        let _connected = connected?;
        // The handler has the QP, so the connection ends with it.
        id.release_handler(&env.cx);
        let again = id.accept(Events::new()?, &cm::ConnParam::default(), &env.cx);
        check_err!(again, EINVAL);
        Ok(())
    }

    #[test]
    fn no_answer_after_a_rejection() -> Result {
        let (env, said) = (Env::new()?, Place::new()?);
        let tell = said.clone();
        refused(&env, move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let rejected = id.reject(&[], cx);
            tell.put((rejected, id.reject(&[], cx)));
            Ok(())
        })?;
        let (rejected, again) = said.wait()?;
        rejected?;
        check_err!(again, EINVAL);
        Ok(())
    }

    #[test]
    fn the_active_side_answers_nothing() -> Result {
        let (env, ids) = (Env::new()?, Place::new()?);
        let addr = env.addr();
        let leave = ids.clone();
        let leaves = move |request: cm::Request<'_>, cx: &Sleepable| {
            leave.put(request.into_id(cx)?);
            Ok(())
        };
        let _listener = listen(&env, addr, leaves)?;
        let (active, said) = (Place::<cm::Id>::new()?, Place::new()?);
        let (leave, tell) = (active.clone(), said.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let connect = || -> Result {
                let env = Env::new()?;
                let id = cm::Id::resolve(&env.client, addr, STEP_MS, cx)?;
                leave.put(id.clone());
                let cq = env.cq::<Softirq>(64)?;
                let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), cx)?;
                id.connect(Events::new()?, &cm::ConnParam::default(), cx)?;
                Ok(())
            };
            tell.put(connect());
        })?;
        let passive: cm::Id = ids.wait()?;
        let id = active.wait()?;
        let rejected = id.reject(&[], &env.cx);
        id.release_handler(&env.cx);
        let accepted = id.accept(Events::new()?, &cm::ConnParam::default(), &env.cx);
        passive.reject(&[], &env.cx)?;
        check_err!(said.wait()?, ECONNREFUSED);
        check_err!(rejected, EINVAL);
        check_err!(accepted, EINVAL);
        Ok(())
    }

    #[test]
    fn nothing_waits_in_a_removal() -> Result {
        not_on_iwarp!(c"the links of their own are of rxe");
        let unplugged = OwnLink::new();
        let env = unplugged.env()?;
        let (listener, _) = listen_to_service(&env, |_, _| Ok(()))?;
        let waits = Arc::new(Waits(Place::new()?, Place::new()?), GFP_KERNEL)?;
        waits.0.put(listener);
        let (passive, pd) = (Place::new()?, env.pd.clone());
        let leave = passive.clone();
        let (_server, service) = listen_to_service(&env, move |request, cx| {
            let qp = raw_qp(&pd, cx)?;
            let connection =
                request.accept(&qp, CmEvents::new()?, &cm::ConnParam::default(), cx)?;
            leave.put((qp, connection));
            Ok(())
        })?;
        let qp = raw_qp(&env.pd, &env.cx)?;
        let gid = gid(&env, env.ip)?;
        let path = ibcm::Path::new(&gid, gid.gid(), &env.cx)?;
        let (handler, param) = (waits.clone(), ibcm::Param::default());
        let made = ibcm::Connection::connect(&qp, &path, service, handler, &param, &env.cx)?;
        unplugged.unplug()?;
        let said = waits.1.wait();
        drop((made, passive));
        check_err!(said?, EDEADLK);
        Ok(())
    }
}
