// SPDX-License-Identifier: GPL-2.0

//! QPs, and CQs that the RDMA core polls: so many at once are set up, and then taken down.

use crate::{
    args::Args,
    link::Nowhere,
    poll::{
        alloc_cq,
        Qp, //
    },
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

/// Objects that are set up, and taken down in the opposite order.
trait Objects {
    fn set_up(&mut self) -> Result;
    fn take_down(&mut self) -> Result;
}

struct List<T, U, D> {
    objects: KVVec<T>,
    set_up: U,
    take_down: D,
}

impl<T, U: Fn() -> Result<T>, D: Fn(T) -> Result> Objects for List<T, U, D> {
    fn set_up(&mut self) -> Result {
        let object = (self.set_up)()?;
        Ok(self.objects.push_within_capacity(object)?)
    }

    fn take_down(&mut self) -> Result {
        (self.take_down)(self.objects.pop().ok_or(EIO)?)
    }
}

/// Has objects set up, then taken down, until there were so many. Not generic, as all but two calls
/// is the same for all objects.
#[inline(never)]
fn rounds(
    args: &Args<'_>,
    objects: &mut dyn Objects,
    total: u32,
    hold: bool,
    figures: &mut Figures,
) -> Result {
    *figures = Figures::default();
    while figures.ops < total.into() {
        let began = Instant::<Monotonic>::now();
        for _ in 0..args.qps {
            objects.set_up()?;
        }
        figures.setup_ns += began.elapsed().as_nanos();
        if hold {
            args.hold()?;
        }
        let ending = Instant::<Monotonic>::now();
        for _ in 0..args.qps {
            objects.take_down()?;
        }
        figures.teardown_ns += ending.elapsed().as_nanos();
        figures.ops += u64::from(args.qps);
    }
    figures.ns = figures.setup_ns + figures.teardown_ns;
    Ok(())
}

/// Sets objects up and takes them down, as often as is to be measured.
pub(crate) fn phases<T>(
    args: &Args<'_>,
    set_up: impl Fn() -> Result<T>,
    take_down: impl Fn(T) -> Result,
    report: &mut Report,
) -> Result {
    let mut list = List {
        objects: KVVec::with_capacity(args.qps as usize, GFP_KERNEL)?,
        set_up,
        take_down,
    };
    rounds(args, &mut list, args.warmup, false, &mut report.figures)?;
    rounds(args, &mut list, args.count, true, &mut report.figures)
}

/// QPs that can send, without a peer.
#[inline(never)]
pub(crate) fn qps(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let dev = device(client, args.device, cx)?;
    let pd = Pd::alloc(&dev, cx)?;
    let entries = CAPS.entries().checked_mul(args.qps).ok_or(EINVAL)?;
    let cq = alloc_cq(&dev, entries, args.context, cx)?;
    let nowhere = Nowhere::new(&dev)?;
    let set_up = || {
        let qp = Qp::create_raw(&pd, &cq, &cq, &CAPS, cx)?;
        nowhere.connect(&qp, cx)?;
        Ok(qp)
    };
    phases(args, set_up, |qp| qp.destroy(cx), report)
}

/// CQs of a few entries. They are taken down by work items, so the time of that means nothing.
#[inline(never)]
pub(crate) fn cqs(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let dev = device(client, args.device, cx)?;
    let set_up = || alloc_cq(&dev, args.depth, args.context, cx);
    let take_down = |cq| {
        drop(cq);
        Ok(())
    };
    phases(args, set_up, take_down, report)
}
