// SPDX-License-Identifier: GPL-2.0

//! Datagrams on a device that does what it is told.

use crate::fixture::{
    nothing,
    removal_waits_for,
    wait,
    NullEnv,
    Polled,
    UdEnd,
    UdMessage,
    PORT,
    QKEY, //
};
use kernel::prelude::*;
use rdma::{
    ah::{
        Ah,
        Attr, //
    },
    prelude::*,
    ud::{
        UdQp,
        UdWr, //
    }, //
};
use rdma_null::{
    Injection,
    Object, //
};

fn ah(null: &NullEnv) -> Result<Arc<Ah>> {
    let attr = Attr {
        dlid: 1,
        ..Attr::new(PORT)
    };
    let ah = Ah::create(&null.env.pd, &attr, &null.env.cx)?;
    Ok(Arc::new(ah, GFP_KERNEL)?)
}

/// Two QPs, of which the second has this many receives, and an address.
fn pair<C: Polled>(recvs: u32) -> Result<(NullEnv, UdEnd<C>, UdEnd<C>, Arc<Ah>)> {
    let null = NullEnv::new()?;
    let (a, b) = (UdEnd::new(&null.env, 0)?, UdEnd::new(&null.env, recvs)?);
    let to = ah(&null)?;
    Ok((null, a, b, to))
}

fn arrives<C: Polled>() -> Result {
    let (null, a, b, to) = pair::<C>(2)?;
    for text in [&b"one"[..], b"two"] {
        a.send(&null.env, &to, b.qp.num(), QKEY, text)?;
        b.wait(|b| b.received.len() == 1)?;
        let mut message = b.received.pop()?;
        check_eq!(&message.payload()?[..], text);
        check_eq!(message.source()?.qpn(), a.qp.num());
    }
    a.wait(|a| a.sent.len() == 2)
}

#[kunit_tests(rdma_null_ud)]
mod tests {
    use super::*;

    #[test]
    fn arrives_direct() -> Result {
        arrives::<Direct>()
    }

    #[test]
    fn arrives_softirq() -> Result {
        arrives::<Softirq>()
    }

    #[test]
    fn arrives_workqueue() -> Result {
        arrives::<Workqueue>()
    }

    #[test]
    fn datagram_without_a_receive_completes() -> Result {
        let (null, a, b, to) = pair::<Softirq>(1)?;
        let num = b.qp.num();
        for (num, qkey) in [(num, QKEY + 1), (num + (1 << 12), QKEY), (0, QKEY)] {
            a.send(&null.env, &to, num, qkey, b"lost")?;
        }
        for text in [b"here", b"late"] {
            a.send(&null.env, &to, num, QKEY, text)?;
        }
        a.wait(|a| a.sent.len() == 5)?;
        check!(a.sent.take().iter().all(|sent| sent.result.is_ok()));
        b.wait(|b| b.received.len() == 1)?;
        check_eq!(&b.received.pop()?.payload()?[..], b"here");
        Ok(())
    }

    #[test]
    fn receive_that_is_too_short_fails_alone() -> Result {
        let (null, a, b, to) = pair::<Workqueue>(0)?;
        b.recv(&null.env, 3)?;
        b.recv(&null.env, 4)?;
        for _ in 0..2 {
            a.send(&null.env, &to, b.qp.num(), QKEY, b"four")?;
        }
        b.wait(|b| b.received.len() == 2)?;
        a.wait(|a| a.sent.len() == 2)?;
        let (mut second, first) = (b.received.pop()?, b.received.pop()?);
        check!(first
            .result
            .is_err_and(|e| e.status == wc::Status::LOC_LEN_ERR));
        check_eq!(&second.payload()?[..], b"four");
        Ok(())
    }

    #[test]
    fn refused_datagram_comes_back_with_its_address() -> Result {
        for after in 0..3 {
            let (null, a, _b, to) = pair::<Softirq>(0)?;
            let num = a.qp.num();
            null.dev
                .inject_qp(num, Injection::Refuse { after, errno: 5 })?;
            for i in 0..4 {
                let message =
                    UdMessage::new(&null.env.pd, &a.sent, b"x", Some(to.clone()), &null.env.cx)?;
                let posted = a.qp.post_send(message, |l| {
                    let to = l.to.as_ref().ok_or(EINVAL)?;
                    Ok(UdWr::new([l.buf.whole()], to, 0, QKEY))
                });
                check_eq!(posted.is_err(), i == after);
                if let Err(e) = posted {
                    check_eq!(e.error(), EIO);
                    let message = e.owner.ok_or(EIO)?;
                    check!(message.to.as_ref().is_some_and(|ah| Arc::ptr_eq(ah, &to)));
                }
            }
            a.wait(|a| a.sent.len() == 3)?;
            check_eq!(a.sent.gone(), 1);
        }
        Ok(())
    }

    #[test]
    fn failed_creations_leave_nothing() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Softirq>(64)?;
        let entries = cq.free_entries();
        let caps = Caps::new(4, 4);
        let make = || UdQp::create(&null.env.pd, &cq, &cq, &caps, PORT, QKEY, &null.env.cx);
        for (object, errno) in [(Object::Ah, 28), (Object::Qp, 5)] {
            let after = 0;
            null.dev.inject(Injection::Create {
                object,
                after,
                errno,
            })?;
            check_err!(make().map(drop), Error::from_errno(-(errno as i32)));
            check_eq!(cq.free_entries(), entries);
        }
        // The change of state that makes it ready fails.
        null.dev.inject(Injection::Modify { errno: 5, count: 1 })?;
        check_err!(make().map(drop), EIO);
        wait(|| null.dev.objects() == [1, 0, 0, 0])?;
        // The work item gives them back after it has destroyed the QP.
        wait(|| cq.free_entries() == entries)?;
        make()?.destroy(&null.env.cx)?;
        check_eq!(cq.free_entries(), entries);
        Ok(())
    }

    #[test]
    fn drain_without_its_marker_fails() -> Result {
        let (null, a, b, _to) = pair::<Workqueue>(3)?;
        let num = b.qp.num();
        for after in 0..2 {
            null.dev
                .inject_qp(num, Injection::Refuse { after, errno: 22 })?;
            check_err!(b.qp.drain(&null.env.cx), EINVAL);
        }
        b.qp.drain(&null.env.cx)?;
        check_eq!(b.received.len(), 3);
        check_eq!(a.received.len(), 0);
        Ok(())
    }

    #[test]
    fn removal_waits_for_an_address() -> Result {
        removal_waits_for(ah, nothing)
    }

    #[test]
    fn removal_waits_for_a_qp() -> Result {
        removal_waits_for(|null| UdEnd::<Softirq>::new(&null.env, 4), nothing)
    }
}
