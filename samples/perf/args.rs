// SPDX-License-Identifier: GPL-2.0

//! The arguments of a run: a line of `key=value`.
//!
//! | key       | value                                                            | default    |
//! |-----------|------------------------------------------------------------------|------------|
//! | `load`    | `send_lat`, `write_lat`, `read_lat`, `send_rate`, `write_rate`,  |            |
//! |           | `read_rate`, `void_rate`, `queue_rate`, `pool_rate`, `reg_rate`, |            |
//! |           | `call_rate`, `tag_rate`,                                         |            |
//! |           | `rw_read_rate`, `rw_write_rate`, `connect_rate`, `qp_rate`,      |            |
//! |           | `cq_rate`                                                        | `send_lat` |
//! | `device`  | the device of the client's end                                   | `rxe0`     |
//! | `peer`    | the device of the other end                                      | `device`   |
//! | `context` | `direct`, `batch`, `static`, `softirq`, `workqueue`,             |            |
//! |           | `unbound_workqueue`                                              | `softirq`  |
//! | `size`    | bytes of a request                                               | 64         |
//! | `depth`   | requests in flight on a QP                                       | 16         |
//! | `signal`  | one request in so many is signaled; in `void_rate` each is where |            |
//! |           | the caller polls                                                 | 1          |
//! | `qps`     | number of QPs, or of connections or CQs that are there at once   | 1          |
//! | `count`   | operations to measure                                            | 1000       |
//! | `warmup`  | operations before these                                          | 100        |
//! | `timeout` | how long to wait for an acknowledgment, 4.096 us times two to    |            |
//! |           | this power: late is not lost on a machine that is busy           | 20         |
//! | `addr`    | address to connect to                                            | 127.0.0.1  |
//! | `port`    | its port                                                         | 7471       |
//! | `hold`    | 1: keep everything once it was measured, or set up, until 0 is   |            |
//! |           | written to `held` (`void_rate`, `queue_rate`, `pool_rate`,       |            |
//! |           | `connect_rate`, `qp_rate`, `cq_rate`)                            | 0          |

use crate::link;
use core::{
    net::{
        IpAddr,
        Ipv4Addr,
        SocketAddr, //
    },
    str::FromStr, //
};
use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Release, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

#[inline(never)]
fn position(names: &[&str], name: &str) -> Option<usize> {
    names.iter().position(|other| *other == name)
}

macro_rules! names {
    ($(#[$doc:meta])* $type:ident { $($variant:ident = $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $type {
            $($variant),*
        }

        impl $type {
            const ALL: &[Self] = &[$(Self::$variant),*];
        }

        impl FromStr for $type {
            type Err = Error;

            #[inline]
            fn from_str(name: &str) -> Result<Self> {
                let n = position(&[$($name),*], name).ok_or(EINVAL)?;
                Self::ALL.get(n).copied().ok_or(EINVAL)
            }
        }
    };
}

names! {
    /// The load.
    Load {
        SendLat = "send_lat",
        WriteLat = "write_lat",
        ReadLat = "read_lat",
        SendRate = "send_rate",
        WriteRate = "write_rate",
        ReadRate = "read_rate",
        VoidRate = "void_rate",
        QueueRate = "queue_rate",
        PoolRate = "pool_rate",
        RegRate = "reg_rate",
        CallRate = "call_rate",
        TagRate = "tag_rate",
        RwReadRate = "rw_read_rate",
        RwWriteRate = "rw_write_rate",
        ConnectRate = "connect_rate",
        QpRate = "qp_rate",
        CqRate = "cq_rate",
    }
}

names! {
    /// The polling context.
    Context {
        Direct = "direct",
        Batch = "batch",
        Static = "static",
        Softirq = "softirq",
        Workqueue = "workqueue",
        UnboundWorkqueue = "unbound_workqueue",
    }
}

impl Context {
    /// Returns whether the caller polls.
    pub(crate) fn is_polled(self) -> bool {
        matches!(self, Self::Direct | Self::Batch | Self::Static)
    }
}

/// The arguments of a run.
pub(crate) struct Args<'a> {
    pub(crate) load: Load,
    pub(crate) device: &'a str,
    pub(crate) peer: &'a str,
    pub(crate) context: Context,
    pub(crate) size: usize,
    pub(crate) depth: u32,
    pub(crate) signal: u32,
    pub(crate) qps: u32,
    pub(crate) count: u32,
    pub(crate) warmup: u32,
    pub(crate) timeout: u8,
    pub(crate) addr: SocketAddr,
    /// The file `held`, if everything is to be kept.
    held: Option<&'a Atomic<u32>>,
}

/// The time for which all objects are kept to be looked at, in milliseconds.
const HOLD_MS: u32 = 10_000;

/// The words of a line, each of which is to be taken once.
struct Words<'a> {
    text: &'a str,
    /// The number of words, and of those that were taken.
    len: usize,
    taken: usize,
    /// Set if a word was wrong, which was reported.
    wrong: bool,
}

impl<'a> Words<'a> {
    /// Takes the value of a key, if it has one.
    #[inline(never)]
    fn value(&mut self, key: &str) -> Option<&'a str> {
        let mut found = None;
        self.len = 0;
        for word in self.text.split_ascii_whitespace() {
            self.len = self.len.wrapping_add(1);
            let rest = word.strip_prefix(key);
            if let Some(value) = rest.and_then(|rest| rest.strip_prefix('=')) {
                if found.replace(value).is_some() {
                    self.refuse(fmt!("{key} is given twice\n"));
                }
            }
        }
        self.taken = self.taken.wrapping_add(found.is_some().into());
        found
    }

    #[cold]
    fn refuse(&mut self, why: fmt::Arguments<'_>) {
        pr_err!("{why}");
        self.wrong = true;
    }

    #[inline(never)]
    fn parse<T: FromStr>(&mut self, key: &str, default: T) -> T {
        let Some(value) = self.value(key) else {
            return default;
        };
        value.parse().unwrap_or_else(|_| {
            self.no_such_value(key, value);
            default
        })
    }

    #[cold]
    #[inline(never)]
    fn no_such_value(&mut self, key: &str, value: &str) {
        self.refuse(fmt!("{key}={value}: there is no such value\n"));
    }

    #[inline(never)]
    fn number(&mut self, key: &str, default: u32, first: u32, last: u32) -> u32 {
        let number = self.parse(key, default);
        if number < first || number > last {
            self.refuse(fmt!("{key}={number}: {first} to {last} are possible\n"));
        }
        number
    }

    /// Looks whether all words were taken, and none was wrong.
    fn end(mut self) -> Result {
        if !self.wrong && self.taken != self.len {
            self.refuse(fmt!("a word is not key=value, or its key is unknown\n"));
        }
        if self.wrong {
            return Err(EINVAL);
        }
        Ok(())
    }
}

impl<'a> Args<'a> {
    /// Returns how many groups of requests, of which one is signaled, are in flight on a QP.
    pub(crate) fn groups(&self) -> u32 {
        self.depth.checked_div(self.signal).unwrap_or(0)
    }

    /// Returns how many there are on all QPs.
    pub(crate) fn owners(&self) -> u32 {
        self.groups().saturating_mul(self.qps)
    }

    /// Returns how many receives are posted to a QP: more than there can be messages.
    pub(crate) fn receives(&self) -> u32 {
        self.depth.saturating_mul(2)
    }

    /// Returns how many transfers by `rdma_rw` there are at once.
    pub(crate) fn transfers(&self) -> u32 {
        match self.load {
            Load::RwReadRate | Load::RwWriteRate => self.depth,
            _ => 0,
        }
    }

    /// Keeps what the caller has until 0 is written to `held`, if that was asked for.
    #[inline(never)]
    pub(crate) fn hold(&self) -> Result {
        let Some(held) = self.held else {
            return Ok(());
        };
        held.store(1, Release);
        for _ in 0..HOLD_MS {
            if held.load(Acquire) == 0 {
                return Ok(());
            }
            fsleep(Delta::from_millis(1));
        }
        held.store(0, Release);
        Err(ETIMEDOUT)
    }

    pub(crate) fn parse(text: &'a str, held: &'a Atomic<u32>) -> Result<Self> {
        let mut words = Words {
            text,
            len: 0,
            taken: 0,
            wrong: false,
        };
        let load = words.parse("load", Load::SendLat);
        let is_lat = matches!(load, Load::SendLat | Load::WriteLat | Load::ReadLat);
        let device = words.value("device").unwrap_or("rxe0");
        let context = words.parse("context", Context::Softirq);
        let depth = words.number("depth", 16, 1, 1024);
        let is_void = load == Load::VoidRate && context.is_polled();
        let holds = matches!(
            load,
            Load::VoidRate
                | Load::QueueRate
                | Load::PoolRate
                | Load::ConnectRate
                | Load::QpRate
                | Load::CqRate
        );
        let hold = words.number("hold", 0, 0, 1);
        if hold == 1 && !holds {
            words.refuse(fmt!("hold=1: this load keeps nothing\n"));
        }
        let max_size = if is_lat { 1 << 16 } else { 1 << 20 };
        let args = Self {
            load,
            device,
            peer: words.value("peer").unwrap_or(device),
            context,
            size: words.number("size", 64, 1, max_size) as usize,
            depth,
            signal: words.number("signal", 1, 1, if is_void { 1 } else { depth.max(1) }),
            qps: words.number("qps", 1, 1, 16384),
            count: words.number("count", 1_000, 1, u32::MAX),
            warmup: words.number("warmup", 100, 0, u32::MAX),
            timeout: words.number("timeout", link::TIMEOUT.into(), 1, 31) as u8,
            addr: SocketAddr::new(
                words.parse("addr", IpAddr::V4(Ipv4Addr::LOCALHOST)),
                words.number("port", 7471, 1, 65535) as u16,
            ),
            held: (hold != 0).then_some(held),
        };
        words.end()?;
        Ok(args)
    }
}
