// SPDX-License-Identifier: GPL-2.0

//! How shared receive queues end, and what becomes of their slots.

use crate::fixture::{
    received,
    send,
    wait,
    Counter,
    Desk,
    Env,
    Inbox,
    Line,
    Ticket,
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
    srq::Srq, //
};

const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: 7,
};

/// Drops an SRQ, a QP on it and their CQ in this order, with receives outstanding.
fn in_order(order: [usize; 3]) -> Result {
    let (env, desk) = (Env::new()?, Desk::new(false)?);
    let cq = env.cq::<Workqueue>(64)?;
    let srq = env.srq(4, &desk)?;
    let line = Line::new(&env, &srq, &cq, &PARAM)?;
    let (mut line, mut srq, mut cq) = (Some(line), Some(srq), Some(cq));
    for which in order {
        match which {
            0 => drop(line.take()),
            1 => drop(srq.take()),
            _ => drop(cq.take()),
        }
    }
    wait(|| desk.gone() == 4)
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
        let (env, desk) = (Env::new()?, Desk::new(false)?);
        let srq = env.srq(16, &desk)?;
        let other = srq.clone();
        drop(srq);
        fsleep(Delta::from_millis(50));
        check_eq!(desk.gone(), 0);
        drop(other);
        wait(|| desk.gone() == 16)
    }

    #[test]
    fn slots_that_were_made_are_dropped_when_one_fails() -> Result {
        let (env, desk) = (Env::new()?, Desk::new(false)?);
        let slot = |i| match i {
            5 => Err(EXDEV),
            _ => Ticket::new(&env.pd, &desk.0, &env.cx),
        };
        check_err!(Srq::create(&env.pd, 8, slot, &env.cx), EXDEV);
        check_eq!(desk.gone(), 5);
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
        let (env, desk, sent) = (Env::new()?, Desk::new(false)?, Inbox::new()?);
        let (srq, cq) = (env.srq(4, &desk)?, env.cq::<Softirq>(64)?);
        let line = Line::new(&env, &srq, &cq, &PARAM)?;
        drop((srq, cq));
        for i in 0..10 {
            // No more than there are slots: on iWARP no send waits for one.
            wait(|| i < 4 + desk.received())?;
            send(&line.a.qp, env.message(&sent, b"data")?)?;
        }
        wait(|| desk.received() == 10)?;
        check_eq!(desk.gone(), 0);
        drop(line);
        wait(|| desk.gone() == 4)
    }

    #[test]
    fn kept_slot_outlives_everything_else() -> Result {
        let (env, desk, sent) = (Env::new()?, Desk::new(true)?, Inbox::new()?);
        let (srq, cq) = (env.srq(4, &desk)?, env.cq::<Softirq>(64)?);
        let line = Line::new(&env, &srq, &cq, &PARAM)?;
        send(&line.a.qp, env.message(&sent, b"kept")?)?;
        send(&line.a.qp, env.message(&sent, b"more")?)?;
        wait(|| desk.len() == 2 && sent.len() == 2)?;
        let (mut last, mut first) = (desk.pop()?, desk.pop()?);
        let entries = cq.entries();
        let Line { a, b } = line;
        drop((a, srq, b));
        wait(|| cq.free_entries() == entries)?;
        drop(cq);
        fsleep(Delta::from_millis(50));
        check_eq!(desk.gone(), 0);
        check_eq!(&first.bytes()?[..], b"kept");
        drop(first);
        check_eq!(&last.bytes()?[..], b"more");
        check_eq!(desk.gone(), 0);
        drop(last);
        wait(|| desk.gone() == 4)
    }

    #[test]
    fn drain_twice() -> Result {
        let (env, desk) = (Env::new()?, Desk::new(false)?);
        let (srq, cq) = (env.srq(4, &desk)?, env.cq::<Softirq>(64)?);
        let line = Line::new(&env, &srq, &cq, &PARAM)?;
        line.b.qp.drain(&env.cx)?;
        line.b.qp.drain(&env.cx)?;
        Ok(())
    }

    #[test]
    fn drain_waits_for_the_handlers() -> Result {
        let (env, desk, sent) = (Env::new()?, Desk::new(true)?, Inbox::new()?);
        let (srq, cq) = (env.srq(8, &desk)?, env.cq::<UnboundWorkqueue>(64)?);
        let line = Line::new(&env, &srq, &cq, &PARAM)?;
        for _ in 0..8 {
            send(&line.a.qp, env.message(&sent, b"data")?)?;
        }
        wait(|| sent.len() == 8)?;
        received(&env, &line.a.qp, &line.b.qp, || ())?;
        line.b.qp.drain(&env.cx)?;
        check_eq!(desk.len(), 8);
        Ok(())
    }

    #[test]
    fn qp_that_was_never_connected() -> Result {
        let (env, desk) = (Env::new()?, Desk::new(false)?);
        let (srq, cq) = (env.srq(4, &desk)?, env.cq::<Softirq>(64)?);
        let init = || rdma::qp::InitAttr::on_srq(&env.pd, &cq, &srq, &Caps::new(2, 0));
        init().create(&env.cx)?.destroy(&env.cx)?;
        init().create_for(&env.id()?, &env.cx)?.destroy(&env.cx)?;
        check_eq!(cq.entries(), cq.free_entries());
        Ok(())
    }

    #[test]
    fn under_traffic() -> Result {
        for round in 0..4 {
            let (env, desk, sent) = (Env::new()?, Desk::new(false)?, Inbox::new()?);
            let (srq, cq) = (env.srq(6, &desk)?, env.cq::<Workqueue>(64)?);
            let line = Line::new(&env, &srq, &cq, &PARAM)?;
            let posted = flood(&env, &line.a.qp, &sent, 40)?;
            wait(|| desk.received() > round)?;
            let Line { a, b } = line;
            // Who receives goes first.
            drop((b, srq, cq));
            wait(|| desk.gone() == 6)?;
            drop(a);
            wait(|| sent.len() == posted)?;
        }
        Ok(())
    }

    #[test]
    fn slots_come_back_from_other_threads_meanwhile() -> Result {
        const SLOTS: i32 = 16;
        for _ in 0..4 {
            let (env, desk, sent) = (Env::new()?, Desk::new(true)?, Inbox::new()?);
            let (srq, cq) = (env.srq(SLOTS as u32, &desk)?, env.cq::<Softirq>(64)?);
            let line = Line::new(&env, &srq, &cq, &PARAM)?;
            flood(&env, &line.a.qp, &sent, 60)?;
            let threads = Counter::new()?;
            for _ in 0..2 {
                let (tray, threads) = (desk.0.clone(), threads.clone());
                env.client.spawn(GFP_KERNEL, move |_| {
                    let _ = wait(|| {
                        drop(tray.pop_any());
                        tray.gone() == SLOTS
                    });
                    threads.up();
                })?;
            }
            wait(|| desk.received() >= SLOTS / 2)?;
            let Line { a, b } = line;
            drop((b, srq, cq, a));
            wait(|| threads.get() == 2)?;
        }
        Ok(())
    }
}
