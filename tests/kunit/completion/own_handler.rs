// SPDX-License-Identifier: GPL-2.0

//! Completion handlers that use their own QP.

use crate::fixture::{
    wait,
    Counter,
    Env,
    OnDone,
    Polled, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::{
    context::Context,
    prelude::*, //
};

const CAPS: Caps = Caps::new(4, 4);

/// Calls `call` in a handler in context `C`, with a QP of the same CQ, and returns its result.
fn in_own_handler<C, N, T>(call: impl FnOnce(Qp<C>, &N) -> T + Unpin + Send + 'static) -> Result<T>
where
    C: Polled + Provides<N>,
    N: Context,
    T: Copy + Send + Sync + 'static,
{
    let env = Env::new()?;
    let cq = env.cq::<C>(128)?;
    let free = cq.free_entries();
    let (own, caller) = (env.qp(&cq, &CAPS)?, env.qp(&cq, &CAPS)?);
    let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
    let answer = said.clone();
    let handler = OnDone::<N, _>::new(move |_, cx| {
        answer.populate(call(own, cx));
    })?;
    caller.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    // The drain flushes the receive, so its handler is called.
    drop(caller);
    wait(|| {
        C::poll(&cq);
        said.copy().is_some()
    })?;
    // Whatever the handler did, both QPs end.
    wait(|| {
        C::poll(&cq);
        cq.free_entries() == free
    })?;
    said.copy().ok_or(EIO)
}

fn error(result: Result) -> Option<Error> {
    result.err()
}

/// Drains in a handler whose caller may sleep.
fn drains<C: PollContext>(qp: &Qp<C>) -> Option<Error> {
    error(Sleepable::current().and_then(|cx| qp.drain(&cx)))
}

#[kunit_tests(rdma_own_handler)]
mod tests {
    use super::*;

    #[test]
    fn drain_is_refused_workqueue() -> Result {
        let said = in_own_handler::<Workqueue, Sleepable, _>(|qp, cx| error(qp.drain(cx)))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn drain_is_refused_unbound_workqueue() -> Result {
        let said = in_own_handler::<UnboundWorkqueue, Sleepable, _>(|qp, cx| error(qp.drain(cx)))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn destruction_of_the_cq_is_refused() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Workqueue>(128)?;
        let caller = env.qp(&cq, &CAPS)?;
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let answer = said.clone();
        let handler = OnDone::<Sleepable, _>::new(move |_, cx| {
            answer.populate(error(cq.destroy(cx)));
        })?;
        caller.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        drop(caller);
        wait(|| said.copy().is_some())?;
        check_eq!(said.copy().flatten(), Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn drain_is_refused_direct() -> Result {
        let said = in_own_handler::<Direct, context::Atomic, _>(|qp, _| drains(&qp))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn drain_is_refused_waited() -> Result {
        let said = in_own_handler::<Waited, context::Atomic, _>(|qp, _| drains(&qp))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn destroy_is_deferred_workqueue() -> Result {
        let said = in_own_handler::<Workqueue, Sleepable, _>(|qp, cx| error(qp.destroy(cx)))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn destroy_is_deferred_unbound_workqueue() -> Result {
        let said =
            in_own_handler::<UnboundWorkqueue, Sleepable, _>(|qp, cx| error(qp.destroy(cx)))?;
        check_eq!(said, Some(EDEADLK));
        Ok(())
    }

    #[test]
    fn drop_softirq() -> Result {
        in_own_handler::<Softirq, context::Atomic, _>(|qp, _| drop(qp))
    }

    #[test]
    fn drop_direct() -> Result {
        in_own_handler::<Direct, context::Atomic, _>(|qp, _| drop(qp))
    }

    #[test]
    fn drop_workqueue() -> Result {
        in_own_handler::<Workqueue, Sleepable, _>(|qp, _| drop(qp))
    }

    #[test]
    fn drop_unbound_workqueue() -> Result {
        in_own_handler::<UnboundWorkqueue, context::Atomic, _>(|qp, _| drop(qp))
    }

    #[test]
    fn last_reference_to_the_qp_of_the_handler() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let free = cq.free_entries();
        let qp = env.qp(&cq, &CAPS)?;
        let (id, calls) = (env.id()?, Counter::new()?);
        // The queue keeps its own QP: a cycle that the flush ends.
        let (keeps, counts) = (qp.clone(), calls.clone());
        let handler = OnDone::<context::Atomic, _>::new(move |_, _| {
            drop(keeps);
            counts.up();
        })?;
        qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        // A second owner of another QP on the CQ, to show that the CQ goes on.
        let other = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
        qp.drain(&env.cx)?;
        check_eq!(calls.get(), 1);
        drop(qp);
        other.destroy(&env.cx)?;
        wait(|| cq.free_entries() == free)
    }

    #[test]
    fn other_cq_may_be_drained() -> Result {
        let env = Env::new()?;
        let (own, other) = (env.cq::<Workqueue>(64)?, env.cq::<Softirq>(64)?);
        let (caller, drained) = (env.qp(&own, &CAPS)?, env.qp(&other, &CAPS)?);
        let flushed = Counter::new()?;
        let counts = flushed.clone();
        let receive = OnDone::<context::Atomic, _>::new(move |_, _| {
            counts.up();
        })?;
        drained.post_recv(receive, |_| Ok(RecvWr::new([])))?;

        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let (answer, counts) = (said.clone(), flushed.clone());
        let handler = OnDone::<Sleepable, _>::new(move |_, cx| {
            let result = drained.destroy(cx);
            answer.populate((result.err(), counts.get()));
        })?;
        caller.post_recv(handler, |_| Ok(RecvWr::new([])))?;
        caller.destroy(&env.cx)?;
        check_eq!(said.copy(), Some((None, 1)));
        Ok(())
    }
}
