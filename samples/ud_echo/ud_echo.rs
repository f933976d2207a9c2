// SPDX-License-Identifier: GPL-2.0

//! UD echo: on every RDMA device a server that sends datagrams back to whoever they came from, and
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

mod client;
mod server;

use core::net::Ipv6Addr;
use kernel::{
    debugfs::{
        Dir,
        File, //
    },
    fmt,
    prelude::*,
    uaccess::UserSliceReader, //
};
use rdma::{
    device::{
        Gid,
        GidAttr,
        GidType, //
    },
    prelude::*, //
};

const PORT: u32 = 1;
/// The key without which a datagram is not received.
const QKEY: u32 = 0x0ec4_0ec4;
/// The length of each datagram, which every network carries.
const LEN: usize = 200;

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

/// Both ends on one device.
struct Ends {
    pd: Pd,
    server: Arc<server::Server>,
    stats: Arc<client::Stats>,
}

impl Ends {
    fn new(dev: &Device, cx: &Sleepable) -> Result<Arc<Self>> {
        let pd = Pd::alloc(dev, cx)?;
        let this = Self {
            server: server::Server::new(&pd, cx)?,
            pd,
            stats: Arc::new(client::Stats::default(), GFP_KERNEL)?,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// Returns the address that this host is known by: the first of RoCE v2 that has no scope.
    fn gid(&self) -> Result<GidAttr> {
        let port = self.pd.device().port(PORT).ok_or(ENODEV)?;
        let global = |gid: Gid| !Ipv6Addr::from(gid.0).is_unicast_link_local();
        let gid = port
            .gids()
            .find(|attr| attr.gid_type() == GidType::RoceV2 && global(attr.gid()));
        gid.ok_or(EADDRNOTAVAIL)
    }
}

/// What there is for one device: both ends, and files to see them and to set them to work.
#[pin_data]
struct Echo {
    ends: Arc<Ends>,
    #[pin]
    server: File<Arc<Ends>>,
    #[pin]
    ask: File<Arc<Ends>>,
    #[pin]
    stats: File<Arc<Ends>>,
    _dir: Dir,
}

impl DeviceData<UdEcho> for Echo {
    fn add(module: Pin<&UdEcho>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let dir = module.dir.subdir(&dev.name());
        let ends = Ends::new(dev, cx);
        try_pin_init!(Self {
            ends: ends?,
            server <- dir.read_callback_file(c"server", ends.clone(), &server),
            ask <- dir.write_callback_file(c"ask", ends.clone(), &ask),
            stats <- dir.read_callback_file(c"stats", ends.clone(), &stats),
            _dir: dir,
        })
    }

    /// The posted receives own the server, and the server owns its QP: this cuts the ring.
    fn remove(self: Pin<&Self>, _module: Pin<&UdEcho>, _dev: &Device, _cx: &Sleepable) {
        self.ends.stats.stop();
        self.ends.server.stop();
    }
}

fn server(ends: &Arc<Ends>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match (ends.server.qpn(), ends.gid()) {
        (Some(qpn), Ok(gid)) => f.write_fmt(fmt!("qpn {qpn} gid {}\n", gid.gid())),
        _ => f.write_str("not there\n"),
    }
}

fn stats(ends: &Arc<Ends>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_fmt(fmt!("{}served {}\n", *ends.stats, ends.server.served()))
}

/// `COUNT`, or `COUNT QPN GID` of another server.
fn ask(ends: &Arc<Ends>, reader: &mut UserSliceReader) -> Result {
    let mut text = [0; 80];
    let text = text.get_mut(..reader.len()).ok_or(EINVAL)?;
    reader.read_slice(text)?;
    let text = core::str::from_utf8(text).map_err(|_| EINVAL)?;
    let mut words = text.split_ascii_whitespace();
    let count = words.next().and_then(|w| w.parse().ok()).ok_or(EINVAL)?;
    let gid = ends.gid()?;
    let (qpn, to) = match (words.next(), words.next()) {
        (None, None) => (ends.server.qpn().ok_or(ENODEV)?, gid.gid()),
        (Some(qpn), Some(to)) => {
            let ip: Ipv6Addr = to.parse().map_err(|_| EINVAL)?;
            (qpn.parse().map_err(|_| EINVAL)?, Gid(ip.octets()))
        }
        _ => return Err(EINVAL),
    };
    let cx = Sleepable::current()?;
    client::ask(&ends.pd, &gid, to, qpn, count, &ends.stats, &cx)
}

rdma::module_rdma_client! {
    type: UdEcho,
    name: "rdma_ud_echo",
    authors: ["rdma-rs authors"],
    description: "Echo of datagrams in Rust",
    license: "GPL",
}
