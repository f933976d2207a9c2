// SPDX-License-Identifier: GPL-2.0

//! The server: each datagram goes back from the buffer that it came in.

use crate::{
    LEN,
    PORT,
    QKEY, //
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{
            Atomic as AtomicCell,
            Relaxed, //
        },
        SpinLock, //
    }, //
};
use rdma::{
    ah::Ah,
    prelude::*,
    ud::{
        Datagram,
        UdQp,
        UdWr,
        HEADER, //
    },
    wc::Success, //
};

/// How many datagrams may come at once. More are lost.
const DEPTH: u32 = 32;

/// To find the way back to a sender may sleep, so the completions are handled where that is
/// allowed.
type ServerQp = UdQp<Workqueue>;

#[pin_data]
pub(crate) struct Server {
    pd: Pd,
    /// There until the device goes. Never locked in a completion's way, but for a moment.
    #[pin]
    qp: SpinLock<Option<Arc<ServerQp>>>,
    served: AtomicCell<u64>,
}

impl Server {
    pub(crate) fn new(pd: &Pd, cx: &Sleepable) -> Result<Arc<Self>> {
        let caps = Caps::new(DEPTH, DEPTH);
        let cq = Cq::alloc_any(pd.device(), caps.entries(), cx)?;
        let qp = ServerQp::create(pd, &cq, &cq, &caps, PORT, QKEY, cx)?;
        let qp = Arc::new(qp, GFP_KERNEL)?;
        let server = pin_init!(Self {
            pd: pd.clone(),
            qp <- new_spinlock!(Some(qp)),
            served: AtomicCell::new(0),
        });
        let server = Arc::pin_init(server, GFP_KERNEL)?;
        for _ in 0..DEPTH {
            let echo = Echo {
                received: Cqe::new(),
                sent: Cqe::new(),
                buf: Buf::alloc(pd, HEADER + LEN, cx)?,
                to: None,
                server: server.clone(),
            };
            receive(KBox::pin(echo, GFP_KERNEL)?);
        }
        Ok(server)
    }

    /// Lets go of the QP. Once nobody uses it, it comes to its end, and all buffers come back.
    pub(crate) fn stop(&self) {
        let qp = self.qp.lock().take();
        drop(qp);
    }

    fn qp(&self) -> Option<Arc<ServerQp>> {
        self.qp.lock().clone()
    }

    pub(crate) fn qpn(&self) -> Option<u32> {
        self.qp().map(|qp| qp.num())
    }

    /// Returns how many datagrams have gone back.
    pub(crate) fn served(&self) -> u64 {
        self.served.load(Relaxed)
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
    if let Some(qp) = echo.server.qp() {
        // Where the QP refuses the buffer, it is freed.
        let _ = qp.post_recv::<_, 0, 1>(echo, |e| Ok(RecvWr::new([e.buf.whole_mut()])));
    }
}

impl Echo {
    /// Finds out how long the datagram is and where it goes back to.
    fn address(&mut self, wc: Success<'_>, cx: &Sleepable) -> Result<(usize, u32)> {
        let bytes = self.buf.cpu();
        let datagram = Datagram::new(wc, &bytes)?;
        let source = datagram.source(PORT);
        self.to = Some(Ah::reply(&self.server.pd, &source, cx)?);
        Ok((datagram.payload().len(), source.qpn()))
    }
}

impl CqeHandler for Echo {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// A datagram has come: sends it back.
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &Sleepable) {
        // Flushed: the server has stopped.
        let Ok(wc) = wc.result() else { return };
        let (Ok((len, qpn)), Some(qp)) = (this.address(wc, cx), this.server.qp()) else {
            return receive(this);
        };
        let sent = qp.post_send::<_, 1, 1>(this, |e| {
            let to = e.to.as_ref().ok_or(EINVAL)?;
            Ok(UdWr::send(
                [e.buf.sge(HEADER..HEADER + len)?],
                to,
                qpn,
                QKEY,
            ))
        });
        if let Err(refused) = sent {
            receive(refused.owner);
        }
    }
}

impl CqeHandler<1> for Echo {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// It has gone back: waits for another one.
    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
        if wc.result().is_ok() {
            this.server.served.add(1, Relaxed);
            this.to = None;
            receive(this);
        }
    }
}
