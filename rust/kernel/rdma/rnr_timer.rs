// SPDX-License-Identifier: GPL-2.0

//! The RNR timer: how long a sender waits before it repeats a message that found no receive.

use crate::prelude::internal::*;
use kernel::time::Delta;

/// The time that a sender waits after an RNR NAK (`enum ib_rnr_timeout`). The receiver sets it; the
/// sender sets the number of retries ([`cm::ConnParam::rnr_retry_count`]).
///
/// C's own default, code 0, is the longest: 655 ms. The default here is 0.64 ms.
///
/// [`cm::ConnParam::rnr_retry_count`]: crate::cm::ConnParam::rnr_retry_count
///
/// # Examples
///
/// ```
/// use kernel::time::Delta;
/// use rdma::{prelude::*, qp::RnrTimer};
///
/// /// Receives are posted again within two milliseconds.
/// fn param() -> cm::ConnParam<'static> {
///     cm::ConnParam {
///         min_rnr_timer: RnrTimer::at_least(Delta::from_millis(2)),
///         ..Default::default()
///     }
/// }
/// ```
///
/// # Invariants
///
/// The code is one of `enum ib_rnr_timeout`, up to 31.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// The default, 0.64 ms.
    // INVARIANT: This is a code.
    pub const DEFAULT: Self = Self(bindings::ib_rnr_timeout_IB_RNR_TIMER_000_64 as u8);

    /// The durations of codes 1 to 31, in microseconds. Code 0 is longer than all.
    const MICROS: [i64; 31] = [
        10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1_280, 1_920, 2_560, 3_840,
        5_120, 7_680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840,
        245_760, 327_680, 491_520,
    ];

    /// Returns the shortest time that is not less than `duration`, at most 655.36 ms.
    pub fn at_least(duration: Delta) -> Self {
        let is_enough =
            |(_, micros): &(u8, i64)| Delta::from_micros(*micros).as_nanos() >= duration.as_nanos();
        let code = (1..).zip(Self::MICROS).find(is_enough);
        // INVARIANT: The array has 31 entries.
        Self(code.map_or(0, |(code, _)| code))
    }

    /// Returns the time of a code that a driver reports.
    pub(crate) fn from_raw(code: u8) -> Self {
        // INVARIANT: The field has five bits.
        Self(code & 31)
    }

    /// Returns the C value.
    pub(crate) fn as_raw(self) -> u8 {
        self.0
    }
}

impl Default for RnrTimer {
    fn default() -> Self {
        Self::DEFAULT
    }
}
