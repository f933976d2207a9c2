// SPDX-License-Identifier: GPL-2.0

//! One at a time polls a CQ that the RDMA core does not poll.

use crate::fixture::{
    wait,
    Counter,
    NullEnv,
    OnDone,
    Polled, //
};
use kernel::{
    prelude::*,
    sync::SetOnce,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    context::CallerPolled,
    cq::Wait,
    prelude::*, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(32, 1);

/// A QP whose requests go nowhere and complete at once.
struct Lone<C: Polled> {
    qp: Qp<C>,
    cq: Cq<C>,
    null: NullEnv,
}

impl<C: Polled + CallerPolled> Lone<C> {
    fn new() -> Result<Self> {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<C>(2 * CAPS.entries())?;
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        Ok(Self { qp, cq, null })
    }

    /// Posts a request that calls a function.
    fn post(
        &self,
        function: impl FnOnce(&Wc, &context::Atomic) + Unpin + Send + 'static,
    ) -> Result {
        let owner = OnDone::new(function)?;
        Ok(self.qp.post_send(owner, |_| Ok(SendWr::send([])))?)
    }

    /// Has another thread stay in a handler until `go` is counted up; it counts `ended` up then.
    fn stay(&self, go: &Arc<Counter>, ended: &Arc<Counter>) -> Result {
        let entered = Counter::new()?;
        let (enters, goes) = (entered.clone(), go.clone());
        self.post(move |_, _| {
            enters.up();
            let _ = wait(|| goes.get() == 1);
        })?;
        let (cq, ends) = (self.cq.clone(), ended.clone());
        self.null.env.client.spawn(GFP_KERNEL, move |_| {
            cq.process(1);
            ends.up();
        })?;
        wait(|| entered.get() == 1)
    }
}

/// The numbers of completions that were polled in each way.
fn polled<C: CallerPolled + Provides<context::Atomic>>(
    cq: &Cq<C>,
) -> (u32, Result<u32>, Result<usize>) {
    (
        cq.process(8),
        cq.process_with(8, |c| c.dispatch()),
        cq.poll(&mut WcArray::<8>::new()),
    )
}

const NOTHING: (u32, Result<u32>, Result<usize>) = (0, Ok(0), Ok(0));

/// A handler that polls its own CQ finds nothing, though there is something.
fn in_a_handler<C: Polled + CallerPolled>() -> Result {
    let lone = Lone::<C>::new()?;
    let (said, done) = (Arc::new(SetOnce::new(), GFP_KERNEL)?, Counter::new()?);
    let (answer, counts) = (said.clone(), done.clone());
    let later = OnDone::<context::Atomic, _>::new(move |_, _| {
        counts.up();
    })?;
    let (cq, qp) = (lone.cq.clone(), lone.qp.clone());
    lone.post(move |_, _| {
        let posted = qp.post_send(later, |_| Ok(SendWr::send([])));
        answer.populate((posted.is_ok(), polled(&cq)));
    })?;
    check_eq!(lone.cq.process(1), 1);
    check_eq!(said.copy(), Some((true, NOTHING)));
    check_eq!(done.get(), 0);
    check_eq!(lone.cq.process(1), 1);
    check_eq!(done.get(), 1);
    Ok(())
}

/// Nor does another thread.
fn in_another_thread<C: Polled + CallerPolled>() -> Result {
    let lone = Lone::<C>::new()?;
    let (go, ended, done) = (Counter::new()?, Counter::new()?, Counter::new()?);
    lone.stay(&go, &ended)?;
    let counts = done.clone();
    lone.post(move |_, _| {
        counts.up();
    })?;
    check_eq!(polled(&lone.cq), NOTHING);
    check_eq!((ended.get(), done.get()), (0, 0));
    go.up();
    wait(|| ended.get() == 1)?;
    check_eq!(lone.cq.process(8), 1);
    check_eq!(done.get(), 1);
    Ok(())
}

/// A drain lets the handler end that is running, and polls then.
fn drain<C: Polled + CallerPolled>() -> Result {
    let lone = Lone::<C>::new()?;
    let (go, ended, drained) = (Counter::new()?, Counter::new()?, Counter::new()?);
    lone.stay(&go, &ended)?;
    let (qp, drains) = (lone.qp.clone(), drained.clone());
    lone.null.env.client.spawn(GFP_KERNEL, move |cx| {
        if qp.drain(cx).is_ok() {
            drains.up();
        }
    })?;
    fsleep(Delta::from_millis(20));
    check_eq!((ended.get(), drained.get()), (0, 0));
    go.up();
    wait(|| drained.get() == 1)
}

#[kunit_tests(rdma_cq_lock)]
mod tests {
    use super::*;

    #[test]
    fn handler_finds_nothing_direct() -> Result {
        in_a_handler::<Direct>()
    }

    #[test]
    fn handler_finds_nothing_waited() -> Result {
        in_a_handler::<Waited>()
    }

    #[test]
    fn other_thread_finds_nothing_direct() -> Result {
        in_another_thread::<Direct>()
    }

    #[test]
    fn other_thread_finds_nothing_waited() -> Result {
        in_another_thread::<Waited>()
    }

    #[test]
    fn drain_waits_for_the_handler_direct() -> Result {
        drain::<Direct>()
    }

    #[test]
    fn drain_waits_for_the_handler_waited() -> Result {
        drain::<Waited>()
    }

    /// Completions in a batch do not keep others from polling.
    #[test]
    fn batch_does_not_hold_the_lock() -> Result {
        let lone = Lone::<Direct>::new()?;
        let done = Counter::new()?;
        for _ in 0..2 {
            let counts = done.clone();
            lone.post(move |_, _| {
                counts.up();
            })?;
        }
        let mut batch = WcArray::<1>::new();
        check_eq!(lone.cq.poll(&mut batch), Ok(1));
        check_eq!((lone.cq.process(8), done.get()), (1, 1));
        drop(batch);
        check_eq!(done.get(), 2);
        Ok(())
    }

    /// Nor are there others while one is looked at.
    #[test]
    fn each_completion_is_looked_at_alone() -> Result {
        let lone = Lone::<Direct>::new()?;
        let done = Counter::new()?;
        for _ in 0..20 {
            let counts = done.clone();
            lone.post(move |_, _| {
                counts.up();
            })?;
        }
        let mut before = 0;
        let looked = lone.cq.process_with(18, |completion| {
            if polled(&lone.cq) == NOTHING && done.get() == before {
                before += 1;
            }
            completion.dispatch();
        })?;
        check_eq!((looked, before, done.get()), (18, 18, 18));
        check_eq!((lone.cq.process(8), done.get()), (2, 20));
        check_eq!(lone.cq.process_with(0, |c| c.dispatch()), Err(EINVAL));
        Ok(())
    }

    /// A wait does not end for what another thread is about to get.
    #[test]
    fn wait_lasts_while_another_thread_polls() -> Result {
        let lone = Lone::<Waited>::new()?;
        let (go, ended) = (Counter::new()?, Counter::new()?);
        let cx = &lone.null.env.cx;
        lone.stay(&go, &ended)?;
        lone.post(|_, _| ())?;
        check_eq!(lone.cq.wait(Notify::NextComp, 0, cx), Ok(Wait::TimedOut));
        check_eq!(lone.cq.wait(Notify::NextComp, 30, cx), Ok(Wait::TimedOut));
        check_eq!(ended.get(), 0);
        go.up();
        check_eq!(lone.cq.wait(Notify::NextComp, 10_000, cx), Ok(Wait::Ready));
        check_eq!(lone.cq.process(8), 1);
        Ok(())
    }
}
