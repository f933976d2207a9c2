// SPDX-License-Identifier: GPL-2.0

//! A QP that several threads want to change: they do it one after the other, as drivers expect.

use crate::fixture::{
    wait,
    Counter,
    NullEnv, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Attr, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(4, 4);

/// Far longer than what is done meanwhile.
const LONG_US: u32 = 20_000;

/// Has `second` change a QP while another thread is at it.
fn one_after_the_other(second: impl FnOnce(&Arc<Qp<Softirq>>, &Sleepable) -> Result) -> Result {
    let null = NullEnv::new()?;
    let cq = null.env.cq::<Softirq>(CAPS.entries())?;
    let qp = Arc::new(null.env.raw_qp(&cq, &CAPS)?, GFP_KERNEL)?;
    let num = qp.num();
    null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
    null.dev.inject_qp(num, Injection::Dwell { us: LONG_US })?;
    let (ended, counter, first) = (Counter::new()?, Counter::new()?, qp.clone());
    let ends = (ended.clone(), counter.clone());
    null.env.client.spawn(GFP_KERNEL, move |cx| {
        if first.modify(Attr::Error, cx).is_ok() {
            ends.1.up();
        }
        drop(first);
        ends.0.up();
    })?;
    wait(|| null.dev.changes(num).is_ok_and(|(running, _)| running == 1))?;
    let done = second(&qp, &null.env.cx);
    wait(|| ended.get() == 1)?;
    check_eq!(null.dev.changes(num)?, (0, 0));
    check_eq!(counter.get(), 1);
    done
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
