// SPDX-License-Identifier: GPL-2.0

//! Connections that are made by their events, with nobody waiting.

use crate::fixture::{
    accepts,
    listen,
    refuses,
    wait,
    CountDrop,
    Counter,
    Env,
    STEP_MS, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Mutex,
        SetOnce, //
    }, //
};
use rdma::prelude::*;

/// The answer of a [`Dialer`] that is asked for a QP.
type Resolve = fn(&Arc<Dialer>, &cm::Id, &Sleepable) -> Result;

/// A connection that is being made, which owns its QP.
#[pin_data]
struct Dialer {
    pd: Pd,
    resolve: Resolve,
    qp: SetOnce<Qp<Softirq>>,
    resolved: Arc<Counter>,
    established: Arc<Counter>,
    disconnected: Arc<Counter>,
    #[pin]
    failure: Mutex<Option<Error>>,
    #[pin]
    rejected: Mutex<Option<cm::RejectReason>>,
    _gone: CountDrop,
}

impl Dialer {
    fn new(env: &Env, gone: &Arc<Counter>, resolve: Resolve) -> Result<Arc<Self>> {
        let (pd, gone) = (env.pd.clone(), gone.clone());
        Arc::pin_init(
            try_pin_init!(Self {
                pd,
                resolve,
                qp: SetOnce::new(),
                resolved: Counter::new()?,
                established: Counter::new()?,
                disconnected: Counter::new()?,
                failure <- new_mutex!(None),
                rejected <- new_mutex!(None),
                _gone: CountDrop(gone),
            }),
            GFP_KERNEL,
        )
    }

    fn make_qp(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result {
        let cq = Cq::alloc_any(self.pd.device(), 64, cx)?;
        let qp = Qp::create(id, &self.pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        self.qp.populate(qp);
        Ok(())
    }

    /// Makes a QP whose context is the connection, which owns it.
    fn make_own_context(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result {
        self.make_qp(id, cx)?;
        self.qp()?.set_context(self.clone(), cx)
    }

    fn qp(&self) -> Result<&Qp<Softirq>> {
        self.qp.as_ref().ok_or(ENOTCONN)
    }

    /// Says that the handler has been told nothing.
    fn was_told_nothing(&self) -> bool {
        self.established.get() + self.disconnected.get() == 0
            && self.failure.lock().is_none()
            && self.rejected.lock().is_none()
    }
}

impl cm::Handler for Dialer {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => {
                self.established.up();
            }
            cm::Event::Disconnected => {
                self.disconnected.up();
            }
            cm::Event::Failed(e) => *self.failure.lock() = Some(e),
            cm::Event::Rejected(rejected) => *self.rejected.lock() = rejected.reason(),
            _ => {}
        }
    }
}

impl cm::Connect for Dialer {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        self.resolved.up();
        (self.resolve)(self, id, cx)?;
        Ok(cm::ConnParam::default())
    }
}

/// Begins to connect to an address, and keeps the handler to look at.
fn begin(
    env: &Env,
    addr: SocketAddr,
    gone: &Arc<Counter>,
    resolve: Resolve,
) -> Result<(cm::Id, Arc<Dialer>)> {
    let dialer = Dialer::new(env, gone, resolve)?;
    let options = cm::Options::default();
    let id = cm::Id::connect_to(
        &env.client,
        addr,
        STEP_MS,
        &options,
        dialer.clone(),
        &env.cx,
    )?;
    Ok((id, dialer))
}

/// Begins to connect to nobody, and waits for the failure of that.
fn fails(resolve: Resolve) -> Result<Error> {
    let (env, gone) = (Env::new()?, Counter::new()?);
    let (id, dialer) = begin(&env, env.addr(), &gone, resolve)?;
    wait(|| dialer.failure.lock().is_some())?;
    let failure = dialer.failure.lock().ok_or(EINVAL)?;
    check_eq!(dialer.established.get(), 0);
    drop((id, dialer));
    wait(|| gone.get() == 1)?;
    Ok(failure)
}

#[kunit_tests(rdma_cm_async)]
mod tests {
    use super::*;

    #[test]
    fn connects_without_waiting() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        let (id, dialer) = begin(&env, addr, &gone, Dialer::make_qp)?;
        wait(|| dialer.established.get() == 1)?;
        check_eq!(dialer.resolved.get(), 1);
        check!(id.device()? == &env.dev);
        id.disconnect(&env.cx)?;
        wait(|| dialer.disconnected.get() == 1)?;
        check!(dialer.failure.lock().is_none());
        drop((id, dialer));
        wait(|| gone.get() == 1)
    }

    /// A QP that is made when the route is known may keep the connection.
    #[test]
    fn connection_is_the_context_of_its_qp() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        let (id, dialer) = begin(&env, addr, &gone, Dialer::make_own_context)?;
        wait(|| dialer.established.get() == 1)?;
        id.disconnect(&env.cx)?;
        wait(|| dialer.disconnected.get() == 1)?;
        check_err!(dialer.qp()?.set_context(dialer.clone(), &env.cx), EBUSY);
        dialer.qp()?.clear_context(&env.cx)?;
        drop((id, dialer));
        wait(|| gone.get() == 1)
    }

    #[test]
    fn connects_though_the_id_is_dropped() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        let (id, dialer) = begin(&env, addr, &gone, Dialer::make_qp)?;
        drop(id);
        // The QP keeps the id from here on, and the handler the QP.
        wait(|| dialer.established.get() == 1)
    }

    #[test]
    fn nobody_listens() -> Result {
        not_on_iwarp!(c"rejections have no reason");
        let (env, gone) = (Env::new()?, Counter::new()?);
        let (id, dialer) = begin(&env, env.addr(), &gone, Dialer::make_qp)?;
        wait(|| dialer.rejected.lock().is_some())?;
        check_eq!(
            *dialer.rejected.lock(),
            Some(cm::RejectReason::INVALID_SERVICE_ID)
        );
        check_eq!(dialer.established.get(), 0);
        drop((id, dialer));
        wait(|| gone.get() == 1)
    }

    #[test]
    fn listener_refuses() -> Result {
        not_on_iwarp!(c"rejections have no reason");
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, refuses)?;
        let (_id, dialer) = begin(&env, addr, &gone, Dialer::make_qp)?;
        wait(|| dialer.rejected.lock().is_some())?;
        check_eq!(
            *dialer.rejected.lock(),
            Some(cm::RejectReason::CONSUMER_DEFINED)
        );
        Ok(())
    }

    #[test]
    fn no_way_to_the_peer() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let nowhere = SocketAddr::from(([198, 51, 100, 1], 1));
        let dialer = Dialer::new(&env, &gone, Dialer::make_qp)?;
        let resolved = dialer.resolved.clone();
        let options = cm::Options::default();
        let id = cm::Id::connect_to(&env.client, nowhere, STEP_MS, &options, dialer, &env.cx);
        check_err!(id, ENETUNREACH);
        check_eq!((resolved.get(), gone.get()), (0, 1));
        Ok(())
    }

    #[test]
    fn given_up_while_the_peer_is_silent() -> Result {
        not_on_iwarp!(c"siw waits for TCP, for minutes");
        let (env, gone) = (Env::new()?, Counter::new()?);
        // The interface takes any address for one of its network, but none has it.
        let silent = SocketAddr::from(([192, 0, 2, 99], 1));
        let (id, dialer) = begin(&env, silent, &gone, Dialer::make_qp)?;
        wait(|| dialer.resolved.get() == 1)?;
        kernel::time::delay::fsleep(kernel::time::Delta::from_millis(20));
        id.disconnect(&env.cx)?;
        check!(dialer.was_told_nothing());
        drop((id, dialer));
        wait(|| gone.get() == 1)
    }

    #[test]
    fn bad_address_is_said_at_once() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let dialer = Dialer::new(&env, &gone, Dialer::make_qp)?;
        let options = cm::Options {
            src: Some(SocketAddr::from(([192, 0, 2, 1], 0))),
            ..Default::default()
        };
        // Its own address is one of IPv4.
        let dst = SocketAddr::new(crate::fixture::IPV6.into(), 1);
        check_err!(
            cm::Id::connect_to(&env.client, dst, STEP_MS, &options, dialer, &env.cx).map(|_| ()),
            EINVAL
        );
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn handler_makes_no_qp() -> Result {
        check_eq!(fails(|_, _, _| Err(ENOSPC))?, ENOSPC);
        check_eq!(fails(|_, _, _| Ok(()))?, EINVAL);
        Ok(())
    }

    #[test]
    fn handler_may_not_wait() -> Result {
        let said = fails(|_, id, cx| id.resolve_route(STEP_MS, cx))?;
        check_eq!(said, EDEADLK);
        Ok(())
    }

    #[test]
    fn given_up_by_the_handler() -> Result {
        let (env, gone, asked) = (Env::new()?, Counter::new()?, Counter::new()?);
        let (addr, counts) = (env.addr(), asked.clone());
        let never = move |_: cm::Request<'_>, _: &Sleepable| -> Result {
            counts.up();
            Ok(())
        };
        let _listener = listen(&env, addr, never)?;
        let (id, dialer) = begin(&env, addr, &gone, |dialer, id, cx| {
            dialer.make_qp(id, cx)?;
            id.disconnect(cx)
        })?;
        wait(|| dialer.resolved.get() == 1)?;
        drop(id);
        check!(dialer.was_told_nothing());
        drop(dialer);
        wait(|| gone.get() == 1)?;
        check_eq!(asked.get(), 0);
        Ok(())
    }

    #[test]
    fn given_up_at_any_time() -> Result {
        const TIMES: i32 = 24;
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        for i in 0..TIMES {
            let (id, dialer) = begin(&env, addr, &gone, Dialer::make_qp)?;
            kernel::time::delay::fsleep(kernel::time::Delta::from_micros(i64::from(i) * 100));
            // Too early, just then, or when the connection is made.
            id.disconnect(&env.cx)?;
            drop((id, dialer));
        }
        // Nothing keeps a handler.
        wait(|| gone.get() == TIMES)
    }

    #[test]
    fn connects_many_at_a_time() -> Result {
        const TIMES: usize = 8;
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        let mut dialers = KVec::with_capacity(TIMES, GFP_KERNEL)?;
        for _ in 0..TIMES {
            dialers.push(begin(&env, addr, &gone, Dialer::make_qp)?, GFP_KERNEL)?;
        }
        wait(|| {
            dialers
                .iter()
                .all(|(_, dialer)| dialer.established.get() == 1)
        })?;
        for (id, _) in &dialers {
            id.disconnect(&env.cx)?;
        }
        drop(dialers);
        wait(|| gone.get() == TIMES as i32)
    }

    #[test]
    fn comes_from_the_address_that_was_chosen() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, b""))?;
        let dialer = Dialer::new(&env, &gone, Dialer::make_qp)?;
        let options = cm::Options {
            src: Some(SocketAddr::new(env.ip, 0)),
            service_type: Some(8),
            ..Default::default()
        };
        let id = cm::Id::connect_to(
            &env.client,
            addr,
            STEP_MS,
            &options,
            dialer.clone(),
            &env.cx,
        )?;
        check!(id.device()? == &env.dev);
        wait(|| dialer.established.get() == 1)
    }
}
