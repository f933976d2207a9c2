// SPDX-License-Identifier: GPL-2.0

//! Events of devices, and the data of a ULP that they are told to.

use crate::{
    client::{
        Kunit,
        PerDevice, //
    },
    fixture::{
        wait,
        with_device,
        Counter,
        Env,
        OwnLink,
        SlowEvent, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    device::Event,
    prelude::*, //
};
use rdma_bindings as bindings;

/// Raises an event of a port of the device that has the interface `rdma0`, as a driver does.
fn raise(event: bindings::ib_event_type, port: u32) -> Result {
    with_device(c"rdma0", |device| {
        let event = bindings::ib_event {
            device,
            element: bindings::ib_event__bindgen_ty_1 {
                port_num: core::mem::ManuallyDrop::new(port),
            },
            event,
        };
        // SAFETY: The device is held meanwhile, and the event is copied.
        unsafe { bindings::ib_dispatch_event(&event) };
    })
}

fn data(env: &Env) -> Result<Arc<PerDevice>> {
    env.dev.data::<Kunit>(&env.cx).ok_or(ENODEV)
}

/// Raises an event and waits until the ULP has been told.
fn told(raw: bindings::ib_event_type, port: u32, expected: Event) -> Result {
    let env = Env::new()?;
    let data = data(&env)?;
    data.take_events();
    raise(raw, port)?;
    wait(|| data.take_events().contains(&expected))
}

fn shown(event: Event, text: &[u8]) -> Result {
    let shown = kernel::str::CString::try_from_fmt(fmt!("{event}"))?;
    check_eq!(shown.to_bytes(), text);
    Ok(())
}

#[kunit_tests(rdma_device_event)]
mod tests {
    use super::*;

    #[test]
    fn device_has_the_data_of_its_ulp() -> Result {
        let env = Env::new()?;
        let (a, b) = (data(&env)?, data(&env)?);
        check!(core::ptr::eq(&*a, &*b));
        Ok(())
    }

    #[test]
    fn port_becomes_active() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE,
            1,
            Event::PortActive(1),
        )
    }

    #[test]
    fn port_fails() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_PORT_ERR,
            1,
            Event::PortError(1),
        )
    }

    #[test]
    fn subnet_manager_changes() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_SM_CHANGE,
            1,
            Event::SmChange(1),
        )
    }

    #[test]
    fn lid_changes() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_LID_CHANGE,
            1,
            Event::LidChange(1),
        )
    }

    #[test]
    fn pkey_changes() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_PKEY_CHANGE,
            1,
            Event::PkeyChange(1),
        )
    }

    #[test]
    fn clients_are_to_register_again() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
            1,
            Event::ClientReregister(1),
        )
    }

    #[test]
    fn device_fails() -> Result {
        told(
            bindings::ib_event_type_IB_EVENT_DEVICE_FATAL,
            1,
            Event::DeviceFatal,
        )
    }

    #[test]
    fn unknown_events_are_passed_on() -> Result {
        told(1000, 1, Event::Other(1000))
    }

    #[test]
    fn events_have_names() -> Result {
        shown(Event::DeviceFatal, b"device fatal error")?;
        shown(Event::PortActive(1), b"port active, port 1")?;
        shown(Event::GidChange(2), b"GID changed, port 2")?;
        shown(Event::Other(1000), b"unrecognized event")?;
        Ok(())
    }

    /// The GID table is locked while the ULP is told that it has changed.
    #[test]
    fn slow_event_stops_updates_of_the_gids() -> Result {
        not_on_iwarp!(c"no GID changes");
        let link = OwnLink::new();
        let env = link.env()?;
        let slow = SlowEvent::new(&*data(&env)?, Event::GidChange(1))?;
        link.down()?;
        slow.has_begun()?;
        let (begun, updated) = (Counter::new()?, Counter::new()?);
        let (begins, updates, ended) = (begun.clone(), updated.clone(), slow.ended());
        env.client.spawn(GFP_KERNEL, move |_| {
            begins.up();
            // The event has ended first.
            if link.rescan().is_ok() && ended.get() == 1 {
                updates.up();
            }
            begins.up();
        })?;
        wait(|| begun.get() >= 1)?;
        fsleep(Delta::from_millis(30));
        slow.end();
        wait(|| begun.get() == 2)?;
        check_eq!(updated.get(), 1);
        Ok(())
    }
}
