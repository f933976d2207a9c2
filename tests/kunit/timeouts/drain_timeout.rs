// SPDX-License-Identifier: GPL-2.0

//! Drains that cannot prove anything.

use super::timed;
use crate::fixture::{
    Inbox,
    Null, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

const ALL: u32 = u32::MAX;

#[kunit_tests(rdma_drain_timeout)]
mod tests {
    use super::*;

    fn gives_up_without_its_markers<C: crate::fixture::Polled>() -> Result {
        let (null, sent) = (Null::<C>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.send(&sent, b"x")?;
        null.take(&sent, 1)?;
        null.inject(Injection::Hold { count: ALL })?;
        let (ms, drained) = timed(|| null.a.drain(&null.env.cx));
        let held = null.dev.held(null.a.num())?;
        // The markers are late, and the next drain has its own.
        null.inject(Injection::Release {
            count: ALL,
            reversed: false,
        })?;
        check_err!(drained, ETIMEDOUT);
        check!((60_000..61_000).contains(&ms));
        // Both are posted before one is waited for.
        check_eq!(held, 2);
        null.a.drain(&null.env.cx)
    }

    #[test]
    fn gives_up_in_a_softirq() -> Result {
        gives_up_without_its_markers::<Softirq>()
    }

    #[test]
    fn gives_up_in_a_workqueue() -> Result {
        gives_up_without_its_markers::<Workqueue>()
    }

    #[test]
    fn gives_up_where_the_caller_polls() -> Result {
        gives_up_without_its_markers::<Direct>()
    }
}
