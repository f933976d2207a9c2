// SPDX-License-Identifier: GPL-2.0

//! QPs that belong to no id: how they begin and end.

use crate::fixture::{
    recv,
    send,
    wait,
    Env,
    Inbox, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr, //
};

const CAPS: Caps = Caps::new(4, 4);

/// Returns how many entries a QP with room for `contexts` transfers takes of a CQ.
fn cost(env: &Env, contexts: u32) -> Result<u32> {
    let (send, recv) = (env.cq::<Direct>(1024)?, env.cq::<Direct>(64)?);
    let _qp = InitAttr::new(&env.pd, &send, &recv, &CAPS)
        .rw_contexts(contexts, 1)
        .create(&env.cx)?;
    Ok(send.entries() - send.free_entries())
}

#[kunit_tests(rdma_qp_raw)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() -> Result {
        not_on_iwarp!(c"siw counts from zero");
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let (a, b) = (env.raw_qp(&cq, &CAPS)?, env.raw_qp(&cq, &CAPS)?);
        check!(a.num() > 1);
        check!(a.num() != b.num());
        Ok(())
    }

    #[test]
    fn destroyed_in_reset_gives_its_lease_back() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let qp = env.raw_qp(&cq, &CAPS)?;
        check!(cq.free_entries() < cq.entries());
        qp.destroy(&env.cx)?;
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn dropped_in_reset_gives_its_lease_back() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Workqueue>(64)?;
        let qp = env.raw_qp(&cq, &CAPS)?;
        check!(cq.free_entries() < cq.entries());
        drop(qp);
        wait(|| cq.free_entries() == cq.entries())
    }

    #[test]
    fn drain_of_a_direct_cq() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Direct>(64)?, &CAPS)?;
        for _ in 0..2 {
            qp.drain(&env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn posts_in_reset_give_the_owner_back() -> Result {
        not_on_iwarp!(c"siw refuses them with another error");
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        check_err!(send(&qp, env.message(&inbox, &[0; 4])?), EINVAL);
        check_err!(recv(&qp, env.message(&inbox, &[0; 4])?), EINVAL);
        check_eq!(inbox.dropped(), 2);
        Ok(())
    }

    #[test]
    fn needs_room_in_the_cqs() -> Result {
        let env = Env::new()?;
        let (small, large) = (env.cq::<Softirq>(2)?, env.cq::<Softirq>(64)?);
        let (pd, caps) = (&env.pd, Caps::new(8, 8));
        let before = (small.free_entries(), large.free_entries());
        check_err!(Qp::create_raw(pd, &small, &large, &caps, &env.cx), ENOSPC);
        check_err!(Qp::create_raw(pd, &large, &small, &caps, &env.cx), ENOSPC);
        check_eq!((small.free_entries(), large.free_entries()), before);
        Ok(())
    }

    #[test]
    fn sizes_beyond_the_device_are_refused() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        for wr in [env.dev.attrs().max_qp_wr, u32::MAX] {
            check_err!(env.raw_qp(&cq, &Caps::new(wr, 1)), EINVAL);
            check_err!(env.raw_qp(&cq, &Caps::new(1, wr)), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn room_for_transfers_is_leased_too() -> Result {
        not_on_iwarp!(c"the sizes are those of rxe");
        let env = Env::new()?;
        check_eq!(cost(&env, 0)?, 7);
        // One request each, or three where MRs are needed.
        check!(cost(&env, 27)? >= 31);
        Ok(())
    }

    #[test]
    fn room_for_transfers_of_an_id() -> Result {
        let env = Env::new()?;
        let (id, cq) = (env.id()?, env.cq::<Softirq>(256)?);
        let qp = InitAttr::new(&env.pd, &cq, &cq, &CAPS)
            .rw_contexts(27, 1)
            .create_for(&id, &env.cx)?;
        check!(cq.entries() - cq.free_entries() >= 31 + 7);
        qp.destroy(&env.cx)?;
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn room_for_transfers_needs_a_port() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        for (contexts, port) in [(1, 0), (1, 2), (1, u32::MAX), (u32::MAX, 1), (0, 77)] {
            let qp = InitAttr::new(&env.pd, &cq, &cq, &CAPS)
                .rw_contexts(contexts, port)
                .create(&env.cx);
            check_err!(qp, EINVAL);
        }
        Ok(())
    }
}
