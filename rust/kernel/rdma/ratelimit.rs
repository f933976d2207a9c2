// SPDX-License-Identifier: GPL-2.0

//! Limits for messages that peers can cause.
//!
//! A peer that connects a hundred times a second must not fill the log. The kernel crate has no
//! `pr_warn_ratelimited!` yet. How many messages of each place were not printed is in
//! `rdma_rs/ratelimited` of debugfs.
//!
//! C header: [`include/linux/ratelimit.h`](srctree/include/linux/ratelimit.h)

use crate::{
    objects,
    prelude::internal::*, //
};
use kernel::{
    debugfs,
    str::BStr,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
};

/// The length of an interval, in seconds (`DEFAULT_RATELIMIT_INTERVAL`).
const INTERVAL: u64 = 5;
/// The number of messages in each (`DEFAULT_RATELIMIT_BURST`).
const BURST: u32 = 10;
/// The number of places that have a count of their own.
const PLACES: usize = 64;
/// The length of the name of a place, with a zero at its end.
const NAME: usize = 48;

/// How many messages of each place were not printed; the last one is of the places beyond
/// [`PLACES`].
static COUNTS: [Atomic<u64>; PLACES + 1] = [const { Atomic::new(0) }; PLACES + 1];

kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any message.
    unsafe(uninit) static NAMES: SpinLockIrq<Names> = Names {
        names: [[0; NAME]; PLACES],
        used: 0,
    };
}

/// The names of the places that have a count, as copies: their modules may be unloaded.
struct Names {
    names: [[u8; NAME]; PLACES],
    /// The number of those that are used.
    used: usize,
}

impl Names {
    /// Returns the index of the count of a place.
    fn index_of(&mut self, place: &str) -> usize {
        let mut name = [0; NAME];
        // Names differ at their end.
        let from = place.len().saturating_sub(NAME - 1);
        for (to, from) in name.iter_mut().zip(place.bytes().skip(from)) {
            *to = from;
        }
        let mut used = self.names.iter().take(self.used);
        if let Some(index) = used.position(|at| *at == name) {
            return index;
        }
        let index = self.used;
        if let Some(at) = self.names.get_mut(index) {
            *at = name;
            self.used += 1;
        }
        index
    }
}

/// The content of the file `ratelimited`.
pub(crate) struct NotPrinted;

impl debugfs::Writer for NotPrinted {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.lock();
        for (name, count) in names.names.iter().zip(&COUNTS).take(names.used) {
            let name = BStr::from_bytes(name.split(|byte| *byte == 0).next().unwrap_or(&[]));
            let count = count.load(Relaxed);
            f.write_fmt(fmt!("{name}: {count} messages not printed\n"))?;
        }
        match COUNTS[PLACES].load(Relaxed) {
            0 => Ok(()),
            others => f.write_fmt(fmt!("others: {others} messages not printed\n")),
        }
    }
}

/// Initialises the counts, and makes their file in a folder of debugfs.
///
/// # Safety
///
/// Called once, when the module is loaded.
pub(crate) unsafe fn init(dir: &debugfs::Dir) -> objects::File<NotPrinted> {
    // SAFETY: The caller calls this once, when the module is loaded.
    unsafe { NAMES.init() };
    KBox::pin_init(dir.read_only_file(c"ratelimited", NotPrinted), GFP_KERNEL).ok()
}

/// A limit of ten messages in each five seconds, as `struct ratelimit_state` has it by default.
///
/// # Invariants
///
/// The upper half of `state` is the number of an interval since the start of the system, the lower
/// half that of messages in it, or the greatest number.
pub struct Ratelimit {
    place: &'static str,
    state: Atomic<u64>,
    /// The index of its count and one, 0 if it has none yet.
    count: Atomic<u32>,
}

impl Ratelimit {
    /// Makes a limit, of which no message was printed. debugfs counts what is not printed by the
    /// name of the place, of which it shows the last 47 bytes; limits of one name are counted
    /// together.
    pub const fn new(place: &'static str) -> Self {
        Self {
            place,
            // INVARIANT: There was no message.
            state: Atomic::new(0),
            count: Atomic::new(0),
        }
    }

    /// Counts a message that is not printed. The lock is taken for the first one.
    fn not_printed(&self) {
        let index = match self.count.load(Relaxed) {
            0 => {
                let index = NAMES.lock().index_of(self.place);
                self.count.store(index as u32 + 1, Relaxed);
                index
            }
            n => n as usize - 1,
        };
        if let Some(count) = COUNTS.get(index) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Counts a message. Returns whether it is to be printed (`__ratelimit`); the number suppressed
    /// in the last interval with messages is printed first, with the prefix of rdma_rs. Any
    /// context.
    pub fn check(&self) -> bool {
        // SAFETY: The function reads a number that is set since boot.
        let now = unsafe { bindings::ktime_get_seconds() } as u64 / INTERVAL;
        let mut old = self.state.load(Relaxed);
        loop {
            let count = old as u32;
            let is_same = old >> 32 == now;
            let next = if is_same { count.saturating_add(1) } else { 1 };
            // INVARIANT: That many messages are in this interval.
            match self
                .state
                .cmpxchg(old, now << 32 | u64::from(next), Relaxed)
            {
                Ok(_) if is_same && count < BURST => return true,
                Ok(_) if is_same => {
                    self.not_printed();
                    return false;
                }
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
        static LIMIT: $crate::ratelimit::Ratelimit =
            $crate::ratelimit::Ratelimit::new(concat!(module_path!(), ":", line!()));
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
