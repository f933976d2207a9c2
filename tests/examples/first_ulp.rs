// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/first-ulp.rst beyond samples/minimal.

use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::prelude::*;
use zerocopy::byteorder::big_endian::U16;

struct Conn {
    qp: Qp<Softirq>,
    id: cm::Id,
}

/// What each message begins with.
#[derive(FromBytes)]
#[repr(C)]
struct Header {
    op: U16,
    len: U16,
}

impl Conn {
    fn start(&self) {}

    fn handle(&self, header: &Header, payload: &[u8]) -> Result {
        let data = payload.get(..header.len.get().into()).ok_or(EPROTO)?;
        pr_debug!("operation {}, {} bytes\n", header.op.get(), data.len());
        Ok(())
    }
}

impl cm::Handler for Conn {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => self.start(),
            cm::Event::Failed(e) => pr_err!("no connection: {e:?}\n"),
            _ => {}
        }
    }
}

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    conn: Arc<Conn>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Pin<KBox<Self>>, wc: &Wc, _cx: &context::Atomic) {
        let conn = this.conn.clone();
        let handled = wc.result().map_err(Error::from).and_then(|wc| {
            let message = this.buf.received(&wc);
            let (header, payload) = message.header::<Header>()?;
            conn.handle(&header, payload)
        });
        if handled.is_err() {
            conn.id.disconnect_later();
            return;
        }
        let _ = conn
            .qp
            .post_recv(this, |r| Ok(RecvWr::new([r.buf.whole_mut()])));
    }
}

#[pin_data]
struct Sender {
    #[pin]
    idle: Mutex<KVec<Pin<KBox<Message>>>>,
}

impl Sender {
    fn send(&self, qp: &Qp<Softirq>, message: Pin<KBox<Message>>) -> Result {
        match qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()]))) {
            Ok(()) => {}
            Err(e) => {
                pr_err!("not posted: {:?}\n", e.error());
                if let Some(message) = e.owner {
                    self.idle.lock().push(message, GFP_KERNEL)?;
                }
            }
        }
        Ok(())
    }
}

#[derive(HasCqe)]
struct Command {
    reg: Cqe<Self, 0>,
    send: Cqe<Self, 1>,
    region: SharedRegion<FromDevice>,
    buf: Buf<ToDevice>,
}

impl CqeHandler<0> for Command {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

impl CqeHandler<1> for Command {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn command(qp: &Qp<Softirq>, command: &Arc<Command>) -> Result {
    qp.post_send(command.clone(), |c| {
        Ok(SendWr::send([c.buf.whole()]).done_by::<1>())
    })?;
    Ok(())
}
