// SPDX-License-Identifier: GPL-2.0

//! Ids whose last message the connection manager would send again for a minute.

use super::timed;
use crate::fixture::{
    dial,
    listen,
    Env,
    Events,
    Place, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// No id takes so long to be destroyed, in milliseconds.
const BOUND_MS: i64 = 10_000;

/// Accepts a request, does this to its id, and returns how long the destruction of that takes.
fn destroyed_after(
    then: impl Fn(&cm::Id, &Sleepable) -> Result + Send + Sync + 'static,
) -> Result<i64> {
    let (env, said) = (Env::new()?, Place::new()?);
    let (addr, pd, tell) = (env.addr(), env.pd.clone(), said.clone());
    let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        id.accept(Events::new()?, &cm::ConnParam::default(), cx)?;
        tell.put((then(&id, cx), qp, id));
        Ok(())
    };
    let listener = listen(&env, addr, accepts)?;
    let connected = dial(&env, addr, &[]).map(drop);
    let (done, qp, id) = said.wait()?;
    done?;
    listener.destroy(&env.cx)?;
    let (ms, destroyed) = timed(|| {
        qp.destroy(&env.cx)?;
        id.destroy(&env.cx)
    });
    destroyed?;
    drop(connected);
    Ok(ms)
}

#[kunit_tests(rdma_connect_end)]
mod tests {
    use super::*;

    #[test]
    fn rejected_after_it_was_accepted() -> Result {
        let ms = destroyed_after(|id, cx| {
            let _ = id.reject(&[], cx);
            Ok(())
        })?;
        check!(ms < BOUND_MS);
        Ok(())
    }

    #[test]
    fn disconnected_after_it_was_said_to_be_there() -> Result {
        let ms = destroyed_after(|id, cx| {
            id.notify_established(cx)?;
            id.disconnect(cx)
        })?;
        check!(ms < BOUND_MS);
        Ok(())
    }
}
