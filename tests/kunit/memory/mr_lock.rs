// SPDX-License-Identifier: GPL-2.0

//! Regions that threads share: an invalidation never gets into the queue before the registration
//! that it is to end.

use crate::{
    check::fail,
    fixture::{
        both,
        recv,
        wait,
        Counter,
        Inbox,
        Null,
        OnDone,
        Polled, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Chain,
    wr::PostError, //
};
use rdma_null::Injection;

/// The time that a post waits for the one that may not overtake it, in microseconds.
const WINDOW: u32 = 100_000;

/// The number of races.
const TURNS: i32 = 100;

type Whole = SharedRegion<Bidirectional>;

/// A request of a region that others share.
#[derive(HasCqe)]
struct Sharing {
    cqe: Cqe<Self>,
    region: Arc<Whole>,
    message: Buf<ToDevice>,
    done: Arc<Counter>,
}

impl CqeHandler for Sharing {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        match wc.result() {
            Ok(_) => this.done.up(),
            Err(e) => {
                pr_err!("FAILED: a request of a shared region: {}\n", e.status);
                0
            }
        };
    }
}

/// A request of a region that is its own, behind a box.
#[derive(HasCqe)]
struct Owning {
    cqe: Cqe<Self>,
    region: KBox<Region<Bidirectional>>,
    done: Arc<Counter>,
}

impl CqeHandler for Owning {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.done.up();
    }
}

/// The state that threads share.
struct Shared<C: Polled> {
    qp: Qp<C>,
    region: Arc<Whole>,
    pd: Pd,
    registered: Arc<Counter>,
    invalidated: Arc<Counter>,
}

impl<C: Polled> Shared<C> {
    fn owner(&self, done: &Arc<Counter>, cx: &Sleepable) -> Result<Pin<KBox<Sharing>>> {
        let this = Sharing {
            cqe: Cqe::new(),
            region: self.region.clone(),
            message: Buf::alloc(&self.pd, 4, cx)?,
            done: done.clone(),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    /// Registers the region as soon as that is possible.
    fn register(&self, cx: &Sleepable) -> Result {
        soon(self.owner(&self.registered, cx)?, |owner| {
            self.qp
                .post_send(owner, |o| Ok(both(&*o.region)))
                .map(|_| ())
        })
    }

    /// Invalidates the region as soon as that is possible.
    fn invalidate(&self, cx: &Sleepable) -> Result {
        soon(self.owner(&self.invalidated, cx)?, |owner| {
            self.qp.post_send(owner, |o| Ok(InvWr::new(&*o.region)))
        })
    }

    /// Registers the region and sends a message.
    fn submit(&self, cx: &Sleepable) -> Result {
        let owner = self.owner(&self.registered, cx)?;
        Ok(self.qp.post_chain(owner, |o, chain: &mut Chain<'_, 2>| {
            chain.push(RegWr::remote_write(&*o.region))?;
            chain.push(SendWr::send([o.message.whole()]))
        })?)
    }
}

/// Tries to post until the region is in the right state.
fn soon(
    owner: Pin<KBox<Sharing>>,
    post: impl Fn(Pin<KBox<Sharing>>) -> core::result::Result<(), PostError<Pin<KBox<Sharing>>>>,
) -> Result {
    let (mut owner, mut result) = (Some(owner), Ok(()));
    wait(|| {
        // Often, as what is to be hit is short.
        for _ in 0..100 {
            let Some(again) = owner.take() else { break };
            match post(again) {
                Err(e) if e.error() == EBUSY => owner = e.owner,
                posted => result = posted.map_err(Error::from),
            }
        }
        owner.is_none()
    })?;
    result
}

/// Two QPs and a region that is used through `a`.
struct Setup<C: Polled> {
    shared: Arc<Shared<C>>,
    b: Qp<C>,
    cq: Cq<C>,
    received: Arc<Inbox>,
    running: Arc<Counter>,
    null: crate::fixture::NullEnv,
}

impl<C: Polled> Drop for Setup<C> {
    fn drop(&mut self) {
        // A thread that has the last handle of the device, and of what is on it, waits for itself.
        // Each ends: it waits for nothing without a bound.
        while wait(|| self.running.get() == 0).is_err() {}
    }
}

impl<C: Polled> Setup<C> {
    fn new() -> Result<Self> {
        // If this fails, the last of them is dropped first.
        let Null { dev, env, cq, b, a } = Null::<C>::new()?;
        let region = Region::new(Buf::alloc(&env.pd, 8, &env.cx)?, &env.cx)?;
        let shared = Shared {
            qp: a,
            region: Arc::new(region.into_shared(), GFP_KERNEL)?,
            pd: env.pd.clone(),
            registered: Counter::new()?,
            invalidated: Counter::new()?,
        };
        Ok(Self {
            shared: Arc::new(shared, GFP_KERNEL)?,
            b,
            cq,
            received: Inbox::new()?,
            running: Counter::new()?,
            null: crate::fixture::NullEnv { env, dev },
        })
    }

    /// Has the next post to `a` wait for another one.
    fn stall(&self, us: u32, late: bool) -> Result {
        let num = self.shared.qp.num();
        (self.null.dev).inject_qp(num, Injection::Stall { us, late })
    }

    /// Invalidates the region in another thread when a post to `a` waits, and counts when that is
    /// posted.
    fn invalidate_then(&self, posted: &Arc<Counter>) -> Result {
        let (dev, num, posted) = (self.null.dev.clone(), self.shared.qp.num(), posted.clone());
        self.meanwhile(move |shared, cx| {
            wait(|| dev.stalls(num) != Ok(true))?;
            shared.invalidate(cx)?;
            posted.up();
            Ok(())
        })
    }

    /// Does something in another thread.
    fn meanwhile(
        &self,
        function: impl FnOnce(&Shared<C>, &Sleepable) -> Result + Send + 'static,
    ) -> Result {
        let (shared, running) = (self.shared.clone(), self.running.clone());
        running.up();
        let spawned = self.null.env.client.spawn(GFP_KERNEL, move |cx| {
            if let Err(e) = function(&shared, cx) {
                pr_err!("FAILED: the other thread: {e:?}\n");
            }
            drop(shared);
            running.down();
        });
        spawned.inspect_err(|_| self.running.down())
    }

    /// Waits until the region was registered and invalidated, and looks at what is left of that.
    #[track_caller]
    fn ends(&self) -> Result {
        let shared = &self.shared;
        wait(|| {
            C::poll(&self.cq);
            shared.registered.get() == 1 && shared.invalidated.get() == 1
        })?;
        match shared.region.is_idle() {
            true => Ok(()),
            false => Err(fail("the region is not idle")),
        }
    }
}

#[kunit_tests(rdma_mr_lock)]
mod tests {
    use super::*;

    #[test]
    fn invalidation_does_not_overtake_a_registration() -> Result {
        let setup = Setup::<Softirq>::new()?;
        setup.stall(WINDOW, false)?;
        setup.invalidate_then(&Counter::new()?)?;
        setup.shared.register(&setup.null.env.cx)?;
        setup.ends()
    }

    #[test]
    fn invalidation_does_not_overtake_a_chain() -> Result {
        let setup = Setup::<Softirq>::new()?;
        recv(&setup.b, setup.null.env.message(&setup.received, &[0; 4])?)?;
        setup.stall(WINDOW, false)?;
        setup.invalidate_then(&Counter::new()?)?;
        setup.shared.submit(&setup.null.env.cx)?;
        setup.ends()
    }

    #[test]
    fn handler_may_invalidate_before_the_post_has_returned() -> Result {
        // The message arrives while the post that has sent it waits, and who polls on another CPU
        // invalidates the region there and then.
        let setup = Setup::<Direct>::new()?;
        let (shared, answered) = (setup.shared.clone(), Counter::new()?);
        let (owner, up) = (
            shared.owner(&shared.invalidated, &setup.null.env.cx)?,
            answered.clone(),
        );
        let answer = OnDone::<context::Atomic, _>::new(move |wc, _| {
            let posted = shared.qp.post_send(owner, |o| Ok(InvWr::new(&*o.region)));
            if wc.result().is_ok() && posted.is_ok() {
                up.up();
            }
        })?;
        // The message is of no bytes, as there is no memory for any.
        setup.b.post_recv(answer, |_| Ok(RecvWr::new([])))?;
        setup.stall(WINDOW, true)?;
        let (cq, done) = (setup.cq.clone(), setup.shared.invalidated.clone());
        setup.meanwhile(move |_, _| {
            wait(|| {
                cq.process(8);
                done.get() == 1
            })
        })?;
        let owner = (setup.shared).owner(&setup.shared.registered, &setup.null.env.cx)?;
        setup
            .shared
            .qp
            .post_chain(owner, |o, chain: &mut Chain<'_, 2>| {
                chain.push(RegWr::remote_write(&*o.region))?;
                chain.push(SendWr::send([]))
            })?;
        setup.ends()?;
        check_eq!(answered.get(), 1);
        Ok(())
    }

    #[test]
    fn threads_race() -> Result {
        let setup = Setup::<Softirq>::new()?;
        let ended = Counter::new()?;
        let up = ended.clone();
        setup.meanwhile(move |shared, cx| {
            let all = (0..TURNS).try_for_each(|_| shared.invalidate(cx));
            up.up();
            all
        })?;
        for _ in 0..TURNS {
            setup.shared.register(&setup.null.env.cx)?;
        }
        let shared = &setup.shared;
        wait(|| ended.get() == 1 && shared.invalidated.get() == TURNS)?;
        check_eq!(shared.registered.get(), TURNS);
        check!(shared.region.is_idle());
        Ok(())
    }

    #[test]
    fn exclusive_region_takes_no_lock() -> Result {
        // The first post goes on when there is another one, and that waits for the lock.
        let setup = Setup::<Softirq>::new()?;
        let (env, shared) = (&setup.null.env, &setup.shared);
        shared.register(&env.cx)?;
        wait(|| shared.registered.get() == 1)?;
        let region = Region::new(Buf::alloc(&env.pd, 8, &env.cx)?, &env.cx)?;
        let own = Owning {
            cqe: Cqe::new(),
            region: KBox::new(region, GFP_KERNEL)?,
            done: Counter::new()?,
        };
        let done = own.done.clone();
        setup.stall(20 * 1_000_000, false)?;
        let posted = Counter::new()?;
        setup.invalidate_then(&posted)?;
        let own = KBox::pin(own, GFP_KERNEL)?;
        shared.qp.post_send(own, |o| Ok(both(&*o.region)))?;
        wait(|| done.get() == 1 && posted.get() == 1)?;
        setup.ends()
    }
}
