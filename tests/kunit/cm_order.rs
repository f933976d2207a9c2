// SPDX-License-Identifier: GPL-2.0

//! Calls that come when the connection manager is not ready for them.

use crate::fixture::{
    Counter,
    Env,
    STEP_MS, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// A connection that gets no QP.
struct NoQp;

impl cm::Handler for NoQp {
    fn event(&self, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl cm::Connect for NoQp {
    fn resolved(&self, _id: &cm::Id, _cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        Err(ENOSPC)
    }
}

fn begin(env: &Env, addr: SocketAddr) -> Result<cm::Id> {
    let (options, none) = (cm::Options::default(), Arc::new(NoQp, GFP_KERNEL)?);
    cm::Id::connect_to(&env.client, addr, STEP_MS, &options, none, &env.cx)
}

#[kunit_tests(rdma_cm_order)]
mod tests {
    use super::*;

    #[test]
    fn route_before_the_address() -> Result {
        let env = Env::new()?;
        let bound = cm::Options {
            src: Some(SocketAddr::new(env.ip, 0)),
            ..Default::default()
        };
        for options in [cm::Options::default(), bound] {
            let id = cm::Id::create_with(&env.client, &options, &env.cx)?;
            check_err!(id.resolve_route(STEP_MS, &env.cx), ENOTCONN);
            check_err!(id.gids().map(|_| ()), ENOTCONN);
        }
        Ok(())
    }

    #[test]
    fn route_while_the_address_is_being_found() -> Result {
        const TURNS: i32 = 300;
        let env = Env::new()?;
        let addr = env.addr();
        let (ended, wrong) = (Counter::new()?, Counter::new()?);
        for _ in 0..TURNS {
            let id = begin(&env, addr)?;
            // From before the address is known until the connection has failed.
            for _ in 0..400 {
                if id.resolve_route(STEP_MS, &env.cx) != Err(EBUSY) {
                    wrong.up();
                }
            }
            ended.up();
        }
        check_eq!((ended.get(), wrong.get()), (TURNS, 0));
        Ok(())
    }
}
