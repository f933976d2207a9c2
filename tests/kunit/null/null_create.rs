// SPDX-License-Identifier: GPL-2.0

//! Creations that fail: the error comes through, and nothing is left behind.

use crate::fixture::{
    both,
    recv,
    wait,
    Inbox,
    Null,
    NullEnv,
    RegOwner,
    CAPS, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::{
    Injection,
    Object, //
};

/// The objects that a ULP makes at its start.
struct Ulp {
    _region: Region<Bidirectional>,
    _qps: [Qp<Softirq>; 2],
    _cqs: [Cq<Softirq>; 2],
    _pd: Pd,
}

impl Ulp {
    fn new(null: &NullEnv) -> Result<Self> {
        let (dev, cx) = (&null.env.dev, &null.env.cx);
        let pd = Pd::alloc(dev, cx)?;
        let cqs = [Cq::alloc(dev, 128, 0, cx)?, Cq::alloc(dev, 128, 3, cx)?];
        let qp = |n: usize| Qp::create_raw(&pd, &cqs[n], &cqs[1 - n], &CAPS, cx);
        let qps = [qp(0)?, qp(1)?];
        let region = Region::new(Buf::alloc(&pd, 5000, cx)?, cx)?;
        Ok(Self {
            _region: region,
            _qps: qps,
            _cqs: cqs,
            _pd: pd,
        })
    }
}

/// The creation of the object of a kind fails that comes after `after` others.
fn fails(object: Object, after: u32) -> Result {
    let null = NullEnv::new()?;
    null.dev.inject(Injection::Create {
        object,
        after,
        errno: 28,
    })?;
    check_err!(Ulp::new(&null).map(drop), ENOSPC);
    wait(|| null.dev.objects() == [0; 4])?;
    // It was the only one.
    let ulp = Ulp::new(&null)?;
    check_eq!(null.dev.objects(), [2, 2, 0, 1]);
    drop(ulp);
    wait(|| null.dev.objects() == [0; 4])
}

#[kunit_tests(rdma_null_create)]
mod tests {
    use super::*;

    /// A CQ that is destroyed is gone when that returns; one that is in use goes with its last
    /// user.
    #[test]
    fn cq_is_destroyed() -> Result {
        let null = NullEnv::new()?;
        let (dev, cx) = (&null.env.dev, &null.env.cx);
        let cqs = || null.dev.objects()[0];
        Cq::<Direct>::alloc(dev, 16, 0, cx)?.destroy(cx)?;
        check_eq!(cqs(), 0);
        Cq::<Softirq>::alloc(dev, 16, 0, cx)?.destroy(cx)?;
        check_eq!(cqs(), 0);
        Cq::<Waited>::alloc(dev, 16, 0, cx)?.destroy(cx)?;
        check_eq!(cqs(), 0);
        let cq = Cq::<Workqueue>::alloc(dev, 128, 0, cx)?;
        let qp = Qp::create_raw(&Pd::alloc(dev, cx)?, &cq, &cq, &CAPS, cx)?;
        check_err!(cq.clone().destroy(cx), EBUSY);
        check_err!(cq.destroy(cx), EBUSY);
        check_eq!(cqs(), 1);
        drop(qp);
        wait(|| null.dev.objects() == [0; 4])
    }

    #[test]
    fn pd() -> Result {
        fails(Object::Pd, 0)
    }

    #[test]
    fn first_cq() -> Result {
        fails(Object::Cq, 0)
    }

    #[test]
    fn second_cq() -> Result {
        fails(Object::Cq, 1)
    }

    #[test]
    fn first_qp() -> Result {
        fails(Object::Qp, 0)
    }

    #[test]
    fn second_qp() -> Result {
        fails(Object::Qp, 1)
    }

    #[test]
    fn mr() -> Result {
        fails(Object::Mr, 0)
    }

    #[test]
    fn nothing_fails_after_all_was_made() -> Result {
        let null = NullEnv::new()?;
        for object in [Object::Cq, Object::Qp] {
            null.dev.inject(Injection::Create {
                object,
                after: 2,
                errno: 12,
            })?;
        }
        let ulp = Ulp::new(&null)?;
        check_err!(null.env.cq::<Direct>(8).map(drop), ENOMEM);
        drop(ulp);
        Ok(())
    }

    #[test]
    fn failed_qp_gives_its_leases_back() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Softirq>(64)?;
        null.dev.inject(Injection::Create {
            object: Object::Qp,
            after: 0,
            errno: 12,
        })?;
        check_err!(null.env.raw_qp(&cq, &CAPS).map(drop), ENOMEM);
        check_eq!(cq.free_entries(), cq.entries());
        null.env.raw_qp(&cq, &CAPS)?;
        Ok(())
    }

    #[test]
    fn unknown_error_is_one() -> Result {
        let null = NullEnv::new()?;
        null.dev.inject(Injection::Create {
            object: Object::Cq,
            after: 0,
            errno: 0xdead_beef,
        })?;
        check_err!(null.env.cq::<Softirq>(8).map(drop), EINVAL);
        Ok(())
    }

    #[test]
    fn sizes_beyond_the_device_are_refused() -> Result {
        let null = NullEnv::new()?;
        check_err!(null.env.cq::<Softirq>(131_073).map(drop), EINVAL);
        let cq = null.env.cq::<Softirq>(131_072)?;
        check_err!(null.env.raw_qp(&cq, &Caps::new(16384, 1)).map(drop), EINVAL);
        null.env.raw_qp(&cq, &Caps::new(16383, 16383))?;
        Ok(())
    }

    #[test]
    fn refused_registration_can_be_posted_again() -> Result {
        let null = Null::<Softirq>::new()?;
        let region = null.env.region(100)?;
        null.inject(Injection::Refuse {
            after: 0,
            errno: 12,
        })?;
        check_err!(
            null.a
                .post_send(RegOwner::new(&region)?, |o| Ok(both(&o.region))),
            ENOMEM
        );
        let owner = RegOwner::new(&region)?;
        let registered = owner.registered.clone();
        null.a.post_send(owner, |o| Ok(both(&o.region)))?;
        null.wait(|| registered.get() == 1)
    }

    #[test]
    fn request_is_refused_at_each_position() -> Result {
        let null = Null::<Workqueue>::new()?;
        null.disconnect()?;
        for after in 0..8 {
            let sent = Inbox::new()?;
            null.inject(Injection::Refuse { after, errno: 5 })?;
            for i in 0..8 {
                match null.send(&sent, &[0]) {
                    Ok(()) => check!(i != after),
                    Err(e) => {
                        check_eq!(e, EIO);
                        check_eq!(i, after);
                    }
                }
            }
            // The owner of the one that was refused came back with the error.
            null.take(&sent, 7)?;
            check_eq!(sent.dropped(), 8);
        }
        Ok(())
    }

    #[test]
    fn receive_is_refused_at_each_position() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Softirq>(64)?;
        for after in 0..8 {
            let (qp, received) = (null.env.raw_qp(&cq, &CAPS)?, Inbox::new()?);
            let num = qp.num();
            null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
            null.dev
                .inject_qp(num, Injection::Refuse { after, errno: 5 })?;
            for i in 0..8 {
                let posted = recv(&qp, null.env.message(&received, &[0])?);
                check_eq!(posted.is_err(), i == after);
            }
            // Its entries of the CQ are for the next one.
            qp.destroy(&null.env.cx)?;
            check_eq!(received.len(), 7);
        }
        Ok(())
    }
}
