// SPDX-License-Identifier: GPL-2.0

//! QPs: their sizes, and what they are made of.

use crate::fixture::{
    Counter,
    Env,
    OnDone, //
};
use kernel::prelude::*;
use rdma::prelude::*;

#[kunit_tests(rdma_qp)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() -> Result {
        not_on_iwarp!(c"siw counts from zero");
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let (a, b) = (
            env.qp(&cq, &Caps::new(4, 4))?,
            env.qp(&cq, &Caps::new(4, 4))?,
        );
        check!(a.num() > 1);
        check!(a.num() != b.num());
        Ok(())
    }

    #[test]
    fn ends_with_its_last_handle() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let (free, flushed) = (cq.free_entries(), Counter::new()?);
        let qp = env.qp(&cq, &Caps::new(1, 1))?;
        let (other, counts) = (qp.clone(), flushed.clone());
        check_eq!(other.num(), qp.num());
        check_err!(qp.destroy(&env.cx), EBUSY);
        let recv = OnDone::<context::Atomic, _>::new(move |_, _| {
            counts.up();
        })?;
        other.post_recv(recv, |_| Ok(RecvWr::new([])))?;
        check_eq!(flushed.get(), 0);
        check!(cq.free_entries() < free);
        other.destroy(&env.cx)?;
        check_eq!((flushed.get(), cq.free_entries()), (1, free));
        Ok(())
    }

    #[test]
    fn queues_may_be_empty() -> Result {
        let env = Env::new()?;
        let qp = env.qp(&env.cq::<Softirq>(64)?, &Caps::new(0, 0))?;
        qp.drain(&env.cx)
    }

    #[test]
    fn queues_have_the_room_that_was_asked_for() -> Result {
        let env = Env::new()?;
        for size in [1, 3, 4, 7, 15] {
            let qp = env.qp(&env.cq::<Direct>(64)?, &Caps::new(1, size))?;
            for _ in 0..size {
                let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
                qp.post_recv(nothing, |_| Ok(RecvWr::new([])))?;
            }
        }
        Ok(())
    }

    #[test]
    fn sizes_beyond_the_device_are_refused() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        for wr in [
            env.dev.attrs().max_qp_wr,
            env.dev.attrs().max_qp_wr + 1,
            u32::MAX - 1,
            u32::MAX,
        ] {
            check_err!(env.qp(&cq, &Caps::new(wr, 1)), EINVAL);
            check_err!(env.qp(&cq, &Caps::new(1, wr)), EINVAL);
        }
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn entries_beyond_the_device_are_refused() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        for sges in [1 << 10, u32::MAX] {
            let caps = Caps {
                send_sge: sges,
                ..Caps::new(2, 2)
            };
            check!(env.qp(&cq, &caps).is_err());
            let caps = Caps {
                recv_sge: sges,
                ..Caps::new(2, 2)
            };
            check!(env.qp(&cq, &caps).is_err());
        }
        Ok(())
    }

    #[test]
    fn id_has_one_qp() -> Result {
        let env = Env::new()?;
        let (id, cq, caps) = (env.id()?, env.cq::<Softirq>(64)?, Caps::new(4, 4));
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &caps, &env.cx)?;
        check_err!(Qp::create(&id, &env.pd, &cq, &cq, &caps, &env.cx), EBUSY);
        check_err!(
            Qp::create(&id.clone(), &env.pd, &cq, &cq, &caps, &env.cx),
            EBUSY
        );
        qp.destroy(&env.cx)?;
        Qp::create(&id, &env.pd, &cq, &cq, &caps, &env.cx)?;
        Ok(())
    }

    #[test]
    fn id_needs_a_device() -> Result {
        let env = Env::new()?;
        let id = cm::Id::create(&env.client, &env.cx)?;
        let (cq, caps) = (env.cq::<Softirq>(64)?, Caps::new(4, 4));
        check_err!(Qp::create(&id, &env.pd, &cq, &cq, &caps, &env.cx), EINVAL);
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn many_at_once() -> Result {
        let env = Env::new()?;
        let caps = Caps::new(2, 2);
        let cq = env.cq::<Softirq>(16 * caps.entries())?;
        let mut qps = KVec::new();
        for _ in 0..16 {
            qps.push(env.qp(&cq, &caps)?, GFP_KERNEL)?;
        }
        for qp in qps {
            qp.destroy(&env.cx)?;
        }
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }
}
