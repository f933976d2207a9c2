// SPDX-License-Identifier: GPL-2.0

//! MADs without an answer.

use super::timed;
use crate::fixture::{
    message,
    Mads,
    LONG_MS, //
};
use kernel::prelude::*;
use rdma::{
    mad::Method,
    prelude::*, //
};

#[kunit_tests(rdma_mad_timeout)]
mod tests {
    use super::*;

    #[test]
    fn request_is_repeated_and_times_out() -> Result {
        let (mads, cx) = (Mads::new()?, Sleepable::current()?);
        let asked = message(Method::GET, 0, &[]);
        let (ms, said) = timed(|| mads.client.request(&mads.peer, &asked, 5_000, 2, &cx));
        check_err!(said.map(drop), ETIMEDOUT);
        check!((15_000..15_500).contains(&ms));
        let first = mads.server.recv(Some(LONG_MS), &cx)?;
        for _ in 0..2 {
            let again = mads.server.recv(Some(LONG_MS), &cx)?;
            check_eq!(again.header().tid.get(), first.header().tid.get());
        }
        check_err!(mads.server.recv(Some(LONG_MS), &cx), ETIMEDOUT);
        Ok(())
    }
}
