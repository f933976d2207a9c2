// SPDX-License-Identifier: GPL-2.0

//! Queues that have no room for the marker of a drain.

use crate::{
    check::fail,
    fixture::{
        wait,
        CountDrop,
        Counted,
        Counter,
        Null,
        NullEnv,
        OnDone, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        State, //
    }, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(8, 8);

/// Fills the send queue of `a`, which sends to no peer, with requests of which none will be
/// reported. The owner is that of all of them.
fn fill(null: &Null<Direct>, owner: &Arc<Counted>) -> Result {
    let mut batch = null.a.batch(owner.clone());
    for _ in 0..100 {
        let posted = batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])));
        if let Err(e) = posted {
            check_eq!(e, ENOMEM);
            return Ok(());
        }
    }
    Err(fail("the queue is never full"))
}

#[kunit_tests(rdma_null_full)]
mod tests {
    use super::*;

    /// Others may post while it is drained, so the queue is not reset.
    #[test]
    fn queue_of_unsignaled_requests_is_not_drained() -> Result {
        let (null, times) = (Null::<Direct>::with(&CAPS)?, Counter::new()?);
        null.disconnect()?;
        let (kept, received) = (Counted::new(&times)?, Counter::new()?);
        null.a
            .post_recv(Counted::new(&received)?, |_| Ok(RecvWr::new([])))?;
        fill(&null, &kept)?;
        for _ in 0..2 {
            check_err!(null.a.drain(&null.env.cx), EBUSY);
            check_eq!(null.a.query(&null.env.cx)?.state, State::Error);
            // Its receives came back as ever.
            check_eq!((times.get(), received.get()), (0, 1));
        }
        null.a.destroy(&null.env.cx)?;
        check!(Arc::into_unique_or_drop(kept).is_some());
        check_eq!(times.get(), 0);
        Ok(())
    }

    /// Chains that were refused in part, with signaled requests before them.
    #[test]
    fn queue_of_refused_chains_is_emptied_at_its_end() -> Result {
        let (null, times) = (Null::<Direct>::with(&CAPS)?, Counter::new()?);
        null.disconnect()?;
        for _ in 0..4 {
            null.a
                .post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        }
        for _ in 0..2 {
            let posted = null
                .a
                .post_chain(Counted::new(&times)?, |_, chain: &mut Chain<'_, 6>| {
                    (0..6).try_for_each(|_| chain.push(SendWr::send([])))
                });
            check_err!(posted, ENOMEM);
            null.wait(|| times.get() == 4)?;
        }
        null.a.destroy(&null.env.cx)?;
        check_eq!(times.get(), 4);
        Ok(())
    }

    /// In a handler of its CQ a drain fails at once.
    #[test]
    fn drain_that_fails_goes_on_keeping_owners() -> Result {
        let (null, times, gone) = (
            Null::<Direct>::with(&CAPS)?,
            Counter::new()?,
            Counter::new()?,
        );
        null.disconnect()?;
        let kept = CountDrop(gone.clone());
        let mut batch = null
            .a
            .batch(OnDone::<context::Atomic, _>::new(move |_, _| drop(kept))?);
        batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))?;
        drop(batch);
        null.a
            .post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        let (mut drained, cx) = (Ok(()), &null.env.cx);
        wait(|| {
            let processed = null.cq.process_with(1, |completion| {
                drained = null.a.drain(cx);
                completion.dispatch();
            });
            processed == Ok(1)
        })?;
        check_err!(drained, EDEADLK);
        check_eq!(gone.get(), 0);
        null.a.drain(cx)?;
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn qp_with_a_full_queue_is_destroyed() -> Result {
        let (null, times) = (Null::<Direct>::with(&CAPS)?, Counter::new()?);
        null.disconnect()?;
        let kept = Counted::new(&times)?;
        fill(&null, &kept)?;
        let Null {
            a, b, cq, env, dev, ..
        } = null;
        a.destroy(&env.cx)?;
        b.destroy(&env.cx)?;
        check!(Arc::into_unique_or_drop(kept).is_some());
        drop((cq, env));
        check_eq!(dev.objects()[1], 0);
        Ok(())
    }

    /// A driver's own drain returns nothing. It is no proof.
    #[test]
    fn driver_s_own_drain_is_not_believed() -> Result {
        let null = Null::<Direct>::on(NullEnv::with_drain()?, &CAPS)?;
        let times = Counter::new()?;
        null.disconnect()?;
        for _ in 0..4 {
            null.a
                .post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
            null.a
                .post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])))?;
        }
        null.a.drain(&null.env.cx)?;
        check_eq!(times.get(), 8);
        Ok(())
    }

    /// The driver refuses the marker, as that of a dead device does, and its own drain returns at
    /// once: the device may still have the requests that nobody reports.
    #[test]
    fn driver_s_own_drain_does_not_end_what_is_kept() -> Result {
        let null = Null::<Direct>::on(NullEnv::with_drain()?, &CAPS)?;
        let (gone, cx) = (Counter::new()?, &null.env.cx);
        let refuse = Injection::Refuse { after: 0, errno: 5 };
        null.disconnect()?;
        let kept = CountDrop(gone.clone());
        let mut batch = null
            .a
            .batch(OnDone::<context::Atomic, _>::new(move |_, _| drop(kept))?);
        batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))?;
        drop(batch);
        null.dev.inject_qp(null.a.num(), refuse)?;
        check_err!(null.a.drain(cx), EIO);
        check_eq!(gone.get(), 0);
        null.a.drain(cx)?;
        check_eq!(gone.get(), 1);
        // Nothing is kept: what has completions comes back by them.
        null.dev.inject_qp(null.a.num(), refuse)?;
        null.a.drain(cx)
    }
}
