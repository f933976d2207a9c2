// SPDX-License-Identifier: GPL-2.0

//! Events of QPs.

use crate::fixture::{
    to_init,
    to_rtr,
    to_rts,
    wait,
    Counter,
    Env,
    EventLog,
    Inbox, //
};
use kernel::{
    prelude::*,
    str::CString, //
};
use rdma::{
    prelude::*,
    qp::{
        Event,
        InitAttr, //
    }, //
};

const CAPS: Caps = Caps::new(4, 4);

fn text(event: Event) -> Result<CString> {
    Ok(CString::try_from_fmt(fmt!("{event}"))?)
}

/// Returns a QP in the reset state that tells the log of its events.
fn qp(env: &Env, log: &Arc<EventLog>) -> Result<Qp<Softirq>> {
    let cq = env.cq::<Softirq>(64)?;
    InitAttr::new(&env.pd, &cq, &cq, &CAPS)
        .events(log.clone())
        .create(&env.cx)
}

#[kunit_tests(rdma_qp_events)]
mod tests {
    use super::*;

    #[test]
    fn print_what_c_says() -> Result {
        check_eq!(
            text(Event::COMM_EST)?.to_bytes(),
            b"communication established"
        );
        check_eq!(text(Event::FATAL)?.to_bytes(), b"QP fatal error");
        Ok(())
    }

    #[test]
    fn peer_that_writes_where_it_may_not() -> Result {
        not_on_iwarp!(c"there is no connection without an id");
        let (env, gone) = (Env::new()?, Counter::new()?);
        let (log, written) = (EventLog::new(&gone)?, Inbox::new()?);
        let (a, b) = (env.raw_qp(&env.cq::<Softirq>(64)?, &CAPS)?, qp(&env, &log)?);
        for (qp, peer) in [(&a, &b), (&b, &a)] {
            qp.modify(to_init(), &env.cx)?;
            qp.modify(to_rtr(&env, peer.num())?, &env.cx)?;
            qp.modify(to_rts(), &env.cx)?;
        }
        let nowhere = Remote { addr: 0, rkey: 0 };
        a.post_send(env.message(&written, &[0; 4])?, |m| {
            Ok(SendWr::rdma_write([m.buf.whole()], nowhere))
        })?;
        wait(|| written.len() == 1 && log.count() == 1)?;
        check_eq!(written.pop()?.status(), Some(wc::Status::REM_ACCESS_ERR));
        check_eq!(log.last(), (Event::ACCESS_ERROR.as_raw(), b.num()));
        Ok(())
    }

    #[test]
    fn handler_lives_as_long_as_the_qp() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let qp = qp(&env, &EventLog::new(&gone)?)?;
        check_eq!(gone.get(), 0);
        qp.destroy(&env.cx)?;
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn handler_of_a_qp_that_could_not_be_created_is_dropped() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let (small, log) = (env.cq::<Softirq>(2)?, EventLog::new(&gone)?);
        let made = InitAttr::new(&env.pd, &small, &small, &CAPS)
            .events(log)
            .create(&env.cx);
        check_err!(made, ENOSPC);
        check_eq!(gone.get(), 1);
        Ok(())
    }
}
