// SPDX-License-Identifier: GPL-2.0

//! The servers and the clients.

use crate::{
    config::Config,
    conn::{
        Conn,
        Reason, //
    },
    protocol::{
        ping,
        serve, //
    }, //
};
use kernel::{
    fmt,
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    sync::{
        Mutex,
        SpinLockIrq, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;

/// The number of connections that may wait for their peers to confirm them.
const BACKLOG: u32 = 64;

/// The longest time to resolve an address and a route, each, in milliseconds.
const RESOLVE_MS: u32 = 2000;

/// The number of connections that a server may have at once.
const MAX: usize = 256;

#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum State {
    #[default]
    Idle,
    Listening,
    Running,
    Done,
    Failed,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Listening => "listening",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// The state of an instance since its last start: the counters are of all connections.
#[derive(Clone, Copy, Default)]
pub(crate) struct Report {
    pub(crate) state: State,
    /// Why the last connection ended.
    pub(crate) reason: Reason,
    pub(crate) pings: u64,
    pub(crate) bytes_verified: u64,
    pub(crate) completions: u64,
    pub(crate) errors: u64,
    pub(crate) connections: u64,
    /// The time that all pings took together, in nanoseconds.
    pub(crate) nanos: u64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &mut u64, number: u64) {
    *counter = counter.saturating_add(number);
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pings = self.pings;
        let bytes = self.bytes_verified;
        let errors = self.errors;
        f.write_fmt(fmt!("pings {pings}\nbytes_verified {bytes}\n"))?;
        f.write_fmt(fmt!("completions {}\nerrors {errors}\n", self.completions))?;
        let rtt = self.nanos.checked_div(pings).unwrap_or(0);
        f.write_fmt(fmt!("connections {}\nrtt_ns {rtt}\n", self.connections))
    }
}

/// A server or a client.
#[pin_data]
pub(crate) struct Instance {
    pub(crate) client: ClientRef,
    #[pin]
    config: Mutex<Config>,
    /// Connections end in any context.
    #[pin]
    report: SpinLockIrq<Report>,
    /// Locked while a listener is made or destroyed, which waits for its callbacks: `request()` and
    /// `addr_changed()` must not lock it.
    #[pin]
    listener: Mutex<Option<cm::Listener>>,
    /// The connections, until they are stopped.
    #[pin]
    conns: Mutex<Option<KVec<Arc<Conn>>>>,
}

impl Instance {
    pub(crate) fn new(client: ClientRef) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            client,
            config <- new_mutex!(Config::default()),
            report <- new_spinlock_irq!(Report::default()),
            listener <- new_mutex!(None),
            conns <- new_mutex!(None),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    pub(crate) fn config(&self) -> Config {
        *self.config.lock()
    }

    pub(crate) fn report(&self) -> Report {
        *self.report.lock()
    }

    /// Changes the report. Any context.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.lock());
    }

    /// Notes why a connection ended, or could not be made. Any context.
    pub(crate) fn ended(&self, reason: Reason) {
        self.note(|report| {
            add(&mut report.errors, u64::from(reason.is_error()));
            report.reason = reason;
        });
    }

    /// Uses or changes the configuration. Fails with `EBUSY` while the instance runs.
    pub(crate) fn configure<R>(&self, f: impl FnOnce(&mut Config) -> Result<R>) -> Result<R> {
        let mut config = self.config.lock();
        match self.report().state {
            State::Listening | State::Running => Err(EBUSY),
            _ => f(&mut config),
        }
    }

    /// Leaves a state in which the configuration may change, for `state`.
    fn start(&self, state: State) -> Result<Config> {
        self.configure(|config| {
            *self.conns.lock() = Some(KVec::new());
            *self.report.lock() = Report {
                state,
                ..Report::default()
            };
            Ok(*config)
        })
    }

    /// Starts the server.
    pub(crate) fn listen(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let mut listener = self.listener.lock();
        let addr = self.start(State::Listening)?.addr;
        let listening = cm::Listener::new(&self.client, addr, BACKLOG, self.clone(), cx)
            .inspect_err(|e| self.no_listener(*e))?;
        // One that was left over has stopped by itself.
        *listener = Some(listening);
        Ok(())
    }

    /// Makes another listener on the same address, which the device may have later than the
    /// interface: this waits five seconds for that.
    fn listen_again(self: &Arc<Self>, cx: &Sleepable) {
        let mut tries = 0..100;
        while let Err(e) = self.replace_listener(cx) {
            if tries.next().is_none() {
                return self.no_listener(e);
            }
            fsleep(Delta::from_millis(50));
        }
    }

    /// Makes another listener on the same address, if the server was not stopped.
    fn replace_listener(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let mut listener = self.listener.lock();
        if self.report().state != State::Listening {
            return Ok(());
        }
        listener.take().map_or(Ok(()), |old| old.destroy(cx))?;
        let addr = self.config().addr;
        let new = cm::Listener::new(&self.client, addr, BACKLOG, self.clone(), cx)?;
        *listener = Some(new);
        Ok(())
    }

    /// The server has no listener.
    fn no_listener(&self, e: Error) {
        self.ended(e.into());
        self.note(|report| report.state = State::Failed);
    }

    /// Runs the client to its end.
    pub(crate) fn connect(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let config = self.start(State::Running)?;
        let run = || {
            let id = cm::Id::create(&self.client, cx)?;
            id.resolve_addr(config.addr, RESOLVE_MS, cx)?;
            id.resolve_route(RESOLVE_MS, cx)?;
            Conn::run(self, id, cx, ping)
        };
        run().unwrap_or_else(|e: Error| self.ended(e.into()));
        let result = match self.report().reason {
            // There was no other end to wait for.
            Reason::Stopped if config.count == 0 => Ok(()),
            reason => reason.into(),
        };
        self.note(|report| report.state = result.map_or(State::Failed, |()| State::Done));
        result
    }

    /// Stops the server or the client. The writer who runs the client sets its state then.
    pub(crate) fn stop(&self, cx: &Sleepable) -> Result {
        let mut listener = self.listener.lock();
        let stopped = listener.take().map_or(Ok(()), |l| l.destroy(cx));
        let conns = self.conns.lock().take();
        for conn in conns.iter().flatten() {
            conn.end(Reason::Stopped);
        }
        if self.report().state == State::Listening {
            self.note(|report| report.state = State::Idle);
        }
        stopped
    }

    /// Adds a connection, which has to be removed at its end.
    pub(crate) fn add(&self, conn: &Arc<Conn>) -> Result {
        match &mut *self.conns.lock() {
            None => Err(ECANCELED),
            Some(conns) if conns.len() >= MAX => Err(EMFILE),
            Some(conns) => Ok(conns.push(conn.clone(), GFP_KERNEL)?),
        }
    }

    pub(crate) fn remove(&self, conn: &Conn) {
        if let Some(conns) = &mut *self.conns.lock() {
            conns.retain(|other| !core::ptr::eq(&**other, conn));
        }
    }
}

/// The handler of the listener's events.
impl cm::Accept for Instance {
    fn request(self: ArcBorrow<'_, Self>, request: cm::Request<'_>, cx: &Sleepable) {
        // A request that is dropped is refused.
        if let Err(e) = accept(self.into(), request, cx) {
            self.ended(e.into());
        }
    }

    /// A bond has the address of another interface. Connections end when their peers find out.
    fn addr_changed(self: ArcBorrow<'_, Self>) {
        let this = Arc::from(self);
        let again = self
            .client
            .spawn(GFP_KERNEL, move |cx| this.listen_again(cx));
        let _ = again.inspect_err(|e| self.no_listener(*e));
    }

    /// The device that a listener was on is gone. The server may have another one since, or none.
    fn stopped(self: ArcBorrow<'_, Self>) {
        let listener = self.listener.lock();
        if listener.as_ref().is_some_and(cm::Listener::has_stopped) {
            self.no_listener(ENODEV);
        }
    }
}

fn accept(instance: Arc<Instance>, request: cm::Request<'_>, cx: &Sleepable) -> Result {
    if request.initiator_depth() == 0 {
        return Err(EPROTO); // The peer allows no RDMA READ.
    }
    if request.responder_resources() == 0 {
        // See Documentation/safety.rst, a FLUSH without a resource.
        return Err(EPROTO);
    }
    let id = request.into_id(cx)?;
    let client = instance.client.clone();
    client.spawn(GFP_KERNEL, move |cx| {
        Conn::run(&instance, id, cx, serve).unwrap_or_else(|e| instance.ended(e.into()));
    })
}
