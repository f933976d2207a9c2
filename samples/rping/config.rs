// SPDX-License-Identifier: GPL-2.0

//! Control through configfs.
//!
//! `mkdir` in `/sys/kernel/config/rdma_rping` makes an instance, with these files:
//!
//! | file         | content                                                                |
//! |--------------|------------------------------------------------------------------------|
//! | `addr`       | IPv4 or IPv6 address to listen on or to connect to                     |
//! | `port`       | its port                                                               |
//! | `size`       | bytes of a ping (client)                                               |
//! | `count`      | number of pings, 0 for no end (client)                                 |
//! | `context`    | `direct`, `softirq`, `workqueue` or `unbound_workqueue`                |
//! | `validate`   | whether to look at the data                                            |
//! | `timeout_ms` | a connection ends after that long, or a quarter longer, without a ping |
//! | `listen`     | 1 starts the server, 0 stops it                                        |
//! | `connect`    | 1 runs the client; the write returns at its end, with its error        |
//! | `state`      | `idle`, `listening`, `connecting`, `running`, `done` or `failed`       |
//! | `reason`     | why the last connection ended                                          |
//! | `stats`      | counters since the last start, one a line                              |
//!
//! The first seven can be changed while the instance does not run. `rmdir` stops a server; while a
//! client runs, `rmdir` waits for its end, as configfs has it wait for every write.

use crate::{
    context::Kind,
    instance::{
        Instance,
        State, //
    },
    proto::MAX_SIZE, //
};
use core::{
    net::{
        IpAddr,
        Ipv4Addr, //
    },
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
    str::Formatter, //
};
use rdma::{
    client::ClientRef,
    context::Sleepable,
    prelude::Arc, //
};

/// The attributes in configfs.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) addr: IpAddr,
    pub(crate) port: u16,
    pub(crate) size: u32,
    pub(crate) count: u32,
    pub(crate) context: Kind,
    pub(crate) validate: bool,
    pub(crate) timeout_ms: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addr: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            port: 7174,
            size: 64,
            count: 10,
            context: Kind::Softirq,
            validate: true,
            timeout_ms: 30_000,
        }
    }
}

/// The top directory.
pub(crate) struct Root {
    client: ClientRef,
}

pub(crate) fn subsystem(client: ClientRef) -> impl PinInit<Subsystem<Root>, Error> {
    let item_type = configfs_attrs! {
        container: Subsystem<Root>,
        data: Root,
        child: Directory,
        attributes: [],
    };
    Subsystem::new(c"rdma_rping", item_type, Ok(Root { client }))
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
        let instance = Instance::new(&self.client)?;
        Ok(Group::new(
            name.try_into()?,
            item_type,
            Ok(Directory { instance }),
        ))
    }
}

/// The directory of an instance, which ends with it.
pub(crate) struct Directory {
    instance: Arc<Instance>,
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory is removed in process context.
        if let Err(e) = Sleepable::current().and_then(|cx| self.instance.stop(&cx)) {
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

/// Accepts 0 and 1.
fn parse_bool(page: &[u8]) -> Result<bool> {
    match parse::<u8>(page)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(EINVAL),
    }
}

/// Implements a file: how its value is shown and, unless it is read-only, what is written to it.
macro_rules! attribute {
    ($id:literal, |$instance:ident| $show:expr $(, |$self:ident, $page:ident| $store:expr)?) => {
        #[vtable]
        impl AttributeOperations<$id> for Directory {
            type Data = Self;

            fn show(this: &Self, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
                let $instance = &this.instance;
                show(page, $show)
            }

            $(fn store(this: &Self, $page: &[u8]) -> Result {
                let $self = &this.instance;
                $store
            })?
        }
    };
}

attribute!(0, |i| fmt!("{:?}\n", i.config().addr), |i, page| {
    let addr = parse(page)?;
    i.configure(|config| config.addr = addr)
});
attribute!(1, |i| fmt!("{}\n", i.config().port), |i, page| {
    let port = parse(page)?;
    i.configure(|config| config.port = port)
});
attribute!(2, |i| fmt!("{}\n", i.config().size), |i, page| {
    let size = parse(page)?;
    if !(1..=MAX_SIZE).contains(&size) {
        return Err(EINVAL);
    }
    i.configure(|config| config.size = size)
});
attribute!(3, |i| fmt!("{}\n", i.config().count), |i, page| {
    let count = parse(page)?;
    i.configure(|config| config.count = count)
});
attribute!(4, |i| fmt!("{}\n", i.config().context.name()), |i, page| {
    let context = parse(page)?;
    i.configure(|config| config.context = context)
});
attribute!(
    5,
    |i| fmt!("{}\n", u8::from(i.config().validate)),
    |i, page| {
        let validate = parse_bool(page)?;
        i.configure(|config| config.validate = validate)
    }
);
attribute!(6, |i| fmt!("{}\n", i.config().timeout_ms), |i, page| {
    let timeout_ms = parse(page)?;
    if timeout_ms == 0 {
        return Err(EINVAL);
    }
    i.configure(|config| config.timeout_ms = timeout_ms)
});
attribute!(
    7,
    |i| fmt!("{}\n", u8::from(i.state() == State::Listening)),
    |i, page| {
        let cx = Sleepable::current()?;
        if parse_bool(page)? {
            i.listen(&cx)
        } else {
            i.stop(&cx)
        }
    }
);
attribute!(
    8,
    |i| fmt!("{}\n", u8::from(i.state() == State::Running)),
    |i, page| {
        let cx = Sleepable::current()?;
        if parse_bool(page)? {
            i.connect(&cx)
        } else {
            i.stop(&cx)
        }
    }
);
attribute!(9, |i| fmt!("{}\n", i.state().name()));
attribute!(10, |i| fmt!("{}\n", i.reason()));
attribute!(11, |i| fmt!("{}", i.stats));
