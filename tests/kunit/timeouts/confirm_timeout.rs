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
use rdma::{
    ibcm,
    prelude::*, //
};

/// The time that a peer has to confirm, in milliseconds. The kernel's clock may be late.
const GIVEN_UP_MS: core::ops::Range<i64> = 90_000..95_000;

/// A handler that keeps the error of a failure.
struct Says(Arc<Place<Error>>);

impl cm::Handler for Says {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Failed(e) = event {
            self.0.put(e);
        }
    }
}

/// Accepts a request of a peer that confirms nothing, does this to the id, and returns how long it
/// takes until the handler's last event, and what that returns.
fn given_up(then: impl Fn(&cm::Id) + Send + Sync + 'static) -> Result<(i64, Error)> {
    let (env, said, kept) = (Env::new()?, Place::new()?, Place::new()?);
    let (addr, pd, says, keep) = (env.addr(), env.pd.clone(), said.clone(), kept.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        keep.put(qp);
        id.accept(
            Arc::new(Says(says.clone()), GFP_KERNEL)?,
            &cm::ConnParam::default(),
            cx,
        )?;
        then(&id);
        Ok(())
    };
    let _listener = listen(&env, addr, accept)?;
    let given_up = until_failed(&env, addr, &said);
    drop(kept.take());
    given_up
}

/// As [`given_up`], of a connection of `rdma::ibcm`.
fn given_up_by_service() -> Result<(i64, Error)> {
    let (env, said, kept) = (Env::new()?, Place::new()?, Place::new()?);
    let (addr, pd, says, keep) = (env.addr(), env.pd.clone(), said.clone(), kept.clone());
    let accept = move |request: ibcm::Request<'_>, cx: &Sleepable| {
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create_raw(&pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        let waiting = Arc::new(Says(says.clone()), GFP_KERNEL)?;
        let connection = request.accept(&qp, waiting, &cm::ConnParam::default(), cx)?;
        keep.put((connection, qp));
        Ok(())
    };
    // That of the port (`RDMA_PS_TCP`), which the forger asks for.
    let service = 0x0106_0000 | u64::from(addr.port());
    let accept = Arc::new(accept, GFP_KERNEL)?;
    let _listener = ibcm::Listener::new(&env.dev, service, 1, accept, &env.cx)?;
    let given_up = until_failed(&env, addr, &said);
    drop(kept.take());
    given_up
}

/// Has a peer ask that confirms nothing, and returns how long it takes until the last event.
fn until_failed(env: &Env, addr: SocketAddr, said: &Place<Error>) -> Result<(i64, Error)> {
    let forger = Forger::new(env)?;
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
    fn accepted_for_a_service() -> Result {
        let (ms, error) = given_up_by_service()?;
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
