// SPDX-License-Identifier: GPL-2.0

//! Connecting to peers that do not answer, by both connection managers.

use super::timed;
use crate::fixture::{
    connect_to,
    connect_to_service,
    listen,
    listen_to_service,
    wait,
    Counter,
    Env, //
};
use kernel::prelude::*;
use rdma::{
    ibcm::Param,
    prelude::*, //
};

/// The time that the InfiniBand connection manager waits for an answer to the first request and to
/// 15 more, in milliseconds: 4.096 us << 20 each, and as long as packets live.
const GIVES_UP_MS: core::ops::Range<i64> = 16 * 4295..16 * 5000;

#[kunit_tests(rdma_connect_timeout)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_for_a_service() -> Result {
        let (env, over) = (Env::new()?, Counter::new()?);
        let done = over.clone();
        // The answer would come from the callback, which waits until it is too late.
        let (_listener, service) = listen_to_service(&env, move |_, _| wait(|| done.get() == 1))?;
        let (ms, said) = timed(|| connect_to_service(&env, service, &Param::default()));
        over.up();
        check_err!(said, ETIMEDOUT);
        check!(GIVES_UP_MS.contains(&ms));
        Ok(())
    }

    #[test]
    fn no_answer_at_an_address() -> Result {
        let (env, over) = (Env::new()?, Counter::new()?);
        let (addr, done) = (env.addr(), over.clone());
        let silent = move |_: cm::Request<'_>, _: &Sleepable| wait(|| done.get() == 1);
        let _listener = listen(&env, addr, silent)?;
        let (ms, said) = timed(|| connect_to(&env, addr, &[]).map(drop));
        over.up();
        check_err!(said, ETIMEDOUT);
        check!(GIVES_UP_MS.contains(&ms));
        Ok(())
    }
}
