// SPDX-License-Identifier: GPL-2.0

//! MAD ping: on every RDMA device one agent asks, and another one answers.
//!
//! ```text
//! # cd /sys/kernel/debug/rdma_mad_ping/rxe0
//! # echo 100 > answered         a hundred pings, each answered with its bytes inverted
//! # echo 3 > unanswered         three that nobody answers, so that they time out
//! # cat stats
//! ```
//!
//! Both agents are at the same port here, but nothing would change for the one that asks if the
//! other one were at another host: a [`Peer`] is made of two GIDs.

mod ends;

use ends::Ends;
use kernel::{
    debugfs::{
        Dir,
        File, //
    },
    fmt,
    prelude::*,
    uaccess::UserSliceReader, //
};
use rdma::prelude::*;

/// The module.
struct MadPing {
    client: ClientRef,
    dir: Dir,
}

impl Client for MadPing {
    type Data = Pinger;

    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(MadPing {
            client: client.clone(),
            dir: Dir::new(client.name()),
        })
    }
}

/// What there is for one device: the agents, and files to have them work.
#[pin_data]
struct Pinger {
    ends: Arc<Ends>,
    #[pin]
    answered: File<Arc<Ends>>,
    #[pin]
    unanswered: File<Arc<Ends>>,
    #[pin]
    stats: File<Arc<Ends>>,
    _dir: Dir,
}

impl DeviceData<MadPing> for Pinger {
    fn add(module: Pin<&MadPing>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let dir = module.dir.subdir(&dev.name());
        let ends = Ends::new(&module.client, dev, cx);
        try_pin_init!(Self {
            ends: ends?,
            answered <- dir.write_callback_file(c"answered", ends.clone(), &answered),
            unanswered <- dir.write_callback_file(c"unanswered", ends.clone(), &unanswered),
            stats <- dir.read_callback_file(c"stats", ends.clone(), &stats),
            _dir: dir,
        })
    }

    /// Whoever is pinging now stops, and so does the thread that answers.
    fn remove(self: Pin<&Self>, _module: Pin<&MadPing>, _dev: &Device, cx: &Sleepable) {
        self.ends.stop(cx);
    }
}

fn answered(ends: &Arc<Ends>, reader: &mut UserSliceReader) -> Result {
    ends.ping(ends::ANSWERED, count(reader)?, &Sleepable::current()?)
}

fn unanswered(ends: &Arc<Ends>, reader: &mut UserSliceReader) -> Result {
    ends.ping(ends::UNANSWERED, count(reader)?, &Sleepable::current()?)
}

fn stats(ends: &Arc<Ends>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    fmt::Display::fmt(&ends.stats, f)
}

/// Reads a number that somebody has written.
fn count(reader: &mut UserSliceReader) -> Result<u32> {
    let mut text = [0; 16];
    let text = text.get_mut(..reader.len()).ok_or(EINVAL)?;
    reader.read_slice(text)?;
    let text = core::str::from_utf8(text).map_err(|_| EINVAL)?;
    text.trim().parse().map_err(|_| EINVAL)
}

rdma::module_rdma_client! {
    type: MadPing,
    name: "rdma_mad_ping",
    authors: ["rdma-rs authors"],
    description: "Pings by management datagrams in Rust",
    license: "GPL",
}
