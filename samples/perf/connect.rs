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
    setup::{
        phases,
        Objects, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Mutex,
        UniqueArc, //
    }, //
};
use rdma::{
    prelude::*,
    qp::RnrTimer, //
};

const CAPS: Caps = Caps::new(1, 1);

/// The longest time to resolve an address and a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2_000;

const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 7,
    rnr_retry_count: 7,
    min_rnr_timer: RnrTimer::DEFAULT,
    timeout_ms: 60_000,
};

/// The parts that the QPs of an end are made of.
struct Parts {
    pd: Pd,
    cq: Cq,
}

impl Parts {
    #[inline(never)]
    fn new(client: &ClientRef, name: &str, args: &Args<'_>, cx: &Sleepable) -> Result<Self> {
        let dev = device(client, name, cx)?;
        // The last QP may still be going when the next one comes.
        let qps = args.qps.saturating_add(1);
        let entries = CAPS.entries().checked_mul(qps).ok_or(EINVAL)?;
        Ok(Self {
            pd: Pd::alloc(&dev, cx)?,
            cq: alloc_cq(&dev, entries, args.context, cx)?,
        })
    }

    /// The address may be that of another device than the one that was named: then this fails.
    #[inline(never)]
    fn qp(&self, id: &cm::Id, cx: &Sleepable) -> Result<Qp> {
        Qp::create(id, &self.pd, &self.cq, &self.cq, &CAPS, cx)
    }
}

/// The handler of an end of a connection.
impl cm::Handler for Run {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => {}
            cm::Event::Disconnected => self.ended(),
            other => {
                pr_err!("{other}\n");
                self.fail(EIO);
            }
        }
    }
}

/// One end of a connection.
type End = (cm::Id, Qp);

/// The server, with both ends of each connection, its own first.
#[pin_data]
struct Server {
    parts: Parts,
    #[pin]
    ends: Mutex<KVVec<End>>,
    run: Arc<Run>,
}

impl Server {
    fn accept(&self, request: cm::Request<'_>, cx: &Sleepable) -> Result {
        let id = request.into_id(cx)?;
        let qp = self.parts.qp(&id, cx)?;
        self.ends.lock().push_within_capacity((id.clone(), qp))?;
        id.accept(self.run.clone(), &PARAM, cx)
    }
}

impl cm::Accept for Server {
    fn request(self: ArcBorrow<'_, Self>, request: cm::Request<'_>, cx: &Sleepable) {
        if let Err(e) = self.accept(request, cx) {
            self.run.fail(e);
        }
    }
}

struct Connector<'a> {
    client: &'a ClientRef,
    addr: SocketAddr,
    parts: Parts,
    server: Arc<Server>,
    cx: &'a Sleepable,
}

impl Objects for Connector<'_> {
    fn set_up(&mut self) -> Result {
        let id = cm::Id::resolve(self.client, self.addr, RESOLVE_MS, self.cx)?;
        let qp = self.parts.qp(&id, self.cx)?;
        id.connect(self.server.run.clone(), &PARAM, self.cx)?;
        Ok(self.server.ends.lock().push_within_capacity((id, qp))?)
    }

    fn take_down(&mut self) -> Result {
        let Server { ends, run, .. } = &*self.server;
        run.begin(2);
        let id = ends.lock().last().ok_or(EIO)?.0.clone();
        id.disconnect(self.cx)?;
        drop(id);
        // Both ends are told.
        run.sleep()?;
        for _ in 0..2 {
            let (id, qp) = ends.lock().pop().ok_or(EIO)?;
            qp.destroy(self.cx)?;
            id.destroy(self.cx)?;
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
    let server = UniqueArc::new_uninit(GFP_KERNEL)?;
    let parts = Parts::new(client, args.peer, args, cx)?;
    // Both of each connection.
    let ends = KVVec::with_capacity(args.qps.saturating_mul(2) as usize, GFP_KERNEL)?;
    let run = Run::new(0)?;
    let server = Arc::from(server.write_pin_init(pin_init!(Server {
        parts,
        ends <- new_mutex!(ends),
        run,
    }))?);
    let listener = cm::Listener::new(client, args.addr, 64, server.clone(), cx)?;
    let mut connector = Connector {
        client,
        addr: args.addr,
        parts: Parts::new(client, args.device, args, cx)?,
        server,
        cx,
    };
    let result = phases(args, &mut connector, report);
    let left = core::mem::take(&mut *connector.server.ends.lock());
    drop(left);
    listener.destroy(cx)?;
    result
}
