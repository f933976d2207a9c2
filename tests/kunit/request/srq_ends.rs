// SPDX-License-Identifier: GPL-2.0

//! The ends of shared receive queues and of their slots.

use crate::fixture::{
    received,
    send,
    wait,
    Counter,
    Env,
    Inbox,
    RecvBuf,
    RecvListGuard,
    SrqLink,
    SLOT, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::RnrTimer,
    srq::Srq, //
};

const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: 7,
    min_rnr_timer: RnrTimer::DEFAULT,
    timeout_ms: 90_000,
};

/// Drops an SRQ, a QP on it and their CQ in this order, with receives outstanding.
fn in_order(order: [usize; 3]) -> Result {
    let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
    let cq = env.cq::<Workqueue>(64)?;
    let srq = env.srq(4, &recv_list)?;
    let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
    let (mut link, mut srq, mut cq) = (Some(link), Some(srq), Some(cq));
    for which in order {
        match which {
            0 => drop(link.take()),
            1 => drop(srq.take()),
            _ => drop(cq.take()),
        }
    }
    wait(|| recv_list.gone() == 4)
}

/// Posts many messages, and returns how many were posted. iWARP ends the connection when the SRQ
/// has run empty, and siw refuses posts while it does.
fn flood(env: &Env, qp: &Qp<Softirq>, sent: &Arc<Inbox>, count: u8) -> Result<usize> {
    for i in 0..count {
        let posted = send(qp, env.message(sent, &[i; SLOT])?);
        if posted.is_err() && env.is_iwarp() {
            return Ok(i.into());
        }
        posted?;
    }
    Ok(count.into())
}

#[kunit_tests(rdma_srq_ends)]
mod tests {
    use super::*;

    #[test]
    fn posted_slots_are_dropped_with_it() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let srq = env.srq(16, &recv_list)?;
        let other = srq.clone();
        drop(srq);
        fsleep(Delta::from_millis(50));
        check_eq!(recv_list.gone(), 0);
        drop(other);
        wait(|| recv_list.gone() == 16)
    }

    #[test]
    fn slots_that_were_made_are_dropped_when_one_fails() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let slot = |i| match i {
            5 => Err(EXDEV),
            _ => RecvBuf::new(&env.pd, &recv_list.0, &env.cx),
        };
        check_err!(Srq::create(&env.pd, 8, slot, &env.cx), EXDEV);
        check_eq!(recv_list.gone(), 5);
        Ok(())
    }

    #[test]
    fn every_order() -> Result {
        for first in 0..3 {
            for second in (0..3).filter(|n| *n != first) {
                in_order([first, second, 3 - first - second])?;
            }
        }
        Ok(())
    }

    #[test]
    fn qp_keeps_it() -> Result {
        let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(false)?, Inbox::new()?);
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Softirq>(64)?);
        let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
        drop((srq, cq));
        for i in 0..10 {
            // No more than there are slots: on iWARP no send waits for one.
            wait(|| i < 4 + recv_list.received())?;
            send(&link.a.qp, env.message(&sent, b"data")?)?;
        }
        wait(|| recv_list.received() == 10)?;
        check_eq!(recv_list.gone(), 0);
        drop(link);
        wait(|| recv_list.gone() == 4)
    }

    #[test]
    fn kept_slot_outlives_everything_else() -> Result {
        let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(true)?, Inbox::new()?);
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Softirq>(64)?);
        let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
        send(&link.a.qp, env.message(&sent, b"kept")?)?;
        send(&link.a.qp, env.message(&sent, b"more")?)?;
        wait(|| recv_list.len() == 2 && sent.len() == 2)?;
        let (mut last, mut first) = (recv_list.pop()?, recv_list.pop()?);
        let entries = cq.entries();
        let SrqLink { a, b } = link;
        drop((a, srq, b));
        wait(|| cq.free_entries() == entries)?;
        drop(cq);
        fsleep(Delta::from_millis(50));
        check_eq!(recv_list.gone(), 0);
        check_eq!(&first.bytes()?[..], b"kept");
        drop(first);
        check_eq!(&last.bytes()?[..], b"more");
        check_eq!(recv_list.gone(), 0);
        drop(last);
        wait(|| recv_list.gone() == 4)
    }

    #[test]
    fn drain_twice() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Softirq>(64)?);
        let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
        link.b.qp.drain(&env.cx)?;
        link.b.qp.drain(&env.cx)?;
        Ok(())
    }

    #[test]
    fn drain_waits_for_the_handlers() -> Result {
        let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(true)?, Inbox::new()?);
        let (srq, cq) = (env.srq(8, &recv_list)?, env.cq::<UnboundWorkqueue>(64)?);
        let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
        for _ in 0..8 {
            send(&link.a.qp, env.message(&sent, b"data")?)?;
        }
        wait(|| sent.len() == 8)?;
        received(&env, &link.a.qp, &link.b.qp, || ())?;
        link.b.qp.drain(&env.cx)?;
        check_eq!(recv_list.len(), 8);
        Ok(())
    }

    #[test]
    fn qp_that_was_never_connected() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let (srq, cq) = (env.srq(4, &recv_list)?, env.cq::<Softirq>(64)?);
        let init = || rdma::qp::InitAttr::on_srq(&env.pd, &cq, &srq, &Caps::new(2, 0));
        init().create(&env.cx)?.destroy(&env.cx)?;
        init().create_for(&env.id()?, &env.cx)?.destroy(&env.cx)?;
        check_eq!(cq.entries(), cq.free_entries());
        Ok(())
    }

    #[test]
    fn under_traffic() -> Result {
        for round in 0..4 {
            let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(false)?, Inbox::new()?);
            let (srq, cq) = (env.srq(6, &recv_list)?, env.cq::<Workqueue>(64)?);
            let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
            let posted = flood(&env, &link.a.qp, &sent, 40)?;
            wait(|| recv_list.received() > round)?;
            let SrqLink { a, b } = link;
            // The receiver goes first.
            drop((b, srq, cq));
            wait(|| recv_list.gone() == 6)?;
            drop(a);
            wait(|| sent.len() == posted)?;
        }
        Ok(())
    }

    #[test]
    fn slots_come_back_from_other_threads_meanwhile() -> Result {
        const SLOTS: i32 = 16;
        for _ in 0..4 {
            let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(true)?, Inbox::new()?);
            let (srq, cq) = (env.srq(SLOTS as u32, &recv_list)?, env.cq::<Softirq>(64)?);
            let link = SrqLink::new(&env, &srq, &cq, &PARAM)?;
            flood(&env, &link.a.qp, &sent, 60)?;
            let threads = Counter::new()?;
            for _ in 0..2 {
                let (recv_list, threads) = (recv_list.0.clone(), threads.clone());
                env.client.spawn(GFP_KERNEL, move |_| {
                    let _ = wait(|| {
                        drop(recv_list.pop_any());
                        recv_list.gone() == SLOTS
                    });
                    threads.up();
                })?;
            }
            wait(|| recv_list.received() >= SLOTS / 2)?;
            let SrqLink { a, b } = link;
            drop((b, srq, cq, a));
            wait(|| threads.get() == 2)?;
        }
        Ok(())
    }
}
