// SPDX-License-Identifier: GPL-2.0

//! One connection.
//!
//! A connection is in two parts:
//!
//! - [`Conn`] has the QP, and so depends on the polling context. It is owned by what is posted to
//!   the QP, and by nothing else: the owner of the receive that waits for the peer's next message
//!   keeps it alive.
//! - [`Control`] has the id. It is owned by the connection manager, as the handler of the id's
//!   events, and by the instance, until the connection is over.
//!
//! So there is a circle: the QP keeps the receive, and the receive's owner keeps the QP. It opens
//! when the QP goes to the error state: all that is posted comes back to its handlers, which drop
//! it, the last of it drops the [`Conn`], and the crate destroys the QP from a work item. Every
//! cause that ends a connection does it in this way, by [`Control::end`].

use crate::{
    context::{
        Cq,
        Qp, //
    },
    control::Control,
    proto::MESSAGE_LEN,
    reason::Reason, //
};
use kernel::{
    prelude::*,
    time::hrtimer::ArcHrTimerHandle, //
};
use rdma::{
    prelude::*,
    wc::Success, //
};

/// The sizes of a QP's queues. A server has one receive, and at the most a go-ahead and an RDMA
/// request; a client one receive, and two registrations and an advertisement at the beginning.
pub(crate) const CAPS: Caps = Caps::new(6, 2);

/// The part of a connection that has the QP.
pub(crate) struct Conn {
    pub(crate) qp: Qp,
    pub(crate) control: Arc<Control>,
    _watch: ArcHrTimerHandle<Control>,
}

impl Conn {
    /// Makes the QP, and starts to watch for progress.
    pub(crate) fn new(
        control: &Arc<Control>,
        pd: &Pd,
        cq: &Cq,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let conn = Self {
            qp: Qp::create(&control.id, pd, cq, cq, &CAPS, cx)?,
            control: control.clone(),
            _watch: control.clone().watch(),
        };
        Ok(Arc::new(conn, GFP_KERNEL)?)
    }

    /// Ends the connection and waits until all that was posted has come back. For those who make a
    /// connection, and keep it until it is over.
    pub(crate) fn shut_down(&self, reason: Reason, cx: &Sleepable) {
        self.control.stop(reason, cx);
        // What handlers post during the first drain is flushed after it; where only the caller
        // polls, the second one finds that.
        for _ in 0..2 {
            if let Err(e) = self.qp.drain(cx) {
                pr_err!("a QP was not drained: {e:?}\n");
                break;
            }
        }
        self.control.instance.connections.remove(&self.control);
    }

    /// Counts a completion. One that failed ends the connection: its owner is to be dropped.
    #[inline]
    pub(crate) fn completed<'a>(&self, wc: &'a Wc) -> Option<Success<'a>> {
        self.control.instance.stats.completion();
        wc.result()
            .inspect_err(|e| self.control.failed(e.status))
            .ok()
    }

    /// Ends the connection if a request was not posted.
    #[inline]
    pub(crate) fn posted<P>(&self, result: Result<(), PostError<P>>) {
        if let Err(e) = result {
            self.control.end(e.error().into());
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.control.set_gone();
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

impl CqeHandler for Message {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let _ = this.conn.completed(wc);
    }
}

impl Message {
    pub(crate) fn new(
        conn: &Arc<Conn>,
        pd: &Pd,
        bytes: [u8; MESSAGE_LEN],
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let mut buf = Buf::alloc(pd, MESSAGE_LEN, cx)?;
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
        conn.posted(conn.qp.post_send(self, |message| {
            Ok(SendWr::send([message.buf.sge(0..MESSAGE_LEN)?]))
        }));
    }
}
