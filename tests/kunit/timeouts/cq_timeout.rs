// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions that do not come.

use super::timed;
use crate::fixture::NullEnv;
use kernel::prelude::*;
use rdma::prelude::*;

/// Less than what a task may be blocked for.
const LONG_MS: u32 = 50_000;

#[kunit_tests(rdma_cq_timeout)]
mod tests {
    use super::*;

    #[test]
    fn waits_to_its_end() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        let (ms, said) = timed(|| cq.wait(Notify::NextComp, LONG_MS, &null.env.cx));
        check_eq!(said?, cq::Wait::TimedOut);
        check!((50_000..57_000).contains(&ms));
        Ok(())
    }

    #[test]
    fn waits_for_what_is_solicited() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        let (ms, said) = timed(|| cq.wait(Notify::Solicited, LONG_MS, &null.env.cx));
        check_eq!(said?, cq::Wait::TimedOut);
        check!((50_000..57_000).contains(&ms));
        Ok(())
    }

    #[test]
    fn next_comes_not_at_all() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        let mut batch = WcArray::<4>::new();
        let (ms, said) =
            timed(|| Ok::<_, Error>(cq.next(&mut batch, LONG_MS, &null.env.cx)?.is_none()));
        check!(said?);
        check!((50_000..57_000).contains(&ms));
        Ok(())
    }
}
