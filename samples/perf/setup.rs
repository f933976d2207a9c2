// SPDX-License-Identifier: GPL-2.0

//! QPs, and CQs that the RDMA core polls: so many at once are set up, and then taken down.

use crate::{
    args::Args,
    link::Nowhere,
    poll::Mode,
    run::{
        device,
        Figures,
        Report, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(1, 1);

/// Has objects set up, then taken down, until there were so many.
fn rounds<T>(
    args: &Args<'_>,
    total: u32,
    hold: impl Fn() -> Result,
    set_up: impl Fn() -> Result<T>,
    take_down: impl Fn(T) -> Result,
) -> Result<Figures> {
    let mut figures = Figures::default();
    while figures.ops < total.into() {
        let mut objects = KVVec::with_capacity(args.qps as usize, GFP_KERNEL)?;
        let began = Instant::<Monotonic>::now();
        for _ in 0..args.qps {
            objects.push(set_up()?, GFP_KERNEL)?;
        }
        let there = Instant::<Monotonic>::now();
        hold()?;
        let ending = Instant::<Monotonic>::now();
        objects.into_iter().try_for_each(&take_down)?;
        figures.teardown_ns += ending.elapsed().as_nanos();
        figures.setup_ns += (there - began).as_nanos();
        figures.ops += u64::from(args.qps);
    }
    figures.ns = figures.setup_ns + figures.teardown_ns;
    Ok(figures)
}

/// Sets objects up and takes them down, as often as is to be measured.
pub(crate) fn phases<T>(
    args: &Args<'_>,
    set_up: impl Fn() -> Result<T>,
    take_down: impl Fn(T) -> Result,
) -> Result<Figures> {
    rounds(args, args.warmup, || Ok(()), &set_up, &take_down)?;
    rounds(args, args.count, || args.hold(), &set_up, &take_down)
}

/// QPs that can send, to nobody.
pub(crate) fn qps(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device)?;
    let pd = Pd::alloc(&dev, cx)?;
    let entries = CAPS.entries().checked_mul(args.qps).ok_or(EINVAL)?;
    let cq = Softirq::cq(&dev, entries, args.context, cx)?;
    let nowhere = Nowhere::new(&dev)?;
    let set_up = || {
        let qp = Qp::create_raw(&pd, &cq, &cq, &CAPS, cx)?;
        nowhere.connect(&qp, cx)?;
        Ok(qp)
    };
    Ok(phases(args, set_up, |qp| qp.destroy(cx))?.into())
}

/// CQs of a few entries. They are taken down by work items, so the time of that means nothing.
pub(crate) fn cqs(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let dev = device(client, args.device)?;
    let set_up = || Softirq::cq(&dev, args.depth, args.context, cx);
    let take_down = |cq| {
        drop(cq);
        Ok(())
    };
    Ok(phases(args, set_up, take_down)?.into())
}
