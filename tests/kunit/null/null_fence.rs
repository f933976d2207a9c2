// SPDX-License-Identifier: GPL-2.0

//! The end of CQs whose poll is about to return: it is waited for.

use crate::fixture::{
    wait,
    Counted,
    Counter,
    NullEnv,
    Polled, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
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

/// Ends a CQ again and again while its poll is late.
fn ends_while_it_is_polled<C: Polled + CorePolled>() -> Result {
    let null = NullEnv::new()?;
    for _ in 0..5 {
        let times = Counter::new()?;
        let cq = null.env.cq::<C>(CAPS.entries())?;
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        null.dev.inject(Injection::Arm {
            us: LATE_US,
            count: LATE,
        })?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        wait(|| times.get() == 1)?;
        qp.destroy(&null.env.cx)?;
        drop(cq);
        wait(|| null.dev.objects()[0] == 0)?;
        null.dev.inject(Injection::Arm { us: 0, count: 0 })?;
    }
    Ok(())
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
        null.dev.inject(Injection::Arm { us: 0, count: LATE })?;
        let (cq, times) = (null.env.cq::<Softirq>(CAPS.entries())?, Counter::new()?);
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        wait(|| times.get() == 1)
    }

    /// They share what they wait for. How long it takes is said, and nothing asserted.
    #[test]
    fn many_cqs_end_together() -> Result {
        const MANY: usize = 1_000;

        let null = NullEnv::new()?;
        let mut cqs = KVec::with_capacity(MANY, GFP_KERNEL)?;
        for _ in 0..MANY {
            cqs.push(null.env.cq::<Softirq>(1)?, GFP_KERNEL)?;
        }
        let start = Instant::<Monotonic>::now();
        drop(cqs);
        wait(|| null.dev.objects()[0] == 0)?;
        let ms = start.elapsed().as_millis();
        pr_info!("{MANY} CQs ended in {ms} ms\n");
        Ok(())
    }
}
