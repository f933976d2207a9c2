// SPDX-License-Identifier: GPL-2.0

//! MADs: requests, replies, and what is refused.

use crate::fixture::{
    gid,
    message,
    serve,
    Env,
    Mads,
    BACKLOG,
    CLASS,
    IPV6,
    LONG_MS, //
};
use kernel::prelude::*;
use rdma::{
    mad::{
        Agent,
        Class,
        Method,
        Peer, //
    },
    prelude::*, //
};

/// The answer of the MAD layer where no agent serves the class (`..._UNSUPPORTED_METHOD_ATTRIB`).
const NOT_SUPPORTED: u16 = 0x000c;

fn refused(class: Class) -> Result<Error> {
    let env = Env::new()?;
    let methods = [Method::GET];
    match Agent::register(&env.dev, 1, class, &methods, 1, &env.cx) {
        Ok(_) => Err(EINVAL),
        Err(e) => Ok(e),
    }
}

#[kunit_tests(rdma_mad)]
mod tests {
    use super::*;

    #[test]
    fn reply_comes_back() -> Result {
        let mads = Mads::new()?;
        mads.echo()?;
        let reply = mads.ask(b"hello")?;
        check!(reply.payload().starts_with(b"hello\0"));
        check_eq!(reply.status(), 0);
        check_eq!(reply.header().method, Method(0x81));
        check_eq!(reply.header().attr_id.get(), 0x7a7b);
        Ok(())
    }

    #[test]
    fn request_says_what_was_sent() -> Result {
        let mads = Mads::with(CLASS, BACKLOG)?;
        let sent = message(Method::SEND, 0x0102_0304, b"data");
        mads.client.send(&mads.peer, &sent, &mads.env.cx)?;
        let mad = mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        let header = mad.header();
        check_eq!(header.base_version, 1);
        check_eq!(header.mgmt_class, 0x30);
        check_eq!(header.class_version, 1);
        check_eq!(header.method, Method::SEND);
        check_eq!(header.attr_id.get(), 0x7a7b);
        check_eq!(header.attr_mod.get(), 0x0102_0304);
        check_eq!(mad.payload().len(), 216);
        check!(mad.payload().starts_with(b"data\0"));
        Ok(())
    }

    #[test]
    fn transaction_ids_differ() -> Result {
        let mads = Mads::new()?;
        mads.tell(0)?;
        mads.tell(1)?;
        let first = mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        let second = mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        check!(first.header().tid.get() != second.header().tid.get());
        Ok(())
    }

    #[test]
    fn reply_has_a_status() -> Result {
        let mads = Mads::new()?;
        let server = mads.server.clone();
        mads.env.client.spawn(GFP_KERNEL, move |cx| {
            if let Ok(mad) = server.recv(Some(LONG_MS), cx) {
                let _ = server.reply(&mad, 0x001c, &[], cx);
            }
        })?;
        check_eq!(mads.ask(&[])?.status(), 0x001c);
        Ok(())
    }

    #[test]
    fn full_payload() -> Result {
        let mads = Mads::new()?;
        mads.echo()?;
        let mut payload = [0; 216];
        for (i, byte) in payload.iter_mut().enumerate() {
            *byte = i as u8;
        }
        check_eq!(mads.ask(&payload)?.payload(), &payload[..]);
        Ok(())
    }

    #[test]
    fn payload_too_long() -> Result {
        let mads = Mads::new()?;
        check_err!(mads.ask(&[1; 217]), EMSGSIZE);
        check_err!(mads.ask(&[1; 257]), EMSGSIZE);
        mads.echo()?;
        mads.ask(&[1])?;
        Ok(())
    }

    #[test]
    fn class_without_oui() -> Result {
        let class = Class::new(0x09, 1);
        let mads = Mads::with(class, BACKLOG)?;
        mads.echo()?;
        check!(mads.ask(&[7; 232])?.payload() == [7; 232]);
        Ok(())
    }

    #[test]
    fn unserved_get_is_answered_by_the_mad_layer() -> Result {
        let mads = Mads::new()?;
        mads.server.stop(&mads.env.cx)?;
        check_eq!(mads.ask(&[])?.status(), NOT_SUPPORTED);
        Ok(())
    }

    #[test]
    fn another_oui_is_another_class() -> Result {
        let mads = Mads::new()?;
        let other = Class::with_oui(0x30, [0x00, 0x00, 0x5f]);
        let agent = Agent::register(&mads.env.dev, 1, other, &[], 0, &mads.env.cx)?;
        let asked = message(Method::GET, 0, &[]);
        let reply = agent.request(&mads.peer, &asked, LONG_MS, 0, &mads.env.cx)?;
        check_eq!(reply.status(), NOT_SUPPORTED);
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ETIMEDOUT);
        Ok(())
    }

    #[test]
    fn no_such_class() -> Result {
        check_eq!(refused(Class::new(0x00, 1))?, EINVAL);
        // Subnet management is QP 0's.
        check_eq!(refused(Class::new(0x01, 1))?, EINVAL);
        check_eq!(refused(Class::new(0x81, 1))?, EINVAL);
        check_eq!(refused(Class::new(0x50, 1))?, EINVAL);
        check_eq!(refused(Class::new(0x09, 0xff))?, EINVAL);
        check_eq!(refused(Class::with_oui(0x30, [0; 3]))?, EINVAL);
        Ok(())
    }

    /// An agent that serves nothing gets replies, and those of these classes do not come by QP 1.
    #[test]
    fn no_such_class_for_replies_either() -> Result {
        let env = Env::new()?;
        for id in [0x01, 0x81] {
            let class = Class::new(id, 1);
            check_err!(Agent::register(&env.dev, 1, class, &[], 0, &env.cx), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn no_such_port() -> Result {
        let env = Env::new()?;
        for port in [0, 2, u32::MAX] {
            check_err!(
                Agent::register(&env.dev, port, CLASS, &[], 0, &env.cx),
                EINVAL
            );
        }
        Ok(())
    }

    #[test]
    fn method_is_served_once() -> Result {
        let mads = Mads::new()?;
        check_err!(serve(&mads.env, mads.class, 1), EINVAL);
        // Replies go to who has asked.
        let (dev, cx) = (&mads.env.dev, &mads.env.cx);
        let reply = [Method(0x81)];
        check_err!(Agent::register(dev, 1, mads.class, &reply, 1, cx), EINVAL);
        mads.server.stop(&mads.env.cx)?;
        serve(&mads.env, mads.class, 1)?.stop(&mads.env.cx)?;
        Ok(())
    }

    #[test]
    fn request_must_be_one() -> Result {
        let (mads, cx) = (Mads::new()?, Sleepable::current()?);
        let (get, reply) = (message(Method::GET, 0, &[]), message(Method(0x81), 0, &[]));
        check_err!(mads.client.request(&mads.peer, &get, 0, 0, &cx), EINVAL);
        check_err!(mads.client.request(&mads.peer, &reply, 100, 0, &cx), EINVAL);
        check_err!(
            mads.client.request(&mads.peer, &get, u32::MAX, 0, &cx),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn only_requests_are_answered() -> Result {
        let mads = Mads::new()?;
        mads.echo()?;
        let reply = mads.ask(&[])?;
        check_err!(mads.client.reply(&reply, 0, &[], &mads.env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn only_the_own_class_is_answered() -> Result {
        let mads = Mads::new()?;
        mads.tell(0)?;
        let mad = mads.server.recv(Some(LONG_MS), &mads.env.cx)?;
        let other = Class::new(0x0a, 1);
        let other = Agent::register(&mads.env.dev, 1, other, &[], 0, &mads.env.cx)?;
        check_err!(other.reply(&mad, 0, &[], &mads.env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn replies_over_ipv4_cannot_be_matched() -> Result {
        let (mads, cx) = (Mads::new()?, Sleepable::current()?);
        let ipv4 = gid(&mads.env, mads.env.ip)?;
        let peer = Peer::new(&mads.client, &ipv4, ipv4.gid(), &cx)?;
        let (get, send) = (message(Method::GET, 0, &[]), message(Method::SEND, 5, &[]));
        check_err!(
            mads.client.request(&peer, &get, LONG_MS, 0, &cx),
            EPROTONOSUPPORT
        );
        // Everything else works.
        mads.client.send(&peer, &send, &cx)?;
        let mad = mads.server.recv(Some(LONG_MS), &cx)?;
        check_eq!(mad.header().attr_mod.get(), 5);
        mads.server.reply(&mad, 0, &[], &cx)
    }

    #[test]
    fn peer_needs_a_way() -> Result {
        let mads = Mads::new()?;
        let from = gid(&mads.env, IPV6.into())?;
        let mut nowhere = from.gid();
        nowhere.0[3] ^= 1;
        let made = Peer::new(&mads.client, &from, nowhere, &mads.env.cx);
        check_err!(made, ENETUNREACH);
        Ok(())
    }
}
