// SPDX-License-Identifier: GPL-2.0

//! One connection, of a server or a client.
//!
//! A thread runs it from its beginning to its end: the writer of `connect`, or a work item of the
//! server. It posts requests, and waits until their owners are back; the handlers of completions
//! run in the polling context, and only hand the owners over.

use crate::{
    config::Config,
    instance::{
        add,
        Instance, //
    },
    protocol::{
        pattern,
        Advertisement,
        MESSAGE_LEN, //
    }, //
};
use kernel::{
    fmt,
    new_condvar,
    new_spinlock_irq,
    prelude::*,
    sync::{
        CondVar,
        SpinLockIrq, //
    },
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    prelude::*,
    session,
    wc::Success, //
};

/// The sizes of a QP's queues. A server has one receive, and at the most a go-ahead and an RDMA
/// request; a client one receive, and two registrations and an advertisement at the beginning.
const CAPS: Caps = Caps::new(6, 2);

/// The number of completions that are handled at once where this module polls.
const BUDGET: u32 = 16;

/// The time to sleep after a poll without completions.
const NAP: Delta = Delta::from_micros(20);

/// Why a connection ended, for people ([`fmt::Display`]) and as an error number.
#[derive(Clone, Copy, Default)]
pub(crate) enum Reason {
    /// None has ended yet.
    #[default]
    None,
    /// The client has done all its pings.
    Done,
    /// Asked for.
    Stopped,
    /// The peer has ended it, between two pings.
    PeerDisconnected,
    /// The peer does not keep to the protocol.
    Protocol(&'static str),
    /// A request has failed.
    Request(wc::Status),
    /// Anything else.
    Failed(Error),
}

impl Reason {
    /// Returns whether the connection ended before its time.
    pub(crate) fn is_error(self) -> bool {
        !matches!(self, Self::Done | Self::Stopped | Self::PeerDisconnected)
    }
}

impl From<Error> for Reason {
    fn from(e: Error) -> Self {
        match e {
            ECANCELED => Self::Stopped,
            // A client that was interrupted does not begin again.
            ERESTARTSYS => Self::Failed(EINTR),
            e => Self::Failed(e),
        }
    }
}

impl From<Reason> for Result {
    fn from(reason: Reason) -> Self {
        Err(match reason {
            Reason::None | Reason::Done => return Ok(()),
            Reason::Stopped => ECANCELED,
            Reason::PeerDisconnected => ECONNRESET,
            Reason::Protocol(_) => EPROTO,
            Reason::Request(_) => EIO,
            Reason::Failed(e) => e,
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => Ok(()),
            Self::Done => f.write_str("done"),
            Self::Stopped => f.write_str("stopped"),
            Self::PeerDisconnected => f.write_str("peer disconnected"),
            Self::Protocol(fault) => f.write_str(fault),
            Self::Request(status) => f.write_fmt(fmt!("request failed: {status}")),
            Self::Failed(e) => f.write_fmt(fmt!("failed: {e:?}")),
        }
    }
}

/// The events that the thread waits for.
#[derive(Default)]
struct Events {
    back: Option<Owner>,
    /// When the ping has begun that is under way.
    ping: Option<Instant<Monotonic>>,
    /// Why the connection is over, once it is.
    over: Option<Reason>,
}

#[pin_data]
pub(crate) struct Conn {
    pub(crate) instance: Arc<Instance>,
    pub(crate) config: Config,
    pub(crate) id: cm::Id,
    pub(crate) pd: Pd,
    pub(crate) qp: Qp<AnyContext>,
    cq: Cq<AnyContext>,
    #[pin]
    events: SpinLockIrq<Events>,
    #[pin]
    changed: CondVar,
}

impl Conn {
    /// Makes what the connection of an id needs, has it made and used by `protocol`, and ends it.
    pub(crate) fn run(
        instance: &Arc<Instance>,
        id: cm::Id,
        cx: &Sleepable,
        protocol: impl FnOnce(&Arc<Self>, &Sleepable) -> Result,
    ) -> Result {
        let conn = Self::new(instance, id, cx)?;
        let result = instance.add(&conn).and_then(|()| protocol(&conn, cx));
        conn.end(result.map_or_else(Reason::from, |()| Reason::Done));
        if let Err(e) = session::end(&conn.id, &conn.qp, cx) {
            rdma::pr_err_ratelimited!("QP {} was not drained: {e:?}\n", conn.qp.num());
        }
        instance.remove(&conn);
        let over = conn.events.lock().over;
        if let Some(Reason::Stopped) = over {
            // The peer may take long to confirm the end.
            conn.id.release_handler(cx);
        }
        // It has a reference to the connection.
        let back = conn.events.lock().back.take();
        drop(back);
        Ok(())
    }

    fn new(instance: &Arc<Instance>, id: cm::Id, cx: &Sleepable) -> Result<Arc<Self>> {
        let config = instance.config();
        let pd = Pd::alloc(id.device()?, cx)?;
        let cq = (config.context.alloc_cq)(pd.device(), CAPS.entries(), cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &CAPS, cx)?;
        let init = pin_init!(Self {
            instance: instance.clone(),
            config,
            id,
            pd,
            qp,
            cq,
            events <- new_spinlock_irq!(Events::default()),
            changed <- new_condvar!(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Counts the connection, which was just made. Fails if it was ended before that.
    pub(crate) fn connected(&self) -> Result {
        self.instance.note(|report| add(&mut report.connections, 1));
        self.events.lock().over.map_or(Ok(()), Result::from)
    }

    pub(crate) fn ping_begins(&self) {
        self.events.lock().ping = Some(Instant::now());
    }

    pub(crate) fn ping_ended(&self) {
        let began = self.events.lock().ping.take();
        let nanos = began.map_or(0, |began| began.elapsed().as_nanos().unsigned_abs());
        self.instance.note(|report| {
            add(&mut report.nanos, nanos);
            add(&mut report.pings, 1);
        });
    }

    /// Waits until the request is done that was posted. Fails when the connection is over.
    pub(crate) fn wait(&self) -> Result<Owner> {
        let polls = self.config.context.is_direct();
        let timeout_ms = self.config.timeout_ms.get();
        let began = Instant::<Monotonic>::now();
        loop {
            if polls && self.cq.process(BUDGET) == 0 {
                fsleep(NAP);
            }
            let mut events = self.events.lock();
            if let Some(ping) = events.back.take() {
                return Ok(ping);
            }
            if events.over.is_some() {
                return Err(ECANCELED);
            }
            if current!().signal_pending() {
                return Err(EINTR);
            }
            if began.elapsed() > Delta::from_millis(timeout_ms.into()) {
                return Err(ETIMEDOUT);
            }
            if !polls {
                let jiffies = msecs_to_jiffies(timeout_ms);
                let _ = (self.changed).wait_interruptible_timeout(&mut events, jiffies);
            }
        }
    }

    /// Posts buffers as the receive of a message.
    pub(crate) fn post_recv(&self, ping: Owner) -> Result {
        Ok((self.qp).post_recv(ping, |ping| Ok(RecvWr::new([ping.message.whole_mut()])))?)
    }

    /// Sends a message and waits for the answer. That may come at once, so its receive goes first.
    pub(crate) fn exchange(&self, ping: Owner, message: &Arc<Message>) -> Result<Owner> {
        self.post_recv(ping)?;
        (self.qp).post_send(message.clone(), |m| Ok(SendWr::send([m.item.whole()])))?;
        self.wait()
    }

    /// Posts an RDMA READ or WRITE of the data, and waits for its end.
    pub(crate) fn transfer(
        &self,
        ping: Owner,
        wr: impl for<'a> FnOnce(&'a Ping) -> Result<SendWr<'a, 1>>,
    ) -> Result<Owner> {
        self.qp.post_send(ping, wr)?;
        self.wait()
    }

    /// Counts a completion. One that failed ends the connection: its owner is to be dropped.
    pub(crate) fn completed<'a>(&self, wc: &'a Wc) -> Option<Success<'a>> {
        self.instance.note(|report| add(&mut report.completions, 1));
        wc.result()
            .inspect_err(|e| self.end(Reason::Request(e.status)))
            .ok()
    }

    /// The peer does not keep to the protocol.
    pub(crate) fn fault(&self, fault: &'static str) -> Result {
        self.end(Reason::Protocol(fault));
        Err(EPROTO)
    }

    /// Has the thread end the connection, for the first reason that is given. Any context.
    pub(crate) fn end(&self, reason: Reason) {
        let mut events = self.events.lock();
        if events.over.is_some() {
            return;
        }
        let in_ping = events.ping.is_some();
        let reason = match reason {
            Reason::PeerDisconnected if in_ping => ECONNRESET.into(),
            // A peer that disconnects at once after its last ping may no longer acknowledge
            // the go-ahead. On iWARP that flushes requests before the event.
            Reason::Request(wc::Status::RETRY_EXC_ERR | wc::Status::WR_FLUSH_ERR) if !in_ping => {
                Reason::PeerDisconnected
            }
            reason => reason,
        };
        events.over = Some(reason);
        drop(events);
        self.instance.ended(reason);
        self.changed.notify_all();
        // The thread may wait for a step of the connection manager.
        self.id.disconnect_later();
    }
}

impl cm::Handler for Conn {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        self.end(match event {
            cm::Event::Disconnected => Reason::PeerDisconnected,
            cm::Event::Failed(e) => e.into(),
            cm::Event::Rejected(_) => ECONNREFUSED.into(),
            cm::Event::DeviceRemoval => ENODEV.into(),
            _ => return,
        });
    }
}

/// The buffers of a connection.
///
/// They go round: posted as the receive of a message, or as an RDMA READ or WRITE, they come back
/// when that is done. So they are in one place at a time, and nothing is allocated for a ping.
#[derive(HasCqe)]
pub(crate) struct Ping {
    cqe: Cqe<Self>,
    conn: Arc<Conn>,
    message: Buf<FromDevice>,
    pub(crate) data: Buf<Bidirectional>,
}

pub(crate) type Owner = Pin<KBox<Ping>>;

impl CqeHandler for Ping {
    type Pointer = Owner;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let conn = this.conn.clone();
        let Some(wc) = conn.completed(wc) else { return };
        match wc.opcode() {
            Opcode::RdmaRead | Opcode::RdmaWrite => {}
            Opcode::Recv if wc.byte_len() == MESSAGE_LEN => {}
            _ => return conn.end(Reason::Protocol("bad message length")),
        }
        conn.events.lock().back = Some(this);
        conn.changed.notify_all();
    }
}

impl Ping {
    pub(crate) fn new(conn: &Arc<Conn>, size: usize, cx: &Sleepable) -> Result<Owner> {
        let ping = Self {
            cqe: Cqe::new(),
            conn: conn.clone(),
            message: Buf::alloc(&conn.pd, MESSAGE_LEN, cx)?,
            data: Buf::alloc(&conn.pd, size, cx)?,
        };
        Ok(KBox::pin(ping, GFP_KERNEL)?)
    }

    /// Returns where the buffer is that was advertised, and its size.
    pub(crate) fn advertisement(&mut self) -> Result<(Remote, u32)> {
        let message = Advertisement::read_from_bytes(&self.message.cpu()).map_err(|_| EPROTO)?;
        Ok(message.get())
    }

    /// Makes the data of a ping.
    pub(crate) fn fill(&mut self, number: u32, len: usize) {
        for (to, byte) in self.data.cpu().iter_mut().zip(pattern(number, len)) {
            *to = byte;
        }
    }

    /// Compares the first bytes of the data with those of a ping.
    pub(crate) fn validate(&mut self, number: u32, len: usize) -> Result {
        if self.conn.config.validate {
            let data = self.data.cpu();
            if !data.iter().copied().take(len).eq(pattern(number, len)) {
                return self.conn.fault("data mismatch");
            }
            (self.conn.instance).note(|report| add(&mut report.bytes_verified, len as u64));
        }
        Ok(())
    }
}

/// Memory that is posted and not written to: it may be posted several times at once, and the queue
/// owns a reference for each.
#[derive(HasCqe)]
pub(crate) struct Shared<T> {
    cqe: Cqe<Self>,
    pub(crate) item: T,
    conn: Arc<Conn>,
}

impl<T: Send + Sync + 'static> Shared<T> {
    pub(crate) fn new(conn: &Arc<Conn>, item: T) -> Result<Arc<Self>> {
        let shared = Self {
            cqe: Cqe::new(),
            item,
            conn: conn.clone(),
        };
        Ok(Arc::new(shared, GFP_KERNEL)?)
    }
}

impl<T: Send + Sync + 'static> CqeHandler for Shared<T> {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let _ = this.conn.completed(wc);
    }
}

/// A message that is sent any number of times, always the same.
pub(crate) type Message = Shared<Buf<ToDevice>>;

impl Message {
    pub(crate) fn with(conn: &Arc<Conn>, content: &[u8], cx: &Sleepable) -> Result<Arc<Self>> {
        let mut buf = Buf::alloc(&conn.pd, content.len(), cx)?;
        buf.cpu().copy_from_slice(content);
        Self::new(conn, buf)
    }
}
