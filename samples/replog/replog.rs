// SPDX-License-Identifier: GPL-2.0

//! A replicated log: a leader appends records to a follower's memory, which nobody but the leader's
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

mod follower;
mod leader;
mod record;

use follower::Log;
use kernel::prelude::*;
use leader::Leader;
use rdma::prelude::*;

/// The size of a log, in bytes.
const LOG: usize = 256 * 1024;

struct Replog;

/// What all rounds have come to.
#[derive(Default)]
struct Totals {
    acknowledged: u64,
    recovered: u64,
    bytes: usize,
    errors: u64,
}

/// Appends until `count` records are acknowledged, crashes, and recovers.
fn round(client: &ClientRef, count: u64, totals: &mut Totals, cx: &Sleepable) -> Result {
    let dev = client.first_device().ok_or(ENODEV)?;
    let addr = SocketAddr::new(dev.ip_addr().ok_or(ENODEV)?, 7176);
    let pd = Pd::alloc(&dev, cx)?;
    let log = Log::new(&pd, LOG, cx)?;
    let (own_pd, own_log) = (pd.clone(), log.clone());
    let accept =
        move |request: cm::Request<'_>, cx: &Sleepable| own_log.accept(request, &own_pd, cx);
    let listener = cm::Listener::new(client, addr, 1, Arc::new(accept, GFP_KERNEL)?, cx)?;

    let mut leader = Leader::connect(client, addr, &pd, cx)?;
    leader.run(count, cx)?;
    let acknowledged = leader.crash(cx)?;
    listener.destroy(cx)?;

    let (found, right) = log.recover()?;
    totals.acknowledged += acknowledged;
    totals.recovered += found.records;
    totals.bytes += found.bytes;
    if !right || found.records < acknowledged {
        pr_err!(
            "{acknowledged} records were acknowledged, {} recovered, right: {right}\n",
            found.records
        );
        totals.errors += 1;
    }
    Ok(())
}

impl Client for Replog {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Replog)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let mut totals = Totals::default();
        let records = u64::from(module_parameters::records.value());
        for n in 0..u64::from(module_parameters::rounds.value()) {
            // Each round ends at another record.
            round(client, records + n, &mut totals, cx)?;
        }
        pr_info!(
            "acknowledged {} recovered {} bytes {} errors {}\n",
            totals.acknowledged,
            totals.recovered,
            totals.bytes,
            totals.errors
        );
        if totals.errors != 0 {
            return Err(EBADMSG);
        }
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
