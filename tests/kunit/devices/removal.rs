// SPDX-License-Identifier: GPL-2.0

//! Devices that go while MAD agents and connection managers work on them. What the null device has
//! is in the suite of that.

use crate::fixture::{
    gid,
    listen,
    listen_to_service,
    message,
    own_class,
    port,
    serve,
    service_id,
    wait,
    CmEvents,
    CmLink,
    Counter,
    Env,
    Events,
    Link,
    Mads,
    OwnLink,
    BACKLOG,
    LONG_MS,
    STEP_MS,
    THREADS, //
};
use core::net::{
    IpAddr,
    Ipv6Addr, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    device::Gid,
    ibcm,
    mad::{
        Agent,
        Method, //
    },
    prelude::*, //
};

const CAPS: Caps = Caps::new(4, 4);

/// Returns an address behind the device that no host has, so that there is no answer.
fn unused_address(env: &Env) -> Result<Ipv6Addr> {
    match env.ip {
        IpAddr::V6(own) => Ok(Ipv6Addr::from_bits(own.to_bits() + 1)),
        IpAddr::V4(_) => Err(EAFNOSUPPORT),
    }
}

/// Counts when it is told that no further requests come.
struct Ear(Arc<Counter>);

impl ibcm::Accept for Ear {
    fn request(self: ArcBorrow<'_, Self>, _request: ibcm::Request<'_>, _cx: &Sleepable) {}

    fn stopped(self: ArcBorrow<'_, Self>) {
        self.0.up();
    }
}

impl cm::Accept for Ear {
    fn request(self: ArcBorrow<'_, Self>, _request: cm::Request<'_>, _cx: &Sleepable) {}

    fn stopped(self: ArcBorrow<'_, Self>) {
        self.0.up();
    }
}

/// Listens in one place after the other, as after a change of the address.
#[pin_data]
struct Moving {
    #[pin]
    listener: Mutex<Option<cm::Listener>>,
    stopped: Arc<Counter>,
}

impl cm::Accept for Moving {
    fn request(self: ArcBorrow<'_, Self>, _request: cm::Request<'_>, _cx: &Sleepable) {}

    fn stopped(self: ArcBorrow<'_, Self>) {
        let gone = self.listener.lock().take_if(|it| it.has_stopped());
        drop(gone);
        self.stopped.up();
    }
}

/// Takes long when it is told that no further requests come: it waits until so many threads know
/// that the device goes.
struct Busy {
    knowing: Arc<Counter>,
    all: i32,
    done: Arc<Counter>,
}

impl ibcm::Accept for Busy {
    fn request(self: ArcBorrow<'_, Self>, _request: ibcm::Request<'_>, _cx: &Sleepable) {}

    fn stopped(self: ArcBorrow<'_, Self>) {
        if wait(|| self.knowing.get() == self.all).is_ok() {
            self.done.up();
        }
    }
}

/// A handler that takes a lock of the ULP when it is dropped.
struct Locks(Arc<Mutex<()>>);

impl cm::Handler for Locks {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl Drop for Locks {
    fn drop(&mut self) {
        drop(self.0.lock());
    }
}

/// Counts who learns in a wait that the device goes.
fn knows(counter: &Counter, waited: Result) {
    match waited {
        Err(ENODEV) => drop(counter.up()),
        other => pr_err!("FAILED: {other:?}\n"),
    }
}

#[kunit_tests(rdma_removal)]
mod tests {
    use super::*;

    #[test]
    fn of_mad_agents() -> Result {
        let link = OwnLink::new();
        let (env, class) = (link.env()?, own_class());
        let ip = env.ip;
        let mads = Mads::on(env, ip, class, BACKLOG)?;
        let recv = |agent: &Agent, cx: &Sleepable| agent.recv(None, cx).map(drop);
        let receivers = mads.threads(ENODEV, recv, &mads.client)?;
        let peer = mads.peer.clone();
        let ask = move |agent: &Agent, cx: &Sleepable| {
            let asked = message(Method::GET, 0, &[]);
            agent.request(&peer, &asked, LONG_MS, 9, cx).map(drop)
        };
        let askers = mads.threads(ENODEV, ask, &mads.client)?;
        for _ in 0..THREADS {
            mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        }
        link.unplug()?;
        wait(|| receivers.get() == THREADS && askers.get() == THREADS)?;
        check_err!(mads.server.recv(None, &mads.env.cx), ENODEV);
        check_err!(mads.tell(0), ENODEV);
        check_err!(mads.ask(&[]), ENODEV);
        check_err!(serve(&mads.env, own_class(), 1).map(drop), ENODEV);
        // Why it has ended stays.
        mads.client.stop(&mads.env.cx)?;
        check_err!(mads.client.recv(Some(0), &mads.env.cx), ENODEV);
        Ok(())
    }

    #[test]
    fn of_what_the_infiniband_connection_manager_has() -> Result {
        let unplugged = OwnLink::new();
        let (connected, env) = (CmLink::on(unplugged.env()?)?, unplugged.env()?);
        let (stopped, refused, begun) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let ear = Arc::new(Ear(stopped.clone()), GFP_KERNEL)?;
        let listener = ibcm::Listener::new(&env.dev, service_id(), 1, ear.clone(), &env.cx)?;
        // A thread waits for an answer that never comes.
        let (failed, begins) = (refused.clone(), begun.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let connect = || -> Result {
                let other = unplugged.env()?;
                let qp = other.raw_qp(&other.cq::<Softirq>(64)?, &CAPS)?;
                let from = gid(&other, other.ip)?;
                let to = Gid(unused_address(&other)?.octets());
                let path = ibcm::Path::new(&from, to, cx)?;
                let (events, param) = (CmEvents::new()?, ibcm::Param::default());
                begins.up();
                ibcm::Connection::connect(&qp, &path, service_id(), events, &param, cx).map(drop)
            };
            match connect() {
                Err(ENODEV) => failed.up(),
                other => {
                    pr_err!("FAILED: {other:?}\n");
                    0
                }
            };
        })?;
        wait(|| begun.get() == 1)?;
        fsleep(Delta::from_millis(20));
        unplugged.unplug()?;
        wait(|| stopped.get() == 1)?;
        wait(|| refused.get() == 1)?;
        // The end that is told first disconnects, which the other may hear first.
        for end in [&connected.a, &connected.b] {
            wait(|| end.events.removed() + end.events.disconnected() != 0)?;
        }
        check!(connected.a.events.removed() + connected.b.events.removed() != 0);
        let another = ibcm::Listener::new(&env.dev, service_id(), 1, ear, &env.cx);
        check_err!(another.map(drop), ENODEV);
        // No client is told twice.
        check_eq!((refused.get(), stopped.get()), (1, 1));
        drop(listener);
        Ok(())
    }

    /// Lockdep reports the order of the two locks.
    #[test]
    fn handler_is_not_dropped_with_the_list_locked() -> Result {
        let unplugged = OwnLink::new();
        let env = unplugged.env()?;
        let lock = Arc::pin_init(new_mutex!(()), GFP_KERNEL)?;
        let (asked, refused) = (Counter::new()?, Counter::new()?);
        let (asks, ended) = (asked.clone(), refused.clone());
        let locked = lock.lock();
        let (_listener, service) = listen_to_service(&env, move |_, _| {
            asks.up();
            wait(|| ended.get() == 1)
        })?;
        drop(locked);
        let (handler, fails) = (Arc::new(Locks(lock), GFP_KERNEL)?, refused.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let connect = || -> Result {
                let other = unplugged.env()?;
                let qp = other.raw_qp(&other.cq::<Softirq>(64)?, &CAPS)?;
                let gid = gid(&other, other.ip)?;
                let (path, param) = (ibcm::Path::new(&gid, gid.gid(), cx)?, Default::default());
                ibcm::Connection::connect(&qp, &path, service, handler, &param, cx)?;
                Ok(())
            };
            knows(&fails, connect());
        })?;
        wait(|| asked.get() == 1)?;
        unplugged.unplug()?;
        wait(|| refused.get() == 1)
    }

    #[test]
    fn waiter_is_told_first() -> Result {
        let link = OwnLink::new();
        let env = link.env()?;
        let (knowing, begun, done) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let busy = Busy {
            knowing: knowing.clone(),
            all: 3,
            done: done.clone(),
        };
        let busy = Arc::new(busy, GFP_KERNEL)?;
        let listener = ibcm::Listener::new(&env.dev, service_id(), 1, busy, &env.cx)?;
        let cq = env.cq::<Waited>(16)?;
        let (knows_it, begins) = (knowing.clone(), begun.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            begins.up();
            knows(&knows_it, cq.wait(Notify::NextComp, LONG_MS, cx).map(drop));
        })?;
        let ip = env.ip;
        let mads = Mads::on(link.env()?, ip, own_class(), BACKLOG)?;
        let (knows_it, begins, to) = (knowing.clone(), begun.clone(), mads.peer.clone());
        let asker = mads.client.clone();
        env.client.spawn(GFP_KERNEL, move |cx| {
            begins.up();
            let asked = message(Method::GET, 0, &[]);
            knows(
                &knows_it,
                asker.request(&to, &asked, LONG_MS, 9, cx).map(drop),
            );
        })?;
        let (knows_it, begins) = (knowing.clone(), begun.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let connect = || -> Result {
                let other = link.env()?;
                let to = SocketAddr::new(unused_address(&other)?.into(), port());
                let id = cm::Id::resolve(&other.client, to, STEP_MS, cx)?;
                let cq = other.cq::<Softirq>(64)?;
                let _qp = Qp::create(&id, &other.pd, &cq, &cq, &CAPS, cx)?;
                begins.up();
                id.connect(Events::new()?, &cm::ConnParam::default(), cx)?;
                Ok(())
            };
            knows(&knows_it, connect());
        })?;
        wait(|| begun.get() == 3)?;
        mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        fsleep(Delta::from_millis(20));
        link.unplug()?;
        wait(|| done.get() == 1)?;
        drop((listener, mads, env));
        Ok(())
    }

    /// The word of a listener that goes comes when there is another one.
    #[test]
    fn of_a_listener_that_was_replaced() -> Result {
        let (unplugged, stays) = (OwnLink::new(), Env::new()?);
        let (env, stopped) = (unplugged.env()?, Counter::new()?);
        let counts = stopped.clone();
        let moving = pin_init!(Moving {
            listener <- new_mutex!(None),
            stopped: counts,
        });
        let moving = Arc::pin_init(moving, GFP_KERNEL)?;
        let listen =
            |env: &Env| cm::Listener::new(&env.client, env.addr(), 1, moving.clone(), &env.cx);
        let (old, new) = (listen(&env)?, listen(&stays)?);
        *moving.listener.lock() = Some(new);
        check!(!old.has_stopped());
        unplugged.unplug()?;
        drop(env);
        wait(|| stopped.get() == 1)?;
        check!(old.has_stopped());
        let new = moving.listener.lock().take();
        check!(new.is_some_and(|it| !it.has_stopped()));
        // What the handler has of its own goes when it was told.
        *moving.listener.lock() = Some(old);
        cm::Accept::stopped(moving.as_arc_borrow());
        check!(moving.listener.lock().is_none());
        Ok(())
    }

    #[test]
    fn of_what_the_connection_manager_has() -> Result {
        let unplugged = OwnLink::new();
        let env = unplugged.env()?;
        let (send, recv) = (env.cq::<Softirq>(64)?, env.cq::<Softirq>(64)?);
        let param = cm::ConnParam::default();
        let connected = Link::on(unplugged.env()?, &send, &recv, &CAPS, &param)?;
        let stopped = Counter::new()?;
        let listener = listen(&env, env.addr(), Ear(stopped.clone()))?;
        let (waits, begun) = (Counter::new()?, Counter::new()?);
        let (failed, begins) = (waits.clone(), begun.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let connect = || -> Result {
                let other = unplugged.env()?;
                let to = SocketAddr::new(unused_address(&other)?.into(), port());
                let id = cm::Id::resolve(&other.client, to, STEP_MS, cx)?;
                let cq = other.cq::<Softirq>(64)?;
                let _qp = Qp::create(&id, &other.pd, &cq, &cq, &CAPS, cx)?;
                begins.up();
                id.connect(Events::new()?, &cm::ConnParam::default(), cx)?;
                Ok(())
            };
            match connect() {
                Err(ENODEV) => failed.up(),
                other => {
                    pr_err!("FAILED: {other:?}\n");
                    0
                }
            };
        })?;
        wait(|| begun.get() == 1)?;
        fsleep(Delta::from_millis(20));
        unplugged.unplug()?;
        wait(|| waits.get() == 1)?;
        for end in [&connected.a, &connected.b] {
            wait(|| end.events.removed() == 1)?;
        }
        let late = cm::Id::create(&env.client, &env.cx)?;
        check!(late.resolve_addr(env.addr(), STEP_MS, &env.cx).is_err());
        // The connection manager itself is told last, when there is no other user of the device.
        check_eq!(stopped.get(), 0);
        drop((late, send, recv, connected, env));
        wait(|| stopped.get() == 1)?;
        drop(listener);
        Ok(())
    }
}
