// SPDX-License-Identifier: GPL-2.0

//! The ends of connections, timers, and connecting again.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::fixture::{
    accepts,
    listen,
    wait,
    Counter,
    Env,
    Inbox,
    Link,
    Message,
    NullEnv,
    Place, //
};
use core::{
    net::SocketAddr,
    ops::ControlFlow, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    prelude::*,
    session::{
        self,
        Activity,
        Backoff,
        Connecting,
        Connector,
        Reconnect,
        Ticker, //
    }, //
};
use rdma_null::Injection;

/// Attempts, of which number `last` ends them with this result.
#[pin_data]
struct Mount {
    last: (u32, Result),
    attempts: Arc<Counter>,
    /// The action of an attempt, instead of that.
    #[pin]
    own: SpinLockIrq<Option<Arc<Reconnect>>>,
    #[pin]
    ended: SpinLockIrq<KVec<Result>>,
}

impl Mount {
    /// Number `succeeds` is successful.
    fn new(succeeds: u32) -> Result<Arc<Self>> {
        Self::ends((succeeds, Ok(())))
    }

    fn ends(last: (u32, Result)) -> Result<Arc<Self>> {
        let attempts = Counter::new()?;
        let init = pin_init!(Self {
            last,
            attempts,
            own <- new_spinlock_irq!(None),
            ended <- new_spinlock_irq!(KVec::new()),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Waits until it has ended, once, and returns how.
    #[track_caller]
    fn end(&self) -> Result<Result> {
        wait(|| !self.ended.lock().is_empty())?;
        let mut ended = self.ended.lock();
        check_eq!(ended.len(), 1);
        ended.pop().ok_or(ENODATA)
    }
}

impl Connector for Mount {
    fn connect(
        self: ArcBorrow<'_, Self>,
        attempt: u32,
        cx: &Sleepable,
    ) -> ControlFlow<Result, Error> {
        if self.attempts.up() != attempt as i32 {
            pr_err!("FAILED: attempt {attempt}\n");
        }
        let own = self.own.lock().take();
        if let Some(own) = own {
            if own.cancel_sync(cx) != Err(EDEADLK) {
                pr_err!("FAILED: it does not wait for itself\n");
            }
        }
        match self.last {
            (last, result) if attempt == last => ControlFlow::Break(result),
            _ => ControlFlow::Continue(ECONNREFUSED),
        }
    }

    fn ended(self: ArcBorrow<'_, Self>, result: Result, _cx: &Sleepable) {
        if self.ended.lock().push(result, GFP_ATOMIC).is_err() {
            pr_err!("FAILED: no memory for an end\n");
        }
    }
}

const SOON: Backoff = Backoff {
    first_ms: 1,
    longest_ms: 4,
    attempts: 5,
};

/// A time that no case waits for.
const LATE: Backoff = Backoff {
    first_ms: 1_000_000,
    longest_ms: 1_000_000,
    attempts: 5,
};

/// A ULP whose first connection is lost at once.
struct Lost {
    reconnect: Arc<Place<Arc<Reconnect>>>,
    ended: Arc<Counter>,
}

impl Connector for Lost {
    fn connect(
        self: ArcBorrow<'_, Self>,
        _attempt: u32,
        _cx: &Sleepable,
    ) -> ControlFlow<Result, Error> {
        ControlFlow::Break(match self.reconnect.take() {
            Some(reconnect) => reconnect.start(Arc::from(self)),
            None => Ok(()),
        })
    }

    fn ended(self: ArcBorrow<'_, Self>, _result: Result, _cx: &Sleepable) {
        self.ended.up();
    }
}

/// A ULP that connects to an address where nobody listens at first.
struct Peer {
    client: ClientRef,
    addr: SocketAddr,
    ended: Arc<Counter>,
    failed: Arc<Counter>,
}

struct Quiet;

impl cm::Handler for Quiet {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl Peer {
    fn connect_once(&self, cx: &Sleepable) -> Result {
        let id = cm::Id::resolve(&self.client, self.addr, 10_000, cx)?;
        let dev = id.device()?.clone();
        let (pd, caps) = (Pd::alloc(&dev, cx)?, Caps::new(2, 2));
        let cq = Cq::<Workqueue>::alloc(&dev, caps.entries(), 0, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &caps, cx)?;
        let connecting = Connecting::new(&id, &qp, cx);
        let inbox = Inbox::new()?;
        let message = Message::new(&pd, &inbox, &[0; 4], cx)?;
        qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
        let connected = id.connect(Arc::new(Quiet, GFP_KERNEL)?, &cm::ConnParam::default(), cx);
        if let Err(e) = connected {
            drop(connecting);
            // The receive is back.
            if inbox.len() != 1 {
                pr_err!("FAILED: the receive is not back\n");
            }
            self.failed.up();
            return Err(e);
        }
        connecting.connected();
        session::end(&id, &qp, cx)?;
        session::end(&id, &qp, cx)
    }
}

impl Connector for Peer {
    fn connect(
        self: ArcBorrow<'_, Self>,
        _attempt: u32,
        cx: &Sleepable,
    ) -> ControlFlow<Result, Error> {
        match self.connect_once(cx) {
            Ok(()) => ControlFlow::Break(Ok(())),
            Err(e) => ControlFlow::Continue(e),
        }
    }

    fn ended(self: ArcBorrow<'_, Self>, result: Result, _cx: &Sleepable) {
        if let Err(e) = result {
            pr_err!("FAILED: {e:?}\n");
        }
        self.ended.up();
    }
}

#[kunit_tests(rdma_session_end)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_longest() -> Result {
        let backoff = Backoff {
            first_ms: 100,
            longest_ms: 1000,
            attempts: u32::MAX,
        };
        for (attempt, ms) in [
            (0, 100),
            (1, 100),
            (2, 200),
            (4, 800),
            (5, 1000),
            (u32::MAX, 1000),
        ] {
            check_eq!(backoff.delay_ms(attempt), ms);
        }
        let most = Backoff {
            first_ms: u32::MAX,
            longest_ms: u32::MAX,
            attempts: 1,
        };
        check_eq!(most.delay_ms(40), u32::MAX);
        Ok(())
    }

    #[test]
    fn attempts_end_with_success() -> Result {
        let (env, mount) = (Env::new()?, Mount::new(3)?);
        let reconnect = Reconnect::new(&env.client, SOON)?;
        reconnect.start(mount.clone())?;
        check_eq!(mount.end()?, Ok(()));
        check_eq!(mount.attempts.get(), 3);
        reconnect.cancel_sync(&env.cx)
    }

    #[test]
    fn attempts_are_given_up() -> Result {
        let (env, mount) = (Env::new()?, Mount::new(0)?);
        let _reconnect = Reconnect::new(&env.client, SOON)?;
        _reconnect.start(mount.clone())?;
        check_eq!(mount.end()?, Err(ECONNREFUSED));
        check_eq!(mount.attempts.get(), 5);
        let mount = Mount::new(0)?;
        let never = Backoff {
            attempts: 0,
            ..SOON
        };
        let _reconnect = Reconnect::new(&env.client, never)?;
        _reconnect.start(mount.clone())?;
        check_eq!(mount.end()?, Err(ECANCELED));
        Ok(())
    }

    /// As the peer has said that no other will do.
    #[test]
    fn attempt_gives_up() -> Result {
        let (env, mount) = (Env::new()?, Mount::ends((2, Err(EACCES)))?);
        let reconnect = Reconnect::new(&env.client, SOON)?;
        reconnect.start(mount.clone())?;
        check_eq!(mount.end()?, Err(EACCES));
        check_eq!(mount.attempts.get(), 2);
        // Those of the next connection that is lost are made.
        let mount = Mount::new(1)?;
        reconnect.start(mount.clone())?;
        check_eq!(mount.end()?, Ok(()));
        reconnect.cancel_sync(&env.cx)
    }

    #[test]
    fn waiting_is_cancelled() -> Result {
        let env = Env::new()?;
        for drops in [false, true] {
            let mount = Mount::new(1)?;
            let reconnect = Reconnect::new(&env.client, LATE)?;
            reconnect.start(mount.clone())?;
            if drops {
                drop(reconnect);
            } else {
                reconnect.cancel();
            }
            check_eq!(mount.end()?, Err(ECANCELED));
            check_eq!(mount.attempts.get(), 0);
        }
        let mount = Mount::new(1)?;
        let reconnect = Reconnect::new(&env.client, LATE)?;
        reconnect.start(mount.clone())?;
        reconnect.cancel_sync(&env.cx)?;
        check_eq!(mount.ended.lock().len(), 1);
        reconnect.cancel_sync(&env.cx)
    }

    #[test]
    fn attempt_does_not_wait_for_itself() -> Result {
        let (env, mount) = (Env::new()?, Mount::new(0)?);
        let backoff = Backoff {
            first_ms: 20,
            longest_ms: 20,
            ..SOON
        };
        let reconnect = Reconnect::new(&env.client, backoff)?;
        reconnect.start(mount.clone())?;
        let reconnect = Arc::new(reconnect, GFP_KERNEL)?;
        *mount.own.lock() = Some(reconnect.clone());
        // It was cancelled in the first attempt that has found it.
        check_eq!(mount.end()?, Err(ECANCELED));
        check!(mount.attempts.get() >= 1);
        Ok(())
    }

    /// A connection is lost where nothing can be allocated.
    #[cfg(has_faults)]
    #[test]
    fn attempts_begin_without_memory() -> Result {
        let (env, mount) = (Env::new()?, Mount::new(1)?);
        let reconnect = Reconnect::new(&env.client, SOON)?;
        let (started, failed) = with_fault(1, || reconnect.start(mount.clone()));
        started?;
        check!(!failed);
        check_eq!(mount.end()?, Ok(()));
        Ok(())
    }

    #[test]
    fn attempts_begin_again() -> Result {
        let env = Env::new()?;
        let reconnect = Reconnect::new(&env.client, SOON)?;
        for succeeds in [2, 0, 1] {
            let mount = Mount::new(succeeds)?;
            reconnect.start(mount.clone())?;
            check_eq!(mount.end()?.is_ok(), succeeds != 0);
        }
        reconnect.cancel_sync(&env.cx)?;
        let mount = Mount::new(1)?;
        check_err!(reconnect.start(mount.clone()), ECANCELED);
        check_eq!(mount.attempts.get(), 0);
        Ok(())
    }

    #[test]
    fn connection_is_lost_before_its_attempt_has_ended() -> Result {
        let (env, ended) = (Env::new()?, Counter::new()?);
        let lost = Lost {
            reconnect: Place::new()?,
            ended: ended.clone(),
        };
        let (lost, reconnect) = (
            Arc::new(lost, GFP_KERNEL)?,
            Reconnect::new(&env.client, SOON)?,
        );
        let reconnect = Arc::new(reconnect, GFP_KERNEL)?;
        lost.reconnect.put(reconnect.clone());
        reconnect.start(lost)?;
        wait(|| ended.get() == 2)?;
        reconnect.cancel_sync(&env.cx)?;
        check_eq!(ended.get(), 2);
        Ok(())
    }

    #[test]
    fn connection_is_made_again() -> Result {
        let null = NullEnv::with_cm()?;
        let peer = Peer {
            client: null.env.client.clone(),
            addr: null.env.addr(),
            ended: Counter::new()?,
            failed: Counter::new()?,
        };
        let (ended, failed) = (peer.ended.clone(), peer.failed.clone());
        null.dev.inject(Injection::Reject { count: 2 })?;
        let listener = listen(&null.env, peer.addr, accepts(&null.env, &[]))?;
        let peer = Arc::new(peer, GFP_KERNEL)?;
        let reconnect = Reconnect::new(&null.env.client, SOON)?;
        reconnect.start(peer)?;
        wait(|| ended.get() == 1)?;
        check_eq!(failed.get(), 2);
        reconnect.cancel_sync(&null.env.cx)?;
        drop(listener);
        Ok(())
    }

    #[test]
    fn connection_ends_with_its_requests() -> Result {
        let link = Link::<Workqueue>::new()?;
        let inbox = Inbox::new()?;
        let message = link.env.message(&inbox, &[0; 4])?;
        let qp = &link.a.qp;
        qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
        session::end(&link.a.id, qp, &link.env.cx)?;
        check_eq!(inbox.len(), 1);
        wait(|| link.b.events.disconnected() == 1)
    }

    #[test]
    fn function_is_called_until_it_breaks() -> Result {
        let (env, calls) = (Env::new()?, Counter::new()?);
        let count = calls.clone();
        let ticker = Ticker::start(&env.client, 0, GFP_KERNEL, move |_| match count.up() {
            3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })?;
        wait(|| calls.get() == 3)?;
        ticker.stop_sync(&env.cx)?;
        check_eq!(calls.get(), 3);
        Ok(())
    }

    #[test]
    fn function_is_not_called_after_the_stop() -> Result {
        let (env, calls) = (Env::new()?, Counter::new()?);
        let count = calls.clone();
        let ticker = Ticker::start(&env.client, 1, GFP_KERNEL, move |_| {
            count.up();
            ControlFlow::Continue(())
        })?;
        wait(|| calls.get() > 2)?;
        ticker.stop_sync(&env.cx)?;
        let last = calls.get();
        let again = Counter::new()?;
        let (count, gone) = (again.clone(), calls.clone());
        // Another one has its turns meanwhile.
        let other = Ticker::start(&env.client, 1, GFP_KERNEL, move |_| {
            let _ = &gone;
            count.up();
            ControlFlow::Continue(())
        })?;
        wait(|| again.get() > 5)?;
        check_eq!(calls.get(), last);
        drop(other);
        Ok(())
    }

    #[test]
    fn activity_is_noted() -> Result {
        let (env, activity, later) = (Env::new()?, Activity::new(), Counter::new()?);
        let count = later.clone();
        let _ticker = Ticker::start(&env.client, 50, GFP_KERNEL, move |_| {
            count.up();
            ControlFlow::Break(())
        })?;
        wait(|| later.get() == 1)?;
        check!(activity.idle_ms() >= 40);
        let default = Activity::default();
        activity.note();
        check!(activity.idle_ms() <= default.idle_ms());
        Ok(())
    }
}
