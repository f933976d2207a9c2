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
//! | `state`      | `idle`, `listening`, `running`, `done` or `failed`                      |
//! | `reason`     | why the last connection ended                                          |
//! | `stats`      | counters since the last start, one a line                              |
//!
//! The first seven can be changed while the instance does not run. `rmdir` stops a server; while a
//! client runs, `rmdir` waits for its end, as configfs has it wait for every write.

use crate::{
    context::Kind,
    instance::Instance,
    proto::MAX_SIZE,
    run::State, //
};
use core::{
    net::{
        IpAddr,
        Ipv4Addr,
        SocketAddr, //
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
    str::{
        kstrtobool_bytes,
        Formatter, //
    }, //
};
use rdma::{
    client::ClientRef,
    context::{
        Sleepable,
        Softirq, //
    }, //
};

/// The attributes that can be changed.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    addr: IpAddr,
    port: u16,
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
            context: Kind::of::<Softirq>(),
            validate: true,
            timeout_ms: 30_000,
        }
    }
}

impl Config {
    pub(crate) fn is_valid(&self) -> bool {
        (1..=MAX_SIZE).contains(&self.size) && self.timeout_ms != 0
    }

    /// Returns the address to listen on or to connect to.
    pub(crate) fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.addr, self.port)
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
        child: Instance,
        attributes: [],
    };
    Subsystem::new(c"rdma_rping", item_type, Ok(Root { client }))
}

#[vtable]
impl GroupOperations for Root {
    type Child = Instance;

    fn make_group(&self, name: &CStr) -> Result<impl PinInit<Group<Instance>, Error>> {
        let item_type = configfs_attrs! {
            container: Group<Instance>,
            data: Instance,
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
        let instance = Instance::new(self.client.clone());
        Ok(Group::new(name.try_into()?, item_type, instance))
    }
}

fn show(page: &mut [u8; PAGE_SIZE], value: Arguments<'_>) -> Result<usize> {
    let mut text = Formatter::new(page);
    text.write_fmt(value).map_err(|_| EOVERFLOW)?;
    text.write_str("\n").map_err(|_| EOVERFLOW)?;
    Ok(text.bytes_written())
}

fn parse<T: FromStr>(page: &[u8]) -> Result<T> {
    let text = core::str::from_utf8(page).map_err(|_| EINVAL)?;
    text.trim().parse().map_err(|_| EINVAL)
}

/// Implements a file: how its value is shown and, unless it is read-only, what is written to it.
macro_rules! attribute {
    ($id:literal, |$shown:ident| $show:expr $(, |$instance:ident, $page:ident| $store:expr)?) => {
        #[vtable]
        impl AttributeOperations<$id> for Instance {
            type Data = Self;

            fn show($shown: &Self, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
                show(page, $show)
            }

            $(fn store($instance: &Self, $page: &[u8]) -> Result {
                $store
            })?
        }
    };
}

/// Implements the file of a field of [`Config`], with the function that takes what is written.
macro_rules! setting {
    ($id:literal, |$instance:ident| $show:expr, $field:ident = $parse:expr) => {
        attribute!($id, |$instance| $show, |$instance, page| {
            let value = $parse(page)?;
            $instance.configure(|config| config.$field = value)
        });
    };
}

setting!(0, |i| fmt!("{:?}", i.config().addr), addr = parse);
setting!(1, |i| fmt!("{}", i.config().port), port = parse);
setting!(2, |i| fmt!("{}", i.config().size), size = parse);
setting!(3, |i| fmt!("{}", i.config().count), count = parse);
setting!(4, |i| fmt!("{}", i.config().context), context = parse);
setting!(
    5,
    |i| fmt!("{}", u8::from(i.config().validate)),
    validate = kstrtobool_bytes
);
setting!(6, |i| fmt!("{}", i.config().timeout_ms), timeout_ms = parse);

/// Starts an instance, or stops it.
fn switch(instance: &Instance, page: &[u8], start: fn(&Instance, &Sleepable) -> Result) -> Result {
    let cx = Sleepable::current()?;
    if kstrtobool_bytes(page)? {
        start(instance, &cx)
    } else {
        instance.stop(&cx)
    }
}

attribute!(
    7,
    |instance| fmt!("{}", u8::from(instance.run().state() == State::Listening)),
    |instance, page| switch(instance, page, Instance::listen)
);
attribute!(
    8,
    |instance| fmt!("{}", u8::from(instance.run().state() == State::Running)),
    |instance, page| switch(instance, page, Instance::connect)
);
attribute!(9, |instance| fmt!("{}", instance.run().state().name()));
attribute!(10, |instance| fmt!("{}", instance.run().reason()));
attribute!(11, |instance| fmt!("{}", instance.run().stats));
