// SPDX-License-Identifier: GPL-2.0

//! The null device itself.

use crate::{
    client::Kunit,
    fixture::{
        null_device,
        order,
        Env,
        Inbox,
        Null,
        NullEnv,
        CAPS, //
    }, //
};
use kernel::{
    prelude::*,
    str::CString, //
};
use rdma::{
    client::{
        ModuleClient,
        Registration,
        Singleton, //
    },
    device::Device,
    prelude::*, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// A client that has null devices only.
struct Nulls;

impl Client for Nulls {
    type Data = OfNull;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Nulls)
    }
}

// SAFETY: The static variable is for this type only, and the module is that of the suites. The one
// test that makes a registration drops it, also where it fails.
unsafe impl ModuleClient for Nulls {
    fn singleton() -> &'static Singleton {
        static SINGLETON: Singleton = Singleton::new();
        &SINGLETON
    }

    fn module() -> &'static ThisModule {
        Kunit::module()
    }
}

struct OfNull;

impl DeviceData<Nulls> for OfNull {
    fn add(_client: Pin<&Nulls>, dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        let name = dev.name();
        let is_null = name.to_bytes().starts_with(b"kunit");
        is_null.then_some(OfNull).ok_or(ENODEV)
    }
}

#[kunit_tests(rdma_null_device)]
mod tests {
    use super::*;

    #[test]
    fn comes_and_goes() -> Result {
        let other = NullEnv::new()?;
        let Env { client, cx, .. } = &other.env;
        let dev = null_device()?;
        check!(client.device_by_name(dev.name(), cx).is_some());
        dev.remove();
        check!(client.device_by_name(dev.name(), cx).is_none());
        // It is gone already.
        dev.remove();
        Ok(())
    }

    #[test]
    fn has_its_own_name() -> Result {
        let (a, b) = (null_device()?, null_device()?);
        check!(*a.name() != *b.name());
        check_err!(NullDevice::new(a.name()).map(drop), ENFILE);
        let name = CString::try_from(a.name())?;
        drop(a);
        NullDevice::new(&name)?;
        Ok(())
    }

    #[test]
    fn has_limits() -> Result {
        let null = NullEnv::new()?;
        check!(null.env.dev.num_comp_vectors() >= 4);
        check!(null.env.dev.attrs().max_cqe >= 65536);
        check!(null.env.dev.attrs().max_qp_wr >= 16384);
        check!(null.env.dev.attrs().max_fast_reg_page_list_len >= 256);
        check!(null.env.dev.ip_addr().is_none());
        let node = cfg!(CONFIG_NUMA).then_some(0);
        check_eq!(null.env.dev.numa_node(), node);
        Ok(())
    }

    #[test]
    fn without_address_it_is_passed_over() -> Result {
        let cx = &Sleepable::current()?;
        check_err!(ClientRef::of::<Nulls>(cx).map(drop), ENODEV);
        let registration = KBox::pin_init(Registration::<Nulls>::new(c"nulls"), GFP_KERNEL)?;
        let client = ClientRef::of::<Nulls>(cx)?;
        let first = || client.first_device_with_addr(cx);
        check_err!(first().map(drop), ENODEV);

        let null = NullEnv::new()?;
        check!(client.device_by_name(null.dev.name(), cx).is_some());
        check_err!(first().map(drop), ENODEV);
        let with_cm = NullEnv::with_cm()?;
        let (dev, ip) = first()?;
        check_eq!(dev.name().to_bytes(), with_cm.dev.name().to_bytes());
        check_eq!(Some(ip), dev.ip_addr());
        drop(dev);
        drop(with_cm);
        check_err!(first().map(drop), ENODEV);

        drop(null);
        drop(client);
        drop(registration);
        check_err!(ClientRef::of::<Nulls>(cx).map(drop), ENODEV);
        Ok(())
    }

    #[test]
    fn counts_its_objects() -> Result {
        let null = Null::<Softirq>::new()?;
        check_eq!(null.dev.objects(), [1, 2, 0, 0]);
        // The first one is dropped last.
        let Null { dev, env, cq, a, b } = null;
        a.destroy(&env.cx)?;
        b.destroy(&env.cx)?;
        check_eq!(dev.objects(), [1, 0, 0, 0]);
        drop(cq);
        crate::fixture::wait(|| dev.objects() == [0; 4])
    }

    #[test]
    fn transfers_messages() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 16)?;
        null.send(&sent, b"hello")?;
        null.one(&sent)?.ok()?;
        let mut message = null.one(&received)?;
        check_eq!(message.ok()?.byte_len, 5);
        check_eq!(&message.bytes()?[..5], b"hello");
        Ok(())
    }

    #[test]
    fn keeps_the_order_of_messages() -> Result {
        let (null, sent, received) = (Null::<Workqueue>::new()?, Inbox::new()?, Inbox::new()?);
        for _ in 0..8 {
            null.recv(&received, 1)?;
        }
        for i in 0..8 {
            null.send(&sent, &[i])?;
        }
        check_eq!(order(null.take(&sent, 8)?)?[..], [0, 1, 2, 3, 4, 5, 6, 7]);
        check_eq!(
            order(null.take(&received, 8)?)?[..],
            [0, 1, 2, 3, 4, 5, 6, 7]
        );
        Ok(())
    }

    #[test]
    fn no_receive_is_an_error() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.send(&sent, b"x")?;
        null.send(&sent, b"y")?;
        let all = null.take(&sent, 2)?;
        check!(all[0].status() == Some(wc::Status::RNR_RETRY_EXC_ERR));
        check!(all[1].was_flushed());
        Ok(())
    }

    #[test]
    fn short_receive_is_an_error_at_both_ends() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 2)?;
        null.recv(&received, 9)?;
        null.send(&sent, b"abc")?;
        check!(null.one(&sent)?.status() == Some(wc::Status::REM_INV_REQ_ERR));
        let mut all = null.take(&received, 2)?;
        check!(all[0].status() == Some(wc::Status::LOC_LEN_ERR));
        check_eq!(&all[0].bytes()?[..], &[0, 0]);
        check!(all[1].was_flushed());
        Ok(())
    }

    #[test]
    fn peer_that_failed_does_not_answer() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 2)?;
        null.dev.inject_qp(null.b.num(), Injection::Fail)?;
        check!(null.one(&received)?.was_flushed());
        null.send(&sent, b"a")?;
        check!(null.one(&sent)?.status() == Some(wc::Status::RETRY_EXC_ERR));
        Ok(())
    }

    #[test]
    fn sends_into_the_void() -> Result {
        let (null, sent) = (Null::<UnboundWorkqueue>::new()?, Inbox::new()?);
        null.disconnect()?;
        for _ in 0..8 {
            null.send(&sent, b"x")?;
        }
        check!(null.take(&sent, 8)?.iter().all(|done| done.ok().is_ok()));
        Ok(())
    }

    #[test]
    fn queue_is_full_until_its_completions_are_polled() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.disconnect()?;
        // One more than was asked for, which is for the drain.
        for _ in 0..=CAPS.send_wr {
            null.send(&sent, b"x")?;
        }
        check_err!(null.send(&sent, b"x"), ENOMEM);
        null.cq.process(1);
        null.send(&sent, b"x")?;
        check_err!(null.send(&sent, b"x"), ENOMEM);
        null.take(&sent, 10)?;
        Ok(())
    }

    #[test]
    fn injections_need_their_target() -> Result {
        let null = Null::<Direct>::new()?;
        check_err!(null.dev.inject_qp(1, Injection::Fail), ENOENT);
        check_err!(null.dev.inject(Injection::Fail), EINVAL);
        check_err!(null.inject(Injection::Eager { on: true }), EINVAL);
        check_err!(null.dev.held(1), ENOENT);
        Ok(())
    }

    #[test]
    fn injections_that_no_consumer_can_take_are_refused() -> Result {
        let null = Null::<Direct>::new()?;
        check_err!(null.inject(Injection::Duplicate { count: 1 }), EPERM);
        check_err!(null.dev.inject(Injection::Duplicate { count: 1 }), EPERM);
        check_err!(null.dev.inject(Injection::Peek { on: true }), EPERM);
        Ok(())
    }

    #[test]
    fn events_need_a_device() -> Result {
        let dev = null_device()?;
        // IB_EVENT_PORT_ERR.
        dev.inject(Injection::Event { event: 10 })?;
        dev.remove();
        check_err!(dev.inject(Injection::Event { event: 10 }), ENODEV);
        Ok(())
    }
}
