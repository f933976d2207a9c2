// SPDX-License-Identifier: GPL-2.0

//! The polling contexts: where CQs come from, and how they are polled.

use crate::{
    owners::Message,
    rng::Rng, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// A polling context.
pub(crate) trait Way: Provides<Atomic> + Unpin + Sized {
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
    let mut batch = Batch::<5>::new();
    match rng.below(5) {
        0 => drop(cq.process(1 + rng.below(40))),
        1 => drop(cq.process_with::<Message, 0>(1 + rng.below(40))?),
        2 => drop(cq.process_each::<Message, 0>(16, |owner, _wc| owner.life.back())?),
        3 => {
            cq.poll(&mut batch)?;
            // A completion that is not taken goes to its handler: now, or at the end of the batch.
            drop(batch.next());
            if rng.once_in(2) {
                batch.dispatch();
            }
        }
        _ => {
            let completion = cq.next(&mut batch)?;
            if let Some(Ok((owner, _wc))) = completion.map(|c| c.take::<Message, 0>()) {
                owner.life.back();
            }
        }
    }
    Ok(())
}

/// Makes a CQ of one's own or takes a part of one that others share.
fn alloc_or_share<C: CorePolled>(
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
            cq.wait(1, cx)?;
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
