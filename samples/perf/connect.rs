// SPDX-License-Identifier: GPL-2.0

//! Connections by the connection manager: each is set up and taken down before the next one.

use crate::{
    args::{
        Args,
        Context, //
    },
    poll::Mode,
    run::{
        device,
        Figures,
        Report,
        Run, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(1, 1);

/// QPs at an end, at once: the last one may still be going.
const QPS: u32 = 2;

/// How long to look for an address and for a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2_000;

const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 7,
    rnr_retry_count: 7,
};

/// What the QPs of an end are made of.
struct Parts<C: PollContext> {
    pd: Pd,
    cq: Cq<C>,
}

impl<C: Mode> Parts<C> {
    fn new(dev: &Device, context: Context, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            pd: Pd::alloc(dev, cx)?,
            cq: C::cq(dev, QPS * CAPS.entries(), context, cx)?,
        })
    }

    /// The address may be that of another device than the one that was named: then this fails.
    fn qp(&self, id: &cm::Id, cx: &Sleepable) -> Result<Qp<C>> {
        Qp::create(id, &self.pd, &self.cq, &self.cq, &CAPS, cx)
    }
}

/// What is told of an end of a connection.
struct Events(Arc<Run<()>>);

impl cm::Handler for Events {
    fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => {}
            cm::Event::Disconnected => self.0.through(()),
            other => {
                pr_err!("{other}\n");
                self.0.fail(EIO);
            }
        }
    }
}

/// The server, with its end of the connection, if there is one.
#[pin_data]
struct Server<C: PollContext> {
    parts: Parts<C>,
    #[pin]
    end: Mutex<Option<(cm::Id, Qp<C>)>>,
    events: Arc<Events>,
}

impl<C: Mode> Server<C> {
    fn accept(&self, request: cm::Request<'_>, cx: &Sleepable) -> Result {
        let id = request.into_id(cx)?;
        let qp = self.parts.qp(&id, cx)?;
        *self.end.lock() = Some((id.clone(), qp));
        id.accept(self.events.clone(), &PARAM, cx)
    }
}

impl<C: Mode> cm::Accept for Server<C> {
    fn request(&self, request: cm::Request<'_>, cx: &Sleepable) {
        if let Err(e) = self.accept(request, cx) {
            self.events.0.fail(e);
        }
    }
}

struct Connector<'a, C: PollContext> {
    client: &'a ClientRef,
    addr: SocketAddr,
    parts: Parts<C>,
    server: Arc<Server<C>>,
}

impl<C: Mode> Connector<'_, C> {
    fn once(&self, cx: &Sleepable) -> Result {
        let events = &self.server.events;
        let id = cm::Id::resolve(self.client, self.addr, RESOLVE_MS, cx)?;
        let qp = self.parts.qp(&id, cx)?;
        events.0.begin(2);
        id.connect(events.clone(), &PARAM, cx)?;
        id.disconnect(cx)?;
        // Both ends are told.
        events.0.sleep()?;
        let (peer, peer_qp) = self.server.end.lock().take().ok_or(ENOTCONN)?;
        peer_qp.destroy(cx)?;
        peer.destroy(cx)?;
        qp.destroy(cx)?;
        id.destroy(cx)
    }

    fn phase(&self, count: u32, cx: &Sleepable) -> Result<Figures> {
        let began = Instant::<Monotonic>::now();
        for _ in 0..count {
            self.once(cx)?;
        }
        Ok(Figures {
            ops: count.into(),
            ns: began.elapsed().as_nanos(),
            ..Default::default()
        })
    }
}

pub(crate) fn run<C: Mode>(client: &ClientRef, args: &Args<'_>, cx: &Sleepable) -> Result<Report> {
    let (dev, peer) = (device(client, args.device)?, device(client, args.peer)?);
    let events = Arc::new(Events(Run::new(0)?), GFP_KERNEL)?;
    let parts = Parts::<C>::new(&peer, args.context, cx)?;
    let server = pin_init!(Server {
        parts,
        end <- new_mutex!(None),
        events,
    });
    let server = Arc::pin_init(server, GFP_KERNEL)?;
    let listener = cm::Listener::new(client, args.addr, 1, server.clone(), cx)?;
    let connector = Connector {
        client,
        addr: args.addr,
        parts: Parts::new(&dev, args.context, cx)?,
        server,
    };
    let figures = connector
        .phase(args.warmup, cx)
        .and_then(|_| connector.phase(args.count, cx));
    let left = connector.server.end.lock().take();
    drop(left);
    listener.destroy(cx)?;
    Ok(figures?.into())
}
