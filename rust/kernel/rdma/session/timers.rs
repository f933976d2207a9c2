// SPDX-License-Identifier: GPL-2.0

//! Timers of connections: keep-alive messages, the end of idle ones, and connecting again.

use crate::{
    atomic::{
        AtomicUsize,
        Ordering, //
    },
    client::ClientRef,
    completion::wait_event,
    prelude::internal::*, //
};
use core::{
    mem::replace,
    ops::ControlFlow, //
};
use kernel::{
    alloc::Flags,
    sync,
    task::Task,
    workqueue, //
};

/// Returns `jiffies`.
#[inline]
fn now() -> usize {
    // SAFETY: The kernel's clock is a number that is read at once.
    unsafe { (&raw const bindings::jiffies).read_volatile() }
}

/// The last time that something happened, as a message. Noting it is a load and a store.
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
/// }
///
/// fn accepted(id: cm::Id) -> Result<Arc<Conn>> {
///     let received = Activity::new();
///     Ok(Arc::new(Conn { id, received }, GFP_KERNEL)?)
/// }
///
/// fn received(conn: &Conn) {
///     conn.received.note();
/// }
///
/// /// Ends a connection from which nothing has come for 15 seconds.
/// fn watch(client: &ClientRef, conn: Arc<Conn>) -> Result<Ticker> {
///     Ticker::start(client, 1_000, GFP_KERNEL, move |cx| {
///         if conn.received.idle_ms() <= 15_000 {
///             return ControlFlow::Continue(());
///         }
///         let _ = conn.id.disconnect(cx);
///         ControlFlow::Break(())
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

/// A function that is called again and again, from a work item that sleeps in between. It ends when
/// this is dropped, and unloading waits for that: a [`Client`](crate::client::Client) that has one
/// drops it in [`Client::unload`](crate::client::Client::unload), or calls [`Ticker::stop_sync`].
pub struct Ticker(Arc<Sleeper>);

impl Ticker {
    /// Calls `tick` every `period_ms` milliseconds, until it breaks. Any context that may allocate
    /// with `flags`. Fails with `ENOMEM`, or with `EPERM` if the client is another module's.
    pub fn start(
        client: &ClientRef,
        period_ms: u32,
        flags: Flags,
        mut tick: impl FnMut(&Sleepable) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Self> {
        let this = Self(Sleeper::make(flags)?);
        let sleeper = this.0.clone();
        client.spawn(flags, move |cx| {
            sleeper.enter();
            while sleeper.sleep(period_ms.max(1), cx) && tick(cx).is_continue() {}
            // It has no connector.
            let _ = sleeper.next();
        })?;
        Ok(this)
    }

    /// Ends it, and waits until the function has returned. Fails with `EDEADLK` in the function.
    pub fn stop_sync(&self, _cx: &Sleepable) -> Result {
        self.0.stop_sync()
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.stop();
    }
}

struct State {
    stopped: bool,
    /// The address of the task while it runs the work item, or zero.
    task: usize,
    /// The work item is queued, or has not ended.
    running: bool,
    /// The connector of a [`Reconnect`] that was started.
    next: Option<Arc<dyn Connector>>,
}

/// A work item that sleeps and is told to stop.
#[pin_data]
struct Sleeper {
    #[pin]
    state: sync::SpinLockIrq<State>,
    #[pin]
    changed: sync::CondVar,
}

impl Sleeper {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    fn make(flags: Flags) -> Result<Arc<Self>> {
        Arc::pin_init(Self::new(true), flags)
    }

    fn new(running: bool) -> impl PinInit<Self> {
        pin_init!(Self {
            state <- kernel::new_spinlock_irq!(State {
                stopped: false,
                task: 0,
                running,
                next: None,
            }),
            changed <- kernel::new_condvar!(),
        })
    }

    /// The work item has begun, in the current task.
    fn enter(&self) {
        self.state.lock().task = Task::current_raw().addr();
    }

    /// Returns the connector to go on with. Without one the work item has ended.
    fn next(&self) -> Option<Arc<dyn Connector>> {
        let mut state = self.state.lock();
        let next = state.next.take();
        if next.is_none() {
            state.task = 0;
            state.running = false;
            drop(state);
            self.changed.notify_all();
        }
        next
    }

    /// The work item was not queued: it has ended, and its connector is let go.
    fn not_queued(&self) {
        let mut state = self.state.lock();
        let next = state.next.take();
        state.running = false;
        drop(state);
        self.changed.notify_all();
        drop(next);
    }

    /// Ends it. Any context.
    fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Ends it, and waits for that. Fails with `EDEADLK` in the work item.
    fn stop_sync(&self) -> Result {
        self.stop();
        let mut state = self.state.lock();
        if state.task == Task::current_raw().addr() {
            return Err(EDEADLK);
        }
        while state.running {
            self.changed.wait(&mut state);
        }
        Ok(())
    }

    /// Sleeps for so many milliseconds. Returns `false` at once when the work item is to end.
    fn sleep(&self, ms: u32, cx: &Sleepable) -> bool {
        let stopped = |state: &mut State| state.stopped.then_some(());
        let mut state = self.state.lock();
        // Its result is found below; a work item gets no signals.
        let _ = wait_event(&self.changed, &mut state, Some(ms), stopped, cx);
        !state.stopped
    }
}

/// A ULP that connects again.
pub trait Connector: Send + Sync + 'static {
    /// Tries to connect, for the time number `attempt`, counted from 1. Continues with the error of
    /// an attempt after which another is worth it, if there is one left; breaks where it was
    /// successful, or where no attempt can be, as the peer has said (the status of NVMe's Connect
    /// command with "do not retry").
    fn connect(
        self: ArcBorrow<'_, Self>,
        attempt: u32,
        cx: &Sleepable,
    ) -> ControlFlow<Result, Error>;

    /// No more attempts are made: the last one was successful, or failed by this error;
    /// `ECANCELED` if it was [cancelled](Reconnect::cancel) before that.
    fn ended(self: ArcBorrow<'_, Self>, result: Result, cx: &Sleepable);
}

/// The delays between attempts to connect, and their number: with `first_ms` and `longest_ms` the
/// same, `reconnect_delay` of NVMe over fabrics, and `ctrl_loss_tmo` divided by that.
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

/// Attempts to connect again, from a work item, until one is successful. Its memory is allocated
/// when it is made, so that none is needed where a connection is lost.
///
/// It is cancelled when it is dropped, but a [`Connector`] that has its `Reconnect` is kept by it
/// during the attempts: cancel it where the ULP ends, and in [`DeviceData::remove`]. Unloading
/// waits until it is dropped: a [`Client`](crate::client::Client) that has one drops it in
/// [`Client::unload`](crate::client::Client::unload).
///
/// [`DeviceData::remove`]: crate::client::DeviceData::remove
///
/// # Examples
///
/// ```
/// use core::ops::ControlFlow;
/// use rdma::{prelude::*, session::{Backoff, Connector, Reconnect}};
///
/// struct Mount {
///     reconnect: Reconnect,
/// }
///
/// impl Mount {
///     fn connect_once(&self) -> Result {
///         Err(ECONNREFUSED)
///     }
/// }
///
/// impl Connector for Mount {
///     fn connect(
///         self: ArcBorrow<'_, Self>,
///         attempt: u32,
///         _cx: &Sleepable,
///     ) -> ControlFlow<Result, Error> {
///         pr_info!("attempt {attempt}\n");
///         match self.connect_once() {
///             // The peer does not know this host.
///             Err(e) if e == EACCES => ControlFlow::Break(Err(e)),
///             Err(e) => ControlFlow::Continue(e),
///             Ok(()) => ControlFlow::Break(Ok(())),
///         }
///     }
///
///     fn ended(self: ArcBorrow<'_, Self>, result: Result, _cx: &Sleepable) {
///         pr_info!("connected, or given up: {result:?}\n");
///     }
/// }
///
/// /// Will try every ten seconds for ten minutes.
/// fn mount(client: &ClientRef) -> Result<Arc<Mount>> {
///     let backoff = Backoff { first_ms: 10_000, longest_ms: 10_000, attempts: 60 };
///     pr_info!("the first attempt after {} ms\n", backoff.delay_ms(1));
///     let reconnect = Reconnect::new(client, backoff)?;
///     Ok(Arc::new(Mount { reconnect }, GFP_KERNEL)?)
/// }
///
/// /// The connection is lost.
/// fn lost(mount: &Arc<Mount>) {
///     // It fails when the mount is removed.
///     let _ = mount.reconnect.start(mount.clone());
/// }
///
/// /// A user has removed the mount. Where this may not wait, there is `cancel`.
/// fn unmount(mount: &Mount, cx: &Sleepable) -> Result {
///     mount.reconnect.cancel();
///     mount.reconnect.cancel_sync(cx)
/// }
/// ```
pub struct Reconnect(Arc<Attempts>);

#[pin_data]
struct Attempts {
    client: ClientRef,
    backoff: Backoff,
    #[pin]
    sleeper: Sleeper,
    #[pin]
    work: workqueue::Work<Self>,
}

kernel::impl_has_work! {
    impl HasWork<Self> for Attempts { self.work }
}

impl workqueue::WorkItem for Attempts {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.sleeper.enter();
        while let Some(connector) = this.sleeper.next() {
            this.attempt(&connector, &cx);
        }
    }
}

impl Attempts {
    fn attempt(&self, connector: &Arc<dyn Connector>, cx: &Sleepable) {
        let mut result = Err(ECANCELED);
        for attempt in 1..=self.backoff.attempts {
            if !self.sleeper.sleep(self.backoff.delay_ms(attempt), cx) {
                result = Err(ECANCELED);
                break;
            }
            // For a connection that was lost before it.
            self.forget_next();
            match connector.as_arc_borrow().connect(attempt, cx) {
                ControlFlow::Continue(e) => result = Err(e),
                ControlFlow::Break(last) => {
                    result = last;
                    break;
                }
            }
        }
        if result.is_err() {
            self.forget_next();
        }
        connector.as_arc_borrow().ended(result, cx);
    }

    fn forget_next(&self) {
        let next = self.sleeper.state.lock().next.take();
        drop(next);
    }
}

impl Reconnect {
    /// Allocates what attempts need. Fails with `ENOMEM`.
    pub fn new(client: &ClientRef, backoff: Backoff) -> Result<Self> {
        let init = pin_init!(Attempts {
            client: client.clone(),
            backoff,
            sleeper <- Sleeper::new(false),
            work <- kernel::new_work!("rdma::session::Reconnect"),
        });
        Ok(Self(Arc::pin_init(init, GFP_KERNEL)?))
    }

    /// A connection is lost: begins with the first delay. Any context; allocates nothing. During
    /// attempts the next one of these will do; after one that was successful they begin again when
    /// [`Connector::ended`] has returned. Fails with `ECANCELED` after [`Reconnect::cancel`], or
    /// with `EPERM` if the client is another module's.
    pub fn start<T: Connector>(&self, connector: Arc<T>) -> Result {
        self.0.client.check_type::<T>()?;
        self.start_any(connector)
    }

    fn start_any(&self, connector: Arc<dyn Connector>) -> Result {
        let mut state = self.0.sleeper.state.lock();
        if state.stopped {
            drop(state);
            return Err(ECANCELED);
        }
        let old = state.next.replace(connector);
        let running = replace(&mut state.running, true);
        drop(state);
        drop(old);
        if running {
            return Ok(());
        }
        // It is not queued: it has ended, or never begun.
        let queued = self.0.client.enqueue(self.0.clone());
        queued.inspect_err(|_| self.0.sleeper.not_queued())
    }

    /// Makes no further attempt, ever. One that is being made goes on. Any context.
    pub fn cancel(&self) {
        self.0.sleeper.stop();
    }

    /// Makes no further attempt, and waits until [`Connector::ended`] has returned. Fails with
    /// `EDEADLK` in a method of the [`Connector`].
    pub fn cancel_sync(&self, _cx: &Sleepable) -> Result {
        self.0.sleeper.stop_sync()
    }
}

impl Drop for Reconnect {
    fn drop(&mut self) {
        self.cancel();
    }
}
