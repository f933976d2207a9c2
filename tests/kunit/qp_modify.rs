// SPDX-License-Identifier: GPL-2.0

//! QPs that are taken through their states by hand.

use crate::fixture::{
    path,
    recv,
    send,
    to_init,
    to_rtr,
    to_rts,
    Env,
    Inbox,
    Link,
    Pair,
    Polled, //
};
use kernel::prelude::*;
use rdma::{
    ah,
    prelude::*,
    qp::{
        Access,
        Attr,
        AttrMask,
        ModifyError,
        Mtu,
        State, //
    }, //
};

const CAPS: Caps = Caps::new(8, 8);

/// Sends a few messages from one QP to the other.
fn exchange<C: Polled>(pair: &Pair<C>) -> Result {
    let (sent, received) = (Inbox::new()?, Inbox::new()?);
    for n in 0..5u8 {
        recv(&pair.b, pair.env.message(&received, &[0; 8])?)?;
        send(&pair.a, pair.env.message(&sent, &[n; 8])?)?;
        pair.wait(|| sent.len() == 1 && received.len() == 1)?;
        sent.pop()?.ok()?;
        let mut arrived = received.pop()?;
        check_eq!(arrived.ok()?.byte_len, 8);
        check_eq!(arrived.bytes()?[..], [n; 8][..]);
    }
    Ok(())
}

/// Returns the attributes of a change that were out of range.
fn out_of_range(result: core::result::Result<(), ModifyError>) -> Option<AttrMask> {
    match result {
        Err(ModifyError::OutOfRange { attrs }) => Some(attrs),
        _ => None,
    }
}

/// The longest time of the drain of a QP without a peer: far longer than it takes.
#[cfg(CONFIG_FAILSLAB)]
const DRAIN_MS: u32 = 10_000;

/// Takes a QP to RTR, where an allocation fails, and drains it. Returns whether one has failed, and
/// the change with it.
#[cfg(CONFIG_FAILSLAB)]
fn drains_after_fault<C: Polled>(nth: u32) -> Result<(bool, bool)> {
    let (env, inbox) = (Env::new()?, Inbox::new()?);
    let qp = env.raw_qp(&env.cq::<C>(64)?, &CAPS)?;
    qp.modify(to_init(), &env.cx)?;
    for _ in 0..3 {
        recv(&qp, env.message(&inbox, &[0; 8])?)?;
    }
    let attr = to_rtr(&env, qp.num())?;
    let (modified, failed) = crate::fixture::with_fault(nth, || qp.modify(attr, &env.cx));
    check!(failed || modified.is_ok());
    qp.drain_within(DRAIN_MS, &env.cx)?;
    check_eq!(inbox.len(), 3);
    check!(inbox.take().iter().all(|completed| completed.was_flushed()));
    qp.destroy(&env.cx)?;
    Ok((failed, modified.is_err()))
}

#[kunit_tests(rdma_qp_modify)]
mod tests {
    use super::*;

    #[cfg(CONFIG_FAILSLAB)]
    #[test]
    fn drains_after_a_change_without_memory() -> Result {
        let mut refused = 0;
        for nth in 1.. {
            let (failed, with_it) = drains_after_fault::<Softirq>(nth)?;
            if !failed {
                break;
            }
            refused += u32::from(with_it);
            drains_after_fault::<Direct>(nth)?;
        }
        check!(refused > 0);
        Ok(())
    }

    #[test]
    fn connected_by_hand_softirq() -> Result {
        exchange(&Pair::<Softirq>::new(&CAPS)?)
    }

    #[test]
    fn connected_by_hand_direct() -> Result {
        exchange(&Pair::<Direct>::new(&CAPS)?)
    }

    #[test]
    fn query_tells_what_was_set() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let info = pair.a.query(&pair.env.cx)?;
        check_eq!(info.state(), State::Rts);
        check!(!info.is_sq_draining());
        check_eq!(info.port(), 1);
        check_eq!(info.pkey_index(), 0);
        check_eq!(info.path_mtu(), Some(Mtu::B1024));
        check_eq!(info.dest_qp(), pair.b.num());
        check_eq!(info.rq_psn(), 0xff_fff0);
        check_eq!(info.sq_psn(), 0xff_fff0);
        check_eq!(info.max_rd_atomic(), 4);
        check_eq!(info.max_dest_rd_atomic(), 4);
        check_eq!(info.min_rnr_timer(), 1);
        check_eq!(info.timeout(), 18);
        check_eq!(info.retry_count(), 6);
        check_eq!(info.rnr_retry(), 7);
        check_eq!(info.qkey(), 0);
        check!(info
            .access()
            .contains(Access::REMOTE_READ | Access::REMOTE_WRITE));
        check_eq!(info.path().grh, path(&pair.env)?.grh);
        check_eq!(info.path().port, 1);
        // One place is the drain's.
        check!(info.caps().send_wr > CAPS.send_wr);
        check!(info.caps().recv_wr > CAPS.recv_wr);
        check!(info.caps().send_sge >= 1 && info.caps().recv_sge >= 1);
        Ok(())
    }

    #[test]
    fn query_of_an_id_s_qp() -> Result {
        let link = Link::<Softirq>::new()?;
        let info = link.a.qp.query(&link.env.cx)?;
        check_eq!(info.state(), State::Rts);
        check_eq!(info.dest_qp(), link.b.qp.num());
        Ok(())
    }

    #[test]
    fn missing_attributes_are_named() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        let error = qp.modify(Attr::init().port(1), &env.cx);
        let (from, to) = (State::Reset, State::Init);
        let attrs = AttrMask::PKEY_INDEX.or(AttrMask::ACCESS);
        check_eq!(error, Err(ModifyError::Missing { from, to, attrs }));
        check_eq!(qp.query(&env.cx)?.state(), State::Reset);
        Ok(())
    }

    #[test]
    fn superfluous_attributes_are_named() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        let error = qp.modify(to_init().qkey(1).timeout(3), &env.cx);
        let (from, to) = (State::Reset, State::Init);
        let attrs = AttrMask::QKEY.or(AttrMask::TIMEOUT);
        check_eq!(error, Err(ModifyError::Superfluous { from, to, attrs }));
        Ok(())
    }

    #[test]
    fn illegal_transitions_are_refused() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        for attr in [to_rtr(&env, 5)?, to_rts(), Attr::sqd(), Attr::error()] {
            let illegal = matches!(
                qp.modify(attr, &env.cx),
                Err(ModifyError::Illegal {
                    from: State::Reset,
                    ..
                })
            );
            check!(illegal);
        }
        check_err!(qp.modify(to_rts(), &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn values_out_of_range_are_named() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (qp, cx) = (&pair.a, &pair.env.cx);
        let set = [
            (Attr::init().port(0), AttrMask::PORT),
            (Attr::init().port(u32::MAX), AttrMask::PORT),
            (Attr::init().pkey_index(u16::MAX), AttrMask::PKEY_INDEX),
            (Attr::rtr().dest_qp(1 << 24), AttrMask::DEST_QPN),
            (Attr::rtr().rq_psn(1 << 24), AttrMask::RQ_PSN),
            (Attr::rts().sq_psn(u32::MAX), AttrMask::SQ_PSN),
            (Attr::rtr().min_rnr_timer(32), AttrMask::MIN_RNR_TIMER),
            (Attr::rts().timeout(32), AttrMask::TIMEOUT),
            (Attr::rts().retry_count(8), AttrMask::RETRY_COUNT),
            (Attr::rts().rnr_retry(8), AttrMask::RNR_RETRY),
            (Attr::rts().max_rd_atomic(u8::MAX), AttrMask::MAX_RD_ATOMIC),
            // rxe would round it up to 256, and then take it for 0.
            (
                Attr::rtr().max_dest_rd_atomic(129),
                AttrMask::MAX_DEST_RD_ATOMIC,
            ),
        ];
        for (attr, mask) in set {
            check_eq!(out_of_range(qp.modify(attr, cx)), Some(mask));
        }
        Ok(())
    }

    #[test]
    fn paths_out_of_range_are_refused() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        qp.modify(to_init(), &env.cx)?;
        let mut grh = path(&env)?.grh.ok_or(EIO)?;
        grh.flow_label = 1 << 20;
        for path in [
            ah::Attr::new(0),
            ah::Attr::new(2),
            ah::Attr {
                service_level: 16,
                ..path(&env)?
            },
            ah::Attr {
                grh: Some(grh),
                ..path(&env)?
            },
        ] {
            let error = qp.modify(to_rtr(&env, 5)?.path(&path), &env.cx);
            check_eq!(out_of_range(error), Some(AttrMask::PATH));
        }
        // The core refuses a GID that is not there, and RoCE without a GID.
        grh.flow_label = 0;
        grh.sgid_index = u8::MAX;
        for grh in [Some(grh), None] {
            let path = ah::Attr {
                grh,
                ..ah::Attr::new(1)
            };
            let error = qp.modify(to_rtr(&env, 5)?.path(&path), &env.cx);
            check!(matches!(error, Err(ModifyError::Failed(_))));
        }
        check_eq!(qp.query(&env.cx)?.state(), State::Init);
        qp.modify(to_rtr(&env, 5)?, &env.cx)?;
        Ok(())
    }

    #[test]
    fn connection_manager_s_qps_go_to_error_only() -> Result {
        let link = Link::<Softirq>::new()?;
        let cx = &link.env.cx;
        for attr in [Attr::rts(), Attr::sqd(), to_init()] {
            check_eq!(link.a.qp.modify(attr, cx), Err(ModifyError::Managed));
        }
        link.a.qp.modify(Attr::error(), cx)?;
        check_eq!(link.a.qp.query(cx)?.state(), State::Err);
        Ok(())
    }

    #[test]
    fn error_flushes() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        for _ in 0..4 {
            recv(&pair.a, pair.env.message(&inbox, &[0; 4])?)?;
        }
        pair.a.modify(Attr::error(), &pair.env.cx)?;
        pair.wait(|| inbox.len() == 4)?;
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn sends_wait_while_the_queue_is_drained() -> Result {
        let pair = Pair::<Softirq>::new(&CAPS)?;
        let (cx, env) = (&pair.env.cx, &pair.env);
        pair.a.modify(Attr::sqd(), cx)?;
        pair.wait(|| {
            pair.a
                .query(cx)
                .is_ok_and(|info| info.state() == State::Sqd && !info.is_sq_draining())
        })?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&pair.b, env.message(&received, &[0; 4])?)?;
        send(&pair.a, env.message(&sent, &[1; 4])?)?;
        check_eq!(sent.len() + received.len(), 0);
        pair.a.modify(Attr::rts(), cx)?;
        // rxe does not look at its send queue before the next request.
        send(&pair.a, env.message(&sent, &[2; 4])?)?;
        pair.wait(|| received.len() == 1)?;
        check_eq!(received.pop()?.bytes()?[..], [1; 4][..]);
        Ok(())
    }

    #[test]
    fn reset_gives_all_back_and_the_qp_works_again() -> Result {
        let (mut pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        for _ in 0..2 {
            for _ in 0..8 {
                recv(&pair.a, pair.env.message(&inbox, &[0; 4])?)?;
            }
            pair.a.reset(&pair.env.cx)?;
            pair.b.reset(&pair.env.cx)?;
            check_eq!(inbox.take().len(), 8);
            check_eq!(pair.a.query(&pair.env.cx)?.state(), State::Reset);
            pair.connect()?;
            exchange(&pair)?;
        }
        Ok(())
    }

    #[test]
    fn reset_is_not_for_ids() -> Result {
        let env = Env::new()?;
        let mut qp = env.qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        check_err!(qp.reset(&env.cx), EPERM);
        Ok(())
    }
}
