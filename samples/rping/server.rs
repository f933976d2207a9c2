// SPDX-License-Identifier: GPL-2.0

//! The server.
//!
//! [`Ping`] is all there is to the protocol. It owns the buffers of a connection, and it goes
//! round: it is posted as the receive of an advertisement, then as the RDMA READ or WRITE of what
//! was advertised, then as the next receive. At any time it is in one place only, so its fields
//! are the state of the protocol, and neither a lock nor an allocation is needed.

use crate::{
    config::Config,
    conn::{
        Conn,
        Message,
        CAPS, //
    },
    control::Control,
    instance::Instance,
    proto::{
        Advertisement,
        Pattern,
        MAX_SIZE,
        MESSAGE_LEN, //
    },
    reason::Reason, //
};
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// The handler of a listener's events.
pub(crate) struct Server {
    pub(crate) instance: Arc<Instance>,
    pub(crate) config: Config,
}

impl cm::Accept for Server {
    fn request(&self, request: cm::Request<'_>, cx: &Sleepable) {
        // A request that is dropped is refused.
        if let Err(reason) = self.take(request, cx) {
            self.instance.set_reason(reason);
        }
    }

    fn stopped(&self) {
        self.instance.listener_stopped();
    }
}

impl Server {
    fn take(&self, request: cm::Request<'_>, cx: &Sleepable) -> Result<(), Reason> {
        if request.initiator_depth() == 0 {
            return Err(Reason::NoRead);
        }
        let responder_resources = request.responder_resources().min(1);
        let id = request.into_id(cx)?;
        let control = Control::new(&self.instance, &self.config, id)?;
        let param = cm::ConnParam {
            responder_resources,
            ..Default::default()
        };
        accept(&control, &self.config, &param, cx)
            .inspect_err(|_| self.instance.connections.remove(&control))
    }
}

/// Makes what a connection needs, and accepts it.
fn accept(
    control: &Arc<Control>,
    config: &Config,
    param: &cm::ConnParam<'_>,
    cx: &Sleepable,
) -> Result<(), Reason> {
    let dev = control.id.device()?;
    let pd = Pd::alloc(dev, cx)?;
    let cq = config.context.alloc_cq(dev, CAPS.entries(), cx)?;
    let conn = Conn::new(control, &pd, &cq, cx)?;
    let ping = Ping::new(&conn, &pd, config.validate, cx)?;
    config.context.serve(cq, control)?;
    ping.receive();
    control
        .id
        .accept(control.clone(), param, cx)
        .map_err(Reason::from)
        // It may have been ended before there was anything to disconnect.
        .and_then(|()| control.check())
        .inspect(|()| control.instance.stats.connection())
        .inspect_err(|reason| conn.shut_down(*reason, cx))
}

/// The uses of a [`Ping`] as a request.
const RECV: u64 = 0;
const READ: u64 = 1;
const WRITE: u64 = 2;

/// The state of a connection's protocol.
#[derive(HasCqe)]
struct Ping {
    recv: Cqe<Self, RECV>,
    read: Cqe<Self, READ>,
    write: Cqe<Self, WRITE>,
    conn: Arc<Conn>,
    inbox: Buf<FromDevice>,
    data: Buf<Bidirectional>,
    go_ahead: Arc<Message>,
    validate: bool,
    /// The number of the ping, from 0 on, and when it began.
    number: u32,
    began: Instant<Monotonic>,
    /// The number of bytes that were read for this ping; 0 if they still have to be.
    len: usize,
    /// The last advertisement.
    remote: Remote,
}

impl Ping {
    fn new(conn: &Arc<Conn>, pd: &Pd, validate: bool, cx: &Sleepable) -> Result<Pin<KBox<Self>>> {
        let ping = Self {
            recv: Cqe::new(),
            read: Cqe::new(),
            write: Cqe::new(),
            conn: conn.clone(),
            inbox: Buf::alloc(pd, MESSAGE_LEN, cx)?,
            data: Buf::alloc(pd, MAX_SIZE as usize, cx)?,
            go_ahead: Message::new(conn, pd, [0; MESSAGE_LEN], cx)?,
            validate,
            number: 0,
            began: Instant::now(),
            len: 0,
            remote: Remote { addr: 0, rkey: 0 },
        };
        Ok(KBox::pin(ping, GFP_KERNEL)?)
    }

    /// Waits for an advertisement.
    fn receive(self: Pin<KBox<Self>>) {
        let conn = self.conn.clone();
        conn.posted(conn.qp.post_recv::<_, RECV, _>(self, |ping| {
            Ok(RecvWr::new([ping.inbox.sge_mut(0..MESSAGE_LEN)?]))
        }));
    }

    /// Lets the client go on. Its next message may come at once, so the receive goes first.
    fn go_ahead(self: Pin<KBox<Self>>) {
        let message = self.go_ahead.clone();
        self.receive();
        message.send();
    }

    /// Checks the advertisement that has come.
    fn advertised(&mut self, received: usize) -> Result<Advertisement, Reason> {
        let inbox = self.inbox.cpu();
        inbox
            .get(..received)
            .and_then(Advertisement::parse)
            .ok_or(Reason::MessageLen(received))
    }
}

/// An advertisement has come.
impl CqeHandler<RECV> for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let conn = this.conn.clone();
        let Some(wc) = conn.completed(wc) else { return };
        let advertised = match this.advertised(wc.byte_len()) {
            Ok(advertised) => advertised,
            Err(reason) => return conn.control.end(reason),
        };
        let size = advertised.size;
        this.remote = advertised.remote;
        if this.len != 0 {
            // The sink, for what was read.
            if (size as usize) < this.len {
                return conn.control.end(Reason::SinkSize(size));
            }
            return conn.posted(conn.qp.post_send::<_, _, WRITE, _>(this, |ping| {
                Ok(SendWr::rdma_write(
                    [ping.data.sge(0..ping.len)?],
                    ping.remote,
                ))
            }));
        }
        if size == 0 || size > MAX_SIZE {
            return conn.control.end(Reason::Size(size));
        }
        conn.control.step();
        this.began = Instant::now();
        this.len = size as usize;
        conn.posted(conn.qp.post_send::<_, _, READ, _>(this, |ping| {
            Ok(SendWr::rdma_read(
                [ping.data.sge_mut(0..ping.len)?],
                ping.remote,
            ))
        }));
    }
}

/// The client's data are here.
impl CqeHandler<READ> for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        if this.conn.completed(wc).is_none() {
            return;
        }
        let (len, number) = (this.len, this.number);
        if this.validate {
            let data = this.data.cpu();
            if !data
                .get(..len)
                .is_some_and(|data| Pattern::new(number).matches(data))
            {
                drop(data);
                return this.conn.control.end(Reason::Mismatch(number));
            }
            drop(data);
            this.conn.control.instance.stats.verified(len);
        }
        this.go_ahead();
    }
}

/// The client has its data back.
impl CqeHandler<WRITE> for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        if this.conn.completed(wc).is_none() {
            return;
        }
        this.conn.control.instance.stats.ping(this.began.elapsed());
        this.conn.control.step();
        this.number = this.number.wrapping_add(1);
        this.len = 0;
        this.go_ahead();
    }
}
