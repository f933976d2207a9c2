// SPDX-License-Identifier: GPL-2.0

//! Remote procedure calls with bulk data, as storage protocols make them.
//!
//! A client registers memory and sends a call with its address and key. The server reads the data
//! (PUT) or writes them (GET) there, and answers with a SEND that invalidates the client's key. So
//! the client has its memory for itself again when it has the answer, and lends it anew for the
//! next call.
//!
//! The module plays both parts on one device when it is loaded. Several clients call at the same
//! time, `calls` times each; and one sends nonsense, which costs it its connection, and the others
//! nothing. Each byte is compared. The totals go to the kernel log; an error fails the loading.
//!
//! - [`proto`]: what goes over the wire.
//! - [`server`]: an SRQ whose slots go from a call to its answer, and transfers by `rdma_rw`.
//! - [`client`]: registration, and the proof that it has ended.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod client;
mod proto;
mod server;

use client::Caller;
use kernel::prelude::*;
use proto::{
    CALL,
    GET,
    MAX_LEN,
    PUT, //
};
use rdma::prelude::*;

/// The most clients.
const MOST: u32 = 1000;

struct Rpc;

/// The operation of call `number`, and its length: from one byte to all, each multiple of a page
/// and not.
fn plan(number: u32) -> (u32, usize) {
    let op = if number % 2 == 0 { PUT } else { GET };
    let len = (number as usize).wrapping_mul(4_095) % MAX_LEN;
    (op, len.saturating_add(1))
}

/// Makes all calls, and returns how many bytes they were about.
fn run(client: &ClientRef, clients: u32, calls: u32, cx: &Sleepable) -> Result<usize> {
    let (dev, ip) = client.first_device_with_addr(cx)?;
    let addr = SocketAddr::new(ip, 7177);
    let pd = Pd::alloc(&dev, cx)?;
    let listener = server::serve(client, addr, clients.saturating_add(1), &pd, cx)?;
    let mut callers = KVec::with_capacity(clients as usize, GFP_KERNEL)?;
    for _ in 0..clients {
        callers.push(Caller::connect(client, addr, &pd, cx)?, GFP_KERNEL)?;
    }

    let mut bytes = 0;
    let mut stranger = Caller::connect(client, addr, &pd, cx)?;
    for number in 0..calls {
        if number == calls / 2 {
            stranger.send(&[0xff; CALL], cx)?;
        }
        // Every client makes this call, all at the same time.
        let (op, len) = plan(number);
        for caller in &mut callers {
            caller.call(op, number, len, cx)?;
        }
        for caller in &mut callers {
            caller.answer(number, len)?;
            bytes = len.saturating_add(bytes);
        }
    }
    // Its receive is flushed.
    if stranger.answer(0, 0) != Err(EIO) {
        return Err(EBADMSG);
    }
    drop(callers);
    listener.destroy(cx)?;
    Ok(bytes)
}

impl Client for Rpc {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Rpc)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let clients = module_parameters::clients.value();
        let calls = module_parameters::calls.value();
        if calls == 0 {
            pr_err!("calls=0: 1 or more\n");
            return Err(EINVAL);
        }
        if !(1..=MOST).contains(&clients) {
            pr_err!("clients={clients}: 1 to {MOST}\n");
            return Err(EINVAL);
        }
        let bytes = run(client, clients, calls, cx)?;
        pr_info!("{clients} clients made {calls} calls, of {bytes} bytes\n");
        Ok(())
    }
}

rdma::module_rdma_client! {
    type: Rpc,
    name: "rdma_rpc",
    authors: ["rdma-rs authors"],
    description: "Remote procedure calls with bulk data in Rust",
    license: "GPL",
    params: {
        clients: u32 { default: 4, description: "clients at the same time", },
        calls: u32 { default: 60, description: "calls of each client", },
    },
}
