// SPDX-License-Identifier: GPL-2.0

//! Rounds: a device of its own, threads that use it, and its removal, at any time.

use crate::{
    counts::Counts,
    rng::Rng,
    steps::Turn,
    tally::Tally,
    way::Way,
    world::World, //
};
use kernel::{
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::{
    ClientRef,
    Sleepable, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The threads of a round.
struct Crew {
    /// How many have not ended.
    running: Atomic<u32>,
    /// Whether they are to end, as the device goes.
    stop: Atomic<bool>,
    /// Whether the device is gone.
    removed: Atomic<bool>,
}

/// What is to be done.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) threads: u32,
    /// In each context, and in each round of it.
    pub(crate) steps: u64,
    pub(crate) round: u64,
    /// Whether what may be posted in part is posted.
    pub(crate) parts: bool,
}

/// Takes the steps of a plan in context `C`, in rounds.
pub(crate) fn run<C: Way>(client: &ClientRef, plan: &Plan, cx: &Sleepable) -> Result {
    let (counts, begin) = (Counts::new()?, Instant::<Monotonic>::now());
    let mut seeds = Rng::new(plan.seed);
    let mut rounds = 0;
    while counts.sum() < plan.steps {
        let seed = seeds.next();
        rounds += 1;
        match round::<C>(client, plan, seed, &counts, cx) {
            // Allocations may be made to fail.
            Ok(()) | Err(ENOMEM) => {}
            Err(e) => {
                pr_err!(
                    "FAILED: {} round {rounds}, SEED={}: {e:?}\n",
                    C::NAME,
                    plan.seed
                );
                return Err(e);
            }
        }
    }
    counts.print(&C::NAME, Turn::<C>::STEPS.iter().map(|step| step.0));
    pr_info!(
        "{}: {} steps, {rounds} rounds, {} ms\n",
        C::NAME,
        counts.sum(),
        begin.elapsed().as_millis()
    );
    Ok(())
}

fn round<C: Way>(
    client: &ClientRef,
    plan: &Plan,
    seed: u64,
    counts: &Arc<Counts>,
    cx: &Sleepable,
) -> Result {
    static NEXT: Atomic<u32> = Atomic::new(0);
    let mut rng = Rng::new(seed);
    let tally = Tally::new()?;
    let name = CString::try_from_fmt(fmt!("random{}", NEXT.fetch_add(1, Relaxed)))?;
    let null = Arc::new(NullDevice::new(&name)?, GFP_KERNEL)?;
    let dev = client.device_by_name(&name, cx).ok_or(ENODEV)?;
    let world = World::<C>::new(&dev, &null, &tally, plan.parts, &mut rng, cx)?;
    drop(dev);
    let crew = Crew {
        running: Atomic::new(0),
        stop: Atomic::new(false),
        removed: Atomic::new(false),
    };
    let crew = Arc::new(crew, GFP_KERNEL)?;

    let share = plan.round.checked_div(plan.threads.into()).ok_or(EINVAL)?;
    for _ in 0..plan.threads {
        let (world, crew, counts) = (world.clone(), crew.clone(), counts.clone());
        let thread = Rng::new(rng.next());
        crew.running.fetch_add(1, Full);
        let running = crew.clone();
        let spawned = client.spawn(GFP_KERNEL, move |cx| {
            walk(&world, thread, share, &crew, &counts, cx);
            drop(world);
            crew.running.fetch_sub(1, Full);
        });
        if spawned.is_err() {
            running.running.fetch_sub(1, Full);
        }
    }
    // Owners may have the last reference to a QP, and nobody else may be left to poll.
    let cq = world.cq.clone();
    drop(world);

    // The device goes in the middle of one round in three.
    let end = match rng.once_in(3) {
        true => counts.sum() + u64::from(rng.below(plan.round as u32)),
        false => u64::MAX,
    };
    while crew.running.load(Acquire) > 0 && counts.sum() < end {
        release(&null, &mut rng);
    }
    crew.stop.store(true, Relaxed);
    loop {
        let (null, crew) = (null.clone(), crew.clone());
        let spawned = client.spawn(GFP_KERNEL, move |_| {
            null.remove();
            drop(null);
            crew.removed.store(true, Release);
        });
        // Allocations may be made to fail.
        if spawned.is_ok() {
            break;
        }
    }
    for turn in 1_u64.. {
        if crew.running.load(Acquire) == 0 && tally.is_over() {
            break;
        }
        release(&null, &mut rng);
        C::settle(&cq);
        if turn % 5000 == 0 {
            pr_err!(
                "FAILED: {}: SEED={}: waits, {}\n",
                C::NAME,
                plan.seed,
                *tally
            );
        }
    }
    drop(cq);
    while !crew.removed.load(Acquire) {
        release(&null, &mut rng);
    }

    if !tally.is_exact() || null.objects() != [0; 4] {
        pr_err!("FAILED: {}: SEED={}: {}\n", C::NAME, plan.seed, *tally);
        return Err(EIO);
    }
    Ok(())
}

/// Lets go of what is held back, in turn or reversed, now and then.
fn release(null: &NullDevice, rng: &mut Rng) {
    let _ = null.inject(Injection::Release {
        count: u32::MAX,
        reversed: rng.once_in(2),
    });
    fsleep(Delta::from_millis(1));
}

/// Takes the steps of one thread.
fn walk<C: Way>(
    world: &World<C>,
    rng: Rng,
    steps: u64,
    crew: &Crew,
    counts: &Counts,
    cx: &Sleepable,
) {
    let mut turn = Turn {
        world,
        rng,
        kept: KVec::new(),
        cx,
    };
    for _ in 0..steps {
        if crew.stop.load(Relaxed) {
            break;
        }
        counts.count(turn.step());
    }
}
