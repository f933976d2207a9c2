// SPDX-License-Identifier: GPL-2.0

//! The directories in configfs: each is a server or a client.

use crate::{
    client,
    config::Config,
    connections::Connections,
    reason::{
        Last,
        Reason, //
    },
    server::Server,
    stats::Stats, //
};
use core::net::SocketAddr;
use kernel::{
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    sync::{
        Mutex,
        SpinLockIrq, //
    }, //
};
use rdma::{
    client::ClientRef,
    cm::Listener,
    context::Sleepable,
    prelude::Arc, //
};

/// The number of connections that may wait for their peers to confirm them.
const BACKLOG: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    Listening,
    Connecting,
    Running,
    Done,
    Failed,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Listening => "listening",
            Self::Connecting => "connecting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    fn is_busy(self) -> bool {
        matches!(self, Self::Listening | Self::Connecting | Self::Running)
    }
}

/// A server or a client.
#[pin_data]
pub(crate) struct Instance {
    pub(crate) client: ClientRef,
    #[pin]
    pub(crate) connections: Connections,
    pub(crate) stats: Stats,
    #[pin]
    config: Mutex<(Config, State)>,
    /// Why the last connection ended. Connections end in any context.
    #[pin]
    reason: SpinLockIrq<Option<Reason>>,
    /// The server's listener. Locked while one is made or destroyed; so its own callbacks must not
    /// lock it.
    #[pin]
    listener: Mutex<Option<Listener>>,
}

impl Instance {
    pub(crate) fn new(client: &ClientRef) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            client: client.clone(),
            connections <- Connections::new(),
            stats: Stats::new(),
            config <- new_mutex!((Config::default(), State::Idle)),
            reason <- new_spinlock_irq!(None),
            listener <- new_mutex!(None),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    pub(crate) fn config(&self) -> Config {
        self.config.lock().0
    }

    /// Changes the configuration.
    ///
    /// # Errors
    ///
    /// `EBUSY` while the instance runs.
    pub(crate) fn configure(&self, change: impl FnOnce(&mut Config)) -> Result {
        let (config, state) = &mut *self.config.lock();
        if state.is_busy() {
            return Err(EBUSY);
        }
        change(config);
        Ok(())
    }

    pub(crate) fn state(&self) -> State {
        self.config.lock().1
    }

    fn set_state(&self, state: State) {
        self.config.lock().1 = state;
    }

    /// The client has its connection.
    pub(crate) fn connected(&self) {
        self.stats.connection();
        self.set_state(State::Running);
    }

    pub(crate) fn reason(&self) -> Last {
        Last(*self.reason.lock())
    }

    /// Notes why a connection ended. Any context.
    pub(crate) fn set_reason(&self, reason: Reason) {
        if reason.is_error() {
            self.stats.error();
        }
        *self.reason.lock() = Some(reason);
    }

    /// Leaves a state in which the configuration may change, for `state`.
    fn start(&self, state: State) -> Result<Config> {
        let (config, now) = &mut *self.config.lock();
        if now.is_busy() {
            return Err(EBUSY);
        }
        *now = state;
        self.stats.reset();
        *self.reason.lock() = None;
        Ok(*config)
    }

    /// Starts the server.
    pub(crate) fn listen(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let mut listener = self.listener.lock();
        let config = self.start(State::Listening)?;
        let addr = SocketAddr::new(config.addr, config.port);
        let server = Server {
            instance: self.clone(),
            config,
        };
        let listening = Arc::new(server, GFP_KERNEL)
            .map_err(Error::from)
            .and_then(|server| Listener::new(&self.client, addr, BACKLOG, server, cx))
            .inspect_err(|e| {
                self.set_reason((*e).into());
                self.set_state(State::Failed);
            })?;
        // One that was left over has stopped by itself.
        *listener = Some(listening);
        Ok(())
    }

    /// The device that the server listened on is gone.
    pub(crate) fn listener_stopped(&self) {
        self.set_reason(Reason::DeviceRemoved);
        let (_, state) = &mut *self.config.lock();
        if *state == State::Listening {
            *state = State::Failed;
        }
    }

    /// Runs the client to its end.
    pub(crate) fn connect(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let config = self.start(State::Connecting)?;
        let reason = client::run(self, &config, cx);
        let result = match reason {
            // There was no other end to wait for.
            Reason::Stopped if config.count == 0 => Ok(()),
            reason => reason.into(),
        };
        self.set_state(match result {
            Ok(()) => State::Done,
            Err(_) => State::Failed,
        });
        result
    }

    /// Stops the server or the client. The writer who runs the client says what its state is then.
    pub(crate) fn stop(&self, cx: &Sleepable) -> Result {
        let mut listener = self.listener.lock();
        let stopped = listener.take().map_or(Ok(()), |l| l.destroy(cx));
        self.connections.stop(cx);
        if self.state() == State::Listening {
            self.set_state(State::Idle);
        }
        stopped
    }
}
