// SPDX-License-Identifier: GPL-2.0

//! UD echo: on every RDMA device a server that sends datagrams back to their sources, and
//! a client that counts what comes back.
//!
//! ```text
//! # cd /sys/kernel/debug/rdma_ud_echo/rxe0
//! # cat server                                    who the server is, for clients elsewhere
//! qpn 18 gid ::ffff:192.0.2.1
//! # echo 100 > ask                                asks it a hundred times
//! # echo 100 18 ::ffff:192.0.2.2 > ask            asks one at another host
//! # cat stats
//! ```
//!
//! Datagrams may get lost: a client that hears nothing for a while counts that and goes on.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod client;
mod server;

use core::net::Ipv6Addr;
use kernel::{
    debugfs::{
        Dir,
        Scope, //
    },
    fmt,
    prelude::*,
    uaccess::UserSliceReader, //
};
use rdma::{
    ah::Ah,
    device::{
        Device,
        Gid,
        GidAttr,
        GidType,
        Name, //
    },
    prelude::*, //
};
use server::{
    Server,
    Started, //
};

const PORT: u32 = 1;
/// The key without which a datagram is not received.
const QKEY: u32 = 0x0ec4_0ec4;
/// The length of each datagram, which every network carries.
const LEN: usize = 200;

/// Counts since the device was added.
#[derive(Debug, Default)]
struct Stats {
    served: u64,
    echoes: u64,
    bytes_verified: u64,
    lost: u64,
    errors: u64,
}

/// Adds to a counter.
fn add(counter: &mut u64, number: u64) {
    *counter = counter.saturating_add(number);
}

/// The module.
struct UdEcho {
    dir: Dir,
}

impl Client for UdEcho {
    type Data = Echo;

    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(UdEcho {
            dir: Dir::new(client.name()),
        })
    }
}

/// The state of a device: a server, and files to see it and to run clients.
#[pin_data]
struct Echo {
    name: Name,
    #[pin]
    server: Scope<Started>,
}

impl DeviceData<UdEcho> for Echo {
    fn add(module: Pin<&UdEcho>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let server = Server::start(dev, cx);
        try_pin_init!(Self {
            name: dev.name(),
            server <- module.dir.scope(server?, name, |it, dir| {
                dir.read_callback_file(c"server", it, &show);
                dir.write_only_callback_file(c"ask", it, &ask);
                dir.read_only_file(c"stats", &it.stats);
            }),
        })
    }

    /// Ends what is under way: the files, which ask, go after this.
    fn remove(self: Pin<&Self>, _module: Pin<&UdEcho>, _dev: &Device, cx: &Sleepable) {
        let _ = self.server.stop(cx);
    }
}

/// Returns the address that this host is known by: the first of RoCE v2 that has no scope.
fn own_gid(dev: &Device) -> Result<GidAttr> {
    let global = |gid: Gid| !Ipv6Addr::from(gid.0).is_unicast_link_local();
    let port = dev.port(PORT).ok_or(ENODEV)?;
    let gid = port
        .gids()
        .find(|attr| attr.gid_type() == GidType::RoceV2 && global(attr.gid()));
    gid.ok_or(EADDRNOTAVAIL)
}

fn show(server: &Started, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let gid = own_gid(server.pd.device()).map_or(Gid([0; 16]), |attr| attr.gid());
    f.write_fmt(fmt!("qpn {} gid {gid}\n", server.qp.num()))
}

/// Reads `COUNT`, or `COUNT QPN GID` of another server.
fn parse(text: &[u8]) -> Option<(u32, Option<(u32, Gid)>)> {
    let mut words = core::str::from_utf8(text).ok()?.split_ascii_whitespace();
    let count = words.next()?.parse().ok()?;
    let peer = match words.next() {
        None => None,
        Some(qpn) => {
            let ip: Ipv6Addr = words.next()?.parse().ok()?;
            Some((qpn.parse().ok()?, Gid(ip.octets())))
        }
    };
    words.next().is_none().then_some((count, peer))
}

/// Asks as many times as was written, this server or another.
fn ask(server: &Started, reader: &mut UserSliceReader) -> Result {
    let mut text = [0; 80];
    let len = reader.len();
    let asked = match text.get_mut(..len) {
        None => None,
        Some(text) => {
            reader.read_slice(text)?;
            parse(text)
        }
    };
    let Some((count, peer)) = asked else {
        pr_err!("ask: COUNT, or COUNT QPN GID, and no other {len} bytes\n");
        return Err(EINVAL);
    };
    let from = own_gid(server.pd.device())?;
    let (qpn, to) = peer.unwrap_or((server.qp.num(), from.gid()));
    let cx = &Sleepable::current()?;
    let to = Arc::new(Ah::resolve(&server.pd, &from, to, cx)?, GFP_KERNEL)?;
    client::ask(&server.pd, &to, qpn, count, &server.stats, cx)
}

rdma::module_rdma_client! {
    type: UdEcho,
    name: "rdma_ud_echo",
    authors: ["rdma-rs authors"],
    description: "Echo of datagrams in Rust",
    license: "GPL",
}
