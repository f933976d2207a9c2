// SPDX-License-Identifier: GPL-2.0

//! Removals that wait, and say for what.

use crate::{
    check::expect,
    client::{
        Kunit,
        PerDevice, //
    },
    fixture::{
        accepts,
        begin_removal,
        listen,
        removal_waits_for,
        wait,
        Counted,
        Counter,
        NullEnv,
        CAPS,
        STEP_MS, //
    }, //
};
use kernel::{
    prelude::*,
    str::CString,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::Chain, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// Takes a device away whose ULP takes 34 seconds for a call, which `set` has it do: for an event,
/// which comes before, for the removal, or for the drop of its data.
fn removal_with(set: impl FnOnce(&PerDevice, Arc<Counter>) -> Result, in_event: bool) -> Result {
    let NullEnv { dev, env } = NullEnv::new()?;
    let (client, begun) = (env.client.clone(), Counter::new()?);
    let data = env.dev.data::<Kunit>(&env.cx).ok_or(ENODEV)?;
    set(&data, begun.clone())?;
    drop((data, env));
    if in_event {
        dev.inject(Injection::Event { event: 1000 })?;
        wait(|| begun.get() == 1)?;
    }
    begin_removal(&dev, &client)?;
    wait(|| dev.is_removed())?;
    check_eq!(begun.get(), 1);
    Ok(())
}

fn sleep() {
    fsleep(Delta::from_secs(34));
}

/// A handler that takes 34 seconds for the removal of its device.
struct Slow(Arc<Counter>);

impl cm::Handler for Slow {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if matches!(event, cm::Event::DeviceRemoval) {
            self.0.up();
            sleep();
        }
    }
}

#[kunit_tests(rdma_removal_timeout)]
mod tests {
    use super::*;

    #[test]
    fn says_every_ten_seconds_what_it_waits_for() -> Result {
        expect(3, "waits for 1 device handle(s)");
        removal_waits_for(
            |null| Ok(null.env.dev.clone()),
            |_, _| {
                fsleep(Delta::from_secs(34));
                Ok(())
            },
        )
    }

    #[test]
    fn says_every_ten_seconds_that_an_event_has_not_ended() -> Result {
        expect(3, "waits for the end of event()");
        removal_with(
            |data, begun| {
                data.in_event(move |_| {
                    begun.up();
                    sleep();
                })
            },
            true,
        )
    }

    #[test]
    fn says_every_ten_seconds_that_remove_has_not_ended() -> Result {
        expect(3, "waits for the end of remove()");
        removal_with(
            |data, begun| {
                data.in_remove(move |_| {
                    begun.up();
                    sleep();
                })
            },
            false,
        )
    }

    #[test]
    fn says_every_ten_seconds_that_a_handler_has_not_ended() -> Result {
        expect(
            3,
            "waits for the end of MAD agents, listeners and handlers of connections",
        );
        let NullEnv { dev, env } = NullEnv::with_cm()?;
        let (client, addr, begun) = (env.client.clone(), env.addr(), Counter::new()?);
        let listener = listen(&env, addr, accepts(&env, &[]))?;
        let id = cm::Id::resolve(&client, addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
        let handler = Arc::new(Slow(begun.clone()), GFP_KERNEL)?;
        id.connect(handler, &cm::ConnParam::default(), &env.cx)?;
        listener.destroy(&env.cx)?;
        drop((cq, env));
        begin_removal(&dev, &client)?;
        wait(|| begun.get() == 1)?;
        drop((qp, id));
        wait(|| dev.is_removed())
    }

    #[test]
    fn says_every_ten_seconds_that_the_data_are_not_dropped() -> Result {
        expect(3, "waits for the end of the drop of the ULP's data");
        removal_with(
            |data, begun| {
                data.in_drop(move |_| {
                    begun.up();
                    sleep();
                })
            },
            false,
        )
    }

    #[test]
    fn names_what_it_waits_for() -> Result {
        let make = |null: &NullEnv| {
            let cq = null.env.cq::<Softirq>(64)?;
            let qp = null.env.raw_qp(&cq, &CAPS)?;
            null.dev
                .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
            let times = Counter::new()?;
            // The first has no completion, so the QP keeps its owner; the second is still to come.
            let mut batch = qp.batch(Counted::new(&times)?);
            batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))?;
            drop(batch);
            qp.post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])))?;
            Ok((qp, cq))
        };
        let last = |_: &NullDevice, (qp, _): &(Qp<Softirq>, Cq<Softirq>)| {
            let num = qp.num();
            let counted = core::any::type_name::<Counted>();
            // The QP is named three times: each line is one of these.
            for text in [
                fmt!("waits for QP {num}, made "),
                fmt!("1 posted, the first a {counted}, "),
                fmt!("1 kept until it is drained, the first a {counted}, "),
            ] {
                expect(1, CString::try_from_fmt(text)?.to_str()?);
            }
            expect(3, "waits for CQ ");
            expect(3, "waits for PD ");
            sleep();
            Ok(())
        };
        removal_waits_for(make, last)
    }

    /// As where a test fails: what is on the device is dropped after it, and an injection holds
    /// what a QP has posted.
    #[test]
    fn device_is_dropped_before_what_is_on_it() -> Result {
        let NullEnv { env, dev } = NullEnv::new()?;
        let cq = env.cq::<Softirq>(CAPS.entries())?;
        let qp = env.raw_qp(&cq, &CAPS)?;
        dev.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        dev.inject_qp(qp.num(), Injection::Hold { count: u32::MAX })?;
        let times = Counter::new()?;
        qp.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
        drop(dev);
        // The module is not unloaded before the device is gone.
        wait(|| times.get() == 1)
    }
}
