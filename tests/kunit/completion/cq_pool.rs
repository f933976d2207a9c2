// SPDX-License-Identifier: GPL-2.0

//! Shared CQs, CQs for all vectors, moderation.

use crate::fixture::{
    recv,
    send,
    wait,
    Env,
    Inbox,
    Link,
    Polled, //
    RecvListGuard,
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr, //
};

/// The largest CQ that the pool makes without being asked for more (`IB_MAX_SHARED_CQ_SZ`).
const SHARED: u32 = 4096;

/// Messages arrive through entries of a shared CQ, which are given back.
fn arrives<C: Polled + CorePolled>() -> Result {
    let (env, sent, received) = (Env::new()?, Inbox::new()?, Inbox::new()?);
    let caps = Caps::new(4, 4);
    let cq = Cq::<C>::pool_get(&env.dev, 2 * caps.entries(), None, &env.cx)?;
    check_eq!(cq.entries(), 2 * caps.entries());
    let link = Link::on(env, &cq, &cq, &caps, &cm::ConnParam::default())?;
    check!(cq.free_entries() < cq.entries());
    for _ in 0..8 {
        recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        send(&link.a.qp, link.env.message(&sent, b"data")?)?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        check_eq!(&received.pop()?.bytes()?[..], b"data");
        sent.pop()?.ok()?;
    }
    recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
    drop(link);
    wait(|| cq.free_entries() == cq.entries())?;
    check!(received.pop()?.was_flushed());
    Ok(())
}

#[kunit_tests(rdma_cq_pool)]
mod tests {
    use super::*;

    #[test]
    fn arrives_softirq() -> Result {
        arrives::<Softirq>()
    }

    #[test]
    fn arrives_workqueue() -> Result {
        arrives::<Workqueue>()
    }

    #[test]
    fn arrives_unbound_workqueue() -> Result {
        arrives::<UnboundWorkqueue>()
    }

    #[test]
    fn size_is_checked_before_the_core_loops() -> Result {
        let env = Env::new()?;
        for entries in [0, env.dev.attrs().max_cqe + 1, 1 << 31, u32::MAX] {
            check_err!(
                Cq::<Softirq>::pool_get(&env.dev, entries, None, &env.cx),
                EINVAL
            );
        }
        Ok(())
    }

    #[test]
    fn largest_size_is_given() -> Result {
        let env = Env::new()?;
        let max = env.dev.attrs().max_cqe;
        let cq = Cq::<Softirq>::pool_get(&env.dev, max, Some(0), &env.cx)?;
        check_eq!(cq.entries(), max);
        // The pool has to make another CQ.
        let other = Cq::<Softirq>::pool_get(&env.dev, max, Some(0), &env.cx)?;
        check_eq!(other.entries(), max);
        Ok(())
    }

    #[test]
    fn whole_shared_cq_is_given() -> Result {
        let env = Env::new()?;
        let first = Cq::<UnboundWorkqueue>::pool_get(&env.dev, SHARED - 1, Some(0), &env.cx)?;
        let second = Cq::<UnboundWorkqueue>::pool_get(&env.dev, SHARED - 1, Some(0), &env.cx)?;
        check_eq!(first.entries() + second.entries(), 2 * SHARED - 2);
        Ok(())
    }

    #[test]
    fn entries_taken_bound_the_leases() -> Result {
        let env = Env::new()?;
        let caps = Caps::new(2, 2);
        // The shared CQ has thousands of entries, but only these are ours.
        let cq = Cq::<Workqueue>::pool_get(&env.dev, caps.entries(), None, &env.cx)?;
        let qp = env.qp(&cq, &caps)?;
        check_err!(env.qp(&cq, &caps), ENOSPC);
        qp.destroy(&env.cx)?;
        check_eq!(cq.free_entries(), cq.entries());
        env.qp(&cq, &caps)?.destroy(&env.cx)
    }

    #[test]
    fn vector_is_a_hint() -> Result {
        let env = Env::new()?;
        for hint in [0, 1, 2, 77] {
            Cq::<Softirq>::pool_get(&env.dev, 16, Some(hint), &env.cx)?;
        }
        check_err!(
            Cq::<Softirq>::pool_get(&env.dev, 16, Some(u32::MAX), &env.cx),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn shared_cq_is_not_moderated() -> Result {
        let env = Env::new()?;
        let cq = Cq::<Softirq>::pool_get(&env.dev, 16, None, &env.cx)?;
        check_err!(cq.moderate(8, 16, &env.cx), EOPNOTSUPP);
        Ok(())
    }

    #[test]
    fn qp_on_an_srq_is_refused() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let srq = env.srq(4, &recv_list)?;
        let cq = Cq::<Softirq>::pool_get(&env.dev, 64, None, &env.cx)?;
        let caps = Caps::new(4, 0);
        check_err!(
            InitAttr::on_srq(&env.pd, &cq, &srq, &caps).create(&env.cx),
            EINVAL
        );
        check_eq!(cq.free_entries(), cq.entries());
        let own = env.cq::<Softirq>(64)?;
        InitAttr::on_srq(&env.pd, &own, &srq, &caps).create(&env.cx)?;
        Ok(())
    }

    #[test]
    fn rxe_does_not_moderate() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(16)?;
        check_err!(cq.moderate(8, 16, &env.cx), EOPNOTSUPP);
        Ok(())
    }
}
