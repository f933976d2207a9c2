// SPDX-License-Identifier: GPL-2.0

//! What a server or a client has from one start to the next: its connections, and their counters.

use crate::{
    config::Config,
    conn::Conn,
    reason::Reason, //
};
use core::ops::ControlFlow;
use kernel::{
    fmt,
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex,
        SpinLockIrq, //
    }, //
};
use rdma::{
    client::ClientRef,
    context::Sleepable,
    prelude::Arc,
    session::Ticker, //
};

/// The number of connections that a server may have at once.
const MAX: usize = 256;

/// The number of checks for progress within the time that a connection may be idle.
const TICKS: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
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

    pub(crate) fn is_busy(self) -> bool {
        matches!(self, Self::Listening | Self::Running)
    }
}

/// From one start of a server or a client to the next.
#[pin_data]
pub(crate) struct Run {
    pub(crate) client: ClientRef,
    pub(crate) config: Config,
    pub(crate) stats: Stats,
    /// And why the last connection ended. Connections end in any context.
    #[pin]
    state: SpinLockIrq<(State, Reason)>,
    /// The connections, to end them all, until that is done. Each takes itself out when it is over.
    #[pin]
    conns: Mutex<Option<KVec<Arc<Conn>>>>,
}

impl Run {
    pub(crate) fn new(client: &ClientRef, config: Config, state: State) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            client: client.clone(),
            config,
            stats: Stats::new(),
            state <- new_spinlock_irq!((state, Reason::None)),
            conns <- new_mutex!(Some(KVec::new())),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    pub(crate) fn state(&self) -> State {
        self.state.lock().0
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.lock().0 = state;
    }

    /// Returns why the last connection ended.
    pub(crate) fn reason(&self) -> Reason {
        self.state.lock().1
    }

    /// Notes why a connection ended, or could not be made. Any context.
    pub(crate) fn set_reason(&self, reason: Reason) {
        if reason.is_error() {
            self.stats.errors.add(1, Relaxed);
        }
        self.state.lock().1 = reason;
    }

    /// Ends connections without progress, until the ticker is dropped.
    pub(crate) fn watch(self: &Arc<Self>) -> Result<Ticker> {
        let (run, timeout_ms) = (self.clone(), self.config.timeout_ms);
        Ticker::start(&self.client, timeout_ms / TICKS, GFP_KERNEL, move |_cx| {
            for conn in run.conns.lock().iter().flatten() {
                if conn.idle_ms() > timeout_ms {
                    conn.end(ETIMEDOUT.into());
                }
            }
            ControlFlow::Continue(())
        })
    }

    /// Adds a connection. Fails with `ECANCELED` when all were ended, or with `EMFILE`.
    pub(crate) fn add(&self, conn: &Arc<Conn>) -> Result {
        let mut conns = self.conns.lock();
        let Some(conns) = &mut *conns else {
            return Err(ECANCELED);
        };
        if conns.len() >= MAX {
            return Err(EMFILE);
        }
        Ok(conns.push(conn.clone(), GFP_KERNEL)?)
    }

    /// Takes a connection out.
    pub(crate) fn remove(&self, conn: &Conn) {
        if let Some(conns) = &mut *self.conns.lock() {
            conns.retain(|other| !core::ptr::eq(&**other, conn));
        }
    }

    /// Ends all connections.
    pub(crate) fn stop(&self, cx: &Sleepable) {
        let conns = self.conns.lock().take();
        for conn in conns.iter().flatten() {
            conn.end(Reason::Stopped);
            conn.shut_down(cx);
        }
    }
}

/// Counters of all connections.
pub(crate) struct Stats {
    pub(crate) pings: Atomic<u64>,
    pub(crate) bytes_verified: Atomic<u64>,
    pub(crate) completions: Atomic<u64>,
    pub(crate) errors: Atomic<u64>,
    pub(crate) connections: Atomic<u64>,
    /// The time that all pings took together, in nanoseconds.
    pub(crate) nanos: Atomic<u64>,
}

impl Stats {
    const fn new() -> Self {
        Self {
            pings: Atomic::new(0),
            bytes_verified: Atomic::new(0),
            completions: Atomic::new(0),
            errors: Atomic::new(0),
            connections: Atomic::new(0),
            nanos: Atomic::new(0),
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pings = self.pings.load(Relaxed);
        let bytes_verified = self.bytes_verified.load(Relaxed);
        let completions = self.completions.load(Relaxed);
        let errors = self.errors.load(Relaxed);
        let connections = self.connections.load(Relaxed);
        let rtt_ns = self.nanos.load(Relaxed).checked_div(pings).unwrap_or(0);
        f.write_fmt(fmt!("pings {pings}\nbytes_verified {bytes_verified}\n"))?;
        f.write_fmt(fmt!("completions {completions}\nerrors {errors}\n"))?;
        f.write_fmt(fmt!("connections {connections}\nrtt_ns {rtt_ns}"))
    }
}
