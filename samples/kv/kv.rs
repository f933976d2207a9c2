// SPDX-License-Identifier: GPL-2.0

//! A key-value store in the shape of a storage protocol.
//!
//! The target listens on each RDMA device that has an IP address. The initiator connects to that of
//! the first device, or to another, with several connections of many requests each: each value is
//! written by a PUT, read by a GET and compared. Short values travel with the messages. Long ones
//! go by RDMA from and to memory that neither side has allocated for RDMA: that of the values
//! themselves, and of the users that read and write them; the reply takes the key back.
//!
//! ```sh
//! insmod rdma_kv.ko operations=10000                  # fails if a value is not as it was written
//! insmod rdma_kv.ko operations=0                      # without an end, until it is unloaded
//! insmod rdma_kv.ko connections=0                     # the target only
//! insmod rdma_kv.ko port=0 server=192.0.2.1           # the initiator only
//! grep . /sys/kernel/debug/rdma_kv/stats/*
//! ```
//!
//! - [`proto`]: what goes over the wire.
//! - [`target`] and [`store`]: what is served, and by which limits.
//! - [`initiator`]: tags, credits, registrations, and a load.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod initiator;
mod proto;
mod store;
mod target;

use initiator::Conn;
use kernel::{
    debugfs::{
        Dir,
        Scope, //
    },
    new_condvar,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        CondVar,
        Mutex, //
    }, //
};
use rdma::{
    device::Device,
    prelude::*, //
};
use target::{
    Target,
    CONNECTIONS, //
};

/// The counters, and the names of the files in debugfs.
enum Count {
    /// Requests that the target has served.
    Served,
    /// Connections that were ended, as the peer did not keep to the protocol.
    Violations,
    /// Requests of the initiator that were answered.
    Answered,
    /// Bytes of values that were read and compared.
    Verified,
    /// Keys that the target has invalidated.
    RemoteInvalidations,
    /// Keys that were invalidated here, as the reply was no proof that they were.
    LocalInvalidations,
}

const NAMES: [&CStr; 6] = [
    c"served",
    c"violations",
    c"answered",
    c"verified",
    c"remote_invalidations",
    c"local_invalidations",
];

struct Stats([Atomic<u64>; NAMES.len()]);

impl Stats {
    fn add(&self, count: Count, n: usize) {
        if let Some(counter) = self.0.get(count as usize) {
            counter.add(n as u64, Relaxed);
        }
    }

    fn get(&self, count: Count) -> u64 {
        self.0
            .get(count as usize)
            .map_or(0, |counter| counter.load(Relaxed))
    }
}

/// The module.
#[pin_data]
struct Kv {
    #[pin]
    stats: Scope<Arc<Stats>>,
}

/// The connections of a load, of which the last one to end wakes the waiter.
#[pin_data]
struct Run {
    #[pin]
    left: Mutex<(u32, Result)>,
    #[pin]
    ended: CondVar,
}

impl Run {
    fn new(connections: u32) -> impl PinInit<Self> {
        pin_init!(Self {
            left <- new_mutex!((connections, Ok(()))),
            ended <- new_condvar!(),
        })
    }

    fn ended(&self, result: Result) {
        let mut left = self.left.lock();
        left.0 = left.0.saturating_sub(1);
        left.1 = left.1.and(result);
        self.ended.notify_all();
    }

    fn wait(&self) -> Result {
        let mut left = self.left.lock();
        while left.0 > 0 {
            if self.ended.wait_interruptible(&mut left) {
                return Err(ERESTARTSYS);
            }
        }
        left.1
    }
}

impl Client for Kv {
    type Data = PerDevice;

    fn init(client: &ClientRef) -> impl PinInit<Self, Error> {
        let dir = Dir::new(client.name());
        let stats = Arc::new(Stats([const { Atomic::new(0) }; NAMES.len()]), GFP_KERNEL);
        try_pin_init!(Self {
            stats <- dir.scope(stats?, c"stats", |stats, dir| {
                for (name, counter) in NAMES.iter().zip(&stats.0) {
                    dir.read_only_file(name, counter);
                }
            }),
        })
    }

    /// Connects, and makes the requests; waits for the last one if there is.
    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let connections = module_parameters::connections.value();
        let operations = module_parameters::operations.value();
        for (name, value) in [
            ("memory", module_parameters::memory.value()),
            ("server_port", module_parameters::server_port.value().into()),
        ] {
            if value == 0 {
                pr_err!("{name}=0: 1 or more\n");
                return Err(EINVAL);
            }
        }
        if connections > CONNECTIONS {
            pr_err!("connections={connections}: 0 to {CONNECTIONS}, as many as a target serves\n");
            return Err(EINVAL);
        }
        if connections == 0 {
            return Ok(());
        }
        let server = match ip_parameters::server.value() {
            None => client.first_device_with_addr(cx)?.1,
            Some(server) => server,
        };
        let addr = SocketAddr::new(server, module_parameters::server_port.value());
        let run = Arc::pin_init(Run::new(connections), GFP_KERNEL)?;
        for number in 0..connections {
            let conn = Conn::connect(client, addr, number, &self.stats, cx)
                .inspect_err(|e| pr_err!("connection {number}: {e:?} ({addr:?})\n"))?;
            let run = run.clone();
            client.spawn(GFP_KERNEL, move |cx| {
                let done = conn.run(operations, cx);
                run.ended(done.inspect_err(|e| pr_err!("connection {number}: {e:?}\n")));
            })?;
        }
        if operations > 0 {
            run.wait()?;
            let answered = self.stats.get(Count::Answered);
            let bytes = self.stats.get(Count::Verified);
            pr_info!("{connections} connections, {answered} requests, {bytes} bytes are right\n");
        }
        Ok(())
    }
}

/// The data of a device: the listener of the target, until the device goes.
struct PerDevice {
    _listener: Option<cm::Listener>,
}

impl DeviceData<Kv> for PerDevice {
    fn add(kv: Pin<&Kv>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        let port = module_parameters::port.value();
        let listen = |ip| {
            let addr = SocketAddr::new(ip, port);
            let bytes = (module_parameters::memory.value() as usize).saturating_mul(1024 * 1024);
            let client = ClientRef::of::<Kv>(cx)?;
            Target::listen(&client, dev, addr, bytes, &kv.stats, cx)
        };
        let ip = dev.ip_addr().filter(|_| port != 0);
        (ip.map(listen).transpose()).map(|_listener| Self { _listener })
    }
}

rdma::ip_params! {
    server: "address of the target, otherwise the device's own",
}

rdma::module_rdma_client! {
    type: Kv,
    name: "rdma_kv",
    authors: ["rdma-rs authors"],
    description: "A key-value store over RDMA in Rust",
    license: "GPL",
    params: {
        port: u16 { default: 7178, description: "port of the target; 0: there is none", },
        server_port: u16 { default: 7178, description: "port that is connected to", },
        connections: u32 { default: 4, description: "connections to it", },
        operations: u32 { default: 1000, description: "requests of each; 0: without an end", },
        memory: u32 { default: 256, description: "MiB of memory for values of the target", },
    },
}
