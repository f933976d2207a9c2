// SPDX-License-Identifier: GPL-2.0

//! Control through configfs.
//!
//! `mkdir` in `/sys/kernel/config/rdma_rping` makes an instance, with these files:
//!
//! | file         | content                                                                |
//! |--------------|------------------------------------------------------------------------|
//! | `addr`       | IPv4 or IPv6 address to listen on or to connect to                     |
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
    net::Ipv4Addr,
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

fn parse<T: FromStr>(page: &[u8]) -> Result<T> {
    let text = core::str::from_utf8(page).map_err(|_| EINVAL)?;
    text.trim().parse().map_err(|_| EINVAL)
}

#[vtable]
impl<const ID: u64> AttributeOperations<ID> for Directory {
    type Data = Self;

    fn show(Self(instance): &Self, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        let (config, report) = (instance.config(), instance.report());
        match ID {
            0 => show(page, fmt!("{:?}\n", config.addr.ip())),
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
            7 if kstrtobool_bytes(page)? => instance.listen(&cx),
            8 if kstrtobool_bytes(page)? => instance.connect(&cx),
            7 | 8 => instance.stop(&cx),
            _ => instance.configure(|config| {
                match ID {
                    0 => config.addr.set_ip(parse(page)?),
                    1 => config.addr.set_port(parse(page)?),
                    2 => config.size = parse(page)?,
                    3 => config.count = parse(page)?,
                    4 => config.context = parse(page)?,
                    5 => config.validate = kstrtobool_bytes(page)?,
                    6 => config.timeout_ms = parse(page)?,
                    _ => return Err(EPERM),
                }
                Ok(())
            }),
        }
    }
}
