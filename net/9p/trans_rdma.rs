// SPDX-License-Identifier: GPL-2.0

//! 9P over RDMA: a transport for the kernel's 9P client, which users mount by `trans=rdma_rs`.
//!
//! A mount has one connection. Each request is an exchange of a [`Tags`], whose number is the tag
//! that the server sees; its first bytes are copied, and the rest is sent from where the client has
//! it. A reply is received into one of the connection's own buffers, and copied to the request's.
//!
//! - [`client`]: what the driver needs of the 9P client, with all unsafe code.
//!
//! See Documentation/9p.rst, which has this file side by side with C's `net/9p/trans_rdma.c`.

// A panic by a number of a server would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

#[allow(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
#[path = "../../drivers/nvme/bindings.rs"]
mod bindings;
mod client;

use crate::client::{
    Flushed,
    Header,
    Message,
    Options,
    Outcome,
    Reply,
    Rest,
    Session,
    Transport, //
};
use kernel::{
    impl_has_work,
    new_mutex,
    new_spinlock,
    new_work,
    prelude::*,
    seq_file::{
        seq_print,
        SeqFile, //
    },
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Mutex,
        SpinLock,
        UniqueArc, //
    },
    workqueue, //
};
use rdma::{
    message::header,
    prelude::*,
    qp::Chain,
    session::{
        tags::{
            Exchange,
            Tag,
            TagId,
            Tags, //
        },
        Connecting,
        Load,
        Received,
        RecvHandler,
        RecvRing,
        Sizes, //
    },
    sg::SgMap,
    wc::Success,
    wr::SgeList, //
};

/// The length of the longest message (`P9_RDMA_MAXSIZE`).
const MAX_SIZE: u32 = 1 << 20;
/// The bytes of a message that are copied: all of those that carry no data, mostly.
const HEAD: usize = 128;
/// The bits of a tag that count the uses of an exchange; those below are the exchange's number.
const GENERATION_BITS: u32 = 6;
const TAG_BITS: u32 = 10;
/// The number of exchanges for flushes. One that the server does not answer is not given back.
const FLUSHES: u32 = 7;
/// The number of the first of these, behind all others. None has the tag `P9_NOTAG`.
const FLUSH: u16 = (1 << TAG_BITS) - 8;
const NOTAG: u16 = u16::MAX;

/// Returns the tag of an exchange, as it is sent.
fn tag_of(id: TagId) -> u16 {
    id.generation << TAG_BITS | id.index
}

/// Returns the exchange that a tag names.
fn id_of(tag: u16) -> TagId {
    TagId {
        index: tag & ((1 << TAG_BITS) - 1),
        generation: tag >> TAG_BITS,
    }
}

/// The part of a request that is posted.
struct Posted {
    head: Buf<ToDevice>,
    rest: Option<SgMap<Rest, ToDevice>>,
    list: Option<client::List>,
}

/// The part of a request that waits for the reply.
#[derive(Default)]
struct Waiting {
    reply: Option<Reply>,
    outcome: Option<Outcome>,
    /// The request that this one flushes.
    flushes: Option<Flushed>,
}

/// A request.
struct Rpc;

impl Exchange for Rpc {
    type Request = Posted;
    type Reply = Waiting;
    type Connection = ();
    type Needs = context::Atomic;

    /// Ends the request, whose message the device no longer reads. If its SEND has failed, the QP
    /// is in the error state, and the receives that are flushed end the connection.
    fn ended(mut tag: Tag<Self>) {
        let (reply, outcome) = take_back(&mut tag);
        drop(tag);
        if let (Some(reply), Some(outcome)) = (reply, outcome) {
            reply.end(outcome);
        }
    }
}

/// Takes a request from its exchange.
fn take_back(tag: &mut Tag<Rpc>) -> (Option<Reply>, Option<Outcome>) {
    let (posted, waiting) = tag.parts();
    if let Some(rest) = posted.rest.take() {
        posted.list = Some(rest.into_owner().into_list());
    }
    waiting.flushes = None;
    (waiting.reply.take(), waiting.outcome.take())
}

/// A connection.
#[pin_data]
struct Conn {
    mount: Arc<Mount>,
    client: ClientRef,
    id: cm::Id,
    pd: Pd,
    qp: Qp<Softirq>,
    tags: Tags<Rpc>,
    /// Those of flushes, which need not wait for requests that are to be flushed.
    flush: Tags<Rpc>,
    /// The exchange of the request without a tag (`Tversion`), until that is answered.
    untagged: Atomic<u32>,
    /// The connection is made. Until then the thread that connects ends it, if it fails.
    connected: Atomic<bool>,
    /// The connection has failed, or is being ended.
    lost: Atomic<bool>,
    #[pin]
    stopping: Mutex<()>,
    #[pin]
    end_work: workqueue::Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Conn { self.end_work }
}

impl workqueue::WorkItem for Conn {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        if let Ok(cx) = Sleepable::current() {
            this.stop(&cx);
        }
    }
}

/// The events of the connection (`p9_cm_event_handler`).
impl cm::Handler for Conn {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        // After a change of the address the connection still uses the old one.
        if event.is_last() || matches!(event, cm::Event::AddrChange) {
            self.end_later();
        }
    }
}

/// The replies (`recv_done`).
impl RecvHandler for Conn {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<Softirq> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let wc = *message.wc();
        let (conn, bytes) = message.open();
        if let Err(e) = conn.reply(&wc, &bytes) {
            if e != EIO {
                rdma::pr_err_ratelimited!("a bad reply: {e:?}\n");
            }
            conn.as_arc_borrow().end_later();
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, error: WcError) {
        if error.status != wc::Status::WR_FLUSH_ERR {
            rdma::pr_info_ratelimited!("a RECV has failed: {}\n", error.status);
        }
        self.end_later();
    }

    fn refused(self: ArcBorrow<'_, Self>, error: Error) {
        rdma::pr_err_ratelimited!("a receive was refused: {error:?}\n");
        self.end_later();
    }
}

impl Conn {
    /// Connects to the server (`rdma_create_trans`).
    fn new(mount: &Arc<Mount>, msize: u32, cx: &Sleepable) -> Result<Arc<Self>> {
        // First, so that there is little to drop where a step fails.
        let conn = UniqueArc::new_uninit(GFP_KERNEL)?;
        let client = ClientRef::of::<NineP>(cx)?;
        let id = if mount.privport {
            Self::bind_privport(&client, mount.addr, cx)?
        } else {
            cm::Id::create(&client, cx)?
        };
        id.resolve_addr(mount.addr, mount.timeout, cx)?;
        id.resolve_route(mount.timeout, cx)?;
        let dev = id.device()?.clone();
        let requests = mount.rq_depth;
        let exchanges = requests.saturating_add(FLUSHES);
        let load = Load {
            requests,
            sends: 1,
            other_sends: FLUSHES,
            // One more for the next reply, before a receive is posted again.
            recvs: exchanges.saturating_add(1),
            send_sge: 2,
            ..Load::NONE
        };
        let sizes =
            Sizes::new(&dev, 1, &load).inspect_err(|misfit| pr_err!("{dev}: {misfit}\n"))?;
        let pd = Pd::alloc(&dev, cx)?;
        let cq = Cq::alloc_any(&dev, sizes.entries, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &sizes.caps, cx)?;
        let mut heads = Bufs::new(&pd, exchanges as usize, HEAD, cx)?;
        let mut exchange = |_| {
            let posted = Posted {
                head: heads.take(cx)?,
                rest: None,
                list: Some(client::List::new()?),
            };
            Ok((posted, Waiting::default()))
        };
        let tags = Tags::new(&qp, (), requests, GENERATION_BITS, &mut exchange, cx)?;
        let flush = Tags::new(&qp, (), FLUSHES, GENERATION_BITS, &mut exchange, cx)?;
        let Ok(conn) = conn.pin_init_with(pin_init!(Self {
            mount: mount.clone(),
            tags,
            flush,
            client,
            id,
            pd,
            qp,
            untagged: Atomic::new(u32::MAX),
            connected: Atomic::new(false),
            lost: Atomic::new(false),
            stopping <- new_mutex!(()),
            end_work <- new_work!("9pnet_rdma::Conn::end_work"),
        }));
        let conn = Arc::from(conn);
        let connecting = Connecting::new(&conn.id, &conn.qp, cx);
        let ring = RecvRing {
            pd: &conn.pd,
            count: load.recvs,
            len: msize as usize,
        };
        ring.post(&conn, cx)?;
        let param = cm::ConnParam {
            responder_resources: 0,
            initiator_depth: 0,
            timeout_ms: mount.timeout,
            ..Default::default()
        };
        conn.id.connect(conn.clone(), &param, cx)?;
        connecting.connected();
        // Either `create` sees that it is lost, or `end_later` that it was connected.
        conn.connected.xchg(true, Full);
        Ok(conn)
    }

    /// Binds to a port that only root may bind to, for a server of this address
    /// (`p9_rdma_bind_privport`).
    fn bind_privport(client: &ClientRef, server: SocketAddr, cx: &Sleepable) -> Result<cm::Id> {
        const END: u16 = bindings::P9_DEF_MAX_RESVPORT as u16 + 1;
        let any = match server {
            SocketAddr::V4(_) => [0_u8; 4].into(),
            SocketAddr::V6(_) => [0_u16; 8].into(),
        };
        let mut options = cm::Options::default();
        let ports = bindings::P9_DEF_MIN_RESVPORT as u16..END;
        let bound = ports.rev().find_map(|port| {
            options.src = Some(SocketAddr::new(any, port));
            let id = cm::Id::create_with(client, &options, cx);
            (id.as_ref().err() != Some(&EADDRINUSE)).then_some(id)
        });
        bound.unwrap_or(Err(EADDRINUSE))
    }

    /// The connection has failed, or the server does not keep to the protocol. Any context.
    fn end_later(self: ArcBorrow<'_, Self>) {
        if self.lost.xchg(true, Full) {
            return;
        }
        self.tags.close(EIO);
        self.flush.close(EIO);
        if self.connected.load(Relaxed) {
            // It is queued once.
            let _ = self.client.enqueue(Arc::from(self));
        }
    }

    /// Ends the connection and all requests; those of a device that completes nothing end when the
    /// QP is destroyed, which takes a minute then.
    fn stop(&self, cx: &Sleepable) {
        let _guard = self.stopping.lock();
        self.lost.store(true, Relaxed);
        // A reply that comes from here on is no misdeed of the server's.
        self.tags.close(EIO);
        self.flush.close(EIO);
        self.mount.session.disconnected(cx);
        // What is on the device goes now, and not when the user unmounts.
        let _gone = self.mount.conn.lock().take();
        self.id.release_handler(cx);
        // If there is no connection, the drain flushes the requests.
        let _ = self.id.disconnect(cx);
        let drained = self.tags.reclaim(&self.qp, cx);
        let drained = drained.and_then(|()| self.flush.reclaim(&self.qp, cx));
        let stopped = drained.or_else(|e| {
            pr_err!("QP {} was not drained: {e:?}\n", self.qp.num());
            // Its receives keep the connection.
            self.qp.release_recvs(cx)
        });
        if let Err(e) = stopped {
            pr_err!("QP {} keeps its connection: {e:?}\n", self.qp.num());
        }
    }

    /// Sends a request (`rdma_request`).
    fn request(&self, message: Message, mut reply: Reply, cx: &Sleepable) -> Result {
        let (tags, first) = if message.is_flush() {
            (&self.flush, FLUSH)
        } else {
            (&self.tags, 0)
        };
        // As the client waits for replies: other signals wait until the system call returns.
        let mut tag = tags.wait_killable(cx)?;
        let mut id = tag.id();
        id.index |= first;
        let mut name = tag_of(id);
        if message.kind() == bindings::p9_msg_t_P9_TVERSION as u8 {
            self.untagged.store(id.to_u32(), Relaxed);
            name = NOTAG;
        }
        reply.set_name(name);
        // A request that has ended while this has waited gives no name: it may be another one's.
        let flushes = message.flushes(cx);
        let (posted, waiting) = tag.parts();
        message.copy(&mut posted.head, HEAD, name, flushes.as_ref())?;
        match message.rest(HEAD, posted.list.take().ok_or(EINVAL)?) {
            // The client has no connection where this fails.
            Ok(rest) => posted.rest = Some(SgMap::new(&self.pd, rest)?),
            Err(list) => posted.list = Some(list),
        }
        waiting.reply = Some(reply);
        waiting.flushes = flushes;
        let posted = tag.post(&self.qp, |posted, chain: &mut Chain<'_, 1, 2>| {
            let mut sges = SgeList::<_, 2>::new(posted.head.filled()?);
            if let Some(rest) = &posted.rest {
                rest.append_to(&mut sges)?;
            }
            chain.push(SendWr::send(sges))
        });
        let Err(refused) = posted else {
            return Ok(());
        };
        let error = refused.error();
        if let Some(mut tag) = refused.owner {
            drop(take_back(&mut tag));
            return Err(error);
        }
        // The request ends with the connection.
        rdma::pr_err_ratelimited!("a SEND was refused: {error:?}\n");
        self.id.disconnect_later();
        Ok(())
    }

    /// Handles a reply. Fails with `EPROTO` if it is none of a request that waits, and with
    /// `EMSGSIZE` if it is longer than that has room for; with `EIO` at the end.
    fn reply(&self, wc: &Success<'_>, bytes: &[u8]) -> Result {
        let (header, _) = header::<Header>(bytes)?;
        if header.size.get() as usize != bytes.len() {
            return Err(EPROTO);
        }
        let mut id = match header.tag.get() {
            NOTAG => TagId::from_u32(self.untagged.xchg(u32::MAX, Relaxed)),
            tag => id_of(tag),
        };
        let mut tags = &self.tags;
        if id.index >= FLUSH {
            (tags, id.index) = (&self.flush, id.index & !FLUSH);
        }
        let mut waiting = tags.reply(wc, id)?;
        let reply = waiting.reply.as_mut().ok_or(EPROTO)?;
        reply.fill(header.kind, bytes)?;
        waiting.outcome = Some(Outcome::Received);
        // A reply to what is flushed would have come before this.
        if header.kind == bindings::p9_msg_t_P9_RFLUSH as u8 {
            let old = waiting.flushes.as_ref().map(|old| id_of(old.name()));
            if let Some(Ok(mut flushed)) = old.map(|old| self.tags.reply(wc, old)) {
                flushed.outcome = Some(Outcome::Flushed);
            }
        }
        Ok(())
    }
}

/// A mount (`struct p9_trans_rdma`).
#[pin_data]
struct Mount {
    session: Arc<Session>,
    addr: SocketAddr,
    privport: bool,
    /// Shown alone: the send queue has a place for each request that has a receive.
    sq_depth: u32,
    rq_depth: u32,
    timeout: u32,
    /// The connection, until it has failed.
    #[pin]
    conn: SpinLock<Option<Arc<Conn>>>,
}

/// Shows an option that does not have its default.
#[inline(never)]
fn show(m: &SeqFile, name: &str, value: u32, default: u32) {
    if value != default {
        seq_print!(m, ",{name}={value}");
    }
}

static OPERATIONS: client::Operations<Mount> = client::Operations::new();

impl Transport for Mount {
    const NAME: &'static CStr = c"rdma_rs";
    const MAX_SIZE: u32 = MAX_SIZE;

    fn create(session: Arc<Session>, options: &Options<'_>, cx: &Sleepable) -> Result<Arc<Self>> {
        let init = try_pin_init!(Self {
            session,
            addr: options.addr()?,
            privport: options.privport(),
            sq_depth: options.sq_depth()?,
            rq_depth: options.rq_depth(FLUSH)?,
            timeout: options.timeout()?,
            conn <- new_spinlock!(None),
        });
        let mount = Arc::pin_init(init, GFP_KERNEL)?;
        let conn = Conn::new(&mount, options.msize, cx)?;
        *mount.conn.lock() = Some(conn.clone());
        // If it has failed before that, nothing else may take it from there.
        if conn.lost.load(Relaxed) {
            conn.stop(cx);
            return Err(ENOTCONN);
        }
        Ok(mount)
    }

    fn close(&self, cx: &Sleepable) {
        let conn = self.conn.lock().take();
        if let Some(conn) = conn {
            conn.stop(cx);
        }
    }

    fn request(&self, message: Message, reply: Reply, cx: &Sleepable) -> Result {
        let conn = self.conn.lock().clone().ok_or(EIO)?;
        conn.request(message, reply, cx)
    }

    fn show_options(&self, m: &SeqFile) {
        show(m, "port", self.addr.port().into(), bindings::P9_RDMA_PORT);
        show(m, "sq", self.sq_depth, bindings::P9_RDMA_SQ_DEPTH);
        show(m, "rq", self.rq_depth, bindings::P9_RDMA_RQ_DEPTH);
        show(m, "timeout", self.timeout, bindings::P9_RDMA_TIMEOUT);
        if self.privport {
            seq_print!(m, ",privport");
        }
    }
}

/// The module.
#[pin_data]
struct NineP {
    /// The transport, from the end of loading until unloading.
    #[pin]
    transport: Mutex<Option<client::Registration<Mount>>>,
}

impl Client for NineP {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            transport <- new_mutex!(None),
        })
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, cx: &Sleepable) -> Result {
        let transport = client::Registration::new(&OPERATIONS, cx)?;
        *self.transport.lock() = Some(transport);
        Ok(())
    }

    /// There is no mount, as each has a reference to the module.
    fn unload(self: Pin<&Self>, _cx: &Sleepable) {
        let transport = self.transport.lock().take();
        drop(transport);
    }
}

rdma::module_rdma_client! {
    type: NineP,
    name: "9pnet_rdma_rs",
    authors: ["rdma-rs authors"],
    description: "RDMA transport for 9P in Rust",
    license: "GPL",
    alias: ["9p-rdma_rs"],
}
