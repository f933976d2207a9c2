// SPDX-License-Identifier: GPL-2.0

//! The polling contexts: where CQs come from, and how they are polled.

use crate::{
    owners::Message,
    rng::Rng, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// A polling context.
pub(crate) trait Way: FixedContext + Provides<Atomic> + Unpin + Sized {
    /// Makes a CQ, which may be one that others share if `pool` says so.
    fn make(
        dev: &Device,
        entries: u32,
        _pool: bool,
        _rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<Cq<Self>> {
        Cq::alloc_any(dev, entries, cx)
    }

    /// Polls, or moderates what the core polls.
    fn poll(cq: &Cq<Self>, rng: &mut Rng, cx: &Sleepable) -> Result;

    /// Polls what is left, where the core does not.
    fn settle(_cq: &Cq<Self>) {}
}

/// Polls in one of the ways in which callers can.
fn poll_any<C: CallerPolled>(cq: &Cq<C>, rng: &mut Rng) -> Result {
    let mut batch = WcArray::<5>::new();
    // Owners that are not taken go to their handlers.
    match rng.below(4) {
        0 => drop(cq.process(1 + rng.below(40))),
        1 => drop(cq.process_with(1 + rng.below(40), |completion| {
            if let Ok((owner, _wc)) = completion.take::<Message, 0>() {
                owner.life.back();
            }
        })?),
        2 => {
            cq.poll(&mut batch)?;
            // One now, the others now or at the end of the batch.
            batch.completions().take(1).for_each(Completion::dispatch);
            if rng.once_in(2) {
                batch.completions().for_each(drop);
            }
        }
        _ => {
            cq.poll(&mut batch)?;
            let completion = batch.completions().next();
            if let Some(Ok((owner, _wc))) = completion.map(|c| c.take::<Message, 0>()) {
                owner.life.back();
            }
        }
    }
    Ok(())
}

/// Makes a CQ of one's own or takes a part of one that others share.
fn alloc_or_share<C: CorePolled + FixedContext>(
    dev: &Device,
    entries: u32,
    pool: bool,
    rng: &mut Rng,
    cx: &Sleepable,
) -> Result<Cq<C>> {
    match rng.below(3) {
        0 if pool => Cq::pool_get(dev, entries, None, cx),
        1 => Cq::alloc(dev, entries, rng.below(dev.num_comp_vectors()), cx),
        _ => Cq::alloc_any(dev, entries, cx),
    }
}

fn moderate<C: CorePolled>(cq: &Cq<C>, rng: &mut Rng, cx: &Sleepable) -> Result {
    cq.moderate(rng.below(8) as u16, rng.below(100) as u16, cx)
}

impl Way for Direct {
    fn poll(cq: &Cq<Self>, rng: &mut Rng, _cx: &Sleepable) -> Result {
        poll_any(cq, rng)
    }

    fn settle(cq: &Cq<Self>) {
        cq.process(1024);
    }
}

impl Way for Waited {
    fn poll(cq: &Cq<Self>, rng: &mut Rng, cx: &Sleepable) -> Result {
        if rng.once_in(4) {
            cq.wait(Notify::NextComp, 1, cx)?;
        }
        poll_any(cq, rng)
    }

    fn settle(cq: &Cq<Self>) {
        cq.process(1024);
    }
}

macro_rules! core_polled {
    ($($context:ty),*) => {
        $(impl Way for $context {
            fn make(
                dev: &Device,
                entries: u32,
                pool: bool,
                rng: &mut Rng,
                cx: &Sleepable,
            ) -> Result<Cq<Self>> {
                alloc_or_share(dev, entries, pool, rng, cx)
            }

            fn poll(cq: &Cq<Self>, rng: &mut Rng, cx: &Sleepable) -> Result {
                moderate(cq, rng, cx)
            }
        })*
    };
}
core_polled!(Softirq, Workqueue, UnboundWorkqueue);
