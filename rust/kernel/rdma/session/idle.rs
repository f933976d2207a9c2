// SPDX-License-Identifier: GPL-2.0

//! Keep-alive messages, and the end of connections from which nothing comes.

use super::stop::Stop;
use crate::{
    atomic::{
        AtomicUsize,
        Ordering, //
    },
    prelude::*, //
};
use core::ops::ControlFlow;

/// Returns `jiffies`.
#[inline]
fn now() -> usize {
    // SAFETY: The kernel's clock is a number that is read at once.
    unsafe { (&raw const bindings::jiffies).read_volatile() }
}

/// The last time that something happened, such as a message that came. Noting it is a load and a
/// store.
///
/// # Examples
///
/// ```
/// use core::ops::ControlFlow;
/// use rdma::{prelude::*, session::{Activity, Ticker}};
///
/// struct Conn {
///     id: cm::Id,
///     received: Activity,
///     sent: Activity,
/// }
///
/// impl Conn {
///     fn send_keep_alive(&self) {}
/// }
///
/// fn accepted(id: cm::Id) -> Conn {
///     let (received, sent) = (Activity::new(), Activity::new());
///     Conn { id, received, sent }
/// }
///
/// /// Sends something every 5 seconds, and ends a connection from which nothing has come for 15.
/// fn watch(client: &ClientRef, conn: Arc<Conn>) -> Result<Ticker> {
///     Ticker::start(client, 1_000, GFP_KERNEL, move |cx| {
///         if conn.received.idle_ms() > 15_000 {
///             let _ = conn.id.disconnect(cx);
///             return ControlFlow::Break(());
///         }
///         if conn.sent.idle_ms() > 5_000 {
///             conn.send_keep_alive();
///             conn.sent.note();
///         }
///         ControlFlow::Continue(())
///     })
/// }
///
/// fn unwatch(ticker: &Ticker, cx: &Sleepable) -> Result {
///     ticker.stop_sync(cx)
/// }
/// ```
pub struct Activity(AtomicUsize);

impl Activity {
    /// Notes that it has just happened.
    pub fn new() -> Self {
        Self(AtomicUsize::new(now()))
    }

    /// Notes that it happens now. Any context.
    #[inline]
    pub fn note(&self) {
        self.0.store(now(), Ordering::Relaxed);
    }

    /// Returns the time since then, in milliseconds, to the next tick.
    pub fn idle_ms(&self) -> u32 {
        let jiffies = now().wrapping_sub(self.0.load(Ordering::Relaxed));
        // Another processor may have noted it since.
        let jiffies = usize::try_from(jiffies as isize).unwrap_or(0);
        // SAFETY: The function converts any number.
        let ms = unsafe { bindings::jiffies64_to_msecs(jiffies as u64) };
        ms.try_into().unwrap_or(u32::MAX)
    }
}

impl Default for Activity {
    fn default() -> Self {
        Self::new()
    }
}

/// A function that is called again and again, from a work item that sleeps in between.
///
/// One is enough for all connections of a ULP. It ends when this is dropped, and unloading waits
/// for that. What the function has is kept until then.
pub struct Ticker(Arc<Stop>);

impl Ticker {
    /// Calls `tick` every `period_ms` milliseconds, until it breaks. Any context that may allocate
    /// with `flags`. Fails with `ENOMEM`.
    pub fn start(
        client: &ClientRef,
        period_ms: u32,
        flags: kernel::alloc::Flags,
        mut tick: impl FnMut(&Sleepable) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Self> {
        let stop = Stop::spawn(client, flags, move |stop, cx| {
            while stop.sleep(period_ms.max(1), cx) && tick(cx).is_continue() {}
        })?;
        Ok(Self(stop))
    }

    /// Ends it, and waits until the function is not called any more. Fails with `EDEADLK` in the
    /// function.
    pub fn stop_sync(&self, cx: &Sleepable) -> Result {
        self.0.stop_sync(cx)
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.stop();
    }
}
