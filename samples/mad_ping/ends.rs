// SPDX-License-Identifier: GPL-2.0

//! Both ends of a ping, and what they count.

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    device::GidType,
    mad::{
        Agent,
        Class,
        Message,
        Method,
        Methods,
        Peer, //
    },
    prelude::*, //
};

/// A class that vendors share, with an OUI of the range for documentation.
const CLASS: Class = Class::with_oui(0x31, [0x00, 0x00, 0x5e]);
const PORT: u32 = 1;
const LEN: usize = 216;
/// How many pings may wait to be answered. More are dropped, and asked again.
const BACKLOG: usize = 32;

/// A GET, for which there is a server.
pub(crate) const ANSWERED: Method = Method::GET;
/// A REPORT, for which there is none. To a GET the MAD layer itself would say so.
pub(crate) const UNANSWERED: Method = Method::REPORT;

/// How long to wait for an answer, and how often to ask again.
const TIMEOUT_MS: u32 = 50;
const RETRIES: u32 = 2;

/// The two agents of a port.
pub(crate) struct Ends {
    asks: Agent,
    answers: Arc<Agent>,
    pub(crate) stats: Stats,
}

impl Ends {
    pub(crate) fn new(client: &ClientRef, dev: &Device, cx: &Sleepable) -> Result<Arc<Self>> {
        let methods = Methods::NONE.with(ANSWERED);
        let asks = Agent::register(dev, PORT, CLASS, Methods::NONE, 0, cx)?;
        let answers = Agent::register(dev, PORT, CLASS, methods, BACKLOG, cx)?;
        let answers = Arc::new(answers, GFP_KERNEL)?;
        let agent = answers.clone();
        client.spawn(GFP_KERNEL, move |cx| answer(&agent, cx))?;
        let stats = Stats::default();
        Ok(Arc::new(
            Self {
                asks,
                answers,
                stats,
            },
            GFP_KERNEL,
        )?)
    }

    /// Ends both agents, so that nobody waits for them any more.
    pub(crate) fn stop(&self, cx: &Sleepable) {
        self.asks.stop(cx);
        self.answers.stop(cx);
    }

    /// Finds the way to the port itself: any address of it but an IPv4 one, over which the MAD
    /// layer does not recognise replies.
    fn peer(&self, cx: &Sleepable) -> Result<Peer> {
        let port = self.asks.device().port(PORT).ok_or(ENODEV)?;
        let gid = port
            .gids()
            .find(|attr| attr.gid_type() == GidType::RoceV2 && attr.gid().ip().is_ipv6())
            .ok_or(EADDRNOTAVAIL)?;
        Peer::new(&self.asks, &gid, gid.gid(), cx)
    }

    /// Sends pings, one after the other. An answer that does not come is counted; anything else
    /// that goes wrong is the end.
    pub(crate) fn ping(&self, method: Method, count: u32, cx: &Sleepable) -> Result {
        let peer = self.peer(cx)?;
        for number in 0..count {
            let payload = pattern(number);
            let message = Message {
                method,
                attr_id: 1,
                attr_mod: number,
                payload: &payload,
            };
            let begin = Instant::<Monotonic>::now();
            match self.asks.request(&peer, &message, TIMEOUT_MS, RETRIES, cx) {
                Ok(reply) => {
                    let right =
                        reply.status() == 0 && reply.payload().iter().eq(inverted(&payload).iter());
                    let nanos = begin.elapsed().as_nanos().unsigned_abs();
                    self.stats.answer(right, nanos);
                }
                Err(ETIMEDOUT) => self.stats.timeouts.add(1, Relaxed),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// Answers pings until the agent ends.
fn answer(agent: &Agent, cx: &Sleepable) {
    while let Ok(ping) = agent.recv(None, cx) {
        // An answer that could not be sent is one that was lost: the other side asks again.
        let _ = agent.reply(&ping, 0, &inverted(ping.payload()), cx);
    }
}

/// The data of a ping: they are different in each of them.
fn pattern(number: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    for (byte, value) in bytes.iter_mut().zip(number..) {
        *byte = (value % 251) as u8;
    }
    bytes
}

fn inverted(payload: &[u8]) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    for (byte, other) in bytes.iter_mut().zip(payload) {
        *byte = !other;
    }
    bytes
}

/// What has happened since the device came.
pub(crate) struct Stats {
    pings: Atomic<u64>,
    bytes_verified: Atomic<u64>,
    timeouts: Atomic<u64>,
    errors: Atomic<u64>,
    nanos: Atomic<u64>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            pings: Atomic::new(0),
            bytes_verified: Atomic::new(0),
            timeouts: Atomic::new(0),
            errors: Atomic::new(0),
            nanos: Atomic::new(0),
        }
    }
}

impl Stats {
    fn answer(&self, right: bool, nanos: u64) {
        if right {
            self.pings.add(1, Relaxed);
            self.bytes_verified.add(LEN as u64, Relaxed);
            self.nanos.add(nanos, Relaxed);
        } else {
            self.errors.add(1, Relaxed);
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let get = |counter: &Atomic<u64>| counter.load(Relaxed);
        let pings = get(&self.pings);
        let rtt = get(&self.nanos).checked_div(pings).unwrap_or(0);
        f.write_fmt(fmt!("pings {pings}\n"))?;
        f.write_fmt(fmt!("bytes_verified {}\n", get(&self.bytes_verified)))?;
        f.write_fmt(fmt!("timeouts {}\n", get(&self.timeouts)))?;
        f.write_fmt(fmt!("errors {}\n", get(&self.errors)))?;
        f.write_fmt(fmt!("rtt_ns {rtt}\n"))
    }
}
