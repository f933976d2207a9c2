// SPDX-License-Identifier: GPL-2.0

//! Rounds: a device of its own, threads that use it, and its removal, at any time.

use crate::{
    counts::Counts,
    net::Transport,
    rng::Rng,
    steps::Turn,
    tally::Tally,
    way::Way,
    world::World,
    Random, //
};
use kernel::{
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed, //
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
use rdma::{
    device::Device,
    prelude::{
        ClientRef,
        DeviceData,
        Sleepable, //
    }, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The state of a device.
pub(crate) struct OnDevice {
    /// `true` if it goes, as it is removed or the module is unloaded: the threads are to end.
    goes: Arc<Atomic<bool>>,
}

impl DeviceData<Random> for OnDevice {
    fn add(_client: Pin<&Random>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        let goes = || {
            Ok(Self {
                goes: Arc::new(Atomic::new(false), GFP_KERNEL)?,
            })
        };
        goes()
    }

    fn remove(self: Pin<&Self>, _client: Pin<&Random>, _dev: &Device, _cx: &Sleepable) {
        self.goes.store(true, Relaxed);
    }
}

/// The parameters of a run.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) threads: u32,
    /// In each context, and in each round of it.
    pub(crate) steps: u64,
    pub(crate) round: u64,
    /// `true` if what may be posted in part is posted.
    pub(crate) parts: bool,
    /// `true` if CQs may be shared ones.
    pub(crate) pool: bool,
    pub(crate) transport: Transport,
}

/// Takes the steps of a plan in context `C`, in rounds, until `over`.
pub(crate) fn run<C: Way>(
    client: &ClientRef,
    plan: &Plan,
    over: &Atomic<bool>,
    cx: &Sleepable,
) -> Result {
    let (counts, begin) = (Counts::new()?, Instant::<Monotonic>::now());
    let mut seeds = Rng::new(plan.seed);
    let mut rounds = 0;
    while counts.sum() < plan.steps && !over.load(Relaxed) {
        let seed = seeds.next();
        rounds += 1;
        // Says how many steps it took to find what stops the kernel.
        let sum = counts.sum();
        pr_info!("{}: round {rounds} begins after {sum} steps\n", C::NAME);
        match round::<C>(client, plan, seed, &counts, cx) {
            // Allocations may be made to fail.
            Ok(()) | Err(ENOMEM) => {}
            // The device, or the module, is about to go.
            Err(ENODEV) => {
                rounds -= 1;
                fsleep(Delta::from_millis(10));
            }
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
    let name = match plan.transport.device() {
        Some(name) => name.to_cstring()?,
        None => CString::try_from_fmt(fmt!("random{}", NEXT.fetch_add(1, Relaxed)))?,
    };
    let null = match plan.transport {
        Transport::Null => Some(Arc::new(NullDevice::new(&name)?, GFP_KERNEL)?),
        _ => None,
    };
    let dev = client.device_by_name(&name, cx).ok_or(ENODEV)?;
    let goes = dev.data::<Random>(cx).ok_or(ENODEV)?.goes.clone();
    let world = World::<C>::new(client, &dev, null.as_ref(), &tally, plan, &mut rng, cx);
    drop(dev);
    // A device of the network may go at any time.
    let world = world.map_err(|e| if null.is_some() { e } else { ENODEV })?;
    // The threads that have not ended.
    let running = Arc::new(Atomic::new(0_u32), GFP_KERNEL)?;

    // A single thread meets the faults of its own injections only.
    let threads = if rng.once_in(4) { 1 } else { plan.threads };
    let share = plan.round.checked_div(threads.into()).ok_or(EINVAL)?;
    for _ in 0..threads {
        let (world, counts, ended) = (world.clone(), counts.clone(), running.clone());
        let (thread, goes) = (Rng::new(rng.next()), goes.clone());
        running.fetch_add(1, Full);
        let spawned = client.spawn(GFP_KERNEL, move |cx| {
            walk(&world, thread, share, &goes, &counts, cx);
            drop(world);
            ended.fetch_sub(1, Full);
        });
        if spawned.is_err() {
            running.fetch_sub(1, Full);
        }
    }
    // Owners may have the last reference to a QP, and its CQ may not be polled by another thread.
    let cqs = [world.parts.cq.clone(), world.parts.session_cq.clone()];
    drop(world);

    // A null device goes in the middle of one round in three.
    let end = match rng.once_in(3) && null.is_some() {
        true => counts.sum() + u64::from(rng.below(plan.round as u32)),
        false => u64::MAX,
    };
    while running.load(Acquire) > 0 && counts.sum() < end {
        release(null.as_deref(), &mut rng);
    }
    if let Some(null) = &null {
        null.begin_removal()?;
    }
    for turn in 1_u64.. {
        if running.load(Acquire) == 0 && tally.is_over() {
            break;
        }
        release(null.as_deref(), &mut rng);
        cqs.iter().for_each(C::settle);
        if turn % 5000 == 0 {
            pr_err!(
                "FAILED: {}: SEED={}: waits, {}\n",
                C::NAME,
                plan.seed,
                *tally
            );
        }
    }
    drop(cqs);
    while null.as_ref().is_some_and(|null| !null.is_removed()) {
        release(null.as_deref(), &mut rng);
    }

    let left = null.is_some_and(|null| null.objects() != [0; 4]);
    if !tally.is_exact() || left {
        pr_err!("FAILED: {}: SEED={}: {}\n", C::NAME, plan.seed, *tally);
        return Err(EIO);
    }
    Ok(())
}

/// Lets go of what is held back, in turn or reversed, now and then.
fn release(null: Option<&NullDevice>, rng: &mut Rng) {
    let reversed = rng.once_in(2);
    if let Some(null) = null {
        let _ = null.inject(Injection::Release {
            count: u32::MAX,
            reversed,
        });
    }
    fsleep(Delta::from_millis(1));
}

/// Takes the steps of one thread.
fn walk<C: Way>(
    world: &World<C>,
    rng: Rng,
    steps: u64,
    goes: &Atomic<bool>,
    counts: &Counts,
    cx: &Sleepable,
) {
    let mut turn = Turn {
        world,
        rng,
        kept: KVec::new(),
        prepared: KVec::new(),
        cx,
    };
    for _ in 0..steps {
        if goes.load(Relaxed) {
            break;
        }
        let begin = Instant::now();
        counts.count(turn.step(), begin);
    }
}
