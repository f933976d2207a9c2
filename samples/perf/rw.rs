// SPDX-License-Identifier: GPL-2.0

//! Transfers by `rdma_rw`, of memory that a scatter list describes, as those of storage targets.
//! All are posted, then their completions are processed, and so on.

use crate::{
    args::{
        Args,
        Context, //
    },
    end::{
        between,
        End,
        Op, //
    },
    link,
    poll::{
        process,
        Qp, //
    },
    run::{
        Report,
        Run, //
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
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    sg::SgList, //
};

#[derive(HasCqe)]
#[repr(C)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx<Bidirectional, SgList<VVec<u8>>>,
    run: Arc<Run>,
}

impl CqeHandler for Transfer {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    #[inline]
    fn done(this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            failed(this, e);
        }
    }
}

#[cold]
#[inline(never)]
fn failed(transfer: Taken<Transfer>, e: WcError) {
    transfer.run.fail(e.into());
}

/// Posts all transfers.
#[inline(never)]
fn post(
    qp: &Qp,
    kept: &mut Requests<Transfer>,
    write: bool,
    remote: Remote,
    cx: &Sleepable,
) -> Result {
    kept.idle().try_for_each(|transfer| {
        qp.post_rw(transfer, |t| {
            Ok(if write {
                Rw::write(&t.data, .., remote, cx)
            } else {
                Rw::read(&t.data, .., remote, cx)
            })
        })
    })?;
    Ok(())
}

/// Does `count` transfers, in whole rounds.
#[inline(never)]
fn rounds(
    end: &End,
    kept: &mut Requests<Transfer>,
    op: Op,
    run: &Run,
    count: u32,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let (write, remote) = match op {
        Op::Read(from) => (false, from),
        Op::Write(to) => (true, to),
        Op::Send => return Err(EINVAL),
    };
    let qp = end.qps.first().ok_or(EINVAL)?;
    let depth = kept.count() as u32;
    let mut ops = 0;
    let begin = Instant::<Monotonic>::now();
    while ops < count {
        post(qp, kept, write, remote, cx)?;
        let mut left = depth;
        while left > 0 {
            match process(&end.cq, left)? {
                // On this device all are done when they are posted.
                0 => return Err(EIO),
                n => left = left.saturating_sub(n),
            }
        }
        run.check()?;
        ops = ops.saturating_add(depth);
    }
    let figures = &mut report.figures;
    figures.ns = begin.elapsed().as_nanos();
    figures.ops = ops.into();
    (figures.posts, figures.completions) = (figures.ops, figures.ops);
    Ok(())
}

fn transfer(
    args: &Args<'_>,
    ends: &mut [End],
    run: &Arc<Run>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let [a, b] = ends else { return Err(EINVAL) };
    link::connect(a, b, args.timeout, cx)?;
    let make = |_| {
        let memory = VVec::from_elem(0u8, args.size, GFP_KERNEL)?;
        Ok(Transfer {
            cqe: Cqe::new(),
            data: Ctx::new(SgList::new(memory, cx)?, GFP_KERNEL)?,
            run: run.clone(),
        })
    };
    let qp = a.qps.first().ok_or(EINVAL)?;
    let mut kept = Requests::new(qp, args.depth as usize, make, cx)?;
    let op = b.op(args, cx)?;
    rounds(a, &mut kept, op, run, args.warmup, report, cx)?;
    rounds(a, &mut kept, op, run, args.count, report, cx)
}

/// Runs where the caller polls: what is posted sleeps.
pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    if args.context != Context::Direct {
        return Err(EINVAL);
    }
    let caps = Caps::new(1, 0);
    between(client, args, 1, &[caps, caps], transfer, report, cx)
}
