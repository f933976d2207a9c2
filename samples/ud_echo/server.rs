// SPDX-License-Identifier: GPL-2.0

//! The server: each datagram goes back from the buffer that it came in.

use crate::{
    add,
    Stats,
    LEN,
    PORT,
    QKEY, //
};
use core::ops::Deref;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex, //
    }, //
};
use rdma::{
    ah::Ah,
    device::Device,
    prelude::*,
    ud::{
        Datagram,
        UdQp,
        UdWr,
        HEADER, //
    },
    wc::Success, //
};

/// The number of datagrams that may come at once. More are lost.
const DEPTH: u32 = 32;

#[pin_data]
pub(crate) struct Server {
    pub(crate) pd: Pd,
    /// To find the way back to a sender may sleep, so the completions are handled where that is
    /// allowed.
    pub(crate) qp: UdQp<Workqueue>,
    /// No more datagrams are answered. To find the way to a host that is silent takes seconds,
    /// and the drain waits for the datagrams that have come, one after the other.
    stopped: Atomic<bool>,
    #[pin]
    pub(crate) stats: Mutex<Stats>,
}

/// A server that receives until this is dropped.
///
/// The posted receives own the server, and the server owns its QP. The drain gives them back, which
/// cuts the ring.
pub(crate) struct Started(Arc<Server>);

impl Deref for Started {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // If it fails, the removal of the device logs what it waits for.
        let _ = Sleepable::current().and_then(|cx| self.stop(&cx));
    }
}

impl Server {
    /// Answers nothing from here on, and gives the receives back.
    pub(crate) fn stop(&self, cx: &Sleepable) -> Result {
        self.stopped.store(true, Relaxed);
        self.qp.drain(cx)
    }

    pub(crate) fn start(dev: &Device, cx: &Sleepable) -> Result<Started> {
        let caps = Caps::new(DEPTH, DEPTH);
        let pd = Pd::alloc(dev, cx)?;
        let cq = Cq::alloc_any(dev, caps.entries(), cx)?;
        let server = try_pin_init!(Self {
            qp: UdQp::create(&pd, &cq, &cq, &caps, PORT, QKEY, cx)?,
            pd,
            stopped: Atomic::new(false),
            stats <- new_mutex!(Stats::default()),
        });
        let server = Started(Arc::pin_init(server, GFP_KERNEL)?);
        for _ in 0..DEPTH {
            let echo = Echo {
                received: Cqe::new(),
                sent: Cqe::new(),
                buf: Buf::alloc(&server.pd, HEADER + LEN, cx)?,
                to: None,
                server: server.0.clone(),
            };
            receive(KBox::pin(echo, GFP_KERNEL)?);
        }
        Ok(server)
    }
}

/// A datagram on its way here, and then back. It has a callback for each.
#[derive(HasCqe)]
struct Echo {
    received: Cqe<Self>,
    sent: Cqe<Self, 1>,
    buf: Buf<Bidirectional>,
    to: Option<Ah>,
    server: Arc<Server>,
}

/// Waits for a datagram, until the server stops.
fn receive(echo: Pin<KBox<Echo>>) {
    let server = echo.server.clone();
    // If the QP refuses the buffer, it is freed.
    let _ = (server.qp).post_recv(echo, |e| Ok(RecvWr::new([e.buf.whole_mut()])));
}

impl Echo {
    /// Finds out where the datagram ends and where it goes back to.
    fn address(&mut self, wc: Success<'_>, cx: &Sleepable) -> Result<(usize, u32)> {
        let bytes = self.buf.cpu();
        let datagram = Datagram::new(wc, &bytes)?;
        let source = datagram.source(PORT);
        self.to = Some(Ah::reply(&self.server.pd, &source, cx)?);
        let end = HEADER.checked_add(datagram.payload().len());
        Ok((end.ok_or(EMSGSIZE)?, source.qpn()))
    }
}

impl CqeHandler for Echo {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// A datagram has come: sends it back.
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &Sleepable) {
        // Flushed, or to be: the server has stopped.
        let (Ok(wc), false) = (wc.result(), this.server.stopped.load(Relaxed)) else {
            return;
        };
        let Ok((end, qpn)) = this.address(wc, cx) else {
            return receive(this);
        };
        let server = this.server.clone();
        let sent = server.qp.post_send(this, |e| {
            let sge = e.buf.sge(HEADER..end)?;
            let to = e.to.as_ref();
            Ok(UdWr::new([sge], to.ok_or(EINVAL)?, qpn, QKEY).done_by::<1>())
        });
        if let Some(echo) = sent.err().and_then(|refused| refused.owner) {
            receive(echo);
        }
    }
}

impl CqeHandler<1> for Echo {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// It has gone back: waits for another one.
    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
        if wc.result().is_ok() {
            add(&mut this.server.stats.lock().served, 1);
            this.to = None;
            receive(this);
        }
    }
}
