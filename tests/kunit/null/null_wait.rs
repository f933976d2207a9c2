// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions of a device that fails or goes.

use crate::{
    check::{
        expect,
        OVERRUN, //
    },
    fixture::{
        begin_removal,
        nothing,
        removal_waits_for,
        wait,
        Counter,
        Inbox,
        Null,
        NullEnv, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;
use rdma_bindings as bindings;
use rdma_null::Injection;

/// Longer than anything takes.
const LONG_MS: u32 = 100_000;

const FAILURE: Injection = Injection::Event {
    event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
};

/// Threads that wait, and how many of them have got this error.
fn waiters(null: &NullEnv, cq: &Cq<Waited>, error: Error) -> Result<Arc<Counter>> {
    let (begun, ended) = (Counter::new()?, Counter::new()?);
    for solicited in [false, true, false] {
        let (cq, begun, ended) = (cq.clone(), begun.clone(), ended.clone());
        null.env.client.spawn(GFP_KERNEL, move |cx| {
            begun.up();
            let waited = match solicited {
                false => cq.wait(Notify::NextComp, LONG_MS, cx),
                true => cq.wait(Notify::Solicited, LONG_MS, cx),
            };
            if waited == Err(error) {
                ended.up();
            }
        })?;
    }
    wait(|| begun.get() == 3)?;
    fsleep(Delta::from_millis(20));
    check_eq!(ended.get(), 0);
    Ok(ended)
}

#[kunit_tests(rdma_null_wait)]
mod tests {
    use super::*;

    #[test]
    fn failure_of_the_cq_ends_it() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        let ended = waiters(&null, &cq, EOVERFLOW)?;
        expect(1, OVERRUN);
        null.dev.inject(FAILURE)?;
        wait(|| ended.get() == 3)?;
        check_err!(cq.wait(Notify::NextComp, LONG_MS, &null.env.cx), EOVERFLOW);
        Ok(())
    }

    #[test]
    fn completions_come_before_the_failure() -> Result {
        let (null, sent) = (Null::<Waited>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.send(&sent, b"x")?;
        expect(1, OVERRUN);
        null.dev.inject(FAILURE)?;
        wait(|| null.cq.wait(Notify::NextComp, 0, &null.env.cx) == Ok(cq::Wait::Ready))?;
        check_eq!(null.cq.process(8), 1);
        wait(|| null.cq.wait(Notify::NextComp, 0, &null.env.cx) == Err(EOVERFLOW))
    }

    #[test]
    fn failure_of_another_kind_is_none() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        null.dev.inject(Injection::Event {
            event: bindings::ib_event_type_IB_EVENT_DEVICE_FATAL,
        })?;
        check_eq!(
            cq.wait(Notify::NextComp, 30, &null.env.cx)?,
            cq::Wait::TimedOut
        );
        Ok(())
    }

    #[test]
    fn removal_of_the_device_ends_it() -> Result {
        let null = NullEnv::new()?;
        let cq = null.env.cq::<Waited>(16)?;
        let ended = waiters(&null, &cq, ENODEV)?;
        begin_removal(&null.dev, &null.env.client)?;
        wait(|| ended.get() == 3)?;
        // A later thread does not wait, and there is no other such CQ.
        check_err!(cq.wait(Notify::NextComp, LONG_MS, &null.env.cx), ENODEV);
        check_err!(null.env.cq::<Waited>(16).map(drop), ENODEV);
        drop(null.env.cq::<Direct>(16)?);
        check!(!null.dev.is_removed());
        drop(cq);
        let NullEnv { dev, env } = null;
        drop(env);
        wait(|| dev.is_removed())
    }

    #[test]
    fn completions_come_before_the_removal() -> Result {
        let (null, sent) = (Null::<Waited>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.send(&sent, b"x")?;
        begin_removal(&null.dev, &null.env.client)?;
        check_eq!(
            null.cq.wait(Notify::NextComp, 0, &null.env.cx)?,
            cq::Wait::Ready
        );
        null.one(&sent)?.ok()?;
        wait(|| null.cq.wait(Notify::NextComp, 0, &null.env.cx) == Err(ENODEV))?;
        // Requests that are posted now complete as ever.
        null.send(&sent, b"y")?;
        check_eq!(
            null.cq.wait(Notify::NextComp, LONG_MS, &null.env.cx)?,
            cq::Wait::Ready
        );
        null.one(&sent)?.ok()?;
        check!(!null.dev.is_removed());
        let dev = null.dev.clone();
        drop((sent, null));
        wait(|| dev.is_removed())
    }

    #[test]
    fn removal_waits_for_the_cq() -> Result {
        removal_waits_for(|null| null.env.cq::<Waited>(16), nothing)
    }

    #[test]
    fn cqs_can_be_moderated() -> Result {
        let null = NullEnv::new()?;
        let cx = &null.env.cx;
        null.env.cq::<Softirq>(16)?.moderate(8, 16, cx)?;
        null.env.cq::<Workqueue>(16)?.moderate(0, 0, cx)?;
        null.env
            .cq::<Waited>(16)?
            .moderate(u16::MAX, u16::MAX, cx)?;
        let pooled = Cq::<Softirq>::pool_get(&null.env.dev, 16, None, cx)?;
        check_err!(pooled.moderate(8, 16, cx), EOPNOTSUPP);
        Ok(())
    }
}
