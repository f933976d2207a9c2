// SPDX-License-Identifier: GPL-2.0

//! A ULP in steps, each a module. The suite `rdma_course` runs them.

/// Devices.
pub(crate) mod devices {
    use kernel::prelude::*;
    use rdma::{
        device::Device,
        prelude::*, //
    };

    pub(crate) struct Course;

    /// What all connections on a device share.
    pub(crate) struct PerDevice {
        pub(crate) pd: Pd,
    }

    impl DeviceData<Course> for PerDevice {
        fn add(_course: Pin<&Course>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
            let attrs = dev.attrs();
            pr_info!("{dev}: queues of up to {} requests\n", attrs.max_qp_wr);
            let pd = Pd::alloc(dev, cx)?;
            Ok(PerDevice { pd })
        }

        fn remove(self: Pin<&Self>, _course: Pin<&Course>, dev: &Device, _cx: &Sleepable) {
            pr_info!("{dev} goes\n");
        }
    }

    impl Client for Course {
        type Data = PerDevice;

        fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
            Ok(Course)
        }
    }
}

/// A CQ and a QP.
pub(crate) mod queue_pair {
    use kernel::{
        new_condvar,
        new_mutex,
        prelude::*,
        sync::{
            CondVar,
            CondVarTimeoutResult,
            Mutex, //
        },
        time::msecs_to_jiffies, //
    };
    use rdma::prelude::*;
    use rdma_null::{
        Injection,
        NullDevice, //
    };

    /// A value that a handler sets and a thread waits for.
    #[pin_data]
    pub(crate) struct Outcome<T> {
        #[pin]
        value: Mutex<Option<T>>,
        #[pin]
        set: CondVar,
    }

    impl<T: Unpin> Outcome<T> {
        pub(crate) fn new() -> impl PinInit<Self> {
            pin_init!(Self {
                value <- new_mutex!(None),
                set <- new_condvar!(),
            })
        }

        pub(crate) fn set(&self, value: T) {
            *self.value.lock() = Some(value);
            self.set.notify_all();
        }

        pub(crate) fn wait(&self, _cx: &Sleepable) -> Result<T> {
            let (mut value, mut left) = (self.value.lock(), msecs_to_jiffies(60_000));
            loop {
                match value.take() {
                    Some(value) => return Ok(value),
                    None if left == 0 => return Err(ETIMEDOUT),
                    None => {}
                }
                left = match self.set.wait_interruptible_timeout(&mut value, left) {
                    CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
                    CondVarTimeoutResult::Timeout => 0,
                    CondVarTimeoutResult::Woken { jiffies } => jiffies,
                };
            }
        }
    }

    /// A request with its buffer.
    #[derive(HasCqe)]
    pub(crate) struct Request {
        cqe: Cqe<Self>,
        pub(crate) buf: Buf<ToDevice>,
        outcome: Arc<Outcome<Result>>,
    }

    impl Request {
        pub(crate) fn new(
            bytes: &[u8],
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<(Pin<KBox<Self>>, Arc<Outcome<Result>>)> {
            let outcome = Arc::pin_init(Outcome::new(), GFP_KERNEL)?;
            let mut buf = Buf::alloc(pd, bytes.len(), cx)?;
            buf.cpu().copy_from_slice(bytes);
            let request = Self {
                cqe: Cqe::new(),
                buf,
                outcome: outcome.clone(),
            };
            Ok((KBox::pin(request, GFP_KERNEL)?, outcome))
        }
    }

    impl CqeHandler for Request {
        type Pointer = Pin<KBox<Self>>;
        type Needs = Sleepable;

        fn done(this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
            this.outcome.set(wc.result().map(drop).map_err(Error::from));
        }
    }

    const CAPS: Caps = Caps::new(4, 4);

    pub(crate) fn send_one(null: &NullDevice, pd: &Pd, cx: &Sleepable) -> Result {
        let cq = Cq::<Workqueue>::alloc_any(pd.device(), CAPS.entries(), cx)?;
        let qp = Qp::create_raw(pd, &cq, &cq, &CAPS, cx)?;
        // The QP may send, and what it sends goes nowhere.
        null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;

        let (request, outcome) = Request::new(b"hello", pd, cx)?;
        qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?;
        outcome.wait(cx)?
    }
}

/// A connection.
pub(crate) mod connection {
    use kernel::prelude::*;
    use rdma::prelude::*;

    const CAPS: Caps = Caps::new(4, 4);
    const BACKLOG: u32 = 4;

    /// One end of a connection.
    pub(crate) struct Conn {
        pub(crate) id: cm::Id,
        pub(crate) qp: Qp<Workqueue>,
    }

    impl cm::Handler for Conn {
        fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
            rdma::pr_info_ratelimited!("QP {}: {event}\n", self.qp.num());
        }
    }

    impl Conn {
        fn new(id: cm::Id, pd: &Pd, cx: &Sleepable) -> Result<Arc<Self>> {
            let cq = Cq::alloc_any(pd.device(), CAPS.entries(), cx)?;
            let qp = Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?;
            Ok(Arc::new(Self { id, qp }, GFP_KERNEL)?)
        }

        /// The target.
        pub(crate) fn listen(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<cm::Listener> {
            let pd = pd.clone();
            let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
                let conn = Self::new(request.into_id(cx)?, &pd, cx)?;
                conn.id.accept(conn.clone(), &cm::ConnParam::default(), cx)
            };
            cm::Listener::new(client, addr, BACKLOG, Arc::new(accept, GFP_KERNEL)?, cx)
        }

        /// The initiator.
        pub(crate) fn connect(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<Arc<Self>> {
            let conn = Self::new(cm::Id::resolve(client, addr, 5_000, cx)?, pd, cx)?;
            conn.id
                .connect(conn.clone(), &cm::ConnParam::default(), cx)?;
            Ok(conn)
        }
    }
}

/// Messages, whose receives go round.
pub(crate) mod messages {
    use super::queue_pair::{
        Outcome,
        Request, //
    };
    use kernel::prelude::*;
    use rdma::{
        prelude::*,
        session::{
            Received,
            RecvHandler,
            RecvRing, //
        }, //
    };
    use zerocopy::byteorder::little_endian::U64;

    const RECVS: u32 = 4;
    const CAPS: Caps = Caps::new(RECVS, RECVS);

    pub(crate) struct Conn {
        pub(crate) id: cm::Id,
        qp: Qp<Workqueue>,
        pd: Pd,
        /// Where the initiator waits for the answer. The target has none, and answers.
        answer: Option<Arc<Outcome<u64>>>,
    }

    impl cm::Handler for Conn {
        fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
    }

    impl RecvHandler for Conn {
        type Send = Workqueue;
        type Recv = Workqueue;
        type Needs = Sleepable;

        fn qp(&self) -> &Qp<Workqueue> {
            &self.qp
        }

        fn received(mut message: Received<'_, Self>, cx: &Sleepable) {
            let (conn, bytes) = message.open();
            let handled = match (bytes.header::<U64>(), &conn.answer) {
                (Err(e), _) => Err(e),
                (Ok((number, _)), Some(answer)) => {
                    answer.set(number.get());
                    Ok(())
                }
                (Ok((number, _)), None) => conn.send(number.get().wrapping_add(1), cx),
            };
            if handled.is_err() {
                conn.id.disconnect_later();
            }
            // Dropping the message posts its receive again.
        }

        fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

        fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
            self.id.disconnect_later();
        }
    }

    impl Conn {
        /// Makes an end, with its receives posted.
        fn new(
            id: cm::Id,
            pd: &Pd,
            answer: Option<Arc<Outcome<u64>>>,
            cx: &Sleepable,
        ) -> Result<Arc<Self>> {
            let cq = Cq::alloc_any(pd.device(), CAPS.entries(), cx)?;
            let qp = Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?;
            let pd = pd.clone();
            Ok(Arc::new(Self { id, qp, pd, answer }, GFP_KERNEL)?)
        }

        /// Posts the receives and makes the connection. If that fails, the receives still have the
        /// connection, which has the QP: the drain gives them back.
        fn begin(self: &Arc<Self>, make: impl FnOnce() -> Result, cx: &Sleepable) -> Result {
            let ring = RecvRing {
                pd: &self.pd,
                count: RECVS,
                len: 8,
            };
            let made = ring.post(self, cx).and_then(|()| make());
            made.or_else(|e| self.qp.drain(cx).and(Err(e)))
        }

        fn send(&self, number: u64, cx: &Sleepable) -> Result {
            let (message, _) = Request::new(&number.to_le_bytes(), &self.pd, cx)?;
            self.qp
                .post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
            Ok(())
        }

        pub(crate) fn listen(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<cm::Listener> {
            let pd = pd.clone();
            let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
                let conn = Self::new(request.into_id(cx)?, &pd, None, cx)?;
                let param = cm::ConnParam::default();
                conn.begin(|| conn.id.accept(conn.clone(), &param, cx), cx)
            };
            cm::Listener::new(client, addr, 4, Arc::new(accept, GFP_KERNEL)?, cx)
        }

        pub(crate) fn connect(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<Arc<Self>> {
            let answer = Arc::pin_init(Outcome::new(), GFP_KERNEL)?;
            let id = cm::Id::resolve(client, addr, 5_000, cx)?;
            let conn = Self::new(id, pd, Some(answer), cx)?;
            let param = cm::ConnParam::default();
            let connect = || conn.id.connect(conn.clone(), &param, cx).map(drop);
            conn.begin(connect, cx)?;
            Ok(conn)
        }

        /// Sends a number and returns the next one, which the target knows.
        pub(crate) fn ask(&self, number: u64, cx: &Sleepable) -> Result<u64> {
            let answer = self.answer.as_ref().ok_or(EINVAL)?;
            self.send(number, cx)?;
            answer.wait(cx)
        }
    }
}

/// A region and its key.
pub(crate) mod region {
    use super::queue_pair::{
        Outcome,
        Request, //
    };
    use kernel::prelude::*;
    use rdma::prelude::*;

    /// Memory that a peer may write while it is registered.
    #[pin_data]
    #[derive(HasCqe)]
    pub(crate) struct Window {
        reg: Cqe<Self>,
        inv: Cqe<Self, 1>,
        region: SharedRegion<FromDevice>,
        #[pin]
        closed: Outcome<Result>,
    }

    impl CqeHandler for Window {
        type Pointer = Arc<Self>;
        type Needs = Sleepable;

        /// The registration. If it has failed, so does the invalidation.
        fn done(_this: Arc<Self>, _wc: &Wc, _cx: &Sleepable) {}
    }

    impl CqeHandler<1> for Window {
        type Pointer = Arc<Self>;
        type Needs = Sleepable;

        /// The invalidation: the key is no longer valid.
        fn done(this: Arc<Self>, wc: &Wc, _cx: &Sleepable) {
            this.closed.set(wc.result().map(drop).map_err(Error::from));
        }
    }

    impl Window {
        pub(crate) fn new(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Arc<Self>> {
            let window = try_pin_init!(Self {
                reg: Cqe::new(),
                inv: Cqe::new(),
                region: Region::new(Buf::alloc(pd, len, cx)?, cx)?.into_shared(),
                closed <- Outcome::new(),
            }? Error);
            Arc::pin_init(window, GFP_KERNEL)
        }

        /// Registers the memory, under a new key.
        pub(crate) fn open(self: &Arc<Self>, qp: &Qp<Workqueue>) -> Result<Remote> {
            Ok(qp.post_send(self.clone(), |w| Ok(RegWr::remote_write(&w.region)))?)
        }

        /// Invalidates the key, and waits for that.
        pub(crate) fn close(self: &Arc<Self>, qp: &Qp<Workqueue>, cx: &Sleepable) -> Result {
            qp.post_send(self.clone(), |w| Ok(InvWr::new(&w.region).done_by::<1>()))?;
            self.closed.wait(cx)?
        }

        pub(crate) fn read(&self, bytes: &mut [u8]) -> Result {
            self.region.read(0, bytes)
        }
    }

    /// The peer, which has been told of `remote`.
    pub(crate) fn write(
        bytes: &[u8],
        remote: Remote,
        qp: &Qp<Workqueue>,
        pd: &Pd,
        cx: &Sleepable,
    ) -> Result {
        let (request, outcome) = Request::new(bytes, pd, cx)?;
        qp.post_send(request, |r| Ok(SendWr::rdma_write([r.buf.whole()], remote)))?;
        outcome.wait(cx)?
    }
}

/// Requests with replies.
pub(crate) mod requests {
    use super::{
        queue_pair::Outcome,
        sizes, //
    };
    use kernel::{
        impl_has_work,
        new_work,
        prelude::*,
        workqueue::{
            Work,
            WorkItem, //
        }, //
    };
    use rdma::{
        prelude::*,
        qp::Chain,
        session::{
            tags::{
                Exchange,
                Reply,
                Tag,
                TagId,
                Tags, //
            },
            Received,
            RecvHandler,
            RecvRing, //
        }, //
    };
    use zerocopy::byteorder::little_endian::{
        U32,
        U64, //
    };
    use zerocopy_derive::Immutable;

    /// The target has so many blocks of so many bytes. It fills each with its number.
    pub(crate) const BLOCKS: u32 = 16;
    pub(crate) const BLOCK: usize = 512;

    /// A request: what identifies it, the number of the block, and where the target is to write it.
    #[derive(FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    pub(crate) struct Header {
        pub(crate) id: U32,
        pub(crate) block: U32,
        pub(crate) addr: U64,
        pub(crate) rkey: U32,
    }

    const REQUEST: usize = size_of::<Header>();
    /// A reply: what identifies the request.
    const REPLY: usize = size_of::<U32>();

    /// What the initiator has for each tag.
    struct Get;

    struct Request {
        message: Buf<ToDevice>,
        block: Region<FromDevice>,
    }

    struct Wanted {
        came: bool,
        caller: Option<Arc<Outcome<Result<u8>>>>,
    }

    impl Exchange for Get {
        type Request = Request;
        type Reply = Wanted;
        type Connection = ();
        type Needs = Sleepable;

        /// The reply has come, and was no proof that the key is invalid. Now it is.
        fn invalidated(mut reply: Reply<'_, Self>, wc: &Wc, _cx: &Sleepable) {
            reply.came = wc.result().is_ok();
        }

        /// The send has completed and the reply was handled; or neither will be.
        fn ended(mut tag: Tag<Self>) {
            let (request, wanted) = tag.parts();
            let (came, caller) = (core::mem::take(&mut wanted.came), wanted.caller.take());
            let mut first = [0];
            let read = if came {
                request.block.read(0, &mut first)
            } else {
                Err(ECONNRESET)
            };
            drop(tag); // It is free before the caller goes on.
            if let Some(caller) = caller {
                caller.set(read.map(|()| first[0]));
            }
        }
    }

    #[pin_data]
    pub(crate) struct Initiator {
        client: ClientRef,
        pub(crate) id: cm::Id,
        qp: Qp<Workqueue>,
        tags: Tags<Get>,
        #[pin]
        end: Work<Self>,
    }

    impl_has_work! {
        impl HasWork<Self> for Initiator { self.end }
    }

    impl WorkItem for Initiator {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            if let Err(e) = Sleepable::current().and_then(|cx| this.end(&cx)) {
                pr_err!("requests were not given up: {e:?}\n");
            }
        }
    }

    impl Initiator {
        pub(crate) fn connect(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<Arc<Self>> {
            let id = cm::Id::resolve(client, addr, 5_000, cx)?;
            let qp = sizes::qp(&id, pd, &sizes::INITIATOR, cx)?;
            let make = |_| {
                let request = Request {
                    message: Buf::alloc(pd, REQUEST, cx)?,
                    block: Region::new(Buf::alloc(pd, BLOCK, cx)?, cx)?,
                };
                let wanted = Wanted {
                    came: false,
                    caller: None,
                };
                Ok((request, wanted))
            };
            let conn = try_pin_init!(Self {
                client: client.clone(),
                tags: Tags::new(&qp, (), sizes::DEPTH, 16, make, cx)?,
                id,
                qp,
                end <- new_work!("Initiator::end"),
            });
            let conn = Arc::pin_init(conn, GFP_KERNEL)?;
            let ring = RecvRing {
                pd,
                count: sizes::INITIATOR.recvs,
                len: REPLY,
            };
            let param = cm::ConnParam::default();
            let made = ring.post(&conn, cx);
            let made = made.and_then(|()| conn.id.connect(conn.clone(), &param, cx).map(drop));
            made.or_else(|e| conn.qp.drain(cx).and(Err(e)))?;
            Ok(conn)
        }

        /// Ends the connection, from a work item. Any context.
        pub(crate) fn end_later(self: ArcBorrow<'_, Self>) {
            // Already queued is as good.
            let _ = self.client.enqueue(Arc::from(self));
        }

        /// No more replies come: all requests end, and no task waits for a tag.
        fn end(&self, cx: &Sleepable) -> Result {
            self.id.release_handler(cx);
            // It fails if there is no connection, and the drain flushes the QP in any case.
            let _ = self.id.disconnect(cx);
            self.tags.reclaim(&self.qp, cx)
        }

        /// Sends a request for a block.
        pub(crate) fn begin(&self, block: u32, cx: &Sleepable) -> Result<Arc<Outcome<Result<u8>>>> {
            let outcome = Arc::pin_init(Outcome::new(), GFP_KERNEL)?;
            let mut tag = self.tags.wait(5_000, cx)?;
            let id = tag.id().to_u32();
            tag.parts().1.caller = Some(outcome.clone());
            tag.post(&self.qp, |request, chain: &mut Chain<'_, 2>| {
                let remote = chain.push(RegWr::remote_write(&request.block))?;
                let header = Header {
                    id: id.into(),
                    block: block.into(),
                    addr: remote.addr.into(),
                    rkey: remote.rkey.into(),
                };
                let header: [u8; REQUEST] = zerocopy::transmute!(header);
                request.message.write(0, &header)?;
                chain.push(SendWr::send([request.message.whole()]))
            })?;
            Ok(outcome)
        }

        /// Returns the first byte of a block.
        pub(crate) fn get(&self, block: u32, cx: &Sleepable) -> Result<u8> {
            self.begin(block, cx)?.wait(cx)?
        }

        fn reply(&self, message: &Received<'_, Self>, id: u32) -> Result {
            let (wc, id) = (message.wc(), TagId::from_u32(id));
            let mut reply = self.tags.reply(wc, id)?;
            if reply.request().block.remote_invalidated(wc, &self.qp) {
                reply.came = true;
                return Ok(()); // Dropping the reply is the end of its handling.
            }
            Ok(reply.post(&self.qp, |request| Ok(InvWr::new(&request.block)))?)
        }
    }

    impl RecvHandler for Initiator {
        type Send = Workqueue;
        type Recv = Workqueue;
        type Needs = Sleepable;

        fn qp(&self) -> &Qp<Workqueue> {
            &self.qp
        }

        fn received(mut message: Received<'_, Self>, _cx: &Sleepable) {
            let id = message.open().1.header::<U32>().map(|(id, _)| id.get());
            let conn = message.conn();
            if id.and_then(|id| conn.reply(&message, id)).is_err() {
                conn.as_arc_borrow().end_later();
            }
        }

        fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
            self.end_later();
        }

        fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
            self.end_later();
        }
    }

    impl cm::Handler for Initiator {
        fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
            if event.is_last() {
                self.end_later();
            }
        }
    }

    /// What the target sends: a block, and the reply behind it.
    #[derive(HasCqe)]
    struct Answer {
        cqe: Cqe<Self>,
        block: Buf<ToDevice>,
        reply: Buf<ToDevice>,
    }

    impl CqeHandler for Answer {
        type Pointer = Pin<KBox<Self>>;
        type Needs = Sleepable;

        fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Sleepable) {}
    }

    pub(crate) struct Target {
        id: cm::Id,
        qp: Qp<Workqueue>,
        pd: Pd,
    }

    impl Target {
        fn answer(&self, request: &Header, cx: &Sleepable) -> Result {
            let block = request.block.get();
            let remote = Remote {
                addr: request.addr.get(),
                rkey: request.rkey.get(),
            };
            if block >= BLOCKS {
                return Err(EPROTO);
            }
            let mut answer = Answer {
                cqe: Cqe::new(),
                block: Buf::alloc(&self.pd, BLOCK, cx)?,
                reply: Buf::alloc(&self.pd, REPLY, cx)?,
            };
            answer.block.cpu().fill(block as u8);
            answer.reply.cpu().copy_from_slice(request.id.as_bytes());
            let answer = KBox::pin(answer, GFP_KERNEL)?;
            self.qp
                .post_chain(answer, |answer, chain: &mut Chain<'_, 2>| {
                    chain.push(SendWr::rdma_write([answer.block.whole()], remote))?;
                    let reply = SendWr::send([answer.reply.whole()]);
                    chain.push(reply.invalidating(remote.rkey))
                })?;
            Ok(())
        }

        pub(crate) fn listen(
            client: &ClientRef,
            addr: SocketAddr,
            pd: &Pd,
            cx: &Sleepable,
        ) -> Result<cm::Listener> {
            let pd = pd.clone();
            let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
                let id = request.into_id(cx)?;
                let qp = sizes::qp(&id, &pd, &sizes::TARGET, cx)?;
                let pd = pd.clone();
                let conn = Arc::new(Self { id, qp, pd }, GFP_KERNEL)?;
                let ring = RecvRing {
                    pd: &conn.pd,
                    count: sizes::TARGET.recvs,
                    len: REQUEST,
                };
                let param = cm::ConnParam::default();
                let made = ring.post(&conn, cx);
                let made = made.and_then(|()| conn.id.accept(conn.clone(), &param, cx));
                made.or_else(|e| conn.qp.drain(cx).and(Err(e)))
            };
            cm::Listener::new(client, addr, 4, Arc::new(accept, GFP_KERNEL)?, cx)
        }
    }

    impl RecvHandler for Target {
        type Send = Workqueue;
        type Recv = Workqueue;
        type Needs = Sleepable;

        fn qp(&self) -> &Qp<Workqueue> {
            &self.qp
        }

        fn received(mut message: Received<'_, Self>, cx: &Sleepable) {
            let (conn, bytes) = message.open();
            let answered = bytes
                .header()
                .and_then(|(request, _)| conn.answer(&request, cx));
            if answered.is_err() {
                conn.id.disconnect_later();
            }
        }

        fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

        fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
            self.id.disconnect_later();
        }
    }

    impl cm::Handler for Target {
        fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
    }
}

/// The sizes of both ends' queues.
pub(crate) mod sizes {
    use kernel::prelude::*;
    use rdma::{
        prelude::*,
        qp::InitAttr,
        session::{
            Load,
            Sizes, //
        }, //
    };

    /// The number of requests at a time.
    pub(crate) const DEPTH: u32 = 8;

    /// A registration, a request and an invalidation each. A receive for each reply, and one more:
    /// the next reply may come before the message that freed its tag is dropped.
    pub(crate) const INITIATOR: Load = Load {
        requests: DEPTH,
        sends: 3,
        recvs: DEPTH + 1,
        ..Load::NONE
    };

    /// A block and a reply each, and those of the requests before, which the initiator may have got
    /// before they complete here. A receive for each request, and one for that being handled.
    pub(crate) const TARGET: Load = Load {
        requests: DEPTH,
        sends: 2 * 2,
        recvs: DEPTH + 1,
        ..Load::NONE
    };

    /// Makes a QP for a load, with a CQ of its own.
    pub(crate) fn qp(id: &cm::Id, pd: &Pd, load: &Load, cx: &Sleepable) -> Result<Qp<Workqueue>> {
        let sizes = Sizes::new(pd.device(), 1, load)
            .inspect_err(|misfit| pr_err!("{}: {misfit}\n", pd.device()))?;
        let cq = Cq::alloc_any(pd.device(), sizes.entries, cx)?;
        InitAttr::new(pd, &cq, &cq, &sizes.caps).create_for(id, cx)
    }
}

/// Credits, for messages without a reply.
pub(crate) mod credits {
    use super::queue_pair::Request;
    use kernel::{
        prelude::*,
        sync::atomic::{
            Atomic,
            Relaxed, //
        }, //
    };
    use rdma::{
        prelude::*,
        session::{
            Credit,
            Grant,
            Received,
            RecvCredits,
            RecvHandler,
            RecvRing,
            SendCredits, //
        }, //
    };
    use zerocopy::byteorder::little_endian::U32;

    /// The receives of each end, by the protocol.
    const RECVS: u32 = 8;

    /// One end. Each message begins with the number of credits that it gives.
    #[pin_data]
    pub(crate) struct End {
        qp: Qp<Workqueue>,
        pd: Pd,
        #[pin]
        to_send: SendCredits,
        to_recv: RecvCredits,
        received: Atomic<u32>,
    }

    impl End {
        /// Makes an end of a connected QP, and posts its receives.
        pub(crate) fn new(qp: Qp<Workqueue>, pd: &Pd, cx: &Sleepable) -> Result<Arc<Self>> {
            let end = try_pin_init!(Self {
                qp,
                pd: pd.clone(),
                to_send <- SendCredits::with_reserve(RECVS, RECVS)?,
                to_recv: RecvCredits::new(RECVS, RECVS),
                received: Atomic::new(0),
            });
            let end = Arc::pin_init(end, GFP_KERNEL)?;
            let ring = RecvRing {
                pd,
                count: RECVS,
                len: 4,
            };
            let posted = ring.post(&end, cx);
            posted.or_else(|e| end.qp.drain(cx).and(Err(e)))?;
            Ok(end)
        }

        /// Sends a message when the peer has a receive for it.
        pub(crate) fn send(&self, cx: &Sleepable) -> Result {
            let credit = self.to_send.wait(60_000, cx)?;
            self.post(credit, self.to_recv.grant(RECVS), cx)
        }

        /// Posts a message that grants credits. One that is not sent takes none, and grants none.
        fn post(&self, credit: Credit<'_>, grant: Grant<'_>, cx: &Sleepable) -> Result {
            let (message, _) = Request::new(&grant.count().to_le_bytes(), &self.pd, cx)?;
            let post = |_| (self.qp).post_send(message, |m| Ok(SendWr::send([m.buf.whole()])));
            Ok(credit.spend(|| grant.spend(post))?)
        }

        fn handle(message: &mut Received<'_, Self>) -> Result<u32> {
            let (end, bytes) = message.open();
            end.to_recv.received()?;
            let (grant, _) = bytes.header::<U32>()?;
            end.to_send.give(grant.get())?;
            Ok(end.received.fetch_add(1, Relaxed))
        }

        /// The receive is posted again. The peer is told in time, also if there is nothing to send.
        fn posted(&self, cx: &Sleepable) -> Result {
            self.to_recv.posted(1)?;
            if !self.to_recv.is_due() {
                return Ok(());
            }
            let grant = self.to_recv.grant(RECVS);
            match self.to_send.take_to_grant(&grant) {
                Ok(credit) => self.post(credit, grant, cx),
                // The peer's next message gives credits.
                Err(EAGAIN) => Ok(()),
                Err(closed) => Err(closed),
            }
        }

        /// Returns whether a message could be sent now.
        pub(crate) fn may_send(&self) -> bool {
            self.to_send.available() != 0
        }

        /// Returns the number of messages that have come.
        pub(crate) fn received(&self) -> u32 {
            self.received.load(Relaxed)
        }

        /// Ends it: all that is posted comes back.
        pub(crate) fn end(&self, cx: &Sleepable) -> Result {
            self.to_send.close(ENOTCONN);
            self.qp.drain(cx)
        }
    }

    impl RecvHandler for End {
        type Send = Workqueue;
        type Recv = Workqueue;
        type Needs = Sleepable;

        fn qp(&self) -> &Qp<Workqueue> {
            &self.qp
        }

        fn received(mut message: Received<'_, Self>, cx: &Sleepable) {
            let end = message.conn().clone();
            let handled = Self::handle(&mut message);
            drop(message); // Posts its receive again.
            if let Err(e) = handled.and_then(|_| end.posted(cx)) {
                end.to_send.close(e);
            }
        }

        fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
            self.to_send.close(ENOTCONN);
        }

        fn refused(self: ArcBorrow<'_, Self>, error: Error) {
            self.to_send.close(error);
        }
    }
}

/// Ends.
pub(crate) mod ends {
    use super::requests::Initiator;
    use kernel::{
        new_mutex,
        prelude::*,
        sync::Mutex, //
    };
    use rdma::{
        device::Device,
        prelude::*, //
    };

    pub(crate) struct Course;

    /// What the ULP has of a device: the connections that it uses, so that it finds them.
    #[pin_data]
    pub(crate) struct PerDevice {
        pub(crate) pd: Pd,
        #[pin]
        initiators: Mutex<KVec<Arc<Initiator>>>,
    }

    impl PerDevice {
        pub(crate) fn keep(&self, initiator: Arc<Initiator>) -> Result {
            Ok(self.initiators.lock().push(initiator, GFP_KERNEL)?)
        }
    }

    impl DeviceData<Course> for PerDevice {
        fn add(_course: Pin<&Course>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
            let pd = Pd::alloc(dev, cx);
            try_pin_init!(Self {
                pd: pd?,
                initiators <- new_mutex!(KVec::new()),
            })
        }

        /// The crate ends the connections after this, and waits for what is left.
        fn remove(self: Pin<&Self>, _course: Pin<&Course>, _dev: &Device, _cx: &Sleepable) {
            let initiators = core::mem::take(&mut *self.initiators.lock());
            drop(initiators); // With the mutex unlocked.
        }
    }

    impl Client for Course {
        type Data = PerDevice;

        fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
            Ok(Course)
        }
    }
}
