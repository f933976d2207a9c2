// SPDX-License-Identifier: GPL-2.0

//! The end of an id that somebody waits for.

use crate::fixture::{
    accepts,
    listen,
    wait,
    Env,
    Events,
    Place,
    STEP_MS, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::prelude::*;

/// Destroys an id at the first event, and keeps what that returns.
struct Destroys {
    id: Arc<Place<cm::Id>>,
    said: SetOnce<Option<Error>>,
}

impl Destroys {
    fn new() -> Result<Arc<Self>> {
        let this = Self {
            id: Place::new()?,
            said: SetOnce::new(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }
}

impl cm::Handler for Destroys {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, cx: &Sleepable) {
        if let Some(id) = self.id.take() {
            self.said.populate(id.destroy(cx).err());
        }
    }
}

/// Returns the options of an id that is bound to an address which no other test uses.
fn bound(env: &Env) -> cm::Options<'static> {
    cm::Options {
        src: Some(env.addr()),
        ..Default::default()
    }
}

#[kunit_tests(rdma_cm_end)]
mod tests {
    use super::*;

    #[test]
    fn address_is_free() -> Result {
        let env = Env::new()?;
        let options = bound(&env);
        let create = || cm::Id::create_with(&env.client, &options, &env.cx);
        for _ in 0..20 {
            let id = create()?;
            check_err!(create().map(|_| ()), EADDRINUSE);
            id.destroy(&env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn of_one_handle_of_two() -> Result {
        let env = Env::new()?;
        let id = env.id()?;
        check_err!(id.clone().destroy(&env.cx), EBUSY);
        check!(id.device()? == &env.dev);
        id.destroy(&env.cx)
    }

    #[test]
    fn comes_after_the_qp() -> Result {
        let env = Env::new()?;
        let (id, cq) = (env.id()?, env.cq::<Softirq>(64)?);
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        check_err!(id.clone().destroy(&env.cx), EBUSY);
        qp.destroy(&env.cx)?;
        id.destroy(&env.cx)
    }

    #[test]
    fn releases_the_handler() -> Result {
        let (env, events) = (Env::new()?, Events::new()?);
        let (addr, gone) = (env.addr(), events.gone());
        let _listener = listen(&env, addr, accepts(&env, &[]))?;
        let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        id.connect(events, &cm::ConnParam::default(), &env.cx)?;
        check_eq!(gone.get(), 0);
        qp.destroy(&env.cx)?;
        id.destroy(&env.cx)?;
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn in_a_callback_is_deferred() -> Result {
        let (env, destroys) = (Env::new()?, Destroys::new()?);
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, &[]))?;
        let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        let options = bound(&env);
        let create = || cm::Id::create_with(&env.client, &options, &env.cx);
        destroys.id.put(create()?);
        check_err!(create().map(drop), EADDRINUSE);
        id.connect(destroys.clone(), &cm::ConnParam::default(), &env.cx)?;
        wait(|| destroys.said.copy().is_some())?;
        check_eq!(destroys.said.copy(), Some(Some(EDEADLK)));
        // A work item destroys the id, and its address is free.
        wait(|| create().is_ok())
    }
}
