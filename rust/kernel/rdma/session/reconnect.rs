// SPDX-License-Identifier: GPL-2.0

//! Connecting again.

use super::stop::Stop;
use crate::prelude::*;
use kernel::alloc::Flags;

/// A ULP that connects again.
pub trait Connector: Send + Sync + 'static {
    /// Tries to connect, for the time number `attempt`, counted from 1.
    fn connect(&self, attempt: u32, cx: &Sleepable) -> Result;

    /// No attempt is made any more: the last one was successful, or failed by this error;
    /// `ECANCELED` if it was [cancelled](Reconnect::cancel) before that.
    fn ended(&self, result: Result, cx: &Sleepable);
}

/// The delays between attempts to connect, and their number.
///
/// With `first_ms` and `longest_ms` the same they are constant, as `reconnect_delay` of
/// NVMe over fabrics; `attempts` is `ctrl_loss_tmo` divided by that, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The time before the first attempt, in milliseconds. Each delay is twice the one before.
    pub first_ms: u32,
    /// The longest delay, in milliseconds.
    pub longest_ms: u32,
    /// The number of attempts; `u32::MAX` for no end.
    pub attempts: u32,
}

impl Backoff {
    /// Returns the delay before an attempt, in milliseconds.
    pub fn delay_ms(&self, attempt: u32) -> u32 {
        let shift = attempt.saturating_sub(1).min(31);
        let delay = u64::from(self.first_ms) << shift;
        delay.min(self.longest_ms.into()) as u32
    }
}

/// Attempts to connect again, from a work item, until one is successful.
///
/// It is cancelled when it is dropped. A ULP that is a [`Connector`] and has its `Reconnect` is
/// kept by it until it has ended: cancel it where the ULP ends, and in
/// [`DeviceData::remove`](crate::client::DeviceData::remove). Unloading waits for it.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::{Backoff, Connector, Reconnect}};
///
/// struct Mount {
///     name: &'static str,
/// }
///
/// impl Connector for Mount {
///     fn connect(&self, attempt: u32, _cx: &Sleepable) -> Result {
///         pr_info!("{}: attempt {attempt}\n", self.name);
///         Err(ECONNREFUSED)
///     }
///
///     fn ended(&self, result: Result, _cx: &Sleepable) {
///         if let Err(e) = result {
///             pr_err!("{}: given up ({e:?})\n", self.name);
///         }
///     }
/// }
///
/// /// The connection is lost: tries every ten seconds for ten minutes.
/// fn lost(client: &ClientRef, mount: Arc<Mount>) -> Result<Reconnect> {
///     let backoff = Backoff { first_ms: 10_000, longest_ms: 10_000, attempts: 60 };
///     pr_info!("next attempt in {} ms\n", backoff.delay_ms(1));
///     Reconnect::start(client, mount, backoff, GFP_ATOMIC)
/// }
///
/// /// The device is being removed, so that attempts fail.
/// fn removed(reconnect: &Reconnect) {
///     reconnect.cancel();
/// }
///
/// /// A user has removed the mount.
/// fn remove(reconnect: &Reconnect, cx: &Sleepable) -> Result {
///     reconnect.cancel_sync(cx)
/// }
/// ```
pub struct Reconnect(Arc<Stop>);

impl Reconnect {
    /// Begins with the first delay. Any context that may allocate with `flags`. Fails with
    /// `ENOMEM`.
    pub fn start<T: Connector>(
        client: &ClientRef,
        connector: Arc<T>,
        backoff: Backoff,
        flags: Flags,
    ) -> Result<Self> {
        let stop = Stop::spawn(client, flags, move |stop, cx| {
            connector.ended(attempts(stop, &*connector, &backoff, cx), cx);
        })?;
        Ok(Self(stop))
    }

    /// Makes no further attempt. One that is being made goes on. Any context.
    pub fn cancel(&self) {
        self.0.stop();
    }

    /// Makes no further attempt, and waits until [`Connector::ended`] has returned. Fails with
    /// `EDEADLK` in a method of the [`Connector`].
    pub fn cancel_sync(&self, cx: &Sleepable) -> Result {
        self.0.stop_sync(cx)
    }
}

impl Drop for Reconnect {
    fn drop(&mut self) {
        self.cancel();
    }
}

fn attempts(stop: &Stop, connector: &impl Connector, backoff: &Backoff, cx: &Sleepable) -> Result {
    let mut result = Err(ECANCELED);
    for attempt in 1..=backoff.attempts {
        if !stop.sleep(backoff.delay_ms(attempt), cx) {
            return Err(ECANCELED);
        }
        result = connector.connect(attempt, cx);
        if result.is_ok() {
            break;
        }
    }
    result
}
