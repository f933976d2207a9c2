// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/cm.rst.

use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(16, 16);

struct Connection {
    pd: Pd,
    cq: Cq<Softirq>,
    qp: SetOnce<Qp<Softirq>>,
}

impl cm::Handler for Connection {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl cm::Connect for Connection {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        let qp = Qp::create(id, &self.pd, &self.cq, &self.cq, &CAPS, cx)?;
        // Post receives.
        self.qp.populate(qp);
        Ok(cm::ConnParam::default())
    }
}

fn connect(
    client: &ClientRef,
    peer: SocketAddr,
    (pd, cq): (Pd, Cq<Softirq>),
    handler: Arc<dyn cm::Handler>,
    cx: &Sleepable,
) -> Result {
    let id = cm::Id::resolve(client, peer, 2_000, cx)?; // address, device, route
    let qp = Qp::create(&id, &pd, &cq, &cq, &Caps::new(16, 16), cx)?;
    // Post receives, then:
    let answer = id.connect(handler, &cm::ConnParam::default(), cx)?;
    Ok(())
}

fn connect_by_events(
    client: &ClientRef,
    peer: SocketAddr,
    connection: Arc<Connection>,
    cx: &Sleepable,
) -> Result {
    let id = cm::Id::connect_to(client, peer, 2_000, &cm::Options::default(), connection, cx)?;
    Ok(())
}
