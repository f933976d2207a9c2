// SPDX-License-Identifier: GPL-2.0

//! The state that the threads share.

use crate::{
    counts::Counts,
    pool::Pool,
    rng::Rng,
    side::Side,
    steps::Turn,
    tally::Tally,
    times::{
        Kind,
        Times, //
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
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};
use rdma::{
    device::Device,
    ibcm,
    prelude::*, //
};

/// The objects on each device.
pub(crate) struct OnDevice {
    pub(crate) pd: Pd,
    pub(crate) cq: Cq<Softirq>,
}

impl DeviceData<Random> for OnDevice {
    fn add(_client: Pin<&Random>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let made = || {
            Ok(Self {
                pd: Pd::alloc(dev, cx)?,
                cq: Cq::alloc_any(dev, 1024, cx)?,
            })
        };
        made()
    }
}

/// A listener of either manager.
pub(crate) enum Listener {
    Cm(cm::Listener),
    Ib(ibcm::Listener),
}

impl Listener {
    pub(crate) fn destroy(self, cx: &Sleepable) -> Result {
        match self {
            Self::Cm(listener) => listener.destroy(cx),
            Self::Ib(listener) => listener.destroy(cx),
        }
    }
}

#[pin_data(PinnedDrop)]
pub(crate) struct World {
    #[pin]
    pub(crate) sides: Pool<Arc<Side>>,
    /// Requests that are not answered yet.
    #[pin]
    pub(crate) requests: Pool<cm::Id>,
    #[pin]
    pub(crate) listeners: Pool<Listener>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) times: Times,
    established: Atomic<u64>,
    stop: Atomic<bool>,
    seed: Atomic<u64>,
    /// The number of the last listener's port.
    ports: Atomic<u32>,
    /// `true` if listeners share ports.
    share: bool,
}

impl World {
    pub(crate) fn new(seed: u64, share: bool) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            sides <- Pool::new(),
            requests <- Pool::new(),
            listeners <- Pool::new(),
            tally: Tally::new()?,
            counts: Counts::new()?,
            times: Times::new(),
            established: Atomic::new(0),
            stop: Atomic::new(false),
            seed: Atomic::new(seed),
            ports: Atomic::new(0),
            share,
        }? Error);
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Returns the client, unless the module is unloaded.
    pub(crate) fn client(cx: &Sleepable) -> Result<ClientRef> {
        ClientRef::of::<Random>(cx)
    }

    /// Returns other random numbers each time.
    pub(crate) fn rng(&self) -> Rng {
        let mut rng = Rng::new(self.seed.fetch_add(1, Relaxed));
        Rng::new(rng.next())
    }

    pub(crate) fn established(&self) {
        self.established.fetch_add(1, Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Returns the port of one of the last listeners.
    fn port(&self, rng: &mut Rng) -> u16 {
        port(self.ports.load(Relaxed).saturating_sub(rng.below(4)))
    }

    /// Returns the port for a new listener: one that no other has.
    ///
    /// If listeners of C share a port, one may be freed while a request comes to it:
    /// `ib_destroy_cm_id()` waits for callbacks of the last one only, and `cma_ib_req_handler()`
    /// has no reference.
    pub(crate) fn new_port(&self, rng: &mut Rng) -> u16 {
        match self.share {
            true => self.port(rng),
            false => port(self.ports.fetch_add(1, Relaxed) + 1),
        }
    }

    /// Returns an address: of one of the devices, or now and then one that no device has.
    pub(crate) fn addr(&self, rng: &mut Rng) -> SocketAddr {
        let host = match rng.below(12) {
            0 => 9,
            _ => 1,
        };
        let (second, port) = (rng.once_in(2), self.port(rng));
        let ip: IpAddr = match (rng.once_in(2), second) {
            (true, false) => Ipv4Addr::new(192, 0, 2, host).into(),
            (true, true) => Ipv4Addr::new(198, 51, 100, host).into(),
            (false, _) => {
                let net = u16::from(second);
                Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, host.into()).into()
            }
        };
        SocketAddr::new(ip, port)
    }

    /// Returns one of the devices.
    pub(crate) fn device(&self, rng: &mut Rng, cx: &Sleepable) -> Result<Device> {
        let name = match rng.once_in(2) {
            true => c"rxe0",
            false => c"rxe1",
        };
        Self::client(cx)?.device_by_name(name, cx).ok_or(ENODEV)
    }

    /// Finds the way to an address, and waits for that.
    pub(crate) fn resolve(&self, rng: &mut Rng, cx: &Sleepable) -> Result<cm::Id> {
        let (addr, ms) = (self.addr(rng), timeout_ms(rng));
        let client = Self::client(cx)?;
        self.times
            .measure(Kind::Resolve, || cm::Id::resolve(&client, addr, ms, cx))
    }

    /// Keeps a side for others to use.
    pub(crate) fn keep(&self, side: Arc<Side>, rng: &mut Rng, cx: &Sleepable) {
        if let Err(side) = self.sides.put(side) {
            side.let_go(rng, cx);
        }
    }

    /// Drops a side, or keeps one that a thread waits for.
    pub(crate) fn let_go(&self, side: Arc<Side>, rng: &mut Rng, cx: &Sleepable) {
        if !side.let_go(rng, cx) {
            self.keep(side, rng, cx);
        }
    }

    /// Drops an object, without waiting, so that a thread that waits for it does not wait for long.
    pub(crate) fn sweep(&self, rng: &mut Rng, cx: &Sleepable) {
        if let Some(side) = self.sides.thin(24, 4, rng) {
            self.let_go(side, rng, cx);
        }
        drop(self.requests.thin(4, 8, rng));
        drop(self.listeners.thin(12, 64, rng));
    }

    /// Ends everything.
    pub(crate) fn close(&self, cx: &Sleepable) {
        self.stop.store(true, Relaxed);
        drop(self.listeners.close());
        drop(self.requests.close());
        let mut rng = self.rng();
        for side in self.sides.close() {
            side.let_go(&mut rng, cx);
        }
    }
}

#[pinned_drop]
impl PinnedDrop for World {
    fn drop(self: Pin<&mut Self>) {
        let names = Turn::STEPS.iter().map(|step| step.0);
        self.counts.print(&"step", names);
        self.times.print();
        let (steps, made) = (self.counts.sum(), self.established.load(Relaxed));
        let state = match self.tally.is_exact() {
            true => "exact",
            false => "FAILED",
        };
        let ms = self.times.now();
        pr_info!(
            "{state}: {steps} steps, {made} established ends, {ms} ms, {}\n",
            *self.tally
        );
    }
}

fn port(number: u32) -> u16 {
    7000 + (number % 4096) as u16
}

/// Returns how long a step may take.
pub(crate) fn timeout_ms(rng: &mut Rng) -> u32 {
    rng.one_of(&[0, 1, 5, 20, 100, 1000, 1000, 1000])
        .unwrap_or(0)
}
