// SPDX-License-Identifier: GPL-2.0

//! The server: all connections take their receives from one SRQ.
//!
//! A slot of the SRQ has all that a call needs, room for its data included, and goes from request
//! to request until the call is answered. Dropping it, wherever that is, makes it wait for the next
//! call. So nothing is allocated for a call, and as many are served at once as there are slots.

use crate::proto::{
    checksum,
    pattern,
    Answer,
    Call,
    ANSWER,
    CALL,
    GET,
    MAX_LEN, //
};
use kernel::{
    impl_has_work,
    new_work,
    page::PAGE_SIZE,
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};
use rdma::{
    prelude::*,
    qp::{
        InitAttr,
        QpContext, //
    },
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        Load,
        Sizes, //
    },
    srq::{
        Receive,
        Slot,
        Srq, //
    },
    wc::Success, //
};

/// The number of calls that are served at once. A slot is free a little after the answer has come,
/// and a call that finds none is sent again after a while, or, on iWARP, ends its connection: so
/// two for each of the usual clients, and for the one that sends nonsense.
const SLOTS: u32 = 10;
/// The number of connections that may wait for their peers to confirm them. Until these are gone,
/// as many more may come.
const BACKLOG: u32 = 8;
/// The time before a connection that a handler has kept is ended again.
const PAUSE: Delta = Delta::from_secs(1);
/// The pages of a call's data, and how many of them a request has.
const PAGES: u32 = MAX_LEN.div_ceil(PAGE_SIZE) as u32;
const SGES: u32 = 4;

/// For each slot a transfer in several requests, and an answer. The receives are the SRQ's.
const LOAD: Load = Load {
    requests: SLOTS,
    sends: 1,
    transfers: 1,
    pages: PAGES,
    send_sge: SGES,
    ..Load::NONE
};

/// To transfer pages may sleep, so the completions are handled where that is allowed.
type ServerQp = Qp<Workqueue>;

/// A connection: the context of its QP, which all handlers of its completions borrow.
#[pin_data]
struct Connection {
    id: cm::Id,
    qp: ServerQp,
    client: ClientRef,
    #[pin]
    end: Work<Self>,
}

/// The context that handlers run in.
type InConnection = QpContext<Connection, Sleepable>;

impl_has_work! {
    impl HasWork<Self> for Connection { self.end }
}

impl WorkItem for Connection {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        if let Err(e) = Sleepable::current().and_then(|cx| this.end(&cx)) {
            rdma::pr_err_ratelimited!("a connection was not ended: {e:?}\n");
            // The QP still has its context, which only this takes.
            fsleep(PAUSE);
            this.as_arc_borrow().end_later();
        }
    }
}

impl Connection {
    /// Ends the connection, from a work item. Any context.
    fn end_later(self: ArcBorrow<'_, Self>) {
        // Already queued is as good.
        let _ = self.client.enqueue(Arc::from(self));
    }

    /// The QP keeps its context, which owns the QP, until this takes it, from a QP whose device
    /// completes nothing without a drain.
    fn end(&self, cx: &Sleepable) -> Result {
        self.id.release_handler(cx);
        // The drain flushes the QP where there is no connection.
        let _ = self.id.disconnect(cx);
        let cleared = self.qp.clear_context(cx);
        cleared.or_else(|_| self.qp.release_context(cx))
    }
}

impl cm::Handler for Connection {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if event.is_last() {
            self.end_later();
        }
    }
}

/// Serves clients that connect to `addr`, `connections` of them at once, until the listener is
/// dropped and the peers have disconnected.
pub(crate) fn serve(
    client: &ClientRef,
    addr: SocketAddr,
    connections: u32,
    pd: &Pd,
    cx: &Sleepable,
) -> Result<cm::Listener> {
    let mut messages = Bufs::new(pd, SLOTS as usize, CALL.max(ANSWER), cx)?;
    let srq = Srq::create(pd, SLOTS, |_| Request::new(&mut messages, cx), cx)?;

    let load = Load {
        connections: connections.saturating_add(2 * BACKLOG),
        ..LOAD
    };
    let sizes = Sizes::new(pd.device(), 1, &load)
        .inspect_err(|misfit| pr_err!("{}: {misfit}\n", pd.device()))?;
    let entries = sizes.entries.saturating_add(SLOTS);
    let cq = Cq::<Workqueue>::alloc_any(pd.device(), entries, cx)?;

    let pd = pd.clone();
    let ulp = client.clone();
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let qp = InitAttr::on_srq(&pd, &cq, &srq, &sizes.caps)
            .rw_contexts(sizes.rw_contexts, 1)
            .create_for(&id, cx)?;
        let client = ulp.clone();
        let connection = pin_init!(Connection {
            id,
            qp,
            client,
            end <- new_work!("rpc::server::Connection::end"),
        });
        let connection = Arc::pin_init(connection, GFP_KERNEL)?;
        // The peer may call before `accept` returns.
        connection.qp.set_context(connection.clone(), cx)?;
        let accepted = (connection.id).accept(connection.clone(), &cm::ConnParam::default(), cx);
        // Not here: the drain waits for handlers, in the way of all callbacks.
        accepted.inspect_err(|_| connection.as_arc_borrow().end_later())
    };
    cm::Listener::new(client, addr, BACKLOG, Arc::new(accept, GFP_KERNEL)?, cx)
}

/// A call, from its arrival to the end of its answer.
#[derive(HasCqe)]
struct Request {
    fetched: Cqe<Self>,
    answered: Cqe<Self, 1>,
    /// The buffer of the call and of its answer.
    message: Buf<Bidirectional>,
    data: Ctx,
    call: Option<Call>,
}

impl Request {
    fn new(messages: &mut Bufs<Bidirectional>, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            fetched: Cqe::new(),
            answered: Cqe::new(),
            message: messages.take(cx)?,
            data: Ctx::alloc(MAX_LEN, cx)?,
            call: None,
        })
    }

    /// Makes the data, if the call gets them, and writes the answer.
    fn conclude(&mut self, call: &Call) -> Result {
        let mut data = self.data.cpu();
        let bytes = data.pages().flatten().take(call.len());
        let sum = checksum(bytes.zip(pattern(call.number.get())).map(|(byte, made)| {
            if call.op == GET {
                *byte = made;
            }
            *byte
        }));
        let answer = Answer::new(call.number.get(), sum);
        self.message.fill(&[answer.as_bytes()])
    }

    /// The answer, and nothing else of the buffer, which has had the calls of other peers. It takes
    /// the key back that the caller has lent.
    fn answer(&self, call: &Call) -> Result<SendWr<'_>> {
        Ok(SendWr::send([self.message.filled()?]).invalidating(call.data().rkey))
    }
}

impl Receive for Request {
    type Needs = InConnection;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.message.whole_mut()])
    }

    /// A call has come.
    fn done(slot: Slot<Self>, wc: &Wc, cx: &InConnection) {
        // Flushed, or too long for the slot: its connection has ended.
        let (Ok(wc), Some(connection)) = (wc.result(), cx.get_arc()) else {
            return;
        };
        if let Err(e) = begin(slot, &wc, &connection.qp, cx) {
            rdma::pr_info_ratelimited!("a call was refused: {e:?}\n");
            connection.end_later();
        }
    }
}

/// Begins to transfer a call's data.
fn begin(mut slot: Slot<Request>, wc: &Success<'_>, qp: &ServerQp, cx: &Sleepable) -> Result {
    let call = Call::parse(&slot.message.received(wc))?;
    slot.call = Some(call);
    if slot.data.len() == 0 {
        // On iWARP, a transfer that has failed has taken them along.
        slot.data = Ctx::alloc(MAX_LEN, cx)?;
    }
    let range = 0..call.len();
    let data = call.data();
    if call.op == GET {
        slot.conclude(&call)?;
        // The data arrive first: the queue keeps its order.
        return Ok(qp.post_rw(slot, |slot| {
            Ok(Rw::write(&slot.data, range, data, cx)
                .then(slot.answer(&call)?)
                .done_by::<1>())
        })?);
    }
    Ok(qp.post_rw(slot, |slot| Ok(Rw::read(&slot.data, range, data, cx)))?)
}

impl CqeHandler for Request {
    type Pointer = Slot<Self>;
    type Needs = InConnection;

    /// The caller's data are here. If not, its device has refused, and the connection has ended.
    fn done(mut slot: Slot<Self>, wc: &Wc, cx: &InConnection) {
        let (Ok(_), Some(connection), Some(call)) = (wc.result(), cx.get_arc(), slot.call) else {
            return;
        };
        let posted = slot.conclude(&call).and_then(|()| {
            Ok((connection.qp).post_send(slot, |slot| Ok(slot.answer(&call)?.done_by::<1>()))?)
        });
        if posted.is_err() {
            connection.end_later();
        }
    }
}

impl CqeHandler<1> for Request {
    type Pointer = Slot<Self>;
    type Needs = InConnection;

    /// The answer has gone, or the connection: the slot is free.
    fn done(_slot: Slot<Self>, wc: &Wc, cx: &InConnection) {
        if let (Err(_), Some(connection)) = (wc.result(), cx.get_arc()) {
            connection.end_later();
        }
    }
}
