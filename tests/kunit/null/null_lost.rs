// SPDX-License-Identifier: GPL-2.0

//! Completions that come twice or never, and drains that cannot prove anything.

#[cfg(debug_assertions)]
use crate::fixture::{
    duplicate,
    Counted,
    Counter, //
};
use crate::{
    check::{
        expect,
        OVERRUN, //
    },
    fixture::{
        recv,
        send,
        Inbox,
        Null,
        NullEnv, //
    }, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

const ALL: u32 = u32::MAX;
const RELEASE: Injection = Injection::Release {
    count: ALL,
    reversed: false,
};

/// Fills a CQ to its last entry with completions of one QP, of which the last comes `times` times.
fn filled(times: u32) -> Result<(NullEnv, Qp<Direct>, Cq<Direct>, Arc<Inbox>)> {
    let (null, inbox) = (NullEnv::new()?, Inbox::new()?);
    // One for each request and each drain, and none besides.
    let cq = null.env.cq::<Direct>(18)?;
    let qp = null.env.raw_qp(&cq, &Caps::new(8, 8))?;
    check_eq!(cq.free_entries(), 0);
    let num = qp.num();
    null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
    for _ in 0..9 {
        recv(&qp, null.env.message(&inbox, &[0])?)?;
    }
    check_err!(recv(&qp, null.env.message(&inbox, &[0])?), ENOMEM);
    null.dev.inject_qp(num, Injection::Fail)?;
    for _ in 0..8 {
        send(&qp, null.env.message(&inbox, &[0])?)?;
    }
    // SAFETY: The CQ is full with the first completion, and loses the others.
    unsafe { null.dev.duplicate(num, times - 1) }?;
    send(&qp, null.env.message(&inbox, &[0])?)?;
    check_err!(send(&qp, null.env.message(&inbox, &[0])?), ENOMEM);
    Ok((null, qp, cq, inbox))
}

#[kunit_tests(rdma_null_lost)]
mod tests {
    use super::*;
    // Without the table of posted requests (debug.rs), a request that completes twice gives its
    // owner back twice.
    #[cfg(debug_assertions)]
    use crate::check::TWICE;

    #[test]
    #[cfg(debug_assertions)]
    fn duplicate_of_a_send_is_ignored() -> Result {
        let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
        null.disconnect()?;
        duplicate(&null.dev, null.a.num(), 3)?;
        expect(3, TWICE);
        for _ in 0..4 {
            null.send(&sent, b"x")?;
        }
        null.wait(|| sent.len() == 4)?;
        null.a.drain(&null.env.cx)?;
        check_eq!(sent.len(), 4);
        Ok(())
    }

    #[test]
    #[cfg(debug_assertions)]
    fn duplicate_of_a_receive_is_ignored() -> Result {
        let (null, sent, received) = (Null::<Workqueue>::new()?, Inbox::new()?, Inbox::new()?);
        duplicate(&null.dev, null.b.num(), 1)?;
        expect(1, TWICE);
        null.recv(&received, 1)?;
        null.send(&sent, b"x")?;
        null.one(&sent)?.ok()?;
        null.wait(|| received.len() == 1)?;
        null.b.drain(&null.env.cx)?;
        check_eq!(received.len(), 1);
        check_eq!(&received.pop()?.bytes()?[..], b"x");
        Ok(())
    }

    #[test]
    #[cfg(debug_assertions)]
    fn duplicate_of_a_counted_owner_is_ignored() -> Result {
        let (null, times) = (Null::<Direct>::new()?, Counter::new()?);
        null.disconnect()?;
        let counted = Counted::new(&times)?;
        duplicate(&null.dev, null.a.num(), 2)?;
        expect(2, TWICE);
        for _ in 0..4 {
            null.a
                .post_send(counted.clone(), |_| Ok(SendWr::send([])))?;
        }
        null.a.drain(&null.env.cx)?;
        check_eq!(times.get(), 4);
        check!(Arc::into_unique_or_drop(counted).is_some());
        Ok(())
    }

    #[test]
    #[cfg(debug_assertions)]
    fn owner_of_a_duplicate_can_be_posted_again() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.disconnect()?;
        duplicate(&null.dev, null.a.num(), 1)?;
        expect(1, TWICE);
        null.send(&sent, b"x")?;
        let mut message = null.one(&sent)?.message;
        message.again(&sent);
        send(&null.a, message)?;
        null.one(&sent)?.ok()?;
        check_eq!(sent.len(), 0);
        Ok(())
    }

    #[test]
    fn refused_request_can_be_posted_again() -> Result {
        let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
        null.disconnect()?;
        for _ in 0..3 {
            null.inject(Injection::Refuse {
                after: 0,
                errno: 12,
            })?;
            let message = null.env.message(&sent, b"x")?;
            let Err(e) = send(&null.a, message) else {
                return Err(crate::check::fail("it was posted"));
            };
            send(&null.a, e.owner.ok_or(EIO)?)?;
            null.one(&sent)?.ok()?;
        }
        Ok(())
    }

    #[test]
    fn lost_request_comes_to_nobody() -> Result {
        let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.inject(Injection::Hold { count: 1 })?;
        for i in 0..3 {
            null.send(&sent, &[i])?;
        }
        null.take(&sent, 2)?;
        null.a.drain(&null.env.cx)?;
        // Its owner is not freed, so the memory is safe from the device.
        check_eq!(sent.len(), 0);
        check_eq!(sent.dropped(), 2);
        null.inject(RELEASE)?;
        check_eq!(&null.one(&sent)?.bytes()?[..], &[0]);
        Ok(())
    }

    #[test]
    fn drain_fails_if_the_state_cannot_be_changed() -> Result {
        let (null, received) = (Null::<Workqueue>::new()?, Inbox::new()?);
        null.recv(&received, 1)?;
        null.dev.inject_qp(
            null.b.num(),
            Injection::Modify {
                errno: 28,
                count: 1,
            },
        )?;
        check_err!(null.b.drain(&null.env.cx), ENOSPC);
        check_eq!(received.len(), 0);
        null.b.drain(&null.env.cx)?;
        check_eq!(received.len(), 1);
        Ok(())
    }

    #[test]
    fn drain_fails_if_a_marker_is_refused() -> Result {
        let null = Null::<UnboundWorkqueue>::new()?;
        for after in 0..2 {
            null.inject(Injection::Refuse { after, errno: 22 })?;
            check_err!(null.a.drain(&null.env.cx), EINVAL);
        }
        null.a.drain(&null.env.cx)
    }

    #[test]
    fn drain_tries_again_while_a_queue_is_full() -> Result {
        let null = Null::<Softirq>::new()?;
        for after in 0..2 {
            null.inject(Injection::Refuse { after, errno: 12 })?;
            null.a.drain(&null.env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn cq_of_the_leased_size_is_not_overrun() -> Result {
        let (null, qp, cq, inbox) = filled(1)?;
        check_eq!(cq.process(100), 18);
        check_eq!(inbox.len(), 18);
        qp.drain(&null.env.cx)?;
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn overrun_is_noticed_by_the_drain() -> Result {
        expect(1, OVERRUN);
        let (null, qp, cq, inbox) = filled(2)?;
        let num = qp.num();
        check_eq!(cq.process(100), 18);
        check_eq!(inbox.len(), 18);
        null.dev.inject_qp(num, Injection::Hold { count: ALL })?;
        let drained = qp.drain(&null.env.cx);
        null.dev.inject_qp(num, RELEASE)?;
        check_err!(drained, EOVERFLOW);
        Ok(())
    }
}
