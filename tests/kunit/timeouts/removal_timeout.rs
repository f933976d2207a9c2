// SPDX-License-Identifier: GPL-2.0

//! Removals that wait, and say for what.

use crate::{
    check::expect,
    fixture::removal_waits_for, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

#[kunit_tests(rdma_removal_timeout)]
mod tests {
    use super::*;

    #[test]
    fn says_every_ten_seconds_what_it_waits_for() -> Result {
        expect(3, "waits for 1 device handle(s)");
        removal_waits_for(
            |null| Ok(null.env.dev.clone()),
            |_, _| {
                fsleep(Delta::from_secs(34));
                Ok(())
            },
        )
    }
}
