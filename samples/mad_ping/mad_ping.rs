// SPDX-License-Identifier: GPL-2.0

//! MAD ping: on every RDMA device one agent asks, and another one answers.
//!
//! ```text
//! # cd /sys/kernel/debug/rdma_mad_ping/rxe0
//! # echo 100 > answered         a hundred pings, each answered with its bytes inverted
//! # echo 3 > unanswered         three without an answer, so that they time out
//! # cat stats
//! ```
//!
//! Both agents are at the same port here, but nothing would change for the one that asks if the
//! other one were at another host: a [`Peer`] is made of two GIDs.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

use kernel::{
    debugfs::{
        Dir,
        Scope, //
    },
    new_mutex,
    prelude::*,
    sync::Mutex,
    time::{
        Instant,
        Monotonic, //
    },
    uaccess::UserSliceReader, //
};
use rdma::{
    device::{
        Device,
        GidType,
        Name, //
    },
    mad::{
        Agent,
        Class,
        Message,
        Method,
        Peer, //
    },
    prelude::*, //
};

/// A class that vendors share, with an OUI of the range for documentation.
const CLASS: Class = Class::with_oui(0x31, [0x00, 0x00, 0x5e]);
const PORT: u32 = 1;
const LEN: usize = 216;
/// The number of pings that may wait to be answered. More are dropped, and asked again.
const BACKLOG: usize = 32;

/// The time to wait for an answer, and the number of retries.
const TIMEOUT_MS: u32 = 50;
const RETRIES: u32 = 2;

struct MadPing {
    dir: Dir,
}

impl Client for MadPing {
    type Data = Pinger;

    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(MadPing {
            dir: Dir::new(client.name()),
        })
    }
}

/// The state of a device: the agents, and the files that control them.
#[pin_data]
struct Pinger {
    name: Name,
    #[pin]
    ends: Scope<Arc<Ends>>,
}

impl DeviceData<MadPing> for Pinger {
    fn add(module: Pin<&MadPing>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let ends = Ends::new(dev, cx);
        try_pin_init!(Self {
            name: dev.name(),
            ends <- module.dir.scope(ends?, name, |ends, dir| {
                dir.write_only_callback_file(c"answered", ends, &answered);
                dir.write_only_callback_file(c"unanswered", ends, &unanswered);
                dir.read_only_file(c"stats", &ends.stats);
            }),
        })
    }

    /// Ends pings that are under way, and the thread that answers.
    fn remove(self: Pin<&Self>, _module: Pin<&MadPing>, _dev: &Device, cx: &Sleepable) {
        for agent in [&self.ends.asks, &*self.ends.answers] {
            if let Err(e) = agent.stop(cx) {
                pr_err!("an agent was not stopped: {e:?}\n");
            }
        }
    }
}

/// A GET, for which there is a server.
fn answered(ends: &Arc<Ends>, reader: &mut UserSliceReader) -> Result {
    ends.ping(Method::GET, reader)
}

/// A REPORT, for which there is none. To a GET the MAD layer itself would say so.
fn unanswered(ends: &Arc<Ends>, reader: &mut UserSliceReader) -> Result {
    ends.ping(Method::REPORT, reader)
}

/// Counts since the device was added.
#[derive(Debug, Default)]
struct Stats {
    pings: u64,
    bytes_verified: u64,
    timeouts: u64,
    errors: u64,
    /// The time that the last ping took.
    rtt_ns: u64,
}

/// Adds to a counter.
fn add(counter: &mut u64, number: u64) {
    *counter = counter.saturating_add(number);
}

/// The two agents of a port.
#[pin_data]
struct Ends {
    asks: Agent,
    answers: Arc<Agent>,
    #[pin]
    stats: Mutex<Stats>,
}

impl Ends {
    fn new(dev: &Device, cx: &Sleepable) -> Result<Arc<Self>> {
        let methods = [Method::GET];
        let asks = Agent::register(dev, PORT, CLASS, &[], 0, cx)?;
        let answers = Agent::register(dev, PORT, CLASS, &methods, BACKLOG, cx)?;
        let answers = Arc::new(answers, GFP_KERNEL)?;
        let agent = answers.clone();
        let ends = pin_init!(Self {
            asks,
            answers,
            stats <- new_mutex!(Stats::default()),
        });
        let ends = Arc::pin_init(ends, GFP_KERNEL)?;
        let client = ClientRef::of::<MadPing>(cx)?;
        client.spawn(GFP_KERNEL, move |cx| answer(&agent, cx))?;
        Ok(ends)
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

    /// Sends the number of pings that was written, one after the other. An answer that does not
    /// come is counted; anything else that goes wrong is the end.
    fn ping(&self, method: Method, reader: &mut UserSliceReader) -> Result {
        let mut text = [0; 16];
        let len = reader.len();
        let text = match text.get_mut(..len) {
            None => None,
            Some(text) => {
                reader.read_slice(text)?;
                core::str::from_utf8(text).ok()
            }
        };
        let Some(count) = text.and_then(|text| text.trim().parse().ok()) else {
            pr_err!("a number of pings, and no other {len} bytes\n");
            return Err(EINVAL);
        };
        let cx = &Sleepable::current()?;
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
            let reply = self.asks.request(&peer, &message, TIMEOUT_MS, RETRIES, cx);
            let mut stats = self.stats.lock();
            match reply {
                Ok(reply) if reply.status() == 0 && reply.payload() == inverted(&payload) => {
                    add(&mut stats.pings, 1);
                    add(&mut stats.bytes_verified, LEN as u64);
                    stats.rtt_ns = begin.elapsed().as_nanos().unsigned_abs();
                }
                Ok(_) => add(&mut stats.errors, 1),
                Err(ETIMEDOUT) => add(&mut stats.timeouts, 1),
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
    core::array::from_fn(|at| ((number as usize).wrapping_add(at) % 251) as u8)
}

fn inverted(payload: &[u8]) -> [u8; LEN] {
    core::array::from_fn(|at| payload.get(at).map_or(0, |byte| !byte))
}

rdma::module_rdma_client! {
    type: MadPing,
    name: "rdma_mad_ping",
    authors: ["rdma-rs authors"],
    description: "Pings by management datagrams in Rust",
    license: "GPL",
}
