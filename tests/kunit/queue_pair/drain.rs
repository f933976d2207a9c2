// SPDX-License-Identifier: GPL-2.0

//! Drains: every request comes back, once, and before the drain returns.

use crate::fixture::{
    received as has_received,
    recv,
    send,
    Env,
    Inbox,
    Link,
    Polled, //
};
use kernel::prelude::*;
use rdma::prelude::*;

const CAPS: Caps = Caps::new(8, 8);

/// Two QPs whose sends wait for a receive as long as it takes.
fn patient() -> Result<Link<Softirq>> {
    let param = cm::ConnParam {
        rnr_retry_count: 7,
        ..Default::default()
    };
    Link::with(&CAPS, &param)
}

/// All receives of a connected QP are flushed when the drain returns.
fn flushes<C: Polled>() -> Result {
    let (link, inbox) = (Link::<C>::new()?, Inbox::new()?);
    for _ in 0..8 {
        recv(&link.b.qp, link.env.message(&inbox, &[0; 4])?)?;
    }
    check_eq!(inbox.len(), 0);
    link.b.qp.drain(&link.env.cx)?;
    let all = inbox.take();
    check_eq!(all.len(), 8);
    check!(all.iter().all(|completed| completed.was_flushed()));
    check_eq!(inbox.dropped(), 0);
    drop(all);
    check_eq!(inbox.dropped(), 8);
    Ok(())
}

#[kunit_tests(rdma_drain)]
mod tests {
    use super::*;

    #[test]
    fn flushes_receives_direct() -> Result {
        flushes::<Direct>()
    }

    #[test]
    fn flushes_receives_softirq() -> Result {
        flushes::<Softirq>()
    }

    #[test]
    fn flushes_receives_workqueue() -> Result {
        flushes::<Workqueue>()
    }

    #[test]
    fn flushes_receives_unbound_workqueue() -> Result {
        flushes::<UnboundWorkqueue>()
    }

    #[test]
    fn flushes_sends() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let (link, inbox) = (patient()?, Inbox::new()?);
        for _ in 0..6 {
            send(&link.a.qp, link.env.message(&inbox, &[0; 4])?)?;
        }
        link.a.qp.drain(&link.env.cx)?;
        let all = inbox.take();
        check_eq!(all.len(), 6);
        check!(all.iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn can_be_repeated() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&inbox, &[0; 4])?)?;
        for _ in 0..3 {
            link.b.qp.drain(&link.env.cx)?;
            check_eq!(inbox.len(), 1);
        }
        Ok(())
    }

    #[test]
    fn of_a_qp_without_requests() -> Result {
        let link = Link::<Workqueue>::new()?;
        link.a.qp.drain(&link.env.cx)?;
        link.b.qp.drain(&link.env.cx)
    }

    #[test]
    fn of_a_qp_that_was_never_connected() -> Result {
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let cq = env.cq::<Softirq>(64)?;
        let qp = env.qp(&cq, &CAPS)?;
        for _ in 0..5 {
            recv(&qp, env.message(&inbox, &[0; 4])?)?;
        }
        qp.drain(&env.cx)?;
        check_eq!(inbox.len(), 5);
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn direct_cq_needs_no_other_poller() -> Result {
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let cq = env.cq::<Direct>(64)?;
        let qp = env.qp(&cq, &CAPS)?;
        for _ in 0..8 {
            recv(&qp, env.message(&inbox, &[0; 4])?)?;
        }
        qp.drain(&env.cx)?;
        check_eq!(inbox.len(), 8);
        check_eq!(cq.process(64), 0);
        Ok(())
    }

    #[test]
    fn of_queues_in_different_contexts() -> Result {
        let (link, inbox) = (Link::<Direct, Workqueue>::new()?, Inbox::new()?);
        let sent = Inbox::new()?;
        recv(&link.a.qp, link.env.message(&inbox, &[0; 4])?)?;
        send(&link.a.qp, link.env.message(&sent, &[0; 4])?)?;
        link.a.qp.drain(&link.env.cx)?;
        check_eq!(inbox.len(), 1);
        check_eq!(sent.len(), 1);
        Ok(())
    }

    #[test]
    fn of_full_queues() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let (link, sent, received) = (patient()?, Inbox::new()?, Inbox::new()?);
        let (mut sends, mut recvs) = (0, 0);
        while recv(&link.a.qp, link.env.message(&received, &[0; 4])?).is_ok() {
            recvs += 1;
        }
        while send(&link.a.qp, link.env.message(&sent, &[0; 4])?).is_ok() {
            sends += 1;
        }
        link.a.qp.drain(&link.env.cx)?;
        check_eq!(received.len(), recvs);
        check_eq!(sent.len(), sends);
        Ok(())
    }

    #[test]
    fn receive_posted_afterwards_is_flushed() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        link.b.qp.drain(&link.env.cx)?;
        recv(&link.b.qp, link.env.message(&inbox, &[0; 4])?)?;
        link.wait(|| inbox.len() == 1)?;
        check!(inbox.pop()?.was_flushed());
        Ok(())
    }

    #[test]
    fn send_posted_afterwards_is_flushed() -> Result {
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        link.a.qp.drain(&link.env.cx)?;
        for _ in 0..3 {
            send(&link.a.qp, link.env.message(&inbox, &[0; 4])?)?;
        }
        link.wait(|| inbox.len() == 3)?;
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn receive_before_the_drain_is_no_error() -> Result {
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        for _ in 0..4 {
            recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        }
        for _ in 0..2 {
            send(&link.a.qp, link.env.message(&sent, &[5; 4])?)?;
        }
        link.wait(|| sent.len() == 2)?;
        has_received(&link.env, &link.a.qp, &link.b.qp, || ())?;
        link.b.qp.drain(&link.env.cx)?;
        let all = received.take();
        check_eq!(all.len(), 4);
        check_eq!(
            all.iter()
                .filter(|completed| completed.was_flushed())
                .count(),
            2
        );
        check_eq!(
            all.iter()
                .filter(|completed| completed.result.is_ok())
                .count(),
            2
        );
        Ok(())
    }

    #[test]
    fn destroy_drains_first() -> Result {
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let qp = env.qp(&env.cq::<Workqueue>(64)?, &CAPS)?;
        for _ in 0..8 {
            recv(&qp, env.message(&inbox, &[0; 4])?)?;
        }
        qp.destroy(&env.cx)?;
        check_eq!(inbox.len(), 8);
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn drop_drains_too() -> Result {
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let qp = env.qp(&env.cq::<Direct>(64)?, &CAPS)?;
        for _ in 0..8 {
            recv(&qp, env.message(&inbox, &[0; 4])?)?;
        }
        drop(qp);
        crate::fixture::wait(|| inbox.len() == 8)
    }
}
