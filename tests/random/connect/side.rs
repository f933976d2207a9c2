// SPDX-License-Identifier: GPL-2.0

//! One side of a connection: its handler, which has its id and its QP as well.

use crate::{
    link::Link,
    message::Message,
    rng::Rng,
    tally::Life,
    times::Kind,
    world::{
        OnDevice,
        World, //
    },
    Random, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Mutex, //
    }, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(4, 4);

/// The QP that is posted to.
#[derive(Clone)]
struct End {
    qp: Qp<Softirq>,
    pd: Pd,
}

/// Measures from when a side was let go of until it is dropped.
struct Clock {
    world: Arc<World>,
    kind: Kind,
    /// Zero before that.
    since: Atomic<i64>,
    /// `true` if the last event is to release it.
    told: Atomic<bool>,
}

impl Clock {
    fn start(&self) {
        let now = self.world.times.now().max(1);
        let _ = self.since.cmpxchg(0, now, Full);
    }

    fn is_running(&self) -> bool {
        self.since.load(Relaxed) != 0
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if self.is_running() {
            let kind = match (self.told.load(Relaxed), self.kind) {
                (true, Kind::Release) => Kind::Disconnect,
                (true, _) => Kind::IbDisconnect,
                (false, kind) => kind,
            };
            self.world.times.took(kind, self.since.load(Relaxed));
        }
    }
}

#[pin_data]
pub(crate) struct Side {
    #[pin]
    link: Mutex<Option<Link>>,
    #[pin]
    end: Mutex<Option<End>>,
    /// `true` if a thread waits for the connection.
    waited: Atomic<bool>,
    /// When that was given up.
    given_up: Atomic<i64>,
    /// `true` if there was the last event.
    over: Atomic<bool>,
    /// Before `clock`, which may have the last reference to what counts lives.
    _life: Life,
    clock: Clock,
    pub(crate) world: Arc<World>,
}

impl Side {
    pub(crate) fn new(world: &Arc<World>, kind: Kind) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            link <- new_mutex!(None),
            end <- new_mutex!(None),
            waited: Atomic::new(false),
            given_up: Atomic::new(0),
            over: Atomic::new(false),
            _life: Life::new(&world.tally),
            clock: Clock {
                world: world.clone(),
                kind,
                since: Atomic::new(0),
                told: Atomic::new(false),
            },
            world: world.clone(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Makes the QP of an id.
    pub(crate) fn make_qp(&self, id: &cm::Id, cx: &Sleepable) -> Result {
        let on = id.device()?.data::<Random>(cx).ok_or(ENODEV)?;
        let qp = Qp::create(id, &on.pd, &on.cq, &on.cq, &CAPS, cx)?;
        self.set_qp(qp, &on);
        Ok(())
    }

    /// Makes a QP for the other manager.
    pub(crate) fn make_raw_qp(&self, on: &OnDevice, cx: &Sleepable) -> Result<Qp<Softirq>> {
        let qp = Qp::create_raw(&on.pd, &on.cq, &on.cq, &CAPS, cx)?;
        self.set_qp(qp.clone(), on);
        Ok(qp)
    }

    fn set_qp(&self, qp: Qp<Softirq>, on: &OnDevice) {
        let pd = on.pd.clone();
        let before = self.end.lock().replace(End { qp, pd });
        // Not under the lock.
        drop(before);
    }

    pub(crate) fn set_link(&self, link: Link) {
        let before = self.link.lock().replace(link);
        drop(before);
    }

    pub(crate) fn link(&self) -> Option<Link> {
        self.link.lock().clone()
    }

    /// Takes the id, unless a thread waits for the connection, which only that thread can end.
    fn take_link(&self) -> Option<Link> {
        match self.waited.load(Relaxed) {
            true => None,
            false => self.link.lock().take(),
        }
    }

    /// Lets go of the QP.
    pub(crate) fn drop_qp(&self) {
        let end = self.end.lock().take();
        drop(end);
    }

    /// Waits for the connection, until it is made or given up.
    pub(crate) fn wait<T>(&self, kind: Kind, connect: impl FnOnce() -> T) -> T {
        let times = &self.world.times;
        let begin = times.now();
        self.waited.store(true, Relaxed);
        let connected = connect();
        self.waited.store(false, Relaxed);
        match self.given_up.load(Relaxed) {
            0 => times.took(kind, begin),
            since => times.took(Kind::GiveUp, since),
        }
        connected
    }

    /// Posts a message to send or a receive.
    pub(crate) fn post(&self, rng: &mut Rng, cx: &Sleepable) -> Result {
        let end = self.end.lock().clone().ok_or(ENOTCONN)?;
        match rng.once_in(2) {
            true => Message::send(&end.qp, &end.pd, &self.world, cx),
            false => Message::recv(&end.qp, &end.pd, &self.world, cx),
        }
    }

    /// Destroys the id and waits for that.
    pub(crate) fn destroy(&self, cx: &Sleepable) -> Result {
        match self.take_link().ok_or(ENOTCONN)? {
            Link::Cm(id) => {
                self.drop_qp();
                self.clock.start();
                self.world.times.measure(Kind::Destroy, || id.destroy(cx))
            }
            other => {
                self.set_link(other);
                Err(EOPNOTSUPP)
            }
        }
    }

    /// Lets go of the connection in one way or another. Says whether that was done, which it cannot
    /// be while a thread waits for it.
    pub(crate) fn let_go(&self, rng: &mut Rng, cx: &Sleepable) -> bool {
        if let Some(link) = self.link() {
            let way = rng.below(4);
            if self.waited.load(Relaxed) {
                let now = self.world.times.now().max(1);
                let _ = self.given_up.cmpxchg(0, now, Full);
                let _ = link.disconnect(cx);
                return false;
            }
            self.clock.start();
            match way {
                // The last event is to release this.
                0 if link.disconnect(cx).is_ok() => {
                    self.clock.told.store(true, Relaxed);
                    return true;
                }
                1 => link.release_handler(cx),
                _ => {}
            }
        } else if self.waited.load(Relaxed) {
            return false;
        }
        self.clock.start();
        if rng.once_in(2) {
            self.drop_qp();
            drop(self.take_link());
        } else {
            drop(self.take_link());
            self.drop_qp();
        }
        true
    }

    /// Something has happened: do anything in the callback.
    fn told(&self, last: bool, cx: &Sleepable) {
        if self.over.load(Relaxed) {
            self.world.tally.wrong("an event came after the last one");
        }
        self.over.store(last, Relaxed);
        let mut rng = self.world.rng();
        let link = self.link();
        match (rng.below(16), &link) {
            (0, Some(link)) => drop(link.disconnect(cx)),
            (1, Some(link)) => link.disconnect_later(),
            (2..=3, Some(link)) => link.notify_established(),
            (4, Some(link)) => link.release_handler(cx),
            (5, _) => {
                drop(link);
                if self.destroy(cx) == Ok(()) {
                    self.world.tally.wrong("an id was destroyed in a callback");
                }
            }
            (6, _) => drop(self.take_link()),
            (7, _) => self.drop_qp(),
            (8, _) => {
                let waited = self.world.resolve(&mut rng, cx);
                if waited.is_ok() {
                    self.world.tally.wrong("a callback has waited");
                }
            }
            (9..=12, _) => drop(self.post(&mut rng, cx)),
            _ => {}
        }
    }
}

impl cm::Handler for Side {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        use cm::Event::*;

        if matches!(event, Established { .. }) {
            self.world.established();
        }
        let last = matches!(
            event,
            Disconnected | Rejected(_) | Failed(_) | DeviceRemoval
        );
        self.told(last, cx);
    }
}

impl cm::Connect for Side {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        let mut rng = self.world.rng();
        if rng.once_in(10) {
            return Err(EPERM);
        }
        self.make_qp(id, cx)?;
        let _ = self.post(&mut rng, cx);
        match self.clock.is_running() {
            // There is nothing else that ends the connection to a peer that is silent.
            true => Err(ECANCELED),
            false => Ok(cm::ConnParam::default()),
        }
    }
}
