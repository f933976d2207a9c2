// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/session.rst.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    session::{
        Received,
        RecvCredits,
        RecvHandler,
        SendCredits, //
    }, //
};

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {}
}

#[pin_data]
struct Conn {
    id: cm::Id,
    qp: Arc<Qp<Softirq>>,
    #[pin]
    credits: SendCredits,
}

impl Conn {
    fn take(&self, _message: &[u8]) {}

    fn send(&self, message: Pin<KBox<Message>>) -> Result {
        (self.qp).post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
        Ok(())
    }
}

impl RecvHandler for Conn {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = Atomic;

    fn qp(&self) -> &Arc<Qp<Softirq>> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &Atomic) {
        let (conn, bytes) = message.open();
        conn.take(&bytes);
        // Dropping the message posts its receive again.
    }

    fn failed(&self, _error: WcError) {
        self.credits.close(ENOTCONN);
    }

    fn refused(&self, _error: Error) {
        self.id.disconnect_later();
    }
}

/// A side that may send when its peer has given it credits, at most 32, and gives as many at first.
fn credits(id: cm::Id, qp: Arc<Qp<Softirq>>) -> Result<(Arc<Conn>, RecvCredits)> {
    let conn = pin_init!(Conn {
        id,
        qp,
        credits <- SendCredits::new(0, 32),
    });
    Ok((Arc::pin_init(conn, GFP_KERNEL)?, RecvCredits::new(32, 32)))
}

fn send(conn: &Conn, message: Pin<KBox<Message>>, cx: &Sleepable) -> Result {
    if conn.credits.available() == 0 {
        pr_info!("this waits for the peer\n");
    }
    let credit = conn.credits.wait(5_000, cx)?;
    credit.spend(|| conn.send(message))?;
    Ok(())
}

/// Answers where nothing may wait, if the peer has a receive for it.
fn answer(message: &Received<'_, Conn>, answer: Pin<KBox<Message>>) -> Result {
    if message.wc().imm_data().is_some() {
        return Err(EPROTO);
    }
    let conn = message.conn();
    conn.credits.take()?.spend(|| conn.send(answer))
}
