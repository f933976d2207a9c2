// SPDX-License-Identifier: GPL-2.0

//! The end of CQs whose poll is about to return: it is waited for.

#[cfg(not(CONFIG_TINY_RCU))]
use crate::check::fail;
use crate::fixture::{
    wait,
    Counted,
    Counter,
    NullEnv,
    Polled, //
};
#[cfg(not(CONFIG_TINY_RCU))]
use kernel::bindings;
use kernel::prelude::*;
use rdma::{
    context::CorePolled,
    prelude::*, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(4, 4);

/// The time that a poll stays behind the point from which on the core does not wait for it, in
/// microseconds; and how many in a row, as a processor that polls for ever does nothing else.
const LATE_US: u32 = 15_000;
const LATE: u32 = 20;

/// The next `count` times that a CQ is armed take longer, and report completions in any case.
fn arm(us: u32, count: u32) -> Injection {
    let honest = false;
    Injection::Arm { us, count, honest }
}

/// Ends a CQ again and again while its poll is late.
fn ends_while_it_is_polled<C: Polled + CorePolled>() -> Result {
    let null = NullEnv::new()?;
    for _ in 0..5 {
        let times = Counter::new()?;
        let cq = null.env.cq::<C>(CAPS.entries())?;
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        null.dev.inject(arm(LATE_US, LATE))?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        wait(|| times.get() == 1)?;
        qp.destroy(&null.env.cx)?;
        drop(cq);
        wait(|| null.dev.objects()[0] == 0)?;
        null.dev.inject(arm(0, 0))?;
    }
    Ok(())
}

/// Returns the number of grace periods that have begun.
#[cfg(not(CONFIG_TINY_RCU))]
fn grace_periods() -> usize {
    // SAFETY: The function reads a counter of RCU. Its lowest two bits are not of the number.
    unsafe { bindings::get_state_synchronize_rcu() as usize >> 2 }
}

#[kunit_tests(rdma_null_fence)]
mod tests {
    use super::*;

    #[test]
    fn softirq_cq_ends_while_it_is_polled() -> Result {
        ends_while_it_is_polled::<Softirq>()
    }

    #[test]
    fn workqueue_cq_ends_while_it_is_polled() -> Result {
        ends_while_it_is_polled::<Workqueue>()
    }

    /// The core arms a new CQ without asking for completions: those that come have to be told.
    #[test]
    fn late_arming_loses_no_completion() -> Result {
        let null = NullEnv::new()?;
        null.dev.inject(arm(0, LATE))?;
        let (cq, times) = (null.env.cq::<Softirq>(CAPS.entries())?, Counter::new()?);
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        wait(|| times.get() == 1)
    }

    /// The ends of CQs share the grace periods that they wait for. Others pass meanwhile, more of
    /// them on a busy machine: so there are several attempts.
    // With this RCU each call that waits for a grace period is one.
    #[cfg(not(CONFIG_TINY_RCU))]
    #[test]
    fn many_cqs_end_together() -> Result {
        const MANY: usize = 1_000;

        let null = NullEnv::new()?;
        for _ in 0..5 {
            let mut cqs = KVec::with_capacity(MANY, GFP_KERNEL)?;
            for _ in 0..MANY {
                cqs.push(null.env.cq::<Softirq>(1)?, GFP_KERNEL)?;
            }
            let before = grace_periods();
            drop(cqs);
            wait(|| null.dev.objects()[0] == 0)?;
            let passed = grace_periods().wrapping_sub(before);
            pr_info!("{MANY} CQs ended in {passed} grace periods\n");
            if passed < MANY / 2 {
                return Ok(());
            }
        }
        Err(fail("each CQ has waited for a grace period of its own"))
    }
}
