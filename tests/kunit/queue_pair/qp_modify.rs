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
    NullEnv,
    Pair,
    Polled, //
};
use kernel::{
    prelude::*,
    time::Delta, //
};
use rdma::{
    ah,
    prelude::*,
    qp::{
        Access,
        Attr,
        Mtu,
        RnrTimer,
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
    qp.drain(&env.cx)?;
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
        check_eq!(info.state, State::Rts);
        check_eq!(info.dest_qp, pair.b.num());
        // One place is the drain's.
        check!(info.caps.send_wr > CAPS.send_wr);
        check!(info.caps.recv_wr > CAPS.recv_wr);
        check!(info.caps.send_sge >= 1 && info.caps.recv_sge >= 1);
        Ok(())
    }

    #[test]
    fn query_of_an_id_s_qp() -> Result {
        let link = Link::<Softirq>::new()?;
        let info = link.a.qp.query(&link.env.cx)?;
        check_eq!(info.state, State::Rts);
        check_eq!(info.dest_qp, link.b.qp.num());
        Ok(())
    }

    /// The timer of each end of a connection is that of its own parameters, and the default is not
    /// C's, the longest.
    #[test]
    fn rnr_timer_is_that_of_the_parameters() -> Result {
        not_on_iwarp!(c"no sender waits for a receive");
        let timer_of = |param: &cm::ConnParam<'static>| {
            let link = Link::<Softirq>::with(&CAPS, param)?;
            let timer = |qp: &Qp<Softirq>| Ok::<_, Error>(qp.query(&link.env.cx)?.min_rnr_timer);
            let (a, b) = (timer(&link.a.qp)?, timer(&link.b.qp)?);
            check_eq!(a, b);
            Ok::<_, Error>(a)
        };
        check_eq!(timer_of(&cm::ConnParam::default())?, RnrTimer::DEFAULT);
        let param = cm::ConnParam {
            min_rnr_timer: RnrTimer::at_least(Delta::from_millis(20)),
            ..Default::default()
        };
        check_eq!(timer_of(&param)?, param.min_rnr_timer);
        Ok(())
    }

    #[test]
    fn rnr_timer_is_rounded_up() -> Result {
        let rounded = |nanos: i64| RnrTimer::at_least(Delta::from_nanos(nanos));
        for (nanos, expected) in [
            (i64::MIN, 10_000),
            (0, 10_000),
            (10_000, 10_000),
            (10_001, 20_000),
            (640_000, 640_000),
            (1_000_000, 1_280_000),
            (491_520_000, 491_520_000),
        ] {
            check_eq!(rounded(nanos), rounded(expected));
            // It is no longer than that.
            check!(rounded(nanos) != rounded(expected + 1));
        }
        // The longest has code 0.
        for nanos in [491_520_001, 655_360_000] {
            check_eq!(rounded(nanos), rounded(i64::MAX));
        }
        check!(RnrTimer::default() == RnrTimer::at_least(Delta::from_micros(640)));
        Ok(())
    }

    #[test]
    fn illegal_transitions_are_refused() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        for attr in [to_rtr(&env, 5)?, to_rts(), Attr::Error] {
            check_err!(qp.modify(attr, &env.cx), EINVAL);
        }
        check_eq!(qp.query(&env.cx)?.state, State::Reset);
        Ok(())
    }

    /// The null device does not look at them.
    #[test]
    fn values_out_of_range_are_refused() -> Result {
        let null = NullEnv::new()?;
        let (env, cx) = (&null.env, &null.env.cx);
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        let init = |port, pkey_index| Attr::Init {
            port,
            pkey_index,
            access: Access::NONE,
        };
        for attr in [init(0, 0), init(u32::MAX, 0), init(1, u16::MAX)] {
            check_err!(qp.modify(attr, cx), EINVAL);
        }
        qp.modify(init(1, 0), cx)?;
        let rtr = |dest_qp, rq_psn, max_dest_rd_atomic| Attr::Rtr {
            path: ah::Attr::new(1),
            path_mtu: Mtu::B1024,
            dest_qp,
            rq_psn,
            max_dest_rd_atomic,
            min_rnr_timer: RnrTimer::default(),
        };
        for attr in [
            rtr(1 << 24, 0, 1),
            rtr(5, 1 << 24, 1),
            // rxe would round 129 up to 256, and then take it for 0.
            rtr(5, 0, 129),
        ] {
            check_err!(qp.modify(attr, cx), EINVAL);
        }
        qp.modify(rtr(5, 0, 1), cx)?;
        let rts = |timeout, retry_count, rnr_retry, sq_psn, max_rd_atomic| Attr::Rts {
            timeout,
            retry_count,
            rnr_retry,
            sq_psn,
            max_rd_atomic,
        };
        for attr in [
            rts(32, 0, 0, 0, 1),
            rts(0, 8, 0, 0, 1),
            rts(0, 0, 8, 0, 1),
            rts(0, 0, 0, u32::MAX, 1),
            rts(0, 0, 0, 0, u8::MAX),
        ] {
            check_err!(qp.modify(attr, cx), EINVAL);
        }
        qp.modify(rts(0, 0, 0, 0, 1), cx)
    }

    #[test]
    fn paths_out_of_range_are_refused() -> Result {
        let env = Env::new()?;
        let qp = env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?;
        qp.modify(to_init(), &env.cx)?;
        let along = |path| Attr::Rtr {
            path,
            path_mtu: Mtu::B1024,
            dest_qp: 5,
            rq_psn: 0,
            max_dest_rd_atomic: 1,
            min_rnr_timer: RnrTimer::default(),
        };
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
            let error = qp.modify(along(path), &env.cx);
            check_err!(error, EINVAL);
        }
        // The core refuses a GID that is not there, and RoCE without a GID.
        grh.flow_label = 0;
        grh.sgid_index = u8::MAX;
        for grh in [Some(grh), None] {
            let path = ah::Attr {
                grh,
                ..ah::Attr::new(1)
            };
            let error = qp.modify(along(path), &env.cx);
            check!(error.is_err());
        }
        check_eq!(qp.query(&env.cx)?.state, State::Init);
        qp.modify(to_rtr(&env, 5)?, &env.cx)?;
        Ok(())
    }

    #[test]
    fn connection_manager_s_qps_go_to_error_only() -> Result {
        let link = Link::<Softirq>::new()?;
        let cx = &link.env.cx;
        for attr in [to_rts(), to_init()] {
            check_err!(link.a.qp.modify(attr, cx), EPERM);
        }
        link.a.qp.modify(Attr::Error, cx)?;
        check_eq!(link.a.qp.query(cx)?.state, State::Error);
        Ok(())
    }

    #[test]
    fn error_flushes() -> Result {
        let (pair, inbox) = (Pair::<Softirq>::new(&CAPS)?, Inbox::new()?);
        for _ in 0..4 {
            recv(&pair.a, pair.env.message(&inbox, &[0; 4])?)?;
        }
        pair.a.modify(Attr::Error, &pair.env.cx)?;
        pair.wait(|| inbox.len() == 4)?;
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        Ok(())
    }
}
