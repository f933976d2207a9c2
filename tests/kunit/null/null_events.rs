// SPDX-License-Identifier: GPL-2.0

//! Every event that a device can raise reaches its handlers, and no others. That GIDs
//! have changed is said by the core alone, not by devices.

use crate::{
    check::{
        expect,
        OVERRUN, //
    },
    client::Kunit,
    fixture::{
        wait,
        Counter,
        EventLog,
        NullEnv,
        RecvListGuard,
        SlowEvent,
        CAPS, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    device,
    prelude::*,
    qp::{
        self,
        InitAttr, //
    }, //
};
use rdma_bindings as bindings;
use rdma_null::Injection;

/// A QP of the device tells of this event; another one does not.
fn of_qp(event: u32, expected: Option<qp::Event>) -> Result {
    let (null, gone) = (NullEnv::new()?, Counter::new()?);
    let cq = null.env.cq::<Softirq>(64)?;
    let logs = [EventLog::new(&gone)?, EventLog::new(&gone)?];
    let [one, _other] = logs.each_ref().map(|log| {
        InitAttr::new(&null.env.pd, &cq, &cq, &CAPS)
            .events(log.clone())
            .create(&null.env.cx)
    });
    let (one, _other) = (one?, _other?);
    null.dev.inject_qp(one.num(), Injection::Event { event })?;
    check_eq!((logs[0].count(), logs[1].count()), (1, 0));
    check_eq!(logs[0].last(), (event, one.num()));
    if let Some(expected) = expected {
        check_eq!(expected.as_raw(), event);
    }
    Ok(())
}

/// The ULP is told of this event of the device, once.
fn of_device(event: u32, expected: device::Event) -> Result {
    let null = NullEnv::new()?;
    let data = null.env.dev.data::<Kunit>(&null.env.cx).ok_or(ENODEV)?;
    data.take_events();
    null.dev.inject(Injection::Event { event })?;
    let mut told = KVec::new();
    wait(|| {
        told = data.take_events();
        !told.is_empty()
    })?;
    check_eq!(&told[..], &[expected]);
    Ok(())
}

macro_rules! events {
    ($($of:ident($raw:ident, $expected:expr): $name:ident;)*) => {
        #[kunit_tests(rdma_null_events)]
        mod tests {
            use super::*;

            $(
                #[test]
                fn $name() -> Result {
                    $of(bindings::$raw, $expected)
                }
            )*

            #[test]
            fn srq_failed() -> Result {
                let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
                let event = bindings::ib_event_type_IB_EVENT_SRQ_ERR;
                let srq = null.env.srq(2, &recv_list)?;
                expect(1, "an SRQ has failed");
                null.dev.inject(Injection::Event { event })?;
                drop(srq);
                wait(|| recv_list.gone() == 2)?;
                // The handler is gone.
                null.dev.inject(Injection::Event { event })
            }

            /// The core tells of each event by a work item of its own.
            #[test]
            fn slow_event_holds_up_no_other() -> Result {
                let null = NullEnv::new()?;
                let data = null.env.dev.data::<Kunit>(&null.env.cx).ok_or(ENODEV)?;
                let slow = SlowEvent::new(&data, device::Event::PortError(1))?;
                let event = bindings::ib_event_type_IB_EVENT_PORT_ERR;
                null.dev.inject(Injection::Event { event })?;
                slow.has_begun()?;
                let event = bindings::ib_event_type_IB_EVENT_SM_CHANGE;
                null.dev.inject(Injection::Event { event })?;
                wait(|| data.take_events().contains(&device::Event::SmChange(1)))?;
                check_eq!(slow.ended().get(), 0);
                Ok(())
            }

            #[test]
            fn unknown_event_of_a_qp() -> Result {
                of_qp(1000, None)
            }

            #[test]
            fn unknown_event_of_the_device() -> Result {
                of_device(1000, device::Event::Other(1000))
            }

            #[test]
            fn event_of_a_qp_that_is_gone() -> Result {
                let null = NullEnv::new()?;
                let qp = null.env.raw_qp(&null.env.cq::<Softirq>(64)?, &CAPS)?;
                let num = qp.num();
                qp.destroy(&null.env.cx)?;
                check_err!(null.dev.inject_qp(num, Injection::Event { event: 1 }), ENOENT);
                Ok(())
            }

            #[test]
            fn failed_cqs_of_every_kind() -> Result {
                let null = NullEnv::new()?;
                let (direct, softirq) = (null.env.cq::<Direct>(64)?, null.env.cq::<Softirq>(64)?);
                let (one, other) = (
                    null.env.raw_qp(&direct, &CAPS)?,
                    null.env.raw_qp(&softirq, &CAPS)?,
                );
                expect(2, OVERRUN);
                null.dev.inject(Injection::Event {
                    event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
                })?;
                for qp in [one.num(), other.num()] {
                    null.dev.inject_qp(qp, Injection::Hold { count: u32::MAX })?;
                }
                // A drain does not wait for completions of CQs that have failed.
                let drained = [
                    one.drain(&null.env.cx),
                    other.drain(&null.env.cx),
                ];
                for qp in [one.num(), other.num()] {
                    null.dev.inject_qp(qp, Injection::Release {
                        count: u32::MAX,
                        reversed: false,
                    })?;
                }
                check_eq!(drained, [Err(EOVERFLOW); 2]);
                Ok(())
            }
        }
    };
}

events! {
    of_qp(ib_event_type_IB_EVENT_QP_FATAL, Some(qp::Event::FATAL)): qp_fatal;
    of_qp(ib_event_type_IB_EVENT_QP_REQ_ERR, Some(qp::Event::REQUEST_ERROR)): qp_request_error;
    of_qp(ib_event_type_IB_EVENT_QP_ACCESS_ERR, Some(qp::Event::ACCESS_ERROR)): qp_access_error;
    of_qp(ib_event_type_IB_EVENT_COMM_EST, Some(qp::Event::COMM_EST)): qp_established;
    of_qp(ib_event_type_IB_EVENT_SQ_DRAINED, None): qp_sq_drained;
    of_qp(ib_event_type_IB_EVENT_PATH_MIG, None): qp_migrated;
    of_qp(ib_event_type_IB_EVENT_PATH_MIG_ERR, None):
        qp_not_migrated;
    of_qp(ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED, Some(qp::Event::LAST_WQE_REACHED)):
        qp_last_wqe_reached;
    of_device(ib_event_type_IB_EVENT_DEVICE_FATAL, device::Event::DeviceFatal): device_fatal;
    of_device(ib_event_type_IB_EVENT_PORT_ACTIVE, device::Event::PortActive(1)): port_active;
    of_device(ib_event_type_IB_EVENT_PORT_ERR, device::Event::PortError(1)): port_error;
    of_device(ib_event_type_IB_EVENT_LID_CHANGE, device::Event::LidChange(1)): lid_change;
    of_device(ib_event_type_IB_EVENT_PKEY_CHANGE, device::Event::PkeyChange(1)): pkey_change;
    of_device(ib_event_type_IB_EVENT_SM_CHANGE, device::Event::SmChange(1)): sm_change;
    of_device(ib_event_type_IB_EVENT_CLIENT_REREGISTER, device::Event::ClientReregister(1)):
        client_reregister;
}
