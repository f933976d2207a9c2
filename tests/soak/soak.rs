// SPDX-License-Identifier: GPL-2.0

//! Very many completions on a null device, in each polling context: each owner comes back once for
//! each time that it was posted.
//!
//! All of it is done while the module is loaded, which fails if a number is wrong.

use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Completion, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    context,
    device::Device,
    prelude::*, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The number of owners that are under way at a time.
const OWNERS: u32 = 64;

/// The state that the owners of one run share.
#[pin_data]
struct Run {
    /// The number of requests that are still to be posted; less than none at the end.
    left: Atomic<i64>,
    /// The number of owners that will not be posted again.
    ended: Atomic<u32>,
    /// Their counts.
    posted: Atomic<i64>,
    back: Atomic<i64>,
    #[pin]
    done: Completion,
}

/// An owner, which posts itself again each time that it comes back. Only one has it at a time, so
/// it counts without atomics.
#[derive(HasCqe)]
struct Owner<C: Provides<context::Atomic>> {
    cqe: Cqe<Self>,
    qp: Qp<C>,
    run: Arc<Run>,
    posted: i64,
    back: i64,
    failed: bool,
}

impl<C: Provides<context::Atomic> + Unpin> Owner<C> {
    /// Posts the owner, unless enough was posted.
    fn post(mut self: Pin<KBox<Self>>) {
        if self.failed || self.run.left.fetch_sub(1, Relaxed) <= 0 {
            return self.end();
        }
        self.posted += 1;
        let qp = self.qp.clone();
        if let Err(e) = qp.post_send(self, |_| Ok(SendWr::send([]))) {
            pr_err!("a request was refused: {:?}\n", e.error());
            if let Some(owner) = e.owner {
                owner.end();
            }
        }
    }

    /// Adds what the owner has counted, and tells when it is the last one.
    fn end(self: Pin<KBox<Self>>) {
        let run = self.run.clone();
        run.posted.fetch_add(self.posted, Relaxed);
        run.back.fetch_add(self.back, Relaxed);
        drop(self);
        if run.ended.fetch_add(1, Full) + 1 == OWNERS {
            run.done.complete_all();
        }
    }
}

impl<C: Provides<context::Atomic> + Unpin> CqeHandler for Owner<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.back += 1;
        this.failed |= wc.result().is_err();
        this.post();
    }
}

/// Completes `count` requests in polling context `C`.
fn soak<C: context::FixedContext + Provides<context::Atomic> + Unpin>(
    dev: &Device,
    null: &NullDevice,
    count: i64,
    wait: fn(&Cq<C>, &Run),
    cx: &Sleepable,
) -> Result {
    let caps = Caps::new(OWNERS, 0);
    let pd = Pd::alloc(dev, cx)?;
    let cq = Cq::<C>::alloc_any(dev, caps.entries(), cx)?;
    let qp = Qp::create_raw(&pd, &cq, &cq, &caps, cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let run = Arc::pin_init(
        pin_init!(Run {
            left: Atomic::new(count),
            ended: Atomic::new(0),
            posted: Atomic::new(0),
            back: Atomic::new(0),
            done <- Completion::new(),
        }),
        GFP_KERNEL,
    )?;
    let mut owners = KVec::with_capacity(OWNERS as usize, GFP_KERNEL)?;
    for _ in 0..OWNERS {
        let owner = Owner {
            cqe: Cqe::new(),
            qp: qp.clone(),
            run: run.clone(),
            posted: 0,
            back: 0,
            failed: false,
        };
        owners.push(KBox::pin(owner, GFP_KERNEL)?, GFP_KERNEL)?;
    }
    let begin = Instant::<Monotonic>::now();
    owners.into_iter().for_each(Owner::post);
    wait(&cq, &run);
    let (posted, back) = (run.posted.load(Relaxed), run.back.load(Relaxed));
    pr_info!(
        "{}: {posted} posted, {back} back, {} ms\n",
        C::NAME,
        begin.elapsed().as_millis()
    );
    if posted != count || back != count {
        return Err(EIO);
    }
    Ok(())
}

fn sleep<C: PollContext>(_: &Cq<C>, run: &Run) {
    run.done.wait_for_completion();
}

fn poll(cq: &Cq<Direct>, run: &Run) {
    while run.ended.load(Relaxed) < OWNERS {
        cq.process(1 << 16);
        // All of it takes a while, and others are to run.
        fsleep(Delta::from_micros(1));
    }
}

struct Soak;

impl Client for Soak {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Soak)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let count = module_parameters::completions.value();
        let null = NullDevice::new(c"soak")?;
        let dev = client.device_by_name(null.name(), cx).ok_or(ENODEV)?;
        soak::<Direct>(&dev, &null, count, poll, cx)?;
        soak::<Softirq>(&dev, &null, count, sleep, cx)?;
        soak::<Workqueue>(&dev, &null, count, sleep, cx)?;
        soak::<UnboundWorkqueue>(&dev, &null, count, sleep, cx)
    }
}

rdma::module_rdma_client! {
    type: Soak,
    name: "rdma_soak",
    authors: ["rdma-rs authors"],
    description: "Very many completions on a null device",
    license: "GPL",
    params: {
        completions: i64 { default: 1_000_000, description: "how many, in each polling context", },
    },
}
