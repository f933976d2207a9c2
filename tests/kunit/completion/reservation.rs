// SPDX-License-Identifier: GPL-2.0

//! Leases of CQ entries.

use crate::fixture::{
    wait,
    Env, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// Returns how many entries a QP of this size takes.
fn cost(env: &Env, caps: &Caps) -> Result<u32> {
    let cq = env.cq::<Direct>(1024)?;
    let _qp = env.qp(&cq, caps)?;
    Ok(cq.entries() - cq.free_entries())
}

/// Leaves one entry of a new CQ free, by the QPs that are returned with it and use another CQ too.
///
/// rxe rounds all sizes up to one less than a power of two.
fn all_but_one(env: &Env) -> Result<(Cq<Direct>, Cq<Direct>, KVec<Qp<Direct>>)> {
    let (cq, other) = (env.cq::<Direct>(31)?, env.cq::<Direct>(255)?);
    let mut qps = KVec::new();
    for _ in 0..2 {
        let qp = Qp::create(&env.id()?, &env.pd, &cq, &other, &Caps::new(14, 1), &env.cx)?;
        qps.push(qp, GFP_KERNEL)?;
    }
    check_eq!(cq.entries(), 31);
    check_eq!(cq.free_entries(), 1);
    Ok((cq, other, qps))
}

#[kunit_tests(rdma_reservation)]
mod tests {
    use super::*;

    #[test]
    fn caps_entries_is_the_most_a_qp_takes() -> Result {
        let env = Env::new()?;
        for (send, recv) in [
            (0, 0),
            (1, 1),
            (1, 2),
            (2, 2),
            (3, 7),
            (8, 8),
            (16, 1),
            (63, 64),
            (100, 200),
        ] {
            let caps = Caps::new(send, recv);
            let taken = cost(&env, &caps)?;
            check!(taken <= caps.entries());
            // One for each request, and one for the drain of each queue.
            check!(taken >= send + recv + 2);
        }
        Ok(())
    }

    #[test]
    fn caps_entries_does_not_overflow() -> Result {
        let caps = Caps::new(1 << 20, 1 << 20);
        check!(caps.entries() > 2 << 20);
        Ok(())
    }

    #[test]
    fn exact_fit() -> Result {
        not_on_iwarp!(c"the sizes are those of rxe");
        let env = Env::new()?;
        let (cq, other, _qps) = all_but_one(&env)?;
        let qp = Qp::create(&env.id()?, &env.pd, &cq, &other, &Caps::new(0, 1), &env.cx)?;
        check_eq!(cq.free_entries(), 0);
        check_err!(
            Qp::create(&env.id()?, &env.pd, &cq, &other, &Caps::new(0, 1), &env.cx),
            ENOSPC
        );
        qp.destroy(&env.cx)?;
        check_eq!(cq.free_entries(), 1);
        Ok(())
    }

    #[test]
    fn one_entry_too_few_is_refused() -> Result {
        not_on_iwarp!(c"the sizes are those of rxe");
        let env = Env::new()?;
        let (cq, _other, _qps) = all_but_one(&env)?;
        check_err!(env.qp(&cq, &Caps::new(0, 0)), ENOSPC);
        check_eq!(cq.free_entries(), 1);
        Ok(())
    }

    #[test]
    fn failed_recv_lease_gives_the_send_lease_back() -> Result {
        let env = Env::new()?;
        let (send, recv) = (env.cq::<Softirq>(64)?, env.cq::<Direct>(8)?);
        let (send_free, recv_free) = (send.free_entries(), recv.free_entries());
        let made = Qp::create(
            &env.id()?,
            &env.pd,
            &send,
            &recv,
            &Caps::new(4, 64),
            &env.cx,
        );
        check_err!(made, ENOSPC);
        check_eq!(send.free_entries(), send_free);
        check_eq!(recv.free_entries(), recv_free);
        Ok(())
    }

    #[test]
    fn refused_qp_leaves_the_id_free_for_another() -> Result {
        let env = Env::new()?;
        let (small, large) = (env.cq::<Softirq>(2)?, env.cq::<Softirq>(64)?);
        let (id, caps) = (env.id()?, Caps::new(8, 8));
        check_err!(
            Qp::create(&id, &env.pd, &small, &small, &caps, &env.cx),
            ENOSPC
        );
        Qp::create(&id, &env.pd, &large, &large, &caps, &env.cx)?;
        Ok(())
    }

    #[test]
    fn destroyed_qp_has_given_its_lease_back() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Workqueue>(64)?;
        let qp = env.qp(&cq, &Caps::new(8, 8))?;
        check!(cq.free_entries() < cq.entries());
        qp.destroy(&env.cx)?;
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn dropped_qp_gives_its_lease_back() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<UnboundWorkqueue>(64)?;
        let qp = env.qp(&cq, &Caps::new(8, 8))?;
        check!(cq.free_entries() < cq.entries());
        drop(qp);
        wait(|| cq.free_entries() == cq.entries())
    }

    #[test]
    fn qps_share_a_cq_until_it_is_full() -> Result {
        let env = Env::new()?;
        let caps = Caps::new(6, 6);
        let cq = env.cq::<Softirq>(2 * caps.entries())?;
        let cost = cost(&env, &caps)?;
        let mut qps = KVec::new();
        let room = cq.entries().checked_div(cost).ok_or(EIO)?;
        check!(room >= 2);
        for _ in 0..room {
            qps.push(env.qp(&cq, &caps)?, GFP_KERNEL)?;
        }
        check_err!(env.qp(&cq, &caps), ENOSPC);
        qps.pop().ok_or(EIO)?.destroy(&env.cx)?;
        env.qp(&cq, &caps)?;
        Ok(())
    }

    #[test]
    fn each_queue_leases_from_its_own_cq() -> Result {
        let env = Env::new()?;
        let (send, recv) = (env.cq::<Direct>(256)?, env.cq::<Workqueue>(256)?);
        let qp = Qp::create(
            &env.id()?,
            &env.pd,
            &send,
            &recv,
            &Caps::new(2, 60),
            &env.cx,
        )?;
        let reserved = (
            send.entries() - send.free_entries(),
            recv.entries() - recv.free_entries(),
        );
        check!(reserved.0 >= 3 && reserved.0 < 16);
        check!(reserved.1 >= 61);
        qp.destroy(&env.cx)?;
        check_eq!(send.free_entries(), send.entries());
        check_eq!(recv.free_entries(), recv.entries());
        Ok(())
    }
}
