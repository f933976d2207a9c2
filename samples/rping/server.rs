// SPDX-License-Identifier: GPL-2.0

//! The server.
//!
//! [`Ping`] is all there is to the protocol. It owns the buffers of a connection, and it goes
//! round: it is posted as the receive of an advertisement, then as the RDMA READ or WRITE of what
//! was advertised, then as the next receive. At any time it is in one place only, so its fields
//! are the state of the protocol, and neither a lock nor an allocation is needed.

use crate::{
    conn::{
        Conn,
        Message, //
    },
    proto::{
        pattern,
        Advertisement,
        MAX_SIZE,
        MESSAGE_LEN, //
    },
    reason::Reason,
    run::{
        Run,
        State, //
    }, //
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;

/// The handler of a listener's events.
pub(crate) struct Server(pub(crate) Arc<Run>);

impl cm::Accept for Server {
    fn request(&self, request: cm::Request<'_>, cx: &Sleepable) {
        // A request that is dropped is refused.
        if let Err(reason) = self.accept(request, cx) {
            self.0.set_reason(reason);
        }
    }

    /// The device that the server listened on is gone.
    fn stopped(&self) {
        self.0.set_reason(ENODEV.into());
        self.0.set_state(State::Failed);
    }
}

impl Server {
    fn accept(&self, request: cm::Request<'_>, cx: &Sleepable) -> Result<(), Reason> {
        if request.initiator_depth() == 0 {
            return Err(Reason::Protocol("peer allows no RDMA READ"));
        }
        let param = cm::ConnParam {
            responder_resources: request.responder_resources().min(1),
            ..Default::default()
        };
        let conn = Conn::new(&self.0, request.into_id(cx)?, cx)?;
        let accepted = Ping::new(&conn, cx).and_then(|ping| {
            ping.receive();
            conn.id.accept(conn.clone(), &param, cx)?;
            conn.connected()
        });
        if let Err(e) = accepted {
            conn.end(e.into());
            conn.shut_down(cx);
        }
        Ok(())
    }
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
    /// The number of the ping, from 0 on, and when it began.
    number: u32,
    began: Instant<Monotonic>,
    /// The number of bytes that were read for this ping; 0 if they still have to be.
    len: usize,
    /// The last advertisement.
    remote: Remote,
}

impl Ping {
    fn new(conn: &Arc<Conn>, cx: &Sleepable) -> Result<Pin<KBox<Self>>> {
        let ping = Self {
            recv: Cqe::new(),
            read: Cqe::new(),
            write: Cqe::new(),
            conn: conn.clone(),
            inbox: Buf::alloc(&conn.pd, MESSAGE_LEN, cx)?,
            data: Buf::alloc(&conn.pd, MAX_SIZE as usize, cx)?,
            go_ahead: Message::new(conn, [0; MESSAGE_LEN], cx)?,
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
        conn.posted(
            conn.qp
                .post_recv::<_, RECV, _>(self, |ping| Ok(RecvWr::new([ping.inbox.whole_mut()]))),
        );
    }

    /// Lets the client go on. Its next message may come at once, so the receive goes first.
    fn go_ahead(self: Pin<KBox<Self>>) {
        let message = self.go_ahead.clone();
        self.receive();
        message.send();
    }

    /// Takes the advertisement that has come, and posts what it asks for.
    fn advertised(mut self: Pin<KBox<Self>>, received: usize) -> Result<(), Reason> {
        let message = self.inbox.cpu();
        let advertised = message.get(..received).and_then(Advertisement::parse);
        drop(message);
        let Advertisement { remote, size } =
            advertised.ok_or(Reason::Protocol("bad message length"))?;
        self.remote = remote;
        let conn = self.conn.clone();
        if self.len != 0 {
            // The sink, for what was read.
            if (size as usize) < self.len {
                return Err(Reason::Protocol("the sink is too small"));
            }
            conn.posted(conn.qp.post_send::<_, _, WRITE, _>(self, |ping| {
                Ok(SendWr::rdma_write(
                    [ping.data.sge(0..ping.len)?],
                    ping.remote,
                ))
            }));
            return Ok(());
        }
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(Reason::Protocol("bad size of the source"));
        }
        self.began = conn.ping_begins();
        self.len = size as usize;
        conn.posted(conn.qp.post_send::<_, _, READ, _>(self, |ping| {
            Ok(SendWr::rdma_read(
                [ping.data.sge_mut(0..ping.len)?],
                ping.remote,
            ))
        }));
        Ok(())
    }

    /// Compares what was read.
    fn validate(&mut self) -> Result<(), Reason> {
        let data = self.data.cpu();
        let bytes = data.iter().take(self.len).copied();
        if !bytes.eq(pattern(self.number, self.len)) {
            return Err(Reason::Protocol("data mismatch"));
        }
        let stats = &self.conn.run.stats;
        stats.bytes_verified.add(self.len as u64, Relaxed);
        Ok(())
    }
}

/// An advertisement has come.
impl CqeHandler<RECV> for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let conn = this.conn.clone();
        let Some(wc) = conn.completed(wc) else { return };
        if let Err(reason) = this.advertised(wc.byte_len()) {
            conn.end(reason);
        }
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
        if this.conn.run.config.validate {
            if let Err(reason) = this.validate() {
                return this.conn.end(reason);
            }
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
        this.conn.ping_ended(this.began);
        this.number = this.number.wrapping_add(1);
        this.len = 0;
        this.go_ahead();
    }
}
