// SPDX-License-Identifier: GPL-2.0

//! The polling contexts: where CQs come from, and how they are polled.

use crate::{
    owners::Message,
    rng::Rng,
    slow,
    steps::Turn,
    talk,
    world::World, //
};
use kernel::prelude::*;
use rdma::{
    device::Device,
    prelude::*, //
};

/// A polling context.
pub(crate) trait Way: FixedContext + Provides<context::Atomic> + Unpin + Sized {
    /// Makes a CQ, which may be one that others share if `pool` is set.
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
    fn poll(t: &mut Turn<'_, Self>) -> Result;

    /// Polls what is left, where the core does not.
    fn settle(_cq: &Cq<Self>) {}

    /// Leaves completions of a CQ that may end before they are dispatched, where callers poll.
    fn leave(_cq: &Cq<Self>, _world: &World<Self>) -> Result {
        Ok(())
    }

    /// Uses the context of a QP in a handler, where there are such contexts.
    fn context(_t: &mut Turn<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }

    /// Ends a QP in a handler, where that may sleep.
    fn end_in_handler(_t: &mut Turn<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }
}

/// Completions that a caller has polled.
pub(crate) type Batch = WcArray<5>;

/// Polls in one of the ways in which callers can.
fn poll_any<C: Way + CallerPolled>(cq: &Cq<C>, t: &mut Turn<'_, C>) -> Result {
    let mut batch = Batch::new();
    let rng = &mut t.rng;
    // Owners that are not taken go to their handlers.
    match rng.below(6) {
        0 => drop(cq.process(1 + rng.below(40))),
        1 => drop(cq.process_with(1 + rng.below(40), |completion| {
            if let Ok((owner, _wc)) = completion.take::<Message, 0>() {
                owner.life.back();
            }
        })?),
        2 => {
            cq.poll(&mut batch)?;
            // One now, the others now or at the end of the batch.
            batch
                .completions()
                .take(1)
                .for_each(cq::Completion::dispatch);
            if rng.once_in(2) {
                batch.completions().for_each(drop);
            }
        }
        3 => {
            cq.poll(&mut batch)?;
            // Any thread may have the rest, later.
            batch
                .completions()
                .take(1)
                .for_each(cq::Completion::dispatch);
            return t.world.put_batch(batch);
        }
        4 => {
            let mut batch = t.world.take_batch().ok_or(ENODATA)?;
            if rng.once_in(2) {
                batch
                    .completions()
                    .take(1)
                    .for_each(cq::Completion::dispatch);
                return t.world.put_batch(batch);
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

fn leave_any<C: Way + CallerPolled>(cq: &Cq<C>, world: &World<C>) -> Result {
    let mut batch = Batch::new();
    cq.poll(&mut batch)?;
    world.put_batch(batch)
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

/// Returns one of the CQs that all threads use.
fn any_cq<C: Way>(t: &mut Turn<'_, C>) -> Cq<C> {
    let parts = &t.world.parts;
    match t.rng.once_in(2) {
        true => parts.cq.clone(),
        false => parts.session_cq.clone(),
    }
}

fn moderate<C: Way + CorePolled>(t: &mut Turn<'_, C>) -> Result {
    let (count, us) = (t.rng.below(8) as u16, t.rng.below(100) as u16);
    any_cq(t).moderate(count, us, t.cx)
}

impl Way for Direct {
    fn poll(t: &mut Turn<'_, Self>) -> Result {
        poll_any(&any_cq(t), t)
    }

    fn settle(cq: &Cq<Self>) {
        cq.process(1024);
    }

    fn leave(cq: &Cq<Self>, world: &World<Self>) -> Result {
        leave_any(cq, world)
    }
}

impl Way for Waited {
    fn poll(t: &mut Turn<'_, Self>) -> Result {
        let cq = any_cq(t);
        if t.rng.once_in(4) {
            cq.wait(Notify::NextComp, 1, t.cx)?;
        }
        poll_any(&cq, t)
    }

    fn settle(cq: &Cq<Self>) {
        cq.process(1024);
    }

    fn leave(cq: &Cq<Self>, world: &World<Self>) -> Result {
        leave_any(cq, world)
    }
}

macro_rules! core_polled {
    ($($context:ty $(, $end:path)?;)*) => {
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

            fn poll(t: &mut Turn<'_, Self>) -> Result {
                moderate(t)
            }

            fn context(t: &mut Turn<'_, Self>) -> Result {
                talk::context(t)
            }

            $(fn end_in_handler(t: &mut Turn<'_, Self>) -> Result {
                $end(t)
            })?
        })*
    };
}
core_polled! {
    Softirq;
    Workqueue, slow::end;
    UnboundWorkqueue, slow::end;
}
