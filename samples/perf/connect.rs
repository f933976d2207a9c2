// SPDX-License-Identifier: GPL-2.0

//! Connections by the connection manager: so many at once are set up, each before the next one, and
//! then taken down.

use crate::{
    args::Args,
    poll::{
        alloc_cq,
        Cq,
        Qp, //
    },
    run::{
        device,
        Report,
        Run, //
    },
    setup::phases, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(1, 1);

/// The longest time to resolve an address and a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2_000;

const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 7,
    rnr_retry_count: 7,
};

/// The parts that the QPs of an end are made of.
struct Parts {
    pd: Pd,
    cq: Cq,
}

impl Parts {
    fn new(dev: &Device, args: &Args<'_>, cx: &Sleepable) -> Result<Self> {
        // The last QP may still be going when the next one comes.
        let qps = args.qps.saturating_add(1);
        let entries = CAPS.entries().checked_mul(qps).ok_or(EINVAL)?;
        Ok(Self {
            pd: Pd::alloc(dev, cx)?,
            cq: alloc_cq(dev, entries, args.context, cx)?,
        })
    }

    /// The address may be that of another device than the one that was named: then this fails.
    fn qp(&self, id: &cm::Id, cx: &Sleepable) -> Result<Qp> {
        Qp::create(id, &self.pd, &self.cq, &self.cq, &CAPS, cx)
    }
}

/// The handler of an end of a connection.
struct Events(Arc<Run>);

impl cm::Handler for Events {
    fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => {}
            cm::Event::Disconnected => self.0.ended(),
            other => {
                pr_err!("{other}\n");
                self.0.fail(EIO);
            }
        }
    }
}

/// One end of a connection.
type End = (cm::Id, Qp);

/// The server, with its end of the last connection, until that is taken.
#[pin_data]
struct Server {
    parts: Parts,
    #[pin]
    end: Mutex<Option<End>>,
    events: Arc<Events>,
}

impl Server {
    fn accept(&self, request: cm::Request<'_>, cx: &Sleepable) -> Result {
        let id = request.into_id(cx)?;
        let qp = self.parts.qp(&id, cx)?;
        *self.end.lock() = Some((id.clone(), qp));
        id.accept(self.events.clone(), &PARAM, cx)
    }
}

impl cm::Accept for Server {
    fn request(&self, request: cm::Request<'_>, cx: &Sleepable) {
        if let Err(e) = self.accept(request, cx) {
            self.events.0.fail(e);
        }
    }
}

struct Connector<'a> {
    client: &'a ClientRef,
    addr: SocketAddr,
    parts: Parts,
    server: Arc<Server>,
}

impl Connector<'_> {
    /// Returns the two ends of a new connection, the server's first.
    fn set_up(&self, cx: &Sleepable) -> Result<[End; 2]> {
        let id = cm::Id::resolve(self.client, self.addr, RESOLVE_MS, cx)?;
        let qp = self.parts.qp(&id, cx)?;
        id.connect(self.server.events.clone(), &PARAM, cx)?;
        let peer = self.server.end.lock().take().ok_or(ENOTCONN)?;
        Ok([peer, (id, qp)])
    }

    fn take_down(&self, ends: [End; 2], cx: &Sleepable) -> Result {
        let events = &self.server.events;
        let [_, (id, _)] = &ends;
        events.0.begin(2);
        id.disconnect(cx)?;
        // Both ends are told.
        events.0.sleep()?;
        for (id, qp) in ends {
            qp.destroy(cx)?;
            id.destroy(cx)?;
        }
        Ok(())
    }
}

#[inline(never)]
pub(crate) fn run(
    client: &ClientRef,
    args: &Args<'_>,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let (dev, peer) = (
        device(client, args.device, cx)?,
        device(client, args.peer, cx)?,
    );
    let events = Arc::new(Events(Run::new(0)?), GFP_KERNEL)?;
    let parts = Parts::new(&peer, args, cx)?;
    let server = pin_init!(Server {
        parts,
        end <- new_mutex!(None),
        events,
    });
    let server = Arc::pin_init(server, GFP_KERNEL)?;
    let listener = cm::Listener::new(client, args.addr, 64, server.clone(), cx)?;
    let connector = Connector {
        client,
        addr: args.addr,
        parts: Parts::new(&dev, args, cx)?,
        server,
    };
    let result = phases(
        args,
        || connector.set_up(cx),
        |ends| connector.take_down(ends, cx),
        report,
    );
    let left = connector.server.end.lock().take();
    drop(left);
    listener.destroy(cx)?;
    result
}
