// SPDX-License-Identifier: GPL-2.0

//! Handlers of connection requests.

use crate::{
    link::Link,
    rng::Rng,
    side::Side,
    times::Kind,
    world::{
        OnDevice,
        World, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    cm::RejectReason,
    ibcm,
    prelude::*, //
};

/// Accepts, in a callback or after it.
pub(crate) fn accept(world: &Arc<World>, id: cm::Id, rng: &mut Rng, cx: &Sleepable) -> Result {
    let side = Side::new(world, Kind::Release)?;
    side.make_qp(&id, cx)?;
    let _ = side.post(rng, cx);
    side.set_link(Link::Cm(id.clone()));
    let accepted = id.accept(side.clone(), &cm::ConnParam::default(), cx);
    drop(id);
    let _ = side.post(rng, cx);
    world.keep(side, rng, cx);
    accepted
}

/// The handler of requests of the connection manager.
pub(crate) struct Answers(pub(crate) Arc<World>);

impl cm::Accept for Answers {
    fn request(self: ArcBorrow<'_, Self>, request: cm::Request<'_>, cx: &Sleepable) {
        let mut rng = self.0.rng();
        if rng.once_in(12) {
            return;
        }
        let Ok(id) = request.into_id(cx) else {
            return;
        };
        match rng.below(12) {
            0 => drop(id),
            1 => drop(id.reject(b"no", cx)),
            2 => {
                if id.destroy(cx) == Ok(()) {
                    self.0
                        .tally
                        .wrong("a request was destroyed in its callback");
                }
            }
            3..=5 => drop(self.0.requests.put(id)),
            _ => drop(accept(&self.0, id, &mut rng, cx)),
        }
    }
}

/// The handler of requests of the InfiniBand connection manager.
pub(crate) struct IbAnswers {
    pub(crate) world: Arc<World>,
    pub(crate) on: Arc<OnDevice>,
}

impl IbAnswers {
    fn accept(&self, request: ibcm::Request<'_>, rng: &mut Rng, cx: &Sleepable) -> Result {
        let side = Side::new(&self.world, Kind::IbRelease)?;
        let qp = side.make_raw_qp(&self.on, cx)?;
        let param = cm::ConnParam::default();
        let connection = request.accept(&qp, side.clone(), &param, cx)?;
        side.set_link(Link::Ib(Arc::new(connection, GFP_KERNEL)?));
        let _ = side.post(rng, cx);
        self.world.keep(side, rng, cx);
        Ok(())
    }
}

impl ibcm::Accept for IbAnswers {
    fn request(self: ArcBorrow<'_, Self>, request: ibcm::Request<'_>, cx: &Sleepable) {
        let mut rng = self.world.rng();
        match rng.below(8) {
            // A request that is not answered is rejected.
            0 => {}
            1 => drop(request.reject(RejectReason::NO_RESOURCES, b"no", cx)),
            _ => drop(self.accept(request, &mut rng, cx)),
        }
    }
}
