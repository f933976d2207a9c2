// SPDX-License-Identifier: GPL-2.0

//! Suites of what waits in vain.

use kernel::time::{
    Instant,
    Monotonic, //
};

/// Returns how long a call takes, in milliseconds, and what it returns.
fn timed<T>(call: impl FnOnce() -> T) -> (i64, T) {
    let began = Instant::<Monotonic>::now();
    let returned = call();
    (began.elapsed().as_millis(), returned)
}

suites! {
    confirm_timeout: suite_confirm_timeout,
    connect_end: suite_connect_end,
    connect_timeout: suite_connect_timeout,
    cq_timeout: suite_cq_timeout,
    drain_timeout: suite_drain_timeout,
    late_end: suite_late_end,
    mad_timeout: suite_mad_timeout,
    removal_timeout: suite_removal_timeout,
}
