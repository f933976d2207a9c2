// SPDX-License-Identifier: GPL-2.0

//! A QP that several threads want to change: they do it one after the other, as drivers expect.

use crate::fixture::{
    wait,
    Counter,
    NullEnv, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::Attr, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(4, 4);

/// Longer than the test takes, which ends it.
const LONG_US: u32 = 100_000_000;

type Change = fn(&Qp<Softirq>, &Sleepable) -> Result;

/// Has `second` change a QP while another thread is at it.
fn one_after_the_other(second: Change) -> Result {
    let null = NullEnv::new()?;
    let cq = null.env.cq::<Softirq>(CAPS.entries())?;
    let qp = null.env.raw_qp(&cq, &CAPS)?;
    let num = qp.num();
    null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
    null.dev.inject_qp(num, Injection::Dwell { us: LONG_US })?;
    let done = Counter::new()?;
    let change = |change: Change, begun: &Arc<Counter>| {
        let (qp, done, begun) = (qp.clone(), done.clone(), begun.clone());
        null.env.client.spawn(GFP_KERNEL, move |cx| {
            begun.up();
            if change(&qp, cx).is_ok() {
                done.up();
            }
        })
    };
    let begun = Counter::new()?;
    change(|qp, cx| qp.modify(Attr::Error, cx), &begun)?;
    wait(|| null.dev.changes(num).is_ok_and(|(running, _)| running == 1))?;
    change(second, &begun)?;
    wait(|| begun.get() == 2)?;
    fsleep(Delta::from_millis(20));
    check_eq!(null.dev.changes(num)?, (1, 0));
    check_eq!(done.get(), 0);
    null.dev.inject_qp(num, Injection::Dwell { us: 0 })?;
    wait(|| done.get() == 2)?;
    check_eq!(null.dev.changes(num)?, (0, 0));
    Ok(())
}

#[kunit_tests(rdma_null_modify)]
mod tests {
    use super::*;

    #[test]
    fn drain_waits_for_a_change() -> Result {
        one_after_the_other(|qp, cx| qp.drain(cx))
    }

    #[test]
    fn change_waits_for_a_change() -> Result {
        one_after_the_other(|qp, cx| qp.modify(Attr::Error, cx))
    }
}
