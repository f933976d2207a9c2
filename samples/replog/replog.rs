// SPDX-License-Identifier: GPL-2.0

//! A replicated log: a leader appends records to a follower's memory, which only the leader's
//! RDMA device touches.
//!
//! Each record is an RDMA WRITE and a flush, what librpma is for. The module plays both parts on
//! one device when it is loaded: `rounds` times the leader appends until a number of records is
//! acknowledged, and crashes with others under way. Then the follower's memory must be a log whose
//! every record is right, and have each one that was acknowledged. What was found goes to the
//! kernel log; a log that is wrong fails the loading.
//!
//! - [`record`]: the format of the log, and recovery.
//! - [`leader`]: appending, with a CQ that it polls and waits for itself.
//! - [`follower`]: the memory.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

mod follower;
mod leader;
mod record;

use follower::Log;
use kernel::prelude::*;
use leader::{
    Leader,
    WINDOW, //
};
use rdma::prelude::*;
use record::{
    Recovered,
    MAX_RECORD, //
};

/// The size of a log, in bytes.
const LOG: usize = 256 * 1024;

/// The number of records that a log has room for in any case, those under way included.
const MOST: u64 = (LOG / MAX_RECORD).saturating_sub(WINDOW) as u64;

struct Replog;

/// Appends until `count` records are acknowledged, crashes, and recovers. Returns how many were
/// acknowledged, and what was found.
fn round(client: &ClientRef, count: u64, cx: &Sleepable) -> Result<(u64, Recovered)> {
    let (dev, ip) = client.first_device_with_addr(cx)?;
    let addr = SocketAddr::new(ip, 7176);
    let pd = Pd::alloc(&dev, cx)?;
    let log = Log::new(&pd, LOG, cx)?;
    let own_pd = pd.clone();
    let own_log = log.clone();
    let accept =
        move |request: cm::Request<'_>, cx: &Sleepable| own_log.accept(request, &own_pd, cx);
    let listener = cm::Listener::new(client, addr, 8, Arc::new(accept, GFP_KERNEL)?, cx)?;

    let acknowledged = Leader::connect(client, addr, &pd, cx)?.run(count, &pd, cx)?;
    listener.destroy(cx)?;
    Ok((acknowledged, log.recover()?))
}

impl Client for Replog {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Replog)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let mut acknowledged = 0u64;
        let mut recovered = 0u64;
        let mut bytes = 0usize;
        let first = u64::from(module_parameters::records.value());
        let rounds = u64::from(module_parameters::rounds.value());
        if rounds == 0 {
            pr_err!("rounds=0: 1 or more\n");
            return Err(EINVAL);
        }
        if first.saturating_add(rounds) > MOST {
            pr_err!("records={first} rounds={rounds}: the log has room for {MOST} of both\n");
            return Err(EINVAL);
        }
        for n in 0..rounds {
            // Each round ends at another record.
            let (count, found) = round(client, first.saturating_add(n), cx)?;
            if !found.right || found.records < count {
                pr_err!("{count} records were acknowledged, there are {found:?}\n");
                return Err(EBADMSG);
            }
            acknowledged = acknowledged.saturating_add(count);
            recovered = recovered.saturating_add(found.records);
            bytes = bytes.saturating_add(found.bytes);
        }
        pr_info!("acknowledged {acknowledged} recovered {recovered} bytes {bytes}\n");
        Ok(())
    }
}

rdma::module_rdma_client! {
    type: Replog,
    name: "rdma_replog",
    authors: ["rdma-rs authors"],
    description: "A replicated log",
    license: "GPL",
    params: {
        records: u32 { default: 300, description: "records to acknowledge in the first round", },
        rounds: u32 { default: 8, description: "crashes", },
    },
}
