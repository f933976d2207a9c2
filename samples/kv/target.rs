// SPDX-License-Identifier: GPL-2.0

//! The target: serves the values of a [`Store`] to any number of connections, up to a limit.
//!
//! The value of a PUT is read from the initiator's memory, that of a GET is written to it, by
//! `rdma_rw` from and to the memory of the value itself. What can wait (allocations, mapping) is
//! done in the handlers, on a workqueue.

use crate::{
    proto::*,
    store::{
        Store,
        Value, //
    },
    Count,
    Stats, //
};
use kernel::{
    impl_has_work,
    new_work,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
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
    cq::HandlerCell,
    device::Device,
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
        Grant,
        Load,
        Received,
        RecvCredits,
        RecvHandler,
        RecvRing,
        Sizes, //
    },
    sg::SgList,
    wc::Success, //
};

/// The number of connections that may wait for their peers to confirm them.
const BACKLOG: u32 = 16;

/// The pages of a work request of a transfer, where the device takes as many.
const SGES: u32 = 16;
/// The number of connections, those included that wait. The CQs have room for no more QPs.
pub(crate) const CONNECTIONS: u32 = 32;
/// The answers of a connection. One may be on its way still when the peer sends the next request.
const ANSWERS: u32 = 2 * DEPTH as u32;
/// The time before a connection that a handler has kept is ended again.
const PAUSE: Delta = Delta::from_secs(1);

/// The part that connections share: a CQ for each CPU, as far as there are vectors, and the store.
pub(crate) struct Target {
    pd: Pd,
    cqs: KVec<Cq<Workqueue>>,
    next: Atomic<u32>,
    sizes: Sizes,
    store: Arc<Store>,
    stats: Arc<Stats>,
    client: ClientRef,
}

impl Target {
    /// Serves peers that connect to `addr`, and stores at most `bytes` for them.
    pub(crate) fn listen(
        client: &ClientRef,
        dev: &Device,
        addr: SocketAddr,
        bytes: usize,
        stats: &Arc<Stats>,
        cx: &Sleepable,
    ) -> Result<cm::Listener> {
        let vectors = dev.num_comp_vectors().min(kernel::cpu::nr_cpu_ids());
        let load = Load {
            requests: ANSWERS,
            sends: 1,
            transfers: 1,
            pages: MAX_PAGES,
            send_sge: SGES.min(dev.attrs().max_send_sge),
            recvs: DEPTH.into(),
            connections: CONNECTIONS.div_ceil(vectors),
            ..Load::NONE
        };
        let sizes = Sizes::new(dev, 1, &load).inspect_err(|misfit| pr_err!("{dev}: {misfit}\n"))?;
        let mut cqs = KVec::with_capacity(vectors as usize, GFP_KERNEL)?;
        for vector in 0..vectors {
            cqs.push(Cq::alloc(dev, sizes.entries, vector, cx)?, GFP_KERNEL)?;
        }
        let target = Self {
            pd: Pd::alloc(dev, cx)?,
            cqs,
            next: Atomic::new(0),
            sizes,
            store: Store::new(bytes)?,
            stats: stats.clone(),
            client: client.clone(),
        };
        let target = Arc::new(target, GFP_KERNEL)?;
        let accept = move |request: cm::Request<'_>, cx: &Sleepable| target.accept(request, cx);
        cm::Listener::new(client, addr, BACKLOG, Arc::new(accept, GFP_KERNEL)?, cx)
    }

    /// Accepts a connection. One that fails is rejected.
    fn accept(self: &Arc<Self>, request: cm::Request<'_>, cx: &Sleepable) -> Result {
        let depth = depth(request.private_data())?;
        let id = request.into_id(cx)?;
        let next = self.next.fetch_add(1, Relaxed) as usize;
        let next = next.checked_rem(self.cqs.len());
        let cq = next.and_then(|next| self.cqs.get(next)).ok_or(EINVAL)?;
        let qp = InitAttr::new(&self.pd, cq, cq, &self.sizes.caps)
            .rw_contexts(self.sizes.rw_contexts, 1)
            .create_for(&id, cx)?;
        let mut messages = Bufs::new(&self.pd, ANSWERS as usize, REPLY + INLINE, cx)?;
        let answer = |_| Answer::new(messages.take(cx)?);
        let answers = Requests::new(&qp, ANSWERS as usize, answer, cx)?;
        let conn = try_pin_init!(Conn {
            id,
            qp,
            credits: RecvCredits::new(depth.into(), depth.into()),
            answers: HandlerCell::new(cq, answers)?,
            target: self.clone(),
            end <- new_work!("kv::target::Conn::end"),
        });
        let conn = Arc::pin_init(conn, GFP_KERNEL)?;
        // The peer may send requests before `accept` returns.
        conn.qp.set_context(conn.clone(), cx)?;
        let ring = RecvRing {
            pd: &self.pd,
            count: depth.into(),
            len: REQUEST + INLINE,
        };
        let param = cm::ConnParam {
            private_data: &hello(depth),
            ..Default::default()
        };
        let posted = ring.post(&conn, cx);
        let accepted = posted.and_then(|()| conn.id.accept(conn.clone(), &param, cx));
        // Not here: the drain waits for handlers, in the way of all callbacks.
        accepted.inspect_err(|_| conn.as_arc_borrow().end_later())
    }
}

/// A connection: the context of its QP, which all handlers of its completions borrow.
#[pin_data]
struct Conn {
    id: cm::Id,
    qp: Qp<Workqueue>,
    credits: RecvCredits,
    /// The answers. All completions are those of one CQ, whose handlers take them.
    answers: HandlerCell<Requests<Answer>>,
    target: Arc<Target>,
    /// The end of the connection: the last event may be late, or never come.
    #[pin]
    end: Work<Self>,
}

/// The context that handlers run in.
type InConn = QpContext<Conn, Sleepable>;

impl_has_work! {
    impl HasWork<Self> for Conn { self.end }
}

impl WorkItem for Conn {
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

impl cm::Handler for Conn {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if event.is_last() {
            self.end_later();
        }
    }
}

impl RecvHandler for Conn {
    type Send = Workqueue;
    type Recv = Workqueue;
    type Needs = InConn;

    fn qp(&self) -> &Qp<Workqueue> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, cx: &InConn) {
        let Some(conn) = cx.get_arc() else { return };
        let wc = *message.wc();
        let (_, bytes) = message.open();
        let request = conn.credits.received().and_then(|()| {
            let (request, inline) = Request::parse(&bytes)?;
            let mut value = KVVec::new();
            value.extend_from_slice(inline, GFP_KERNEL)?;
            Ok((request, value))
        });
        drop(bytes);
        // Posts the receive before the reply grants a credit for it.
        drop(message);
        let request = conn.credits.posted(1).and(request);
        if let Err(e) = request.and_then(|(request, value)| conn.serve(&wc, request, value, cx)) {
            conn.violated(e);
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
        self.end_later();
    }

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
        self.end_later();
    }
}

impl Conn {
    /// Ends the connection, from a work item. Any context.
    fn end_later(self: ArcBorrow<'_, Self>) {
        // Already queued is as good.
        let _ = self.target.client.enqueue(Arc::from(self));
    }

    /// The QP is drained, and loses its context, which owns it. Where the device completes nothing,
    /// the receives and the context let go of the QP, which gives back the rest when it is
    /// destroyed.
    fn end(&self, cx: &Sleepable) -> Result {
        self.id.release_handler(cx);
        // The drain flushes the QP where there is no connection.
        let _ = self.id.disconnect(cx);
        let cleared = self.qp.clear_context(cx);
        cleared.or_else(|_| {
            self.qp.release_recvs(cx)?;
            self.qp.release_context(cx)
        })
    }

    #[cold]
    fn violated(self: ArcBorrow<'_, Self>, e: Error) {
        rdma::pr_info_ratelimited!("a connection is ended: {e:?}\n");
        self.target.stats.add(Count::Violations, 1);
        self.end_later();
    }

    /// Serves a request, with the value that has come with it.
    fn serve(
        &self,
        wc: &Success<'_>,
        request: Request,
        value: KVVec<u8>,
        cx: &Sleepable,
    ) -> Result {
        let store = &self.target.store;
        let mut answer = self.answers.with(wc, Requests::take)?.ok_or(ENOMEM)?;
        answer.request = request;
        let len = request.len();
        match (request.op.get(), request.lent()) {
            (PUT, None) => self.reply(answer, store.put(request.key.get(), value)),
            (PUT, Some(remote)) => {
                let Ok(value) = KVVec::from_elem(0, len, GFP_KERNEL) else {
                    return self.reply(answer, FULL);
                };
                answer.put.fill(SgList::new(value, cx)?)?;
                Ok((self.qp).post_rw(answer, |answer| {
                    Ok(Rw::read(&answer.put, .., remote, cx).done_by::<1>())
                })?)
            }
            (_, lent) => match store.get(request.key.get()) {
                None => self.reply(answer, MISSING),
                Some(value) if value.len() > len => self.reply(answer, TOO_LONG),
                Some(value) => self.give(answer, value, lent, cx),
            },
        }
    }

    /// Replies with a value, which arrives before the reply: the queue keeps its order.
    fn give(
        &self,
        mut answer: Taken<Answer>,
        value: Value,
        lent: Option<Remote>,
        cx: &Sleepable,
    ) -> Result {
        let len = value.len();
        let grant = self.grant();
        let Some(remote) = lent.filter(|_| len > INLINE) else {
            answer.write(&grant, DONE, len, &value)?;
            return self.send(answer, grant);
        };
        answer.write(&grant, DONE, len, &[])?;
        answer.get.fill(SgList::new(value, cx)?)?;
        let post = |_| {
            (self.qp).post_rw(answer, |answer| {
                Ok(Rw::write(&answer.get, .., remote, cx).then(answer.send()?))
            })
        };
        Ok(grant.spend(post)?)
    }

    fn reply(&self, mut answer: Taken<Answer>, status: u16) -> Result {
        let grant = self.grant();
        answer.write(&grant, status, 0, &[])?;
        self.send(answer, grant)
    }

    fn send(&self, answer: Taken<Answer>, grant: Grant<'_>) -> Result {
        let post = |_| (self.qp).post_send(answer, |answer| answer.send());
        Ok(grant.spend(post)?)
    }

    /// Returns the requests that the initiator may send after the next reply.
    fn grant(&self) -> Grant<'_> {
        self.credits.grant(u16::MAX.into())
    }
}

/// A request that is being served, from its transfer to the end of its reply.
#[derive(HasCqe)]
struct Answer {
    sent: Cqe<Self>,
    fetched: Cqe<Self, 1>,
    message: Buf<ToDevice>,
    /// The length of the message.
    len: usize,
    request: Request,
    /// The value of a PUT or of a GET while it is transferred: no memory otherwise.
    put: Ctx<FromDevice, SgList<KVVec<u8>>>,
    get: Ctx<ToDevice, SgList<Value>>,
}

impl Answer {
    fn new(message: Buf<ToDevice>) -> Result<Self> {
        Ok(Self {
            sent: Cqe::new(),
            fetched: Cqe::new(),
            message,
            len: 0,
            request: Request::new(0, 0, 0, 0, None),
            put: Ctx::empty(GFP_KERNEL)?,
            get: Ctx::empty(GFP_KERNEL)?,
        })
    }

    /// Writes the reply. `value` has `len` bytes, at most [`INLINE`], or none if it is transferred.
    fn write(&mut self, grant: &Grant<'_>, status: u16, len: usize, value: &[u8]) -> Result {
        let reply = Reply {
            id: self.request.id,
            status: status.into(),
            credits: (grant.count() as u16).into(),
            len: (len as u32).into(),
        };
        let mut message = self.message.cpu();
        let (head, rest) = message.split_at_mut_checked(REPLY).ok_or(EINVAL)?;
        head.copy_from_slice(reply.as_bytes());
        let to = rest.get_mut(..value.len()).ok_or(EMSGSIZE)?;
        to.copy_from_slice(value);
        self.len = REPLY.saturating_add(value.len());
        Ok(())
    }

    /// The reply as a request, which takes the key back that the initiator has lent.
    fn send(&self) -> Result<SendWr<'_>> {
        let send = SendWr::send([self.message.sge(0..self.len)?]);
        Ok(match self.request.lent() {
            Some(remote) => send.invalidating(remote.rkey),
            None => send,
        })
    }
}

impl CqeHandler<1> for Answer {
    type Pointer = Taken<Self>;
    type Needs = InConn;

    /// The value of a PUT is here. If not, the initiator's device has refused, and the connection
    /// has ended.
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &InConn) {
        let value = this.put.take();
        let (Ok(_), Some(value), Some(conn)) = (wc.result(), value, cx.get_arc()) else {
            return;
        };
        let store = &conn.target.store;
        let status = store.put(this.request.key.get(), value.into_inner());
        if let Err(e) = conn.reply(this, status) {
            conn.violated(e);
        }
    }
}

impl CqeHandler for Answer {
    type Pointer = Taken<Self>;
    type Needs = InConn;

    /// The reply has gone, or the connection.
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &InConn) {
        drop(this.get.take());
        if let (Ok(_), Some(conn)) = (wc.result(), cx.get()) {
            conn.target.stats.add(Count::Served, 1);
        }
    }
}
