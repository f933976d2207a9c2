// SPDX-License-Identifier: GPL-2.0

//! One connection, of a server or a client.
//!
//! A [`Conn`] has its QP and its id, and is the handler of the id's events. Three things own it:
//!
//! - the id, until the connection's last event;
//! - the [`Run`], to find it, until then;
//! - what is posted to the QP: the owner of the receive that waits for the peer's next message.
//!
//! Every cause that ends a connection calls [`Conn::end`], which has the id disconnected. Then the
//! QP goes to the error state, all that is posted comes back to its handlers, which drop it, and
//! the last owner that drops the [`Conn`] leaves it to the crate to destroy the QP.

use crate::{
    proto::MESSAGE_LEN,
    reason::Reason,
    run::Run, //
};
use kernel::{
    new_condvar,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            AtomicFlag,
            Relaxed, //
        },
        CondVar,
        SpinLockIrq, //
    },
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    prelude::*,
    session::{
        self,
        Activity, //
    },
    wc::Success, //
};

/// The sizes of a QP's queues. A server has one receive, and at the most a go-ahead and an RDMA
/// request; a client one receive, and two registrations and an advertisement at the beginning.
const CAPS: Caps = Caps::new(6, 2);

/// The number of completions that are handled at once where this module polls.
const BUDGET: u32 = 16;

/// The time to sleep after a poll without completions.
const NAP: Delta = Delta::from_micros(20);

#[pin_data]
pub(crate) struct Conn {
    pub(crate) run: Arc<Run>,
    pub(crate) id: cm::Id,
    pub(crate) pd: Pd,
    pub(crate) qp: Qp<AnyContext>,
    /// Whether a ping is under way, and when one has begun or ended.
    in_ping: AtomicFlag,
    progress: Activity,
    /// Why the connection is over, once it is.
    #[pin]
    over: SpinLockIrq<Option<Reason>>,
    #[pin]
    changed: CondVar,
}

impl Conn {
    /// Makes what the connection of an id needs, and adds it to those of the run. It has to be
    /// [shut down](Conn::shut_down) if it is not made.
    pub(crate) fn new(run: &Arc<Run>, id: cm::Id, cx: &Sleepable) -> Result<Arc<Self>> {
        let pd = Pd::alloc(id.device()?, cx)?;
        let kind = run.config.context;
        let cq = (kind.alloc_cq)(pd.device(), CAPS.entries(), cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &CAPS, cx)?;
        let init = pin_init!(Self {
            run: run.clone(),
            id,
            pd,
            qp,
            in_ping: AtomicFlag::new(false),
            progress: Activity::new(),
            over <- new_spinlock_irq!(None),
            changed <- new_condvar!(),
        });
        let conn = Arc::pin_init(init, GFP_KERNEL)?;
        run.add(&conn)?;
        if kind.is_direct() {
            let polled = conn.clone();
            let poll = move |cx: &Sleepable| polled.poll(&cq, cx);
            run.client
                .spawn(GFP_KERNEL, poll)
                .inspect_err(|_| run.remove(&conn))?;
        }
        Ok(conn)
    }

    /// Handles completions until the connection is over, and those of its end.
    fn poll(&self, cq: &Cq<AnyContext>, cx: &Sleepable) {
        while self.over.lock().is_none() {
            if cq.process(BUDGET) == 0 {
                fsleep(NAP);
            }
        }
        self.shut_down(cx);
    }

    /// Counts the connection, which was just made. It may have been ended before there was anything
    /// to disconnect: fails with `ECANCELED` then.
    pub(crate) fn connected(&self) -> Result {
        if self.over.lock().is_some() {
            return Err(ECANCELED);
        }
        self.run.stats.connections.add(1, Relaxed);
        Ok(())
    }

    /// A ping begins. Returns when.
    pub(crate) fn ping_begins(&self) -> Instant<Monotonic> {
        self.in_ping.store(true, Relaxed);
        self.progress.note();
        Instant::now()
    }

    /// A ping has ended.
    pub(crate) fn ping_ended(&self, began: Instant<Monotonic>) {
        self.in_ping.store(false, Relaxed);
        self.progress.note();
        let nanos = began.elapsed().as_nanos().unsigned_abs();
        self.run.stats.nanos.add(nanos, Relaxed);
        self.run.stats.pings.add(1, Relaxed);
    }

    /// Returns the time without progress, in milliseconds.
    pub(crate) fn idle_ms(&self) -> u32 {
        self.progress.idle_ms()
    }

    /// Returns why a peer that has left ends the connection.
    fn peer_left(&self) -> Reason {
        if self.in_ping.load(Relaxed) {
            Reason::PeerGone
        } else {
            Reason::PeerDisconnected
        }
    }

    /// Counts a completion. One that failed ends the connection: its owner is to be dropped.
    #[inline]
    pub(crate) fn completed<'a>(&self, wc: &'a Wc) -> Option<Success<'a>> {
        self.run.stats.completions.add(1, Relaxed);
        wc.result().inspect_err(|e| self.failed(e.status)).ok()
    }

    /// A request has failed.
    fn failed(&self, status: Status) {
        // A peer that disconnects at once after its last ping may not acknowledge the go-ahead any
        // more. On iWARP that flushes requests before it is told.
        let left = matches!(status, Status::RETRY_EXC_ERR | Status::WR_FLUSH_ERR);
        match self.peer_left() {
            reason @ Reason::PeerDisconnected if left => self.end(reason),
            _ => self.end(Reason::Request(status)),
        }
    }

    /// Ends the connection if a request was not posted.
    #[inline]
    pub(crate) fn posted<P>(&self, result: Result<(), PostError<P>>) {
        if let Err(e) = result {
            self.end(e.error().into());
        }
    }

    /// Ends the connection, for the first reason that is given. Any context.
    pub(crate) fn end(&self, reason: Reason) {
        {
            let mut over = self.over.lock();
            if over.is_some() {
                return;
            }
            *over = Some(reason);
        }
        self.run.set_reason(reason);
        self.changed.notify_all();
        self.id.disconnect_later();
    }

    /// Waits until the connection is over, and returns why; a signal ends it.
    pub(crate) fn wait(&self) -> Reason {
        let mut over = self.over.lock();
        loop {
            if let Some(reason) = *over {
                return reason;
            }
            if self.changed.wait_interruptible(&mut over) {
                drop(over);
                self.end(EINTR.into());
                over = self.over.lock();
            }
        }
    }

    /// Waits until all that was posted to a connection that is over has come back, and does not
    /// wait for the peer's consent.
    pub(crate) fn shut_down(&self, cx: &Sleepable) {
        // What handlers post during the first drain is flushed after it; where this module polls,
        // the second one finds that.
        let drained = session::end(&self.id, &self.qp, cx).and_then(|()| self.qp.drain(cx));
        if let Err(e) = drained {
            pr_err!("QP {} was not drained: {e:?}\n", self.qp.num());
        }
        self.id.release_handler(cx);
        self.run.remove(self);
    }
}

impl cm::Handler for Conn {
    fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
        self.end(match event {
            cm::Event::Disconnected => self.peer_left(),
            cm::Event::Failed(e) => e.into(),
            cm::Event::Rejected(_) => ECONNREFUSED.into(),
            cm::Event::DeviceRemoval => ENODEV.into(),
            _ => return,
        });
        self.run.remove(self);
    }
}

/// A message that is sent any number of times, always the same.
///
/// As it is not written to any more, it may be shared: the queue owns a reference for each time it
/// is posted.
#[derive(HasCqe)]
pub(crate) struct Message {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    conn: Arc<Conn>,
}

impl Message {
    pub(crate) fn new(
        conn: &Arc<Conn>,
        bytes: [u8; MESSAGE_LEN],
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let mut buf = Buf::alloc(&conn.pd, MESSAGE_LEN, cx)?;
        buf.cpu().copy_from_slice(&bytes);
        let message = Self {
            cqe: Cqe::new(),
            buf,
            conn: conn.clone(),
        };
        Ok(Arc::new(message, GFP_KERNEL)?)
    }

    pub(crate) fn send(self: Arc<Self>) {
        let conn = self.conn.clone();
        conn.posted(
            conn.qp
                .post_send(self, |message| Ok(SendWr::send([message.buf.whole()]))),
        );
    }
}

impl CqeHandler for Message {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let _ = this.conn.completed(wc);
    }
}
