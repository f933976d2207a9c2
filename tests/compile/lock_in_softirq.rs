// SPDX-License-Identifier: GPL-2.0

//! A lock that is not for softirqs, in a handler that runs in a softirq.

use kernel::prelude::*;
use rdma::{
    device::Device,
    ibcm,
    prelude::*, //
};

#[derive(HasCqe)]
struct Recv {
    cqe: Cqe<Self>,
    client: ClientRef,
    dev: Device,
    id: cm::Id,
    connection: ibcm::Connection,
}

#[cfg(mistake)]
type Context = context::Atomic;
#[cfg(not(mistake))]
type Context = Sleepable;

impl CqeHandler for Recv {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Context;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &Context) {
        let _ = this.client.first_device_with_addr(cx); //~ E0308 mismatched types
        let _ = this.client.device_by_name(c"rxe0", cx); //~ E0308 mismatched types
        let _ = this.client.device_of_netdev(c"eth0", cx); //~ E0308 mismatched types
        let _ = this.dev.port(1).map(|port| port.netdev(cx)); //~ E0308 mismatched types
        let _ = this.id.disconnect(cx); //~ E0308 mismatched types
        this.id.release_handler(cx); //~ E0308 mismatched types
        let _ = this.connection.disconnect(cx); //~ E0308 mismatched types

        // These are for any context.
        this.id.notify_established();
        this.connection.notify_established();
        this.connection.disconnect_later();
    }
}
