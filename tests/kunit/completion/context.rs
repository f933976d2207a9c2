// SPDX-License-Identifier: GPL-2.0

//! Context tokens: where code may sleep.

use crate::fixture::{
    wait,
    Link,
    NullEnv,
    OnDone,
    Polled,
    SOFTIRQ_IS_WORK, //
};
use kernel::{
    new_spinlock,
    new_spinlock_irq,
    prelude::*,
    sync::{
        rcu,
        SpinLock,
        SpinLockIrq, //
    }, //
};
use rdma::{
    context::Context,
    prelude::*, //
};
use rdma_null::Injection;

#[pin_data]
struct Locks {
    #[pin]
    spin: SpinLock<()>,
    #[pin]
    irq: SpinLockIrq<()>,
}

impl Locks {
    fn new() -> Result<Pin<KBox<Self>>> {
        KBox::pin_init(
            pin_init!(Self {
                spin <- new_spinlock!(()),
                irq <- new_spinlock_irq!(()),
            }),
            GFP_KERNEL,
        )
    }
}

fn may_sleep() -> bool {
    Sleepable::current().is_ok()
}

/// Returns whether a handler that is given an `N` in polling context `C` may sleep.
fn handler_may_sleep<C: Polled + Provides<N>, N: Context>() -> Result<bool> {
    let link = Link::<C>::new()?;
    let said = Arc::new(kernel::sync::SetOnce::new(), GFP_KERNEL)?;
    let answer = said.clone();
    let asks = OnDone::<N, _>::new(move |_, _| {
        answer.populate(may_sleep());
    })?;
    link.b.qp.post_recv(asks, |_| Ok(RecvWr::new([])))?;
    let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    link.a.qp.post_send(nothing, |_| Ok(SendWr::send([])))?;
    link.wait(|| said.copy().is_some())?;
    said.copy().ok_or(EIO)
}

/// Set once a handler has run: `true` if it could sleep.
type Answer = Arc<kernel::sync::SetOnce<bool>>;

/// Posts a request that completes to a CQ, whose handler reports whether it may sleep.
fn ask(null: &NullEnv, cq: &Cq<AnyContext>) -> Result<(Qp<AnyContext>, Answer)> {
    let qp = null.env.raw_qp(cq, &Caps::new(1, 1))?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    let said = Arc::new(kernel::sync::SetOnce::new(), GFP_KERNEL)?;
    let answer = said.clone();
    let asks = OnDone::<context::Atomic, _>::new(move |_, _| {
        answer.populate(may_sleep());
    })?;
    qp.post_send(asks, |_| Ok(SendWr::send([])))?;
    Ok((qp, said))
}

/// Returns whether a handler may sleep whose CQ the core polls in context `C`, which its type does
/// not say.
fn chosen_may_sleep<C: CorePolled + FixedContext>() -> Result<bool> {
    let null = NullEnv::new()?;
    let cq = null.env.cq::<C>(4)?.into_any();
    let (_qp, said) = ask(&null, &cq)?;
    wait(|| said.copy().is_some())?;
    check_eq!(cq.process(1), 0);
    said.copy().ok_or(EIO)
}

#[kunit_tests(rdma_context)]
mod tests {
    use super::*;

    #[test]
    fn task_may_sleep() -> Result {
        check!(may_sleep());
        Ok(())
    }

    #[test]
    fn spinlock_forbids_sleep() -> Result {
        let locks = Locks::new()?;
        let guard = locks.spin.lock();
        let error = Sleepable::current().err();
        drop(guard);
        check_eq!(error, Some(EAGAIN));
        check!(may_sleep());
        Ok(())
    }

    #[test]
    fn irq_spinlock_forbids_sleep() -> Result {
        let locks = Locks::new()?;
        let guard = locks.irq.lock();
        let error = Sleepable::current().err();
        drop(guard);
        check_eq!(error, Some(EAGAIN));
        check!(may_sleep());
        Ok(())
    }

    #[test]
    fn rcu_read_side_forbids_sleep() -> Result {
        let guard = rcu::read_lock();
        let error = Sleepable::current().err();
        drop(guard);
        check_eq!(error, Some(EAGAIN));
        Ok(())
    }

    #[test]
    fn softirq_handler_may_not_sleep() -> Result {
        check_eq!(
            handler_may_sleep::<Softirq, context::Atomic>()?,
            SOFTIRQ_IS_WORK
        );
        Ok(())
    }

    #[test]
    fn workqueue_handler_may_sleep() -> Result {
        check!(handler_may_sleep::<Workqueue, Sleepable>()?);
        check!(handler_may_sleep::<Workqueue, context::Atomic>()?);
        Ok(())
    }

    #[test]
    fn unbound_workqueue_handler_may_sleep() -> Result {
        check!(handler_may_sleep::<UnboundWorkqueue, Sleepable>()?);
        Ok(())
    }

    #[test]
    fn context_is_chosen_at_run_time() -> Result {
        check_eq!(chosen_may_sleep::<Softirq>()?, SOFTIRQ_IS_WORK);
        check!(chosen_may_sleep::<Workqueue>()?);
        check!(chosen_may_sleep::<UnboundWorkqueue>()?);
        Ok(())
    }

    #[test]
    fn callers_poll_what_was_chosen_to_be_polled_by_them() -> Result {
        let null = NullEnv::new()?;
        for cq in [
            null.env.cq::<Direct>(4)?.into_any(),
            null.env.cq::<Waited>(4)?.into_any(),
        ] {
            let (_qp, said) = ask(&null, &cq)?;
            check_eq!(said.copy(), None);
            check_eq!(cq.process(1), 1);
            check_eq!(said.copy(), Some(true));
        }
        Ok(())
    }

    #[test]
    fn direct_handler_runs_where_the_poller_is() -> Result {
        check!(handler_may_sleep::<Direct, context::Atomic>()?);
        Ok(())
    }

    #[test]
    fn direct_cq_can_be_polled_under_a_spinlock() -> Result {
        let link = Link::<Direct>::new()?;
        let locks = Locks::new()?;
        let said = Arc::new(kernel::sync::SetOnce::new(), GFP_KERNEL)?;
        let answer = said.clone();
        let asks = OnDone::<context::Atomic, _>::new(move |_, _| {
            answer.populate(may_sleep());
        })?;
        link.a.qp.post_send(asks, |_| {
            Ok(SendWr::rdma_write([], Remote { addr: 0, rkey: 0 }))
        })?;
        wait(|| {
            let guard = locks.spin.lock();
            let n = link.send_cq.process(1);
            drop(guard);
            n == 1
        })?;
        check_eq!(said.copy(), Some(false));
        Ok(())
    }

    #[test]
    fn contexts_have_names() -> Result {
        check_eq!(Direct::NAME, "direct");
        check_eq!(Softirq::NAME, "softirq");
        check_eq!(Workqueue::NAME, "workqueue");
        check_eq!(UnboundWorkqueue::NAME, "unbound_workqueue");
        Ok(())
    }
}
