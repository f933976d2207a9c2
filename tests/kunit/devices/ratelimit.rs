// SPDX-License-Identifier: GPL-2.0

//! Limits for messages that peers can cause.

use kernel::{
    prelude::*,
    time::{
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::ratelimit::Ratelimit;

#[kunit_tests(rdma_ratelimit)]
mod tests {
    use super::*;

    #[test]
    fn ten_messages_in_each_interval() -> Result {
        let (limit, begin) = (Ratelimit::new("one"), Instant::<Monotonic>::now());
        let printed = (0..1_000).filter(|_| limit.check()).count();
        // The first and the last interval may be cut.
        let intervals = begin.elapsed().as_nanos() / Delta::from_secs(5).as_nanos() + 2;
        check!(printed >= 10 && printed as i64 <= 10 * intervals);
        Ok(())
    }

    #[test]
    fn limits_are_apart() -> Result {
        let (one, other) = (Ratelimit::new("one"), Ratelimit::new("other"));
        for _ in 0..1_000 {
            let _ = one.check();
        }
        check!(other.check());
        Ok(())
    }
}
