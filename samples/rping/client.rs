// SPDX-License-Identifier: GPL-2.0

//! The client.
//!
//! The writer of `connect` makes the connection, step by step, and waits for its end. In between,
//! [`Ping`] goes round as in the [server](crate::server): it is posted as the receive of the
//! server's next go-ahead, and back in its handler it advertises the next buffer.

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
use rdma::{
    dma::Direction,
    prelude::*, //
};

/// The longest time to resolve an address and a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2000;

/// Runs a client to its end and says why that was.
pub(crate) fn run(instance: &Arc<Instance>, config: &Config, cx: &Sleepable) -> Reason {
    let control = cm::Id::create(&instance.client, cx)
        .map_err(Reason::from)
        .and_then(|id| Control::new(instance, config, id));
    let control = match control {
        Ok(control) => control,
        Err(reason) => {
            instance.set_reason(reason);
            return reason;
        }
    };
    let reason = resolve(&control, config, cx)
        .and_then(|()| ping(&control, config, cx))
        .err()
        .unwrap_or(Reason::Done);
    control.stop(reason, cx);
    instance.connections.remove(&control);
    control.over().unwrap_or(reason)
}

/// Finds the device and the way to the server.
fn resolve(control: &Control, config: &Config, cx: &Sleepable) -> Result<(), Reason> {
    let addr = SocketAddr::new(config.addr, config.port);
    control.id.resolve_addr(addr, RESOLVE_MS, cx)?;
    control.check()?;
    control.id.resolve_route(RESOLVE_MS, cx)?;
    control.check()
}

/// Makes what a connection needs, connects, and waits for the end of all pings.
fn ping(control: &Arc<Control>, config: &Config, cx: &Sleepable) -> Result<(), Reason> {
    let dev = control.id.device()?;
    let pd = Pd::alloc(dev, cx)?;
    let cq = config.context.alloc_cq(dev, CAPS.entries(), cx)?;
    let conn = Conn::new(control, &pd, &cq, cx)?;
    let started = start(&conn, &pd, config, cx);
    if started.is_ok() {
        config.context.wait(&cq, control);
    }
    conn.shut_down(started.err().unwrap_or(Reason::Done), cx);
    Ok(())
}

/// Connects and begins the first ping.
fn start(conn: &Arc<Conn>, pd: &Pd, config: &Config, cx: &Sleepable) -> Result<(), Reason> {
    let control = &conn.control;
    let source = Memory::new(conn, pd, config.size, cx)?;
    let sink = Memory::new(conn, pd, config.size, cx)?;
    control
        .id
        .connect(control.clone(), &cm::ConnParam::default(), cx)?;
    control.check()?;
    control.instance.connected();

    // Both buffers are registered once; so their advertisements are always the same.
    let source_at = conn
        .qp
        .post_send(source.clone(), |m| Ok(RegWr::remote_read(&m.region)))
        .map_err(Error::from)?;
    let sink_at = conn
        .qp
        .post_send(sink.clone(), |m| Ok(RegWr::remote_write(&m.region)))
        .map_err(Error::from)?;
    let advertise = |remote| {
        let size = config.size;
        Message::new(conn, pd, Advertisement { remote, size }.to_bytes(), cx)
    };
    let ping = Ping {
        recv: Cqe::new(),
        conn: conn.clone(),
        inbox: Buf::alloc(pd, MESSAGE_LEN, cx)?,
        source,
        source_at: advertise(source_at)?,
        sink,
        sink_at: advertise(sink_at)?,
        sink_offered: false,
        data: KVec::from_elem(0, config.size as usize, GFP_KERNEL)?,
        validate: config.validate,
        count: config.count,
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
    fn new(conn: &Arc<Conn>, pd: &Pd, size: u32, cx: &Sleepable) -> Result<Arc<Self>> {
        let memory = Self {
            reg: Cqe::new(),
            region: Region::new(Buf::alloc(pd, size as usize, cx)?, cx)?.into_shared(),
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
    validate: bool,
    /// The number of pings; 0 for no end.
    count: u32,
    /// The number of the ping, from 0 on, and when it began.
    number: u32,
    began: Instant<Monotonic>,
}

impl Ping {
    /// Begins a ping.
    fn begin(mut self: Pin<KBox<Self>>) {
        Pattern::new(self.number).fill(&mut self.data);
        if let Err(e) = self.source.region.write(0, &self.data) {
            return self.conn.control.end(e.into());
        }
        self.sink_offered = false;
        self.conn.control.step();
        self.began = Instant::now();
        let message = self.source_at.clone();
        self.advertise(message);
    }

    /// Sends an advertisement. The answer may come at once, so the receive goes first.
    fn advertise(self: Pin<KBox<Self>>, message: Arc<Message>) {
        let conn = self.conn.clone();
        conn.posted(conn.qp.post_recv(self, |ping| {
            Ok(RecvWr::new([ping.inbox.sge_mut(0..MESSAGE_LEN)?]))
        }));
        message.send();
    }

    /// Compares what the server has written.
    fn validate(&mut self) -> Result<(), Reason> {
        self.sink.region.read(0, &mut self.data)?;
        if !Pattern::new(self.number).matches(&self.data) {
            return Err(Reason::Mismatch(self.number));
        }
        self.conn.control.instance.stats.verified(self.data.len());
        Ok(())
    }
}

/// The server says to go on.
impl CqeHandler for Ping {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let Some(wc) = this.conn.completed(wc) else {
            return;
        };
        let received = wc.byte_len();
        if received != MESSAGE_LEN {
            return this.conn.control.end(Reason::MessageLen(received));
        }
        if !this.sink_offered {
            this.sink_offered = true;
            let message = this.sink_at.clone();
            return this.advertise(message);
        }
        if this.validate {
            if let Err(reason) = this.validate() {
                return this.conn.control.end(reason);
            }
        }
        this.conn.control.instance.stats.ping(this.began.elapsed());
        this.conn.control.step();
        this.number = this.number.wrapping_add(1);
        if this.number == this.count {
            return this.conn.control.end(Reason::Done);
        }
        this.begin();
    }
}
