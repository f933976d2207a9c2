// SPDX-License-Identifier: GPL-2.0

//! The device under a round: a null device of its own, or one of the network, rxe or siw.

use crate::{
    owners::RecvBuf,
    rng::Rng,
    session,
    way::Way, //
};
use core::net::{
    IpAddr,
    Ipv4Addr, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Mutex, //
    }, //
};
use rdma::{
    context,
    prelude::*,
    qp::{
        Event,
        Events,
        InitAttr, //
    },
    srq::Srq, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

pub(crate) const PORT: u32 = 1;
pub(crate) const CAPS: Caps = Caps {
    send_sge: 4,
    ..Caps::new(8, 8)
};
/// The address that `tests/guest/up` gives the interface of the first device.
const IP: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const RESOLVE_MS: u32 = 5_000;

/// The parameter `device`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Null,
    Rxe,
    Siw,
}

impl Transport {
    pub(crate) fn new(number: u8) -> Result<Self> {
        [Self::Null, Self::Rxe, Self::Siw]
            .get(usize::from(number))
            .copied()
            .ok_or(EINVAL)
    }

    /// Returns the name of the device, where there is only one.
    pub(crate) fn device(self) -> Option<&'static CStr> {
        match self {
            Self::Null => None,
            Self::Rxe => Some(c"rxe0"),
            Self::Siw => Some(c"siw0"),
        }
    }
}

/// Nothing is done in an event but to be told of it.
struct Told;

impl Events for Told {
    fn event(self: ArcBorrow<'_, Self>, _event: Event, _qp_num: u32, _cx: &context::Atomic) {}
}

impl cm::Handler for Told {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

/// The parts that QPs are made of.
pub(crate) struct Parts<C: PollContext> {
    pub(crate) pd: Pd,
    pub(crate) cq: Cq<C>,
    /// That of sessions, which is not shared.
    pub(crate) session_cq: Cq<C>,
    pub(crate) srq: Srq<RecvBuf>,
    pub(crate) srq_cq: Cq<AnyContext>,
}

/// What QPs are for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Pair,
    /// One is on the SRQ.
    OnSrq,
    Session,
}

impl Sort {
    /// Returns the private data of a request for such a connection.
    fn private_data(self) -> &'static [u8] {
        match self {
            Self::Pair => b"p",
            Self::OnSrq => b"q",
            Self::Session => b"s",
        }
    }

    fn of_private_data(data: &[u8]) -> Result<Self> {
        let is_it = |sort: &Self| data.starts_with(sort.private_data());
        let all = [Self::Pair, Self::OnSrq, Self::Session];
        all.into_iter().find(is_it).ok_or(EPROTO)
    }
}

impl<C: Way> Parts<C> {
    fn qp(&self, sort: Sort, id: Option<&cm::Id>, cx: &Sleepable) -> Result<Qp<C>> {
        let (cq, caps) = match sort {
            Sort::Session => (&self.session_cq, &session::CAPS),
            _ => (&self.cq, &CAPS),
        };
        let init = InitAttr::new(&self.pd, cq, cq, caps).rw_contexts(2, PORT);
        made(init.events(Arc::new(Told, GFP_KERNEL)?), id, cx)
    }

    /// Makes a QP on the SRQ.
    fn srq_qp(&self, id: Option<&cm::Id>, cx: &Sleepable) -> Result<Qp<AnyContext>> {
        let init = InitAttr::on_srq(&self.pd, &self.srq_cq, &self.srq, &CAPS);
        made(init, id, cx)
    }
}

fn made<C: PollContext>(
    init: InitAttr<'_, C>,
    id: Option<&cm::Id>,
    cx: &Sleepable,
) -> Result<Qp<C>> {
    match id {
        Some(id) => init.create_for(id, cx),
        None => init.create(cx),
    }
}

/// The QP that a request was accepted with.
enum Accepted<C: PollContext> {
    Qp(Qp<C>),
    OnSrq(Qp<AnyContext>),
}

/// A QP, and one on the SRQ that it sends to.
type SrqPair<C> = (Qp<C>, Qp<AnyContext>);

/// The network that connects QPs of one device.
pub(crate) enum Net<C: PollContext> {
    Null(Arc<NullDevice>),
    Link(Pin<KBox<Link<C>>>),
}

impl<C: Way> Net<C> {
    /// Connects two QPs.
    pub(crate) fn pair(
        &self,
        parts: &Parts<C>,
        sort: Sort,
        rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<[Qp<C>; 2]> {
        match self {
            Self::Null(null) => {
                let ends = [parts.qp(sort, None, cx)?, parts.qp(sort, None, cx)?];
                let [a, b] = &ends;
                join(null, a, b)?;
                Ok(ends)
            }
            Self::Link(link) => match link.connect(parts, sort, rng, cx)? {
                (from, Accepted::Qp(to)) => Ok([from, to]),
                _ => Err(ENOTCONN),
            },
        }
    }

    /// Connects a QP to one on the SRQ.
    pub(crate) fn srq_pair(
        &self,
        parts: &Parts<C>,
        rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<SrqPair<C>> {
        match self {
            Self::Null(null) => {
                let ends = (parts.qp(Sort::OnSrq, None, cx)?, parts.srq_qp(None, cx)?);
                join(null, &ends.0, &ends.1)?;
                Ok(ends)
            }
            Self::Link(link) => match link.connect(parts, Sort::OnSrq, rng, cx)? {
                (from, Accepted::OnSrq(to)) => Ok((from, to)),
                _ => Err(ENOTCONN),
            },
        }
    }
}

fn join<A: PollContext, B: PollContext>(null: &NullDevice, a: &Qp<A>, b: &Qp<B>) -> Result {
    null.inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
    null.inject_qp(b.num(), Injection::Connect { peer: a.num() })
}

/// A device of the network that connects to itself, by the connection manager.
#[pin_data]
pub(crate) struct Link<C: PollContext> {
    client: ClientRef,
    addr: SocketAddr,
    accepted: Arc<Last<C>>,
    /// Held to connect.
    #[pin]
    connecting: Mutex<()>,
    _listener: cm::Listener,
}

/// The QP that the last request was accepted with.
#[pin_data]
struct Last<C: PollContext> {
    #[pin]
    accepted: Mutex<Option<Accepted<C>>>,
}

impl<C: Way> Link<C> {
    pub(crate) fn new(
        client: &ClientRef,
        parts: &Arc<Parts<C>>,
        cx: &Sleepable,
    ) -> Result<Pin<KBox<Self>>> {
        // The listener of the round before may not have ended.
        static ROUNDS: Atomic<u32> = Atomic::new(0);
        let port = 7000 + (ROUNDS.fetch_add(1, Relaxed) % 4096) as u16;
        let addr = SocketAddr::new(IP, port);
        let last = pin_init!(Last {
            accepted <- new_mutex!(None),
        });
        let accepted = Arc::pin_init(last, GFP_KERNEL)?;
        let (parts, put) = (parts.clone(), accepted.clone());
        let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            let sort = Sort::of_private_data(request.private_data())?;
            let id = request.into_id(cx)?;
            let accepted = match sort {
                Sort::OnSrq => Accepted::OnSrq(parts.srq_qp(Some(&id), cx)?),
                sort => Accepted::Qp(parts.qp(sort, Some(&id), cx)?),
            };
            let before = put.accepted.lock().replace(accepted);
            drop(before);
            id.accept(Arc::new(Told, GFP_KERNEL)?, &cm::ConnParam::default(), cx)
        };
        let accept = Arc::new(accept, GFP_KERNEL)?;
        let listener = cm::Listener::new(client, addr, 8, accept, cx)?;
        let init = pin_init!(Self {
            client: client.clone(),
            addr,
            accepted,
            connecting <- new_mutex!(()),
            _listener: listener,
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Connects a new QP, and returns what the other end is.
    fn connect(
        &self,
        parts: &Parts<C>,
        sort: Sort,
        rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<(Qp<C>, Accepted<C>)> {
        let _dialing = self.connecting.lock();
        let id = cm::Id::resolve(&self.client, self.addr, RESOLVE_MS, cx)?;
        let qp = parts.qp(sort, Some(&id), cx)?;
        let param = cm::ConnParam {
            private_data: sort.private_data(),
            // Messages without a receive wait for it, or fail.
            rnr_retry_count: if rng.once_in(2) { 7 } else { 1 },
            ..Default::default()
        };
        let connected = id.connect(Arc::new(Told, GFP_KERNEL)?, &param, cx);
        let accepted = self.accepted.accepted.lock().take();
        connected?;
        Ok((qp, accepted.ok_or(ENOTCONN)?))
    }
}
