// SPDX-License-Identifier: GPL-2.0

//! Control through configfs.
//!
//! `mkdir` in `/sys/kernel/config/rdma_rping` makes an instance, with these files:
//!
//! | file         | content                                                                |
//! |--------------|------------------------------------------------------------------------|
//! | `addr`       | address to listen on or to connect to; a link-local one as `fe80::1%3` |
//! | `port`       | its port                                                               |
//! | `size`       | bytes of a ping (client), up to 65535                                  |
//! | `count`      | number of pings, 0 for no end (client)                                 |
//! | `context`    | `direct`, `softirq`, `workqueue` or `unbound_workqueue`                |
//! | `validate`   | whether to look at the data                                            |
//! | `timeout_ms` | a connection ends if one step of a ping takes so long                  |
//! | `listen`     | 1 starts the server, 0 stops it                                        |
//! | `connect`    | 1 runs the client; the write returns at its end, with its error        |
//! | `state`      | `idle`, `listening`, `running`, `done` or `failed`                     |
//! | `reason`     | why the last connection ended                                          |
//! | `stats`      | counters since the last start, one a line                              |
//!
//! The first seven can be changed while the instance does not run. `rmdir` stops a server; while a
//! client runs, `rmdir` waits for its end, as configfs has it wait for every write.

use crate::{
    instance::{
        Instance,
        State, //
    },
    Rping, //
};
use core::{
    net::{
        Ipv4Addr,
        SocketAddrV6, //
    },
    num::NonZero,
    str::FromStr, //
};
use kernel::{
    configfs::{
        configfs_attrs,
        AttributeOperations,
        Group,
        GroupOperations,
        Subsystem, //
    },
    fmt::{
        Arguments,
        Write, //
    },
    page::PAGE_SIZE,
    prelude::*,
    str::{
        kstrtobool_bytes,
        Formatter, //
    }, //
};
use rdma::{
    device::Device,
    prelude::*, //
};

/// A polling context, chosen at run time. All handlers of this module are atomic, so they run in
/// every context, and are compiled once.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    name: &'static str,
    /// Allocates a CQ with so many entries.
    pub(crate) alloc_cq: fn(&Device, u32, &Sleepable) -> Result<Cq<AnyContext>>,
}

impl Kind {
    fn of<C: FixedContext>() -> Self {
        Self {
            name: C::NAME,
            alloc_cq: |dev, entries, cx| Ok(Cq::<C>::alloc_any(dev, entries, cx)?.into_any()),
        }
    }

    /// Returns whether the connection's thread polls, and not the RDMA core.
    pub(crate) fn is_direct(&self) -> bool {
        self.name == Direct::NAME
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [
            Self::of::<Direct>(),
            Self::of::<Softirq>(),
            Self::of::<Workqueue>(),
            Self::of::<UnboundWorkqueue>(),
        ];
        all.into_iter().find(|kind| kind.name == name).ok_or(EINVAL)
    }
}

/// The attributes that can be changed.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) addr: SocketAddr,
    pub(crate) size: NonZero<u16>,
    pub(crate) count: u32,
    pub(crate) context: Kind,
    pub(crate) validate: bool,
    pub(crate) timeout_ms: NonZero<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addr: (Ipv4Addr::UNSPECIFIED, 7174).into(),
            size: NonZero::<u16>::MIN.saturating_add(63),
            count: 10,
            context: Kind::of::<Softirq>(),
            validate: true,
            timeout_ms: NonZero::<u32>::MIN.saturating_add(29_999),
        }
    }
}

/// The top directory.
pub(crate) struct Root;

pub(crate) fn subsystem() -> impl PinInit<Subsystem<Root>, Error> {
    let item_type = configfs_attrs! {
        container: Subsystem<Root>,
        data: Root,
        child: Directory,
        attributes: [],
    };
    Subsystem::new(c"rdma_rping", item_type, Ok(Root))
}

#[vtable]
impl GroupOperations for Root {
    type Child = Directory;

    fn make_group(&self, name: &CStr) -> Result<impl PinInit<Group<Directory>, Error>> {
        let item_type = configfs_attrs! {
            container: Group<Directory>,
            data: Directory,
            attributes: [
                addr: 0,
                port: 1,
                size: 2,
                count: 3,
                context: 4,
                validate: 5,
                timeout_ms: 6,
                listen: 7,
                connect: 8,
                state: 9,
                reason: 10,
                stats: 11,
            ],
        };
        let client = ClientRef::of::<Rping>(&Sleepable::current()?)?;
        let directory = Directory(Instance::new(client)?);
        Ok(Group::new(name.try_into()?, item_type, Ok(directory)))
    }
}

/// The directory of an instance, which ends with it.
pub(crate) struct Directory(Arc<Instance>);

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory is removed in process context.
        if let Err(e) = Sleepable::current().and_then(|cx| self.0.stop(&cx)) {
            pr_err!("an instance was not stopped: {e:?}\n");
        }
    }
}

fn show(page: &mut [u8; PAGE_SIZE], value: Arguments<'_>) -> Result<usize> {
    let mut text = Formatter::new(page);
    text.write_fmt(value).map_err(|_| EOVERFLOW)?;
    Ok(text.bytes_written())
}

/// What can be written to the files, by their numbers.
const TAKEN: [&str; 9] = [
    "addr: an IPv4 or IPv6 address, with %NUMBER of its interface if it is link-local",
    "port: 0 to 65535",
    "size: 1 to 65535",
    "count: 0 to 4294967295",
    "context: direct, softirq, workqueue or unbound_workqueue",
    "validate: 0 or 1",
    "timeout_ms: 1 to 4294967295",
    "listen: 0 or 1",
    "connect: 0 or 1",
];

/// Reads what was written to a file, or logs what the file takes.
fn read<const ID: u64, T>(page: &[u8], from: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    from(page).inspect_err(|_| {
        let text = core::str::from_utf8(page).map_or("no text", str::trim);
        let taken = TAKEN.get(ID as usize).unwrap_or(&"");
        pr_err!("{taken}; not {text:?}\n");
    })
}

fn parse<T: FromStr>(page: &[u8]) -> Result<T> {
    let text = core::str::from_utf8(page).map_err(|_| EINVAL)?;
    text.trim().parse().map_err(|_| EINVAL)
}

/// Reads an address, of which one that is link-local has the number of its interface as well, as
/// `fe80::1%3`.
fn parse_addr(page: &[u8]) -> Result<SocketAddr> {
    let text = core::str::from_utf8(page).map_err(|_| EINVAL)?;
    let Some((ip, scope)) = text.trim().split_once('%') else {
        return Ok(SocketAddr::new(parse(page)?, 0));
    };
    let ip = ip.parse().map_err(|_| EINVAL)?;
    let scope = scope.parse().map_err(|_| EINVAL)?;
    Ok(SocketAddrV6::new(ip, 0, 0, scope).into())
}

fn show_addr(page: &mut [u8; PAGE_SIZE], addr: SocketAddr) -> Result<usize> {
    match addr {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            show(page, fmt!("{:?}%{}\n", v6.ip(), v6.scope_id()))
        }
        _ => show(page, fmt!("{:?}\n", addr.ip())),
    }
}

#[vtable]
impl<const ID: u64> AttributeOperations<ID> for Directory {
    type Data = Self;

    fn show(Self(instance): &Self, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        let config = instance.config();
        let report = instance.report();
        match ID {
            0 => show_addr(page, config.addr),
            1 => show(page, fmt!("{}\n", config.addr.port())),
            2 => show(page, fmt!("{}\n", config.size.get())),
            3 => show(page, fmt!("{}\n", config.count)),
            4 => show(page, fmt!("{}\n", config.context.name)),
            5 => show(page, fmt!("{}\n", u8::from(config.validate))),
            6 => show(page, fmt!("{}\n", config.timeout_ms.get())),
            7 => show(
                page,
                fmt!("{}\n", u8::from(report.state == State::Listening)),
            ),
            8 => show(page, fmt!("{}\n", u8::from(report.state == State::Running))),
            9 => show(page, fmt!("{}\n", report.state.name())),
            10 => show(page, fmt!("{}\n", report.reason)),
            _ => show(page, fmt!("{report}")),
        }
    }

    fn store(Self(instance): &Self, page: &[u8]) -> Result {
        let cx = Sleepable::current()?;
        match ID {
            7 if read::<ID, _>(page, kstrtobool_bytes)? => instance.listen(&cx),
            8 if read::<ID, _>(page, kstrtobool_bytes)? => instance.connect(&cx),
            7 | 8 => instance.stop(&cx),
            _ => instance.configure(|config| {
                match ID {
                    0 => {
                        let port = config.addr.port();
                        config.addr = read::<ID, _>(page, parse_addr)?;
                        config.addr.set_port(port);
                    }
                    1 => config.addr.set_port(read::<ID, _>(page, parse)?),
                    2 => config.size = read::<ID, _>(page, parse)?,
                    3 => config.count = read::<ID, _>(page, parse)?,
                    4 => config.context = read::<ID, _>(page, parse)?,
                    5 => config.validate = read::<ID, _>(page, kstrtobool_bytes)?,
                    6 => config.timeout_ms = read::<ID, _>(page, parse)?,
                    _ => return Err(EPERM),
                }
                Ok(())
            }),
        }
    }
}
