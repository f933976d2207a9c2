// SPDX-License-Identifier: GPL-2.0

/// `make test` runs these, by loading the module. A test that needs a device makes one of its own,
/// and drops it before it asserts: an assertion that fails ends the thread and drops nothing.
#[kunit_tests(NAME)]
mod tests {
    use super::*;
    use rdma_null::{Injection, NullDevice};

    fn hello_on(null: &NullDevice) -> Result {
        let cx = &Sleepable::current()?;
        let client = ClientRef::of::<Minimal>(cx)?;
        let dev = client.device_by_name(null.name(), cx).ok_or(ENODEV)?;
        let ip = dev.ip_addr().ok_or(ENODEV)?;
        hello::<Softirq>(&client, (dev, ip), |_, sent| sent.wait_for_completion())
    }

    #[test]
    fn cq_has_room_for_each_request_and_drain() {
        assert!(CAPS.entries() >= 2 + 2);
    }

    #[test]
    fn request_is_as_small_as_in_c() {
        assert_eq!(size_of::<Cqe<Message>>(), size_of::<fn()>());
    }

    #[test]
    fn says_hello() -> Result {
        hello_on(&NullDevice::with_cm(c"null0")?)
    }

    #[test]
    fn refusal_is_an_error() -> Result {
        let null = NullDevice::with_cm(c"null0")?;
        null.inject(Injection::Reject { count: 1 })?;
        let said = hello_on(&null);
        drop(null);
        assert_eq!(said, Err(ECONNREFUSED));
        Ok(())
    }
}
