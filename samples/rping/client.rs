// SPDX-License-Identifier: GPL-2.0

//! The client.
//!
//! The writer of `connect` makes the connection and waits for its end. In between,
//! [`Ping`] goes round as in the [server](crate::server): it is posted as the receive of the
//! server's next go-ahead, and back in its handler it advertises the next buffer.

use crate::{
    conn::{
        Conn,
        Message, //
    },
    proto::{
        pattern,
        Advertisement,
        MESSAGE_LEN, //
    },
    reason::Reason,
    run::Run, //
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed,
    time::{
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    dma::Direction,
    prelude::*, //
};

/// The longest time to resolve an address and a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2000;

/// Runs a client to its end and returns why that was.
pub(crate) fn run(run: &Arc<Run>, cx: &Sleepable) -> Reason {
    ping(run, cx).unwrap_or_else(|e| {
        run.set_reason(e.into());
        e.into()
    })
}

/// Makes the connection, and waits for the end of all pings.
fn ping(run: &Arc<Run>, cx: &Sleepable) -> Result<Reason> {
    let _ticker = run.watch()?;
    let id = cm::Id::resolve(&run.client, run.config.addr(), RESOLVE_MS, cx)?;
    let conn = Conn::new(run, id, cx)?;
    if let Err(e) = start(&conn, cx) {
        conn.end(e.into());
    }
    let reason = conn.wait();
    conn.shut_down(cx);
    Ok(reason)
}

/// Connects and begins the first ping.
fn start(conn: &Arc<Conn>, cx: &Sleepable) -> Result {
    let size = conn.run.config.size;
    let source = Memory::new(conn, cx)?;
    let sink = Memory::new(conn, cx)?;
    conn.id
        .connect(conn.clone(), &cm::ConnParam::default(), cx)?;
    conn.connected()?;

    // Both buffers are registered once; so their advertisements are always the same.
    let qp = &conn.qp;
    let source_at = qp.post_send(source.clone(), |m| Ok(RegWr::remote_read(&m.region)))?;
    let sink_at = qp.post_send(sink.clone(), |m| Ok(RegWr::remote_write(&m.region)))?;
    let advertise = |remote| Message::new(conn, Advertisement { remote, size }.to_bytes(), cx);
    let ping = Ping {
        recv: Cqe::new(),
        conn: conn.clone(),
        inbox: Buf::alloc(&conn.pd, MESSAGE_LEN, cx)?,
        source,
        source_at: advertise(source_at)?,
        sink,
        sink_at: advertise(sink_at)?,
        sink_offered: false,
        data: KVec::from_elem(0, size as usize, GFP_KERNEL)?,
        number: 0,
        began: Instant::now(),
    };
    KBox::pin(ping, GFP_KERNEL)?.begin();
    Ok(())
}

/// A buffer that the server may access, from its registration to the end of the connection.
#[derive(HasCqe)]
struct Memory<D: Direction> {
    reg: Cqe<Self>,
    region: SharedRegion<D>,
    conn: Arc<Conn>,
}

impl<D: Direction> Memory<D> {
    fn new(conn: &Arc<Conn>, cx: &Sleepable) -> Result<Arc<Self>> {
        let buf = Buf::alloc(&conn.pd, conn.run.config.size as usize, cx)?;
        let memory = Self {
            reg: Cqe::new(),
            region: Region::new(buf, cx)?.into_shared(),
            conn: conn.clone(),
        };
        Ok(Arc::new(memory, GFP_KERNEL)?)
    }
}

impl<D: Direction> CqeHandler for Memory<D> {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let _ = this.conn.completed(wc);
    }
}

/// The state of a connection's protocol.
#[derive(HasCqe)]
struct Ping {
    recv: Cqe<Self>,
    conn: Arc<Conn>,
    inbox: Buf<FromDevice>,
    /// The memory that the server reads, and the message that advertises it.
    source: Arc<Memory<ToDevice>>,
    source_at: Arc<Message>,
    /// The memory that the server writes.
    sink: Arc<Memory<FromDevice>>,
    sink_at: Arc<Message>,
    /// `true` once the sink was advertised in this ping.
    sink_offered: bool,
    /// A copy of the source or the sink.
    data: KVec<u8>,
    /// The number of the ping, from 0 on, and when it began.
    number: u32,
    began: Instant<Monotonic>,
}

impl Ping {
    /// Begins a ping.
    fn begin(mut self: Pin<KBox<Self>>) {
        let bytes = pattern(self.number, self.data.len());
        for (to, byte) in self.data.iter_mut().zip(bytes) {
            *to = byte;
        }
        if let Err(e) = self.source.region.write(0, &self.data) {
            return self.conn.end(e.into());
        }
        self.sink_offered = false;
        self.began = self.conn.ping_begins();
        let message = self.source_at.clone();
        self.advertise(message);
    }

    /// Sends an advertisement. The answer may come at once, so the receive goes first.
    fn advertise(self: Pin<KBox<Self>>, message: Arc<Message>) {
        let conn = self.conn.clone();
        conn.posted(
            conn.qp
                .post_recv(self, |ping| Ok(RecvWr::new([ping.inbox.whole_mut()]))),
        );
        message.send();
    }

    /// Compares what the server has written.
    fn validate(&mut self) -> Result<(), Reason> {
        self.sink.region.read(0, &mut self.data)?;
        let len = self.data.len();
        if !self.data.iter().copied().eq(pattern(self.number, len)) {
            return Err(Reason::Protocol("data mismatch"));
        }
        let stats = &self.conn.run.stats;
        stats.bytes_verified.add(len as u64, Relaxed);
        Ok(())
    }
}

/// The server says to go on.
impl CqeHandler for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let conn = this.conn.clone();
        let Some(wc) = conn.completed(wc) else { return };
        if wc.byte_len() != MESSAGE_LEN {
            return conn.end(Reason::Protocol("bad message length"));
        }
        if !this.sink_offered {
            this.sink_offered = true;
            let message = this.sink_at.clone();
            return this.advertise(message);
        }
        if conn.run.config.validate {
            if let Err(reason) = this.validate() {
                return conn.end(reason);
            }
        }
        conn.ping_ended(this.began);
        this.number = this.number.wrapping_add(1);
        if this.number == conn.run.config.count {
            return conn.end(Reason::Done);
        }
        this.begin();
    }
}
