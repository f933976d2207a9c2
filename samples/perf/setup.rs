// SPDX-License-Identifier: GPL-2.0

//! QPs, and CQs that the RDMA core polls: so many at once are set up, and then taken down.

use crate::{
    args::Args,
    link::{
        Path,
        TIMEOUT, //
    },
    poll::{
        alloc_cq,
        Cq,
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
use rdma::{
    device::Device,
    prelude::*, //
};

const CAPS: Caps = Caps::new(1, 1);

/// Objects that are set up, and taken down in the opposite order.
pub(crate) trait Objects {
    fn set_up(&mut self) -> Result;
    fn take_down(&mut self) -> Result;
}

/// Has objects set up, then taken down, until there were so many.
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
        let setup = began.elapsed().as_nanos();
        figures.setup_ns = figures.setup_ns.saturating_add(setup);
        if hold {
            args.hold()?;
        }
        let ending = Instant::<Monotonic>::now();
        for _ in 0..args.qps {
            objects.take_down()?;
        }
        let teardown = ending.elapsed().as_nanos();
        figures.teardown_ns = figures.teardown_ns.saturating_add(teardown);
        figures.ops = figures.ops.saturating_add(args.qps.into());
    }
    figures.ns = figures.setup_ns.saturating_add(figures.teardown_ns);
    Ok(())
}

/// Sets objects up and takes them down, as often as is to be measured.
#[inline(never)]
pub(crate) fn phases(args: &Args<'_>, objects: &mut dyn Objects, report: &mut Report) -> Result {
    rounds(args, objects, args.warmup, false, &mut report.figures)?;
    rounds(args, objects, args.count, true, &mut report.figures)
}

struct Qps<'a> {
    qps: KVVec<Qp>,
    pd: Pd,
    cq: Cq,
    path: Path,
    cx: &'a Sleepable,
}

impl Objects for Qps<'_> {
    fn set_up(&mut self) -> Result {
        let qp = Qp::create_raw(&self.pd, &self.cq, &self.cq, &CAPS, self.cx)?;
        self.path.connect(&qp, 0, self.cx)?;
        Ok(self.qps.push_within_capacity(qp)?)
    }

    fn take_down(&mut self) -> Result {
        self.qps.pop().ok_or(EIO)?.destroy(self.cx)
    }
}

/// QPs that can send, without a peer.
pub(crate) fn qps(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let dev = device(client, args.device, cx)?;
    let entries = CAPS.entries().checked_mul(args.qps).ok_or(EINVAL)?;
    let mut qps = Qps {
        qps: KVVec::with_capacity(args.qps as usize, GFP_KERNEL)?,
        pd: Pd::alloc(&dev, cx)?,
        cq: alloc_cq(&dev, entries, args.context, cx)?,
        path: Path::new(&dev, &dev, TIMEOUT)?,
        cx,
    };
    phases(args, &mut qps, report)
}

/// CQs of a few entries. In a softirq, to destroy one waits for a grace period of RCU.
struct Cqs<'a> {
    cqs: KVVec<Cq>,
    dev: Device,
    args: &'a Args<'a>,
    cx: &'a Sleepable,
}

impl Objects for Cqs<'_> {
    fn set_up(&mut self) -> Result {
        let cq = alloc_cq(&self.dev, self.args.depth, self.args.context, self.cx)?;
        Ok(self.cqs.push_within_capacity(cq)?)
    }

    fn take_down(&mut self) -> Result {
        self.cqs.pop().ok_or(EIO)?.destroy(self.cx)
    }
}

pub(crate) fn cqs(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let mut cqs = Cqs {
        cqs: KVVec::with_capacity(args.qps as usize, GFP_KERNEL)?,
        dev: device(client, args.device, cx)?,
        args,
        cx,
    };
    phases(args, &mut cqs, report)
}
