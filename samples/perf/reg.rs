// SPDX-License-Identifier: GPL-2.0

//! Fast registrations: each MR is registered, then invalidated, and so on.

use crate::{
    args::Args,
    end::{
        finish,
        End, //
    },
    link,
    poll::{
        caller,
        Owner,
        Qp, //
    },
    run::{
        device,
        share,
        Figures,
        Report,
        Run, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// The memory of an MR, in bytes.
const SIZE: usize = 16 * PAGE_SIZE;

/// The uses of an [`FastReg`] as a request.
const REG: u64 = 0;
const INV: u64 = 1;

type Owned = Pin<KBox<FastReg>>;

#[derive(HasCqe)]
struct FastReg {
    reg: Cqe<Self, REG>,
    inv: Cqe<Self, INV>,
    region: Region<Bidirectional>,
    /// The number of times that it still has to complete.
    left: u32,
    qp: Arc<Qp>,
    run: Arc<Run<Owned>>,
}

impl FastReg {
    /// Registers it for the first time.
    #[inline(never)]
    fn register(self: Pin<KBox<Self>>) {
        let qp = self.qp.clone();
        let posted = qp.post_send::<_, _, REG, _>(self, |fmr| Ok(RegWr::remote_write(&fmr.region)));
        if let Err(e) = posted {
            Self::refused(e);
        }
    }

    #[inline(never)]
    fn register_again(self: Pin<KBox<Self>>, wc: &Wc) {
        let posted = Qp::repost_send::<_, _, REG, _>(
            self,
            wc,
            |fmr| &fmr.qp,
            |fmr| Ok(RegWr::remote_write(&fmr.region)),
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
        let posted = Qp::repost_send::<_, _, INV, _>(
            self,
            wc,
            |fmr| &fmr.qp,
            |fmr| Ok(InvWr::new(&fmr.region)),
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
        if self.run.goes_on(self.left) {
            self.register_again(wc);
        } else {
            self.end();
        }
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
    fn end(self: Pin<KBox<Self>>) {
        self.run.clone().through(self);
    }
}

impl CqeHandler<REG> for FastReg {
    type Pointer = Owned;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned, wc: &Wc, _cx: &Atomic) {
        this.registered(wc);
    }
}

impl CqeHandler<INV> for FastReg {
    type Pointer = Owned;
    type Needs = Atomic;

    #[inline]
    fn done(this: Owned, wc: &Wc, _cx: &Atomic) {
        this.invalidated(wc);
    }
}

impl Owner for FastReg {
    #[inline]
    fn claim(completion: Completion<'_>) {
        match completion.take::<Self, REG>() {
            Ok((this, wc)) => this.registered(wc),
            Err(other) => {
                if let Ok((this, wc)) = other.take_inv::<Self, INV>() {
                    this.invalidated(wc);
                }
            }
        }
    }
}

#[inline(never)]
fn phase(end: &End, args: &Args<'_>, run: &Run<Owned>, count: u32) -> Result<Figures> {
    let owners = args.depth.min(count);
    let mut fmrs = KVec::with_capacity(owners as usize, GFP_KERNEL)?;
    for n in 0..owners {
        let mut fmr = run.take().ok_or(EIO)?;
        fmr.left = share(count, n, owners);
        fmrs.push(fmr, GFP_KERNEL)?;
    }
    if owners == 0 {
        return Ok(Figures::default());
    }
    let poll = caller::<FastReg>(args.context);
    run.begin(owners);
    let began = Instant::<Monotonic>::now();
    for fmr in fmrs {
        fmr.register();
    }
    let over = run.wait(poll.map(|poll| move || poll(&end.cq, args.depth)))?;
    Ok(Figures {
        ops: count.into(),
        ns: (over - began).as_nanos(),
        posts: 2 * u64::from(count),
        completions: 2 * u64::from(count),
        ..Default::default()
    })
}

#[inline(never)]
fn register(
    args: &Args<'_>,
    ends: &[End; 2],
    run: &Arc<Run<Owned>>,
    cx: &Sleepable,
) -> Result<Figures> {
    let [a, b] = ends;
    link::connect(a, b, args.timeout, cx)?;
    let qp = a.qps.first().ok_or(EINVAL)?;
    for _ in 0..args.depth {
        let fmr = FastReg {
            reg: Cqe::new(),
            inv: Cqe::new(),
            region: Region::new(Buf::alloc(&a.pd, SIZE, cx)?, cx)?,
            left: 0,
            qp: qp.clone(),
            run: run.clone(),
        };
        run.keep(KBox::pin(fmr, GFP_KERNEL)?);
    }
    phase(a, args, run, args.warmup)?;
    phase(a, args, run, args.count)
}

pub(crate) fn run(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let (dev, peer) = (
        device(client, args.device, cx)?,
        device(client, args.peer, cx)?,
    );
    let ends = [
        End::new(&dev, 1, &Caps::new(args.depth, 0), args.context, cx)?,
        End::new(&peer, 1, &Caps::new(1, 0), args.context, cx)?,
    ];
    let run = Run::new(args.depth as usize)?;
    let result = register(args, &ends, &run, cx);
    Ok(finish(&run, ends, result, cx)?.into())
}
