// SPDX-License-Identifier: GPL-2.0

//! Several threads that use the same objects at once.

use crate::fixture::{
    wait,
    CountDrop,
    Counter,
    Env,
    Link,
    OnDone, //
};
use kernel::prelude::*;
use rdma::{
    cq::WcArray,
    prelude::*, //
};

/// The number of times that each thread does what it does.
const TURNS: i32 = 40;

/// Runs functions at the same time, each in a thread, and waits for the end of all. They say what
/// went wrong by failing.
fn at_once<const N: usize>(
    env: &Env,
    functions: [KBox<dyn Fn(&Sleepable) -> Result + Send>; N],
) -> Result {
    let (ended, failed, ready) = (Counter::new()?, Counter::new()?, Counter::new()?);
    for function in functions {
        let (ended, failed, ready) = (ended.clone(), failed.clone(), ready.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            ready.up();
            let all = wait(|| ready.get() == N as i32);
            if all.and_then(|()| function(cx)).is_err() {
                failed.up();
            }
            // Its fields are dropped in this thread.
            drop(function);
            ended.up();
        })?;
    }
    wait(|| ended.get() == N as i32)?;
    check_eq!(failed.get(), 0);
    Ok(())
}

fn boxed(
    function: impl Fn(&Sleepable) -> Result + Send + 'static,
) -> Result<KBox<dyn Fn(&Sleepable) -> Result + Send>> {
    Ok(KBox::new(function, GFP_KERNEL)? as KBox<dyn Fn(&Sleepable) -> Result + Send>)
}

/// Posts a request that counts when it completes and when it is dropped.
fn post(qp: &Qp<Direct>, completed: &Arc<Counter>, gone: &Arc<Counter>) -> Result {
    let (completed, gone) = (completed.clone(), CountDrop(gone.clone()));
    let counted = OnDone::<context::Atomic, _>::new(move |_, _| {
        completed.up();
        drop(gone);
    })?;
    let nowhere = Remote { addr: 0, rkey: 0 };
    Ok(qp.post_send(counted, |_| Ok(SendWr::rdma_write([], nowhere)))?)
}

/// An owner that shares its region.
#[derive(HasCqe)]
struct Sharing {
    cqe: Cqe<Self>,
    region: Arc<SharedRegion<Bidirectional>>,
    completed: Arc<Counter>,
}

impl Sharing {
    fn new(
        region: &Arc<SharedRegion<Bidirectional>>,
        completed: &Arc<Counter>,
    ) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            region: region.clone(),
            completed: completed.clone(),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Sharing {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.completed.up();
    }
}

/// A request that is kept.
#[derive(HasCqe)]
struct Again {
    cqe: Cqe<Self>,
    /// The number of times that it has completed, which only its owner looks at.
    uses: i32,
    completed: Arc<Counter>,
    _gone: CountDrop,
}

impl Again {
    /// Returns an array of one.
    fn new(
        qp: &Qp<Direct>,
        completed: &Arc<Counter>,
        gone: &Arc<Counter>,
        cx: &Sleepable,
    ) -> Result<Requests<Self>> {
        let make = |_| {
            Ok(Self {
                cqe: Cqe::new(),
                uses: 0,
                completed: completed.clone(),
                _gone: CountDrop(gone.clone()),
            })
        };
        Requests::new(qp, 1, make, cx)
    }

    /// Posts it, once it is not in flight, where others may poll.
    fn post(kept: &mut Requests<Self>, qp: &Qp<Direct>) -> Result {
        let mut in_flight = None;
        wait(|| {
            in_flight = kept.take();
            in_flight.is_some()
        })?;
        let nowhere = Remote { addr: 0, rkey: 0 };
        let in_flight = in_flight.ok_or(EBUSY)?;
        Ok(qp.post_send(in_flight, |_| Ok(SendWr::rdma_write([], nowhere)))?)
    }
}

impl CqeHandler for Again {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(mut this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.uses += 1;
        this.completed.up();
    }
}

#[kunit_tests(rdma_threads)]
mod tests {
    use super::*;

    #[test]
    fn post_and_poll_in_every_way() -> Result {
        let caps = Caps::new(2 * TURNS as u32, 1);
        let link = Link::<Direct>::with(&caps, &cm::ConnParam::default())?;
        let (completed, gone) = (Counter::new()?, Counter::new()?);
        let poster = || {
            let (qp, completed, gone) = (link.a.qp.clone(), completed.clone(), gone.clone());
            boxed(move |_| (0..TURNS).try_for_each(|_| post(&qp, &completed, &gone)))
        };
        let (cq, done) = (link.send_cq.clone(), completed.clone());
        let processes = boxed(move |_| {
            wait(|| {
                cq.process(3);
                done.get() == 2 * TURNS
            })
        })?;
        let (cq, done) = (link.send_cq.clone(), completed.clone());
        let batches = boxed(move |_| {
            let mut batch = WcArray::<5>::new();
            wait(|| {
                // A completion that was not taken goes to its handler when the batch is filled
                // again.
                let polled = cq.poll(&mut batch);
                drop(batch.completions().next());
                batch.completions().for_each(cq::Completion::dispatch);
                polled.is_err() || done.get() == 2 * TURNS
            })
        })?;
        at_once(&link.env, [poster()?, poster()?, processes, batches])?;
        check_eq!(completed.get(), 2 * TURNS);
        check_eq!(gone.get(), 2 * TURNS);
        Ok(())
    }

    #[test]
    fn kept_requests_complete_elsewhere() -> Result {
        let caps = Caps::new(2 * TURNS as u32, 1);
        let link = Link::<Direct>::with(&caps, &cm::ConnParam::default())?;
        let (completed, gone) = (Counter::new()?, Counter::new()?);
        // One goes on with the same request, the other lets go of each that it has just posted.
        let (qp, counts) = (link.a.qp.clone(), (completed.clone(), gone.clone()));
        let uses_again = boxed(move |cx| {
            let mut kept = Again::new(&qp, &counts.0, &counts.1, cx)?;
            for turn in 0..TURNS {
                wait(|| kept.take().is_some_and(|this| this.uses == turn))?;
                Again::post(&mut kept, &qp)?;
            }
            Ok(())
        })?;
        let (qp, counts) = (link.a.qp.clone(), (completed.clone(), gone.clone()));
        let lets_go = boxed(move |cx| {
            (0..TURNS)
                .try_for_each(|_| Again::post(&mut Again::new(&qp, &counts.0, &counts.1, cx)?, &qp))
        })?;
        let poller = || {
            let (cq, done) = (link.send_cq.clone(), completed.clone());
            boxed(move |_| {
                wait(|| {
                    cq.process(3);
                    done.get() == 2 * TURNS
                })
            })
        };
        at_once(&link.env, [uses_again, lets_go, poller()?, poller()?])?;
        check_eq!(completed.get(), 2 * TURNS);
        wait(|| gone.get() == TURNS + 1)?;
        Ok(())
    }

    #[test]
    fn qps_come_and_go_on_one_cq() -> Result {
        let env = Env::new()?;
        let caps = Caps::new(1, 1);
        let cq = env.cq::<Softirq>(3 * caps.entries())?;
        let maker = || {
            let (pd, cq) = (env.pd.clone(), cq.clone());
            boxed(move |cx| {
                for turn in 0..TURNS / 4 {
                    // The reservations bound their number, and are never too many.
                    match rdma::qp::InitAttr::new(&pd, &cq, &cq, &caps).create(cx) {
                        Ok(qp) if turn % 2 == 0 => qp.destroy(cx)?,
                        Ok(qp) => drop(qp),
                        Err(e) if e == ENOSPC => {}
                        Err(e) => return Err(e),
                    }
                }
                Ok(())
            })
        };
        at_once(&env, [maker()?, maker()?, maker()?, maker()?])?;
        wait(|| cq.free_entries() == cq.entries())
    }

    #[test]
    fn last_handle_may_go_in_any_thread() -> Result {
        let env = Env::new()?;
        for _ in 0..TURNS / 10 {
            let cq = env.cq::<Softirq>(64)?;
            let qp = env.qp(&cq, &Caps::new(1, 1))?;
            let dropper = || {
                let (dev, pd, cq, qp) = (env.dev.clone(), env.pd.clone(), cq.clone(), qp.clone());
                boxed(move |_| {
                    drop((dev.clone(), pd.clone(), cq.clone(), qp.clone()));
                    Ok(())
                })
            };
            let droppers = [dropper()?, dropper()?];
            drop((cq, qp));
            at_once(&env, droppers)?;
        }
        Ok(())
    }

    #[test]
    fn region_is_registered_by_one() -> Result {
        let link = Link::<Softirq>::new()?;
        let buf = Buf::alloc(&link.env.pd, 64, &link.env.cx)?;
        let region = Region::new(buf, &link.env.cx)?.into_shared();
        let region = Arc::new(region, GFP_KERNEL)?;
        for _ in 0..TURNS / 10 {
            let (registered, completed) = (Counter::new()?, Counter::new()?);
            let register = || {
                let (qp, region) = (link.a.qp.clone(), region.clone());
                let (registered, completed) = (registered.clone(), completed.clone());
                boxed(move |_| {
                    let owner = Sharing::new(&region, &completed)?;
                    match qp.post_send(owner, |o| Ok(RegWr::remote_read(&*o.region))) {
                        Ok(_) => {
                            registered.up();
                            Ok(())
                        }
                        Err(refused) if refused.error() == EBUSY => Ok(()),
                        Err(refused) => Err(refused.error()),
                    }
                })
            };
            at_once(&link.env, [register()?, register()?, register()?])?;
            check_eq!(registered.get(), 1);
            wait(|| completed.get() == 1)?;
            let owner = Sharing::new(&region, &completed)?;
            link.a
                .qp
                .post_send(owner, |o| Ok(rdma::mr::InvWr::new(&*o.region)))?;
            wait(|| completed.get() == 2)?;
            check!(region.is_idle());
        }
        Ok(())
    }
}
