// SPDX-License-Identifier: GPL-2.0

//! Surprise removal at each stage of an object's life: it waits for the last handle, and no longer.

use crate::{
    client::Kunit,
    fixture::{
        begin_removal,
        both,
        nothing,
        removal_waits_for as waits_for,
        send,
        wait,
        Counter,
        Inbox,
        Null,
        NullEnv,
        Polled,
        RegOwner,
        CAPS,
        LONG_MS, //
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
use rdma_null::{
    Injection,
    NullDevice, //
};

const ALL: u32 = u32::MAX;

/// Two QPs without the device.
struct Pair<C: Polled> {
    a: Qp<C>,
    _b: Qp<C>,
    inbox: Arc<Inbox>,
}

fn pair<C: Polled>(null: &NullEnv) -> Result<Pair<C>> {
    let cq = null.env.cq::<C>(128)?;
    let (a, b) = (null.env.raw_qp(&cq, &CAPS)?, null.env.raw_qp(&cq, &CAPS)?);
    null.dev
        .inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
    null.dev
        .inject_qp(b.num(), Injection::Connect { peer: a.num() })?;
    Ok(Pair {
        a,
        _b: b,
        inbox: Inbox::new()?,
    })
}

fn cq<C: Polled>() -> Result {
    waits_for(|null| null.env.cq::<C>(16), nothing)
}

#[kunit_tests(rdma_null_removal)]
mod tests {
    use super::*;

    #[test]
    fn of_a_device_that_nobody_uses() -> Result {
        let NullEnv { dev, env } = NullEnv::new()?;
        let client = env.client.clone();
        drop(env);
        begin_removal(&dev, &client)?;
        wait(|| dev.is_removed())
    }

    #[test]
    fn waits_for_a_device_handle() -> Result {
        waits_for(|null| Ok(null.env.dev.clone()), nothing)
    }

    #[test]
    fn waits_for_a_pd() -> Result {
        waits_for(|null| Ok(null.env.pd.clone()), nothing)
    }

    #[test]
    fn waits_for_a_buffer() -> Result {
        waits_for(
            |null| Buf::<ToDevice>::alloc(&null.env.pd, 10, &null.env.cx),
            nothing,
        )
    }

    #[test]
    fn waits_for_a_direct_cq() -> Result {
        cq::<Direct>()
    }

    #[test]
    fn waits_for_a_softirq_cq() -> Result {
        cq::<Softirq>()
    }

    #[test]
    fn waits_for_a_workqueue_cq() -> Result {
        cq::<Workqueue>()
    }

    #[test]
    fn waits_for_an_unbound_workqueue_cq() -> Result {
        cq::<UnboundWorkqueue>()
    }

    #[test]
    fn waits_for_a_qp_in_the_reset_state() -> Result {
        waits_for(
            |null| null.env.raw_qp(&null.env.cq::<Softirq>(64)?, &CAPS),
            nothing,
        )
    }

    #[test]
    fn waits_for_connected_qps() -> Result {
        waits_for(pair::<Workqueue>, nothing)
    }

    #[test]
    fn waits_for_a_qp_in_the_error_state() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Softirq>(null)?;
            null.dev.inject_qp(pair.a.num(), Injection::Fail)?;
            Ok(pair)
        };
        waits_for(make, nothing)
    }

    #[test]
    fn waits_for_a_drained_qp() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<UnboundWorkqueue>(null)?;
            pair.a.drain(&null.env.cx)?;
            Ok(pair)
        };
        waits_for(make, nothing)
    }

    #[test]
    fn waits_for_posted_receives() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Softirq>(null)?;
            for _ in 0..8 {
                crate::fixture::recv(&pair.a, null.env.message(&pair.inbox, &[0; 4])?)?;
            }
            Ok(pair)
        };
        waits_for(make, nothing)
    }

    #[test]
    fn waits_for_completions_that_nobody_polled() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Direct>(null)?;
            let num = pair.a.num();
            null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
            for _ in 0..8 {
                send(&pair.a, null.env.message(&pair.inbox, &[0; 4])?)?;
            }
            Ok(pair)
        };
        waits_for(make, |_, pair| {
            check_eq!(pair.inbox.len(), 0);
            Ok(())
        })
    }

    #[test]
    fn waits_for_completions_that_come_late() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Softirq>(null)?;
            let num = pair.a.num();
            null.dev.inject_qp(num, Injection::Connect { peer: 0 })?;
            null.dev.inject_qp(num, Injection::Hold { count: ALL })?;
            for _ in 0..8 {
                send(&pair.a, null.env.message(&pair.inbox, &[0; 4])?)?;
            }
            Ok(pair)
        };
        waits_for(make, |dev, pair| {
            check_eq!(pair.inbox.len(), 0);
            dev.inject_qp(
                pair.a.num(),
                Injection::Release {
                    count: ALL,
                    reversed: true,
                },
            )?;
            wait(|| pair.inbox.len() == 8)
        })
    }

    #[test]
    fn waits_for_a_region() -> Result {
        waits_for(|null| null.env.region(5000), nothing)
    }

    #[test]
    fn waits_for_a_registered_region() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Softirq>(null)?;
            let region = null.env.region(5000)?;
            let owner = RegOwner::new(&region)?;
            let registered = owner.registered.clone();
            pair.a.post_send(owner, |o| Ok(both(&o.region)))?;
            wait(|| registered.get() == 1)?;
            Ok(region)
        };
        waits_for(make, nothing)
    }

    #[test]
    fn waits_for_a_message_that_came_back() -> Result {
        let make = |null: &NullEnv| {
            let pair = pair::<Workqueue>(null)?;
            crate::fixture::recv(&pair.a, null.env.message(&pair.inbox, &[0; 4])?)?;
            pair.a.drain(&null.env.cx)?;
            pair.inbox.pop()
        };
        waits_for(make, nothing)
    }

    #[test]
    fn objects_work_until_they_go() -> Result {
        let last = |dev: &NullDevice, pair: &Pair<Softirq>| {
            let cx = Sleepable::current()?;
            dev.inject_qp(pair.a.num(), Injection::Connect { peer: 0 })?;
            for _ in 0..100 {
                let nothing = crate::fixture::OnDone::<context::Atomic, _>::new(|_, _| {})?;
                if pair.a.post_send(nothing, |_| Ok(SendWr::send([]))).is_err() {
                    fsleep(Delta::from_millis(1));
                }
            }
            pair.a.drain(&cx)
        };
        waits_for(pair::<Softirq>, last)
    }

    #[test]
    fn drain_can_be_tried_again_meanwhile() -> Result {
        let last = |dev: &NullDevice, pair: &Pair<Direct>| {
            let cx = Sleepable::current()?;
            dev.inject(Injection::Modify { errno: 5, count: 2 })?;
            check_err!(pair.a.drain(&cx), EIO);
            check_err!(pair.a.drain(&cx), EIO);
            pair.a.drain(&cx)
        };
        waits_for(pair::<Direct>, last)
    }

    #[test]
    fn wait_in_an_event_ends() -> Result {
        let NullEnv { dev, env } = NullEnv::new()?;
        let (cq, client) = (env.cq::<Waited>(16)?, env.client.clone());
        let (begun, ended) = (Counter::new()?, Counter::new()?);
        let (begins, ends) = (begun.clone(), ended.clone());
        let data = env.dev.data::<Kunit>(&env.cx).ok_or(ENODEV)?;
        data.in_event(move |cx| {
            begins.up();
            if cq.wait(Notify::NextComp, LONG_MS, cx) == Err(ENODEV) {
                ends.up();
            }
        })?;
        drop((data, env));
        dev.inject(Injection::Event { event: 1000 })?;
        wait(|| begun.get() == 1)?;
        begin_removal(&dev, &client)?;
        wait(|| ended.get() == 1)?;
        wait(|| dev.is_removed())
    }

    #[test]
    fn many_devices_come_and_go() -> Result {
        for _ in 0..3 {
            let (null, inbox) = (Null::<Softirq>::new()?, Inbox::new()?);
            null.recv(&inbox, 4)?;
            let other = NullEnv::new()?;
            // Objects that stay in there would keep the device.
            drop(inbox);
            drop(null);
            drop(other);
        }
        Ok(())
    }
}
