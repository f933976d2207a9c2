// SPDX-License-Identifier: GPL-2.0

/// Code that needs no device is tested here; `make test` runs the rest too, by loading the module.
#[kunit_tests(NAME)]
mod tests {
    use super::*;

    #[test]
    fn cq_has_room_for_each_request_and_drain() {
        assert!(CAPS.entries() >= 2 + 2);
    }

    #[test]
    fn request_is_as_small_as_in_c() {
        assert_eq!(size_of::<Cqe<Message>>(), size_of::<fn()>());
    }
}
