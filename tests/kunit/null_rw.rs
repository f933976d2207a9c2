// SPDX-License-Identifier: GPL-2.0

//! Transfers by `rdma_rw` that are prepared and not posted, or posted in part, of owners that
//! others have, too: what a drain has proved to be out of use is ended by it.

use crate::{
    check::fail,
    fixture::{
        wait,
        Counter,
        NullEnv, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    }, //
};
use rdma_null::Injection;

/// Two requests of as many entries as the device has in one.
const LEN: usize = 40 * PAGE_SIZE;
const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

/// Pages that a table of requests would have, too.
#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    data: Ctx,
    times: Arc<Counter>,
}

impl Shared {
    fn new(times: &Arc<Counter>, cx: &Sleepable) -> Result<Arc<Self>> {
        let this = Self {
            cqe: Cqe::new(),
            data: Ctx::alloc(LEN, cx)?,
            times: times.clone(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    fn write<'a>(&'a self, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::write(&self.data, .., NOWHERE, cx))
    }

    /// As [`Shared::write`], with a range that the crate looks at.
    fn write_range<'a>(&'a self, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::write(&self.data, 0..LEN, NOWHERE, cx))
    }
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &Atomic) {
        this.times.up();
    }
}

/// How a transfer is made.
type Write = for<'a> fn(&'a Shared, &Sleepable) -> Result<Rw<'a>>;

/// Returns a QP for transfers to no peer.
fn lone(null: &NullEnv) -> Result<Qp<Direct>> {
    let env = &null.env;
    let cq = env.cq::<Direct>(64)?;
    let caps = Caps {
        send_sge: 32,
        ..Caps::new(4, 4)
    };
    let qp = InitAttr::new(&env.pd, &cq, &cq, &caps)
        .rw_contexts(2, 1)
        .create(&env.cx)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    Ok(qp)
}

#[kunit_tests(rdma_null_rw)]
mod tests {
    use super::*;

    #[test]
    fn device_that_does_not_say_its_limits() -> Result {
        let (null, times) = (NullEnv::vague()?, Counter::new()?);
        let port = null.env.dev.port(1).ok_or(ENODEV)?;
        check_err!(port.rw_contexts(1), EOPNOTSUPP);
        let shared = Shared::new(&times, &null.env.cx)?;
        let (qp, cx) = (lone(&null)?, &null.env.cx);
        check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EINVAL);
        check_err!(qp.post_rw(shared, |x| x.write_range(cx)), EINVAL);
        check_eq!(times.get(), 0);
        Ok(())
    }

    #[test]
    fn shared_transfer_in_part_is_ended_by_the_drain() -> Result {
        in_part_until_the_drain(Shared::write)
    }

    #[test]
    fn range_in_part_is_ended_by_the_drain() -> Result {
        in_part_until_the_drain(Shared::write_range)
    }

    fn in_part_until_the_drain(write: Write) -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp, other) = (&null.env.cx, lone(&null)?, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 1, errno: 5 })?;
        let Err(e) = qp.post_rw(shared.clone(), |x| write(x, cx)) else {
            return Err(fail("it was posted"));
        };
        check_eq!(e.error(), EIO);
        check!(e.owner.is_none());
        // As long as it may be in use it stays that.
        check_err!(other.post_rw(shared.clone(), |x| x.write(cx)), EBUSY);
        qp.drain(cx)?;
        other.post_rw(shared.clone(), |x| x.write(cx))?;
        other.drain(cx)?;
        check_eq!(times.get(), 1);
        // Not leaked as one whose transfers have not ended.
        qp.destroy(cx)?;
        other.destroy(cx)?;
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }

    /// A driver that names the first request of a list, whichever had no room.
    #[test]
    fn driver_that_names_the_first_may_have_posted_some() -> Result {
        for after in 0..2 {
            let (null, times) = (NullEnv::erdma()?, Counter::new()?);
            let (cx, qp) = (&null.env.cx, lone(&null)?);
            let shared = Shared::new(&times, cx)?;
            null.dev
                .inject_qp(qp.num(), Injection::Refuse { after, errno: 12 })?;
            let Err(e) = qp.post_rw(shared.clone(), |x| x.write(cx)) else {
                return Err(fail("it was posted"));
            };
            check_eq!((e.error(), e.posted()), (ENOMEM, 1));
            check!(e.owner.is_none());
            check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EBUSY);
            qp.drain(cx)?;
            check_eq!(times.get(), 0);
            check!(Arc::into_unique_or_drop(shared).is_some());
        }
        Ok(())
    }

    #[test]
    fn transfer_that_is_refused_is_posted_again() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        let writes: [Write; 2] = [Shared::write, Shared::write_range];
        for write in writes {
            let post = || qp.post_rw(shared.clone(), |x| write(x, cx));
            null.dev
                .inject_qp(qp.num(), Injection::Refuse { after: 0, errno: 5 })?;
            check_err!(post(), EIO);
            post()?;
            qp.drain(cx)?;
        }
        check_eq!(times.get(), 2);
        // Not leaked as one whose transfers have not ended.
        qp.destroy(cx)
    }

    #[test]
    fn qp_stays_while_a_context_is_prepared() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        qp.prepare_rw(shared.write(cx)?)?;
        drop(qp);
        fsleep(Delta::from_millis(30));
        check_eq!(null.dev.objects()[1], 1);
        drop(shared);
        wait(|| null.dev.objects()[1] == 0)?;
        check_eq!(times.get(), 0);
        Ok(())
    }

    #[test]
    fn prepared_transfer_that_is_refused_is_prepared_again() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 0, errno: 5 })?;
        qp.prepare_rw(shared.write(cx)?)?;
        let post = || qp.post_rw(shared.clone(), |x| Ok(Rw::prepared(&x.data)));
        check_err!(post(), EIO);
        check_err!(post(), EINVAL);
        qp.prepare_rw(shared.write(cx)?)?;
        post()?;
        qp.drain(cx)?;
        check_eq!(times.get(), 1);
        Ok(())
    }

    /// As `shared_transfer_in_part_is_ended_by_the_drain`, with no drain but the last.
    #[test]
    fn qp_of_a_shared_transfer_in_part_is_destroyed() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 1, errno: 5 })?;
        check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EIO);
        qp.destroy(cx)?;
        check_eq!(times.get(), 0);
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }
}
