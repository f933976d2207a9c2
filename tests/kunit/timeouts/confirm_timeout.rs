// SPDX-License-Identifier: GPL-2.0

//! Peers that are accepted, confirm nothing, and want to have the answer for a day.

use super::timed;
use crate::fixture::{
    listen,
    Env,
    Forger,
    Place, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;

/// The time that a peer has to confirm, in milliseconds. The kernel's clock may be late.
const GIVEN_UP_MS: core::ops::Range<i64> = 90_000..95_000;

struct Waiting {
    _qp: Qp<Softirq>,
    said: Arc<Place<Error>>,
}

impl cm::Handler for Waiting {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Failed(e) = event {
            self.said.put(e);
        }
    }
}

/// Accepts a request of a peer that confirms nothing, does this to the id, and returns how long it
/// takes until the handler's last event, and what that says.
fn given_up(then: impl Fn(&cm::Id) + Send + Sync + 'static) -> Result<(i64, Error)> {
    let (env, said) = (Env::new()?, Place::new()?);
    let (addr, pd, says) = (env.addr(), env.pd.clone(), said.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let waiting = Waiting {
            _qp: Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?,
            said: says.clone(),
        };
        let waiting = Arc::new(waiting, GFP_KERNEL)?;
        id.accept(waiting, &cm::ConnParam::default(), cx)?;
        then(&id);
        Ok(())
    };
    let _listener = listen(&env, addr, accept)?;
    let forger = Forger::new(&env)?;
    let (ms, error) = timed(|| {
        forger.ask(addr, 31, 15, &env.cx)?;
        for _ in 0..120 {
            if said.is_full() {
                break;
            }
            fsleep(Delta::from_secs(1));
        }
        said.wait()
    });
    Ok((ms, error?))
}

#[kunit_tests(rdma_confirm_timeout)]
mod tests {
    use super::*;

    #[test]
    fn accepted() -> Result {
        let (ms, error) = given_up(|_| ())?;
        check_eq!(error, ETIMEDOUT);
        check!(GIVEN_UP_MS.contains(&ms));
        Ok(())
    }

    #[test]
    fn accepted_and_disconnected() -> Result {
        let (ms, error) = given_up(cm::Id::disconnect_later)?;
        check_eq!(error, ETIMEDOUT);
        check!(GIVEN_UP_MS.contains(&ms));
        Ok(())
    }
}
