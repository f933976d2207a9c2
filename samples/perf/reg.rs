// SPDX-License-Identifier: GPL-2.0

//! Fast registrations: each MR is registered, then invalidated, and so on.

use crate::{
    args::Args,
    end::{
        between,
        End, //
    },
    link,
    poll::{
        handlers,
        Qp, //
    },
    run::{
        Figures,
        Owned,
        Report,
        Run, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::prelude::*;

/// The memory of an MR, in bytes.
const SIZE: usize = 16 * PAGE_SIZE;

/// The uses of an [`FastReg`] as a request.
const REG: u64 = 0;
const INV: u64 = 1;

#[derive(HasCqe)]
#[repr(C)]
pub(crate) struct FastReg {
    reg: Cqe<Self, REG>,
    inv: Cqe<Self, INV>,
    region: Region<Bidirectional>,
    /// The number of times that it still has to complete.
    left: u32,
    pub(crate) qp: Qp,
    run: Arc<Run>,
}

impl FastReg {
    /// Has it complete so often, and returns its QP.
    pub(crate) fn prepare(&mut self, times: u32) -> Qp {
        self.left = times;
        self.qp.clone()
    }

    /// Registers it for the first time.
    #[inline(never)]
    pub(crate) fn start(self: Pin<KBox<Self>>, qp: &Qp) {
        let posted = qp.post_send(self, |fmr| {
            Ok(RegWr::remote_write(&fmr.region).done_by::<REG>())
        });
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[inline(never)]
    fn register_again(self: Pin<KBox<Self>>, wc: &Wc) {
        let posted = Qp::repost_send(
            self,
            wc,
            |fmr| &fmr.qp,
            |fmr| Ok(RegWr::remote_write(&fmr.region).done_by::<REG>()),
        );
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[inline]
    fn registered(self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.fail(e.into());
        }
        let posted = Qp::repost_send(
            self,
            wc,
            |fmr| &fmr.qp,
            |fmr| Ok(InvWr::new(&fmr.region).done_by::<INV>()),
        );
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[inline]
    fn invalidated(mut self: Pin<KBox<Self>>, wc: &Wc) {
        if let Err(e) = wc.result() {
            return self.fail(e.into());
        }
        self.left = self.left.wrapping_sub(1);
        if self.left % 64 == 0 {
            return self.milestone(wc);
        }
        self.register_again(wc);
    }

    #[cold]
    #[inline(never)]
    fn fail(self: Pin<KBox<Self>>, e: Error) {
        self.run.fail(e);
    }

    #[cold]
    #[inline(never)]
    fn refused(e: PostError<Pin<KBox<Self>>>) {
        let error = e.error();
        if let Some(fmr) = e.owner {
            fmr.fail(error);
        }
    }

    #[cold]
    #[inline(never)]
    fn milestone(self: Pin<KBox<Self>>, wc: &Wc) {
        if self.left == 0 {
            return self.run.clone().through(Owned::FastReg(self));
        }
        self.run.tick();
        self.register_again(wc);
    }
}

impl CqeHandler<REG> for FastReg {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.registered(wc);
    }
}

impl CqeHandler<INV> for FastReg {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.invalidated(wc);
    }
}

#[inline(never)]
fn phase(args: &Args<'_>, end: &End, run: &Run, count: u32, figures: &mut Figures) -> Result {
    let poller = handlers(args.context, &end.cq, args.depth);
    let (_, ns) = run.phase(count, &poller, &None)?;
    figures.ops = count.into();
    figures.ns = ns;
    figures.posts = figures.ops.saturating_mul(2);
    figures.completions = figures.posts;
    Ok(())
}

fn register(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [a, b] = ends else { return Err(EINVAL) };
    link::connect(a, b, args.timeout, cx)?;
    let qp = a.qps.first().ok_or(EINVAL)?;
    for _ in 0..args.depth {
        let fmr = KBox::new_uninit(GFP_KERNEL)?;
        let region = Region::new(Buf::alloc(&a.pd, SIZE, cx)?, cx)?;
        let fmr = fmr.write(FastReg {
            reg: Cqe::new(),
            inv: Cqe::new(),
            region,
            left: 0,
            qp: qp.clone(),
            run: run.clone(),
        });
        run.keep(Owned::FastReg(fmr.into()));
    }
    phase(args, a, run, args.warmup, &mut report.figures)?;
    phase(args, a, run, args.count, &mut report.figures)
}

pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let caps = [Caps::new(args.depth, 0), Caps::new(1, 0)];
    between(client, args, 1, &caps, register, report, cx)
}
