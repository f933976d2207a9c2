// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/first-ulp.rst beyond samples/minimal.

use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::prelude::*;

struct Conn {
    qp: Qp<Softirq>,
    id: cm::Id,
}

impl Conn {
    fn start(&self) {}
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
    type Needs = Atomic;

    fn done(mut this: Pin<KBox<Self>>, wc: &Wc, _cx: &Atomic) {
        let Ok(received) = wc.result() else {
            this.conn.id.disconnect_later();
            return;
        };
        let len = received.byte_len();
        // ... use this.buf.cpu() up to `len`, which the peer has chosen ...
        let conn = this.conn.clone();
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
    type Needs = Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &Atomic) {}
}

impl CqeHandler<1> for Command {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &Atomic) {}
}

fn command(qp: &Qp<Softirq>, command: &Arc<Command>) -> Result {
    qp.post_send::<_, _, 1, 1>(command.clone(), |c| Ok(SendWr::send([c.buf.whole()])))?;
    Ok(())
}
