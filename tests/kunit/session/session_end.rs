// SPDX-License-Identifier: GPL-2.0

//! The ends of connections.

use crate::fixture::{
    accepts,
    listen,
    wait,
    Env,
    Inbox,
    Link,
    Message,
    NullEnv, //
};
use core::net::SocketAddr;
use kernel::prelude::*;
use rdma::{
    prelude::*,
    session::{
        self,
        Connecting, //
    }, //
};
use rdma_null::Injection;

struct Quiet;

impl cm::Handler for Quiet {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

/// Connects, and ends that. A refusal gives the receive back.
fn connect_once(client: &ClientRef, addr: SocketAddr, cx: &Sleepable) -> Result {
    let id = cm::Id::resolve(client, addr, 10_000, cx)?;
    let dev = id.device()?.clone();
    let (pd, caps) = (Pd::alloc(&dev, cx)?, Caps::new(2, 2));
    let cq = Cq::<Workqueue>::alloc(&dev, caps.entries(), 0, cx)?;
    let qp = Qp::create(&id, &pd, &cq, &cq, &caps, cx)?;
    let connecting = Connecting::new(&id, &qp, cx);
    let inbox = Inbox::new()?;
    let message = Message::new(&pd, &inbox, &[0; 4], cx)?;
    qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
    let connected = id.connect(Arc::new(Quiet, GFP_KERNEL)?, &cm::ConnParam::default(), cx);
    if let Err(e) = connected {
        drop(connecting);
        check_eq!(inbox.len(), 1);
        return Err(e);
    }
    connecting.connected();
    session::end(&id, &qp, cx)?;
    session::end(&id, &qp, cx)
}

#[kunit_tests(rdma_session_end)]
mod tests {
    use super::*;

    #[test]
    fn connection_is_made_after_two_refusals() -> Result {
        let null = NullEnv::with_cm()?;
        let Env { client, cx, .. } = &null.env;
        let addr = null.env.addr();
        null.dev.inject(Injection::Reject { count: 2 })?;
        let listener = listen(&null.env, addr, accepts(&null.env, &[]))?;
        check_err!(connect_once(client, addr, cx), ECONNREFUSED);
        check_err!(connect_once(client, addr, cx), ECONNREFUSED);
        connect_once(client, addr, cx)?;
        drop(listener);
        Ok(())
    }

    #[test]
    fn connection_ends_with_its_requests() -> Result {
        let link = Link::<Workqueue>::new()?;
        let inbox = Inbox::new()?;
        let message = link.env.message(&inbox, &[0; 4])?;
        let qp = &link.a.qp;
        qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
        session::end(&link.a.id, qp, &link.env.cx)?;
        check_eq!(inbox.len(), 1);
        wait(|| link.b.events.disconnected() == 1)
    }
}
