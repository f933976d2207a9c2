// SPDX-License-Identifier: GPL-2.0

//! The directories in configfs: each is a server or a client.

use crate::{
    client,
    config::Config,
    reason::Reason,
    run::{
        Run,
        State, //
    },
    server::Server, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::{
    client::ClientRef,
    cm::Listener,
    context::Sleepable,
    prelude::Arc,
    session::Ticker, //
};

/// The number of connections that may wait for their peers to confirm them.
const BACKLOG: u32 = 64;

/// A server or a client.
#[pin_data(PinnedDrop)]
pub(crate) struct Instance {
    client: ClientRef,
    /// The configuration of the next run, and the last run.
    #[pin]
    last: Mutex<(Config, Arc<Run>)>,
    /// What a server has. Locked while that is made or destroyed; so the listener's own callbacks
    /// must not lock it.
    #[pin]
    server: Mutex<Option<(Listener, Ticker)>>,
}

impl Instance {
    pub(crate) fn new(client: ClientRef) -> impl PinInit<Self, Error> {
        let config = Config::default();
        try_pin_init!(Self {
            last <- new_mutex!((config, Run::new(&client, config, State::Idle)?)),
            client,
            server <- new_mutex!(None),
        })
    }

    pub(crate) fn config(&self) -> Config {
        self.last.lock().0
    }

    /// Returns the last run.
    pub(crate) fn run(&self) -> Arc<Run> {
        self.last.lock().1.clone()
    }

    /// Changes the configuration. Fails with `EBUSY` while the instance runs, with `EINVAL` if it
    /// cannot be so.
    pub(crate) fn configure(&self, change: impl FnOnce(&mut Config)) -> Result {
        let (config, run) = &mut *self.last.lock();
        if run.state().is_busy() {
            return Err(EBUSY);
        }
        let mut new = *config;
        change(&mut new);
        if !new.is_valid() {
            return Err(EINVAL);
        }
        *config = new;
        Ok(())
    }

    /// Begins a run. Fails with `EBUSY` while there is one.
    fn start(&self, state: State) -> Result<Arc<Run>> {
        let (config, run) = &mut *self.last.lock();
        if run.state().is_busy() {
            return Err(EBUSY);
        }
        *run = Run::new(&self.client, *config, state)?;
        Ok(run.clone())
    }

    /// Starts the server.
    pub(crate) fn listen(&self, cx: &Sleepable) -> Result {
        let mut server = self.server.lock();
        let run = self.start(State::Listening)?;
        let listen = || {
            let accept = Arc::new(Server(run.clone()), GFP_KERNEL)?;
            let listener = Listener::new(&run.client, run.config.addr(), BACKLOG, accept, cx)?;
            Ok((listener, run.watch()?))
        };
        let listening = listen().inspect_err(|e: &Error| {
            run.set_reason((*e).into());
            run.set_state(State::Failed);
        })?;
        // One that was left over has stopped by itself.
        *server = Some(listening);
        Ok(())
    }

    /// Runs the client to its end.
    pub(crate) fn connect(&self, cx: &Sleepable) -> Result {
        let run = self.start(State::Running)?;
        let result = match client::run(&run, cx) {
            // There was no other end to wait for.
            Reason::Stopped if run.config.count == 0 => Ok(()),
            reason => reason.into(),
        };
        run.set_state(match result {
            Ok(()) => State::Done,
            Err(_) => State::Failed,
        });
        result
    }

    /// Stops the server or the client. The writer who runs the client says what its state is then.
    pub(crate) fn stop(&self, cx: &Sleepable) -> Result {
        let mut server = self.server.lock();
        let stopped = server.take().map_or(Ok(()), |(l, _)| l.destroy(cx));
        let run = self.run();
        run.stop(cx);
        if run.state() == State::Listening {
            run.set_state(State::Idle);
        }
        stopped
    }
}

#[pinned_drop]
impl PinnedDrop for Instance {
    fn drop(self: Pin<&mut Self>) {
        // A directory is removed in process context.
        if let Err(e) = Sleepable::current().and_then(|cx| self.stop(&cx)) {
            pr_err!("an instance was not stopped: {e:?}\n");
        }
    }
}
