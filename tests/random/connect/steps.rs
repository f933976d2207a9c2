// SPDX-License-Identifier: GPL-2.0

//! The steps, one of which is taken at a time.
//!
//! A step may fail: there is no listener, the peer refuses, the device goes. It must not
//! wait for ever, or leak anything. To add one, write a function of a [`Turn`] and add it to
//! [`Turn::STEPS`].

use crate::{
    answer::{
        accept,
        Answers,
        IbAnswers, //
    },
    link::Link,
    rng::Rng,
    side::Side,
    times::Kind,
    world::{
        timeout_ms,
        Listener,
        World, //
    },
    Random, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr,
    SocketAddr, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta,
        Instant, //
    }, //
};
use rdma::{
    device::{
        Device,
        Gid,
        GidAttr, //
    },
    ibcm,
    prelude::*, //
};

/// One thread's part.
pub(crate) struct Turn<'a> {
    world: &'a Arc<World>,
    rng: Rng,
    cx: &'a Sleepable,
}

/// A step, and how often it is taken compared to others.
type Step = (&'static str, u32, fn(&mut Turn<'_>) -> Result);

impl Turn<'_> {
    pub(crate) const STEPS: &'static [Step] = &[
        ("listen", 16, listen),
        ("destroy a listener", 1, destroy_listener),
        ("drop a listener", 1, drop_listener),
        ("connect", 10, connect),
        ("connect to", 20, connect_to),
        ("resolve", 2, resolve),
        ("accept", 10, accept_later),
        ("reject", 3, reject),
        ("drop a request", 2, drop_request),
        ("ibcm: listen", 6, ib_listen),
        ("ibcm: connect", 10, ib_connect),
        ("post", 40, |t| t.side()?.post(&mut t.rng, t.cx)),
        ("disconnect", 4, |t| t.link()?.disconnect(t.cx)),
        ("disconnect later", 4, |t| {
            t.link()?.disconnect_later();
            Ok(())
        }),
        ("established", 8, |t| {
            t.link()?.notify_established();
            Ok(())
        }),
        ("accept again", 2, accept_again),
        ("reject again", 2, reject_again),
        ("destroy", 6, destroy),
        ("let go", 10, let_go),
    ];

    /// Takes a step, and returns which, and whether it could be done.
    fn step(&mut self) -> (usize, bool) {
        let mut left = self.rng.below(Self::STEPS.iter().map(|step| step.1).sum());
        for (index, (_, share, step)) in Self::STEPS.iter().enumerate() {
            match left.checked_sub(*share) {
                Some(less) => left = less,
                None => return (index, step(self).is_ok()),
            }
        }
        (0, false)
    }

    fn side(&mut self) -> Result<Arc<Side>> {
        self.world.sides.any(&mut self.rng).ok_or(ENOTCONN)
    }

    fn link(&mut self) -> Result<Link> {
        self.side()?.link().ok_or(ENOTCONN)
    }

    fn request(&mut self) -> Result<cm::Id> {
        self.world.requests.take(&mut self.rng).ok_or(ENOENT)
    }

    fn keep(&mut self, side: Arc<Side>) {
        self.world.keep(side, &mut self.rng, self.cx);
    }
}

/// Takes steps until it is over.
pub(crate) fn walk(world: &Arc<World>, rng: Rng, cx: &Sleepable) {
    let mut turn = Turn { world, rng, cx };
    while !world.is_over() {
        let begin = Instant::now();
        world.counts.count(turn.step(), begin);
        // A step that was begun has to get on, too.
        fsleep(Delta::from_millis(2));
    }
}

/// Lets go of what others have made until it is over.
pub(crate) fn sweep(world: &World, mut rng: Rng, cx: &Sleepable) {
    while !world.is_over() {
        world.sweep(&mut rng, cx);
        fsleep(Delta::from_millis(2));
    }
}

fn listen(t: &mut Turn<'_>) -> Result {
    let addr = t.world.addr(&mut t.rng);
    let any: IpAddr = match addr {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let ip = match t.rng.once_in(2) {
        true => addr.ip(),
        false => any,
    };
    let addr = SocketAddr::new(ip, t.world.new_port(&mut t.rng));
    let dev = t.world.device(&mut t.rng, t.cx).ok();
    let options = cm::Options {
        net_of: dev.as_ref(),
        reuse_addr: t.rng.once_in(4),
        dual_stack: t.rng.once_in(2),
        ..Default::default()
    };
    let (answers, backlog) = (
        Arc::new(Answers(t.world.clone()), GFP_KERNEL)?,
        t.rng.below(9),
    );
    let client = &World::client(t.cx)?;
    let listener = cm::Listener::new_with(client, addr, backlog, &options, answers, t.cx)?;
    drop(t.world.listeners.put(Listener::Cm(listener)));
    Ok(())
}

fn destroy_listener(t: &mut Turn<'_>) -> Result {
    let listener = t.world.listeners.take(&mut t.rng).ok_or(ENOENT)?;
    let times = &t.world.times;
    times.measure(Kind::Unlisten, || listener.destroy(t.cx))
}

fn drop_listener(t: &mut Turn<'_>) -> Result {
    t.world.listeners.take(&mut t.rng).map(drop).ok_or(ENOENT)
}

/// Connects, waiting for each step.
fn connect(t: &mut Turn<'_>) -> Result {
    let id = t.world.resolve(&mut t.rng, t.cx)?;
    let side = Side::new(t.world, Kind::Release)?;
    side.make_qp(&id, t.cx)?;
    side.set_link(Link::Cm(id.clone()));
    let param = cm::ConnParam::default();
    let connected = side.wait(Kind::Connect, || {
        t.keep(side.clone());
        id.connect(side.clone(), &param, t.cx)
    });
    connected.map(|_| t.world.established())
}

/// Connects without waiting.
fn connect_to(t: &mut Turn<'_>) -> Result {
    let (dst, ms) = (t.world.addr(&mut t.rng), timeout_ms(&mut t.rng));
    let dev = t.world.device(&mut t.rng, t.cx).ok();
    let src = t.world.addr(&mut t.rng).ip();
    let options = cm::Options {
        net_of: dev.as_ref().filter(|_| t.rng.once_in(2)),
        src: t.rng.once_in(8).then(|| SocketAddr::new(src, 0)),
        reuse_addr: t.rng.once_in(8),
        ..Default::default()
    };
    let side = Side::new(t.world, Kind::Release)?;
    let client = &World::client(t.cx)?;
    let id = cm::Id::connect_to(client, dst, ms, &options, side.clone(), t.cx)?;
    side.set_link(Link::Cm(id));
    t.keep(side);
    Ok(())
}

fn resolve(t: &mut Turn<'_>) -> Result {
    t.world.resolve(&mut t.rng, t.cx).map(drop)
}

fn accept_later(t: &mut Turn<'_>) -> Result {
    let id = t.request()?;
    accept(t.world, id, &mut t.rng, t.cx)
}

fn reject(t: &mut Turn<'_>) -> Result {
    t.request()?.reject(b"later", t.cx)
}

fn drop_request(t: &mut Turn<'_>) -> Result {
    t.request().map(drop)
}

/// Accepts what is no longer a request.
fn accept_again(t: &mut Turn<'_>) -> Result {
    match t.link()? {
        Link::Cm(id) => {
            let side = Side::new(t.world, Kind::Release)?;
            id.accept(side, &cm::ConnParam::default(), t.cx)
        }
        Link::Ib(_) => Err(EOPNOTSUPP),
    }
}

fn reject_again(t: &mut Turn<'_>) -> Result {
    match t.link()? {
        Link::Cm(id) => id.reject(b"again", t.cx),
        Link::Ib(_) => Err(EOPNOTSUPP),
    }
}

/// Returns a service id, of few.
fn service(rng: &mut Rng) -> u64 {
    0x1000_5e00_0000_0000 + u64::from(rng.below(2))
}

fn ib_listen(t: &mut Turn<'_>) -> Result {
    let dev = t.world.device(&mut t.rng, t.cx)?;
    let on = dev.data::<Random>(t.cx).ok_or(ENODEV)?;
    let world = t.world.clone();
    let answers = Arc::new(IbAnswers { world, on }, GFP_KERNEL)?;
    let (service, backlog) = (service(&mut t.rng), t.rng.below(9));
    let listener = ibcm::Listener::new(&dev, service, backlog, answers, t.cx)?;
    drop(t.world.listeners.put(Listener::Ib(listener)));
    Ok(())
}

/// Returns an entry of a device's GID table.
fn gid(dev: &Device, rng: &mut Rng) -> Result<GidAttr> {
    let port = dev.port(1).ok_or(ENODEV)?;
    let nth = rng.below(port.gids().count() as u32) as usize;
    port.gids().nth(nth).ok_or(ENOENT)
}

/// Connects to the device itself.
fn ib_connect(t: &mut Turn<'_>) -> Result {
    let dev = t.world.device(&mut t.rng, t.cx)?;
    let on = dev.data::<Random>(t.cx).ok_or(ENODEV)?;
    let from = gid(&dev, &mut t.rng)?;
    let to: Gid = from.gid();
    let times = &t.world.times;
    let path = times.measure(Kind::IbPath, || ibcm::Path::new(&from, to, t.cx))?;
    let side = Side::new(t.world, Kind::IbRelease)?;
    let qp = side.make_raw_qp(&on, t.cx)?;
    let param = ibcm::Param {
        response_timeout: 8 + t.rng.below(11) as u8,
        max_cm_retries: 1 + t.rng.below(4) as u8,
        ..Default::default()
    };
    let (handler, service) = (side.clone(), service(&mut t.rng));
    let (connection, _) = times.measure(Kind::IbConnect, || {
        ibcm::Connection::connect(&qp, &path, service, handler, &param, t.cx)
    })?;
    drop(qp);
    t.world.established();
    side.set_link(Link::Ib(Arc::new(connection, GFP_KERNEL)?));
    t.keep(side);
    Ok(())
}

fn destroy(t: &mut Turn<'_>) -> Result {
    t.side()?.destroy(t.cx)
}

fn let_go(t: &mut Turn<'_>) -> Result {
    let side = t.world.sides.take(&mut t.rng).ok_or(ENOTCONN)?;
    t.world.let_go(side, &mut t.rng, t.cx);
    Ok(())
}
