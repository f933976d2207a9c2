// SPDX-License-Identifier: GPL-2.0

//! Datagrams.

use crate::fixture::{wait, Counter, Env, Polled, UdEnd, UdMessage, PAYLOAD, PORT, QKEY};
use kernel::prelude::*;
use rdma::{
    ah::{
        Ah,
        Attr,
        Grh, //
    },
    device::Gid,
    prelude::*,
    ud::{
        Datagram,
        UdQp,
        UdWr,
        HEADER, //
    }, //
};

/// A question and its answer, in context `C`.
fn answered<C: Polled>() -> Result {
    let env = Env::new()?;
    let (a, b) = (UdEnd::<C>::new(&env, 2)?, UdEnd::<C>::new(&env, 2)?);
    let to = env.own_ah()?;
    a.send(&env, &to, b.qp.num(), QKEY, b"question")?;
    a.wait(|a| a.sent.len() == 1)?;
    b.wait(|b| b.received.len() == 1)?;
    let mut question = b.received.pop()?;
    check_eq!(&question.payload()?[..], b"question");
    let source = question.source()?;
    check_eq!(source.qpn(), a.qp.num());

    let back = Arc::new(Ah::reply(&env.pd, source, &env.cx)?, GFP_KERNEL)?;
    b.send(&env, &back, source.qpn(), QKEY, b"answer")?;
    a.wait(|a| a.received.len() == 1)?;
    check_eq!(&a.received.pop()?.payload()?[..], b"answer");
    b.wait(|b| b.sent.len() == 1)
}

/// A receive that looks at what came, in buffers of the wrong size, too.
#[derive(HasCqe)]
struct Parts {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    right: Arc<Counter>,
}

impl CqeHandler for Parts {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let (Ok(wc), right) = (wc.result(), this.right.clone()) else {
            return;
        };
        let bytes = this.buf.cpu();
        if Datagram::new(wc, &bytes).is_ok_and(|d| d.payload() == b"four") {
            right.up();
        }
        for len in [0, HEADER, HEADER + 3] {
            let part = bytes.get(..len).unwrap_or(&bytes);
            if matches!(Datagram::new(wc, part), Err(EMSGSIZE)) {
                right.up();
            }
        }
    }
}

#[kunit_tests(rdma_ud)]
mod tests {
    use super::*;

    #[test]
    fn answered_direct() -> Result {
        answered::<Direct>()
    }

    #[test]
    fn answered_softirq() -> Result {
        answered::<Softirq>()
    }

    #[test]
    fn answered_workqueue() -> Result {
        answered::<Workqueue>()
    }

    #[test]
    fn answered_unbound_workqueue() -> Result {
        answered::<UnboundWorkqueue>()
    }

    #[test]
    fn every_address_of_the_port() -> Result {
        let env = Env::new()?;
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 0)?,
        );
        let port = env.dev.port(PORT).ok_or(ENODEV)?;
        let mut n = 0;
        for from in port.gids() {
            let to = Ah::resolve(&env.pd, &from, from.gid(), &env.cx)?;
            b.recv(&env, PAYLOAD)?;
            let to = Arc::new(to, GFP_KERNEL)?;
            a.send(&env, &to, b.qp.num(), QKEY, b"hello")?;
            b.wait(|b| b.received.len() == 1)?;
            let mut message = b.received.pop()?;
            check_eq!(&message.payload()?[..], b"hello");
            n += 1;
        }
        // Two addresses, IPv4 and IPv6, and a link-local one.
        check!(n >= 3);
        Ok(())
    }

    #[test]
    fn wrong_qkey_is_dropped() -> Result {
        let env = Env::new()?;
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 2)?,
        );
        let to = env.own_ah()?;
        a.send(&env, &to, b.qp.num(), QKEY + 1, b"wrong")?;
        a.send(&env, &to, b.qp.num(), QKEY, b"right")?;
        wait(|| a.sent.len() == 2 && b.received.len() == 1)?;
        check!(a.sent.take().iter().all(|sent| sent.result.is_ok()));
        check_eq!(&b.received.pop()?.payload()?[..], b"right");
        check_eq!(b.received.len(), 0);
        Ok(())
    }

    #[test]
    fn unused_qpn() -> Result {
        let env = Env::new()?;
        let a = UdEnd::<Softirq>::new(&env, 0)?;
        let gone = UdEnd::<Softirq>::new(&env, 0)?;
        let qpn = gone.qp.num();
        gone.qp.destroy(&env.cx)?;
        a.send(&env, &env.own_ah()?, qpn, QKEY, b"anyone?")?;
        wait(|| a.sent.len() == 1)?;
        check!(a.sent.pop()?.result.is_ok());
        Ok(())
    }

    #[test]
    fn lost_without_a_receive() -> Result {
        let env = Env::new()?;
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 1)?,
        );
        let to = env.own_ah()?;
        for byte in [1, 2] {
            a.send(&env, &to, b.qp.num(), QKEY, &[byte; 4])?;
        }
        wait(|| a.sent.len() == 2 && b.received.len() == 1)?;
        check_eq!(&b.received.pop()?.payload()?[..], &[1; 4]);
        // Sent is not yet lost: the one before may still be on its way, and take this receive.
        for byte in 3..100 {
            b.recv(&env, PAYLOAD)?;
            a.send(&env, &to, b.qp.num(), QKEY, &[byte; 4])?;
            wait(|| a.sent.len() == usize::from(byte) && b.received.len() == 1)?;
            let came = b.received.pop()?.payload()?;
            if came[..] == [byte; 4] {
                return Ok(());
            }
            check_eq!(came[..], [byte - 1; 4][..]);
        }
        Err(crate::check::fail("nothing was lost"))
    }

    #[test]
    fn too_long_for_the_receive() -> Result {
        let env = Env::new()?;
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 0)?,
        );
        let to = env.own_ah()?;
        b.recv(&env, 8)?;
        a.send(&env, &to, b.qp.num(), QKEY, &[1; 9])?;
        a.send(&env, &to, b.qp.num(), QKEY, &[2; 8])?;
        wait(|| b.received.len() == 1)?;
        check_eq!(&b.received.pop()?.payload()?[..], &[2; 8]);
        Ok(())
    }

    #[test]
    fn datagram_is_taken_apart_only_whole() -> Result {
        let (env, right) = (Env::new()?, Counter::new()?);
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 0)?,
        );
        let parts = Parts {
            cqe: Cqe::new(),
            buf: Buf::alloc(&env.pd, HEADER + 4, &env.cx)?,
            right: right.clone(),
        };
        let parts = KBox::pin(parts, GFP_KERNEL)?;
        b.qp.post_recv(parts, |p| Ok(RecvWr::new([p.buf.whole_mut()])))?;
        a.send(&env, &env.own_ah()?, b.qp.num(), QKEY, b"four")?;
        // Sent is not yet received.
        wait(|| a.sent.len() == 1 && right.get() == 4)?;
        // That of a send is not a datagram.
        check!(a.sent.pop()?.source.is_none());
        b.qp.destroy(&env.cx)?;
        check_eq!(right.get(), 4);
        Ok(())
    }

    #[test]
    fn address_handle_stays_while_posted() -> Result {
        let env = Env::new()?;
        let (a, b) = (
            UdEnd::<Softirq>::new(&env, 0)?,
            UdEnd::<Softirq>::new(&env, 8)?,
        );
        for i in 0..8 {
            // The request has the only reference.
            a.send(&env, &env.own_ah()?, b.qp.num(), QKEY, &[i; 16])?;
        }
        wait(|| a.sent.len() == 8 && b.received.len() == 8)?;
        for (i, received) in b.received.take().iter_mut().enumerate() {
            check_eq!(received.payload()?[..], [i as u8; 16]);
        }
        // Nothing has counted another one.
        for mut sent in a.sent.take() {
            let to = sent.message.to.take();
            check!(to.and_then(Arc::into_unique_or_drop).is_some());
        }
        Ok(())
    }

    #[test]
    fn address_handle_of_another_pd() -> Result {
        let env = Env::new()?;
        let (a, other) = (UdEnd::<Softirq>::new(&env, 0)?, Env::new()?);
        let to = other.own_ah()?;
        check_err!(a.send(&env, &to, 2, QKEY, b"x"), EINVAL);
        // So is memory of another PD.
        check_err!(a.send(&other, &env.own_ah()?, 2, QKEY, b"x"), EINVAL);
        check_eq!(a.sent.gone(), 2);
        check_eq!(a.sent.len(), 0);
        Ok(())
    }

    #[test]
    fn attributes_are_checked() -> Result {
        let env = Env::new()?;
        let own = Gid([1; 16]);
        check_err!(Ah::create(&env.pd, &Attr::new(0), &env.cx), EINVAL);
        check_err!(Ah::create(&env.pd, &Attr::new(7), &env.cx), EINVAL);
        // On RoCE there has to be a global route, from a GID that is in use.
        check_err!(Ah::create(&env.pd, &Attr::new(PORT), &env.cx), EINVAL);
        let unused = Attr {
            grh: Some(Grh::new(own, 200)),
            ..Attr::new(PORT)
        };
        check_err!(Ah::create(&env.pd, &unused, &env.cx), ENODATA);
        let port = env.dev.port(PORT).ok_or(ENODEV)?;
        let gid = port.gids().next().ok_or(EADDRNOTAVAIL)?;
        let index = gid.index().try_into()?;
        let mut attr = Attr {
            grh: Some(Grh::new(gid.gid(), index)),
            service_level: 3,
            ..Attr::new(PORT)
        };
        Ah::create(&env.pd, &attr, &env.cx)?;
        attr.service_level = 16;
        check_err!(Ah::create(&env.pd, &attr, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn port_is_checked() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let caps = Caps::new(4, 4);
        for port in [0, 2, u32::MAX] {
            check_err!(
                UdQp::create(&env.pd, &cq, &cq, &caps, port, QKEY, &env.cx),
                EINVAL
            );
        }
        check_eq!(cq.free_entries(), cq.entries());
        Ok(())
    }

    #[test]
    fn receives_come_back_flushed() -> Result {
        let env = Env::new()?;
        let end = UdEnd::<Workqueue>::new(&env, 16)?;
        let UdEnd {
            qp, received, cq, ..
        } = end;
        drop(qp);
        wait(|| received.len() == 16)?;
        for message in received.take() {
            let error = message.result.err().ok_or(EINVAL)?;
            check_eq!(error.status, wc::Status::WR_FLUSH_ERR);
        }
        wait(|| cq.free_entries() == cq.entries())
    }

    #[test]
    fn drain_under_traffic() -> Result {
        for _ in 0..3 {
            let env = Env::new()?;
            let (a, b) = (
                UdEnd::<Softirq>::new(&env, 0)?,
                UdEnd::<Softirq>::new(&env, 16)?,
            );
            let to = env.own_ah()?;
            for i in 0..16 {
                a.send(&env, &to, b.qp.num(), QKEY, &[i; 64])?;
            }
            a.qp.drain(&env.cx)?;
            check_eq!(a.sent.len(), 16);
            b.qp.destroy(&env.cx)?;
            check_eq!(b.received.len(), 16);
            // A drain twice, and the end is one more.
            a.qp.drain(&env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn two_threads() -> Result {
        const EACH: usize = 8;
        let env = Env::new()?;
        let (a, b) = (
            Arc::new(UdEnd::<Softirq>::new(&env, 0)?, GFP_KERNEL)?,
            UdEnd::<Softirq>::new(&env, 0)?,
        );
        let (to, qpn) = (env.own_ah()?, b.qp.num());
        for _ in 0..4 {
            for byte in 0..2 {
                let mut messages = KVec::new();
                for _ in 0..EACH {
                    b.recv(&env, PAYLOAD)?;
                    let to = Some(to.clone());
                    let message = UdMessage::new(&env.pd, &a.sent, &[byte; 32], to, &env.cx)?;
                    messages.push(message, GFP_KERNEL)?;
                }
                let a = a.clone();
                env.client.spawn(GFP_KERNEL, move |_| {
                    for message in messages {
                        let posted = a.qp.post_send(message, |l| {
                            let to = l.to.as_ref().ok_or(EINVAL)?;
                            Ok(UdWr::new([l.buf.whole()], to, qpn, QKEY))
                        });
                        if posted.is_err() {
                            pr_err!("FAILED: a datagram was refused\n");
                        }
                    }
                })?;
            }
            wait(|| a.sent.len() == 2 * EACH && b.received.len() == 2 * EACH)?;
            check!(a.sent.take().iter().all(|sent| sent.result.is_ok()));
            for mut message in b.received.take() {
                check_eq!(message.payload()?.len(), 32);
            }
        }
        Ok(())
    }
}
