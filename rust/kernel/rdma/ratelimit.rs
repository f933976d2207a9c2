// SPDX-License-Identifier: GPL-2.0

//! Limits for messages that peers can cause.
//!
//! A peer that connects a hundred times a second must not fill the log. The kernel crate has no
//! `pr_warn_ratelimited!` yet.
//!
//! C header: [`include/linux/ratelimit.h`](srctree/include/linux/ratelimit.h)

use crate::prelude::internal::*;
use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

/// The length of an interval, in seconds (`DEFAULT_RATELIMIT_INTERVAL`).
const INTERVAL: u64 = 5;
/// The number of messages in each (`DEFAULT_RATELIMIT_BURST`).
const BURST: u32 = 10;

/// A limit of ten messages in each five seconds, as `struct ratelimit_state` has it by default.
///
/// # Invariants
///
/// The upper half is the number of an interval since the start of the system, the lower half that
/// of messages in it, or the greatest number.
pub struct Ratelimit(Atomic<u64>);

impl Ratelimit {
    /// Makes a limit, of which no message was printed.
    #[expect(clippy::new_without_default)]
    pub const fn new() -> Self {
        // INVARIANT: There was no message.
        Self(Atomic::new(0))
    }

    /// Counts a message. Returns whether it is to be printed (`__ratelimit`); the number suppressed
    /// in the last interval with messages is printed first, with the prefix of rdma_rs. Any
    /// context.
    pub fn check(&self) -> bool {
        // SAFETY: The function reads a number that is set since boot.
        let now = unsafe { bindings::ktime_get_seconds() } as u64 / INTERVAL;
        let mut old = self.0.load(Relaxed);
        loop {
            let count = old as u32;
            let is_same = old >> 32 == now;
            let next = if is_same { count.saturating_add(1) } else { 1 };
            // INVARIANT: That many messages are in this interval.
            match self.0.cmpxchg(old, now << 32 | u64::from(next), Relaxed) {
                Ok(_) if is_same => return count < BURST,
                Ok(_) => {
                    let missed = count.saturating_sub(BURST);
                    if missed > 0 {
                        pr_warn!("{missed} messages like the next one were not printed\n");
                    }
                    return true;
                }
                Err(other) => old = other,
            }
        }
    }
}

/// Prints by `$print`, ten messages of this place in each five seconds.
#[doc(hidden)]
#[macro_export]
macro_rules! print_ratelimited {
    ($print:ident, $($arg:tt)*) => {{
        static LIMIT: $crate::ratelimit::Ratelimit = $crate::ratelimit::Ratelimit::new();
        if LIMIT.check() {
            ::kernel::$print!($($arg)*);
        }
    }};
}

/// Prints an error that a peer can cause, ten in each five seconds (`pr_err_ratelimited`).
///
/// # Examples
///
/// ```
/// # use rdma::prelude::*;
/// fn failed(error: WcError) {
///     rdma::pr_err_ratelimited!("a request has failed: {}\n", error.status);
/// }
/// ```
#[macro_export]
macro_rules! pr_err_ratelimited {
    ($($arg:tt)*) => { $crate::print_ratelimited!(pr_err, $($arg)*) };
}

/// Prints an error of a device that a peer can cause, ten in each five seconds
/// (`dev_err_ratelimited`).
#[macro_export]
macro_rules! dev_err_ratelimited {
    ($($arg:tt)*) => { $crate::print_ratelimited!(dev_err, $($arg)*) };
}

/// Prints a warning that a peer can cause, ten in each five seconds (`pr_warn_ratelimited`).
#[macro_export]
macro_rules! pr_warn_ratelimited {
    ($($arg:tt)*) => { $crate::print_ratelimited!(pr_warn, $($arg)*) };
}

/// Prints information that a peer can cause, ten in each five seconds (`pr_info_ratelimited`).
#[macro_export]
macro_rules! pr_info_ratelimited {
    ($($arg:tt)*) => { $crate::print_ratelimited!(pr_info, $($arg)*) };
}

/// Prints information of a device that a peer can cause, ten in each five seconds
/// (`dev_info_ratelimited`).
#[macro_export]
macro_rules! dev_info_ratelimited {
    ($($arg:tt)*) => { $crate::print_ratelimited!(dev_info, $($arg)*) };
}
